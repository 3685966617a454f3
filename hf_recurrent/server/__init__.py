"""A server of models: sessions, their scheduler, HTTP routes, and a page."""
