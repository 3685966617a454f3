"""Optional fast paths; importing this package compiles nothing."""
