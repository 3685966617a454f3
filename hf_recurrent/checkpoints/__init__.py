"""Checkpoints: files, hashes, checks, positions, records, saved states."""
