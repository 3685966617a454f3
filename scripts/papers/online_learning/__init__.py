"""Zucchet et al. 2023, *Online Learning of Long-Range Dependencies*."""
