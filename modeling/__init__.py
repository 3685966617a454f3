"""Model, configuration and tokenizer files. They travel with checkpoints, so they import only each other."""

if __name__ == "modeling":
    raise ImportError("import hf_recurrent.modeling: importing `modeling` from the root would copy every class")

# Loading the auto modules registers the classes of this folder, which must not be half loaded then: so they go first.
import transformers.modeling_layers
import transformers.models.auto.tokenization_auto  # noqa: F401
