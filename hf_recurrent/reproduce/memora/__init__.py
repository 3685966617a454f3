"""Memora and its figures."""
