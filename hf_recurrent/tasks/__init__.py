"""Benchmark tasks of the papers: seeded generators, their streams and evaluation, and readers of local datasets."""
