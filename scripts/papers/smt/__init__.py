"""SMT: nonlinear RNNs trained without unrolling them."""
