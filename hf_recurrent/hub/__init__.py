"""Model cards and checkpoints that load where this package is not installed."""
