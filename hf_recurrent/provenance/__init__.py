"""Provenance of weights: how they were trained, recorded while it happens and saved in every checkpoint."""
