"""Memory of contexts: counts of the bytes that followed the same contexts, mixed with the network's prediction."""
