"""Memory and time of a training run, counted before it starts."""
