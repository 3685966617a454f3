"""Model, configuration and tokenizer files. They travel with checkpoints: flat, and importing only each other."""

if __name__ == "modeling":
    raise ImportError("import hf_recurrent.modeling: importing `modeling` from the root would copy every class")
