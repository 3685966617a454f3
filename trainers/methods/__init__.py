"""Training methods: how a trainer learns from a block of streams."""
