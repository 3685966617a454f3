"""Generation that uses a copy of the state: speculative decoding, many continuations of one text, constraints."""
