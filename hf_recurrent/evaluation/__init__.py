"""Evaluation of models: bits per byte, general compressors, answers to tasks, samples."""
