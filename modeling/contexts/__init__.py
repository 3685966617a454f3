"""Memories of contexts: embeddings of hashed n-grams."""
