"""Memories of contexts: embeddings of hashed n-grams, and counts mixed with the network's prediction."""
