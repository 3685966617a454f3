"""Programs of one step or block for other runtimes, exported from a model's own `forward`."""
