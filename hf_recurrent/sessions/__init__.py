"""Texts that a model has read, as states that are saved and continued."""
