"""Saved states of texts, and their continuation."""
