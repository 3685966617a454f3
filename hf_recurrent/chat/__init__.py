"""Conversations with a model in a terminal."""
