"""Model, configuration and tokenizer files. They travel with checkpoints: flat, and importing only each other."""

if __name__ == "modeling":
    raise ImportError("import hf_recurrent.modeling: importing `modeling` from the root would copy every class")

# It loads the auto modules, and those register the classes of this folder: they must not be half loaded then.
import transformers.modeling_layers  # noqa: F401
