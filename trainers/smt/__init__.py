"""Supervised and DAgger Memory Training: objectives, windows of blocks, losses and metrics."""
