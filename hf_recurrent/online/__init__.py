"""Learning during use: one endless stream of bytes, predicted, scored and learned from in one pass."""
