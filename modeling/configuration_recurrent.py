"""Base class of the configurations of all recurrent families."""

from transformers import PreTrainedConfig


def check_positive(config: PreTrainedConfig, *names: str) -> None:
    """Raise a ValueError that names the first of these fields that is not an integer ≥ 1."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"`{name}` is {value!r}; it must be an integer of at least 1.")


POOLINGS = ("mean", "last")


class RecurrentConfig(PreTrainedConfig):
    """Base class of the configurations of recurrent byte-level models.

    Defaults that differ from transformers': the vocabulary is the 256 bytes, byte 0 ends an episode and pads, the
    embedding is tied to the head, no biases, no dropout (paper, Table 3).

    Args:
        vocab_size: V.
        hidden_size: M, model width.
        state_size: S, width of each layer's recurrent state.
        num_hidden_layers: N.
        intermediate_size: width inside the gated MLP; 3·M by default.
        recurrent_unit: name of the recurrent unit in every block, one of `RECURRENT_UNITS`.
        allow_negative_eigenvalues: let decays lie in (-1, 1) instead of (0, 1), for units with real eigenvalues.
        pooling: input of a sequence classifier's head, the "mean" over the steps or the "last" step.
        norm_eps: added to the variance in every norm.
        use_cache: return the state from `forward` by default.

    Raises:
        ValueError: a size is not an integer of at least 1, or `pooling` is unknown.
    """

    keys_to_ignore_at_inference = ["state"]  # noqa: RUF012 (transformers' own name and form)

    vocab_size: int = 256
    hidden_size: int = 128
    state_size: int = 192
    num_hidden_layers: int = 6
    intermediate_size: int | None = None
    allow_negative_eigenvalues: bool = False
    pooling: str = "mean"
    norm_eps: float = 1e-6
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 0
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs):
        check_positive(self, "vocab_size", "hidden_size", "state_size", "num_hidden_layers")
        if self.intermediate_size is None:
            self.intermediate_size = 3 * self.hidden_size
        check_positive(self, "intermediate_size")
        if self.pooling not in POOLINGS:
            raise ValueError(f"`pooling` is {self.pooling!r}; it must be one of {', '.join(POOLINGS)}.")
        super().__post_init__(**kwargs)
