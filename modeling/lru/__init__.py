"""LRU models as published with online learning."""
