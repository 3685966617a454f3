"""The recurrent families of transformers with a state as ours: given to `forward`, returned, reset anywhere."""
