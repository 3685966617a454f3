"""Torchet et al. 2025, *mGRADE: Minimal Recurrent Gating Meets Delay Convolutions*."""
