"""Compression with the probabilities of a model."""
