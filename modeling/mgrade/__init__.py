"""mGRADE: delay convolutions and minGRU."""
