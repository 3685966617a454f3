"""Trainers that carry the recurrent state over many parallel streams."""

if __name__ == "trainers":
    raise ImportError("import hf_recurrent.trainers: importing `trainers` from the root would copy every class")
