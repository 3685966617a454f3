"""Memora: gated linear recurrent units and gated MLPs."""
