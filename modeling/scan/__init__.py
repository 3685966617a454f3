"""The linear scan that all linear recurrent units share."""
