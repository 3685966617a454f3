"""Parts that all families share: embedding, layers, head, state, loss, generation."""
