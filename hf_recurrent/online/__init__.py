"""Learning during use: one endless stream of bytes is predicted, scored and learned from in a single pass."""
