"""A page for people, with Gradio: texts whose bytes have colours, and states to keep. Needs the extra `page`."""
