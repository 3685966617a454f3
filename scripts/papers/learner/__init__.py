"""Experiments of our own on the online learner."""
