"""State tracking and recall, as surveys of recurrent models measure them."""
