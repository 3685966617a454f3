"""Byte tokenizers."""
