"""Single steps without gradients: compiled and captured."""
