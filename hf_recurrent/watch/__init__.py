"""Watching logs: lines as they arrive, the surprise of a model that learns from them, and an adaptive threshold."""
