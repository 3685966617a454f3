"""Configuration of the RNNs of Supervised Memory Training."""

from ..block.configuration_recurrent import MOST_PARTS, POOLINGS, ContextConfig, check_choice, check_positive
from .configuration_smt import SmtConfig

BACKBONES = ("transformer", "mlp", "gru")


class SmtRnnConfig(SmtConfig, ContextConfig):
    """Configuration of an RNN with a memory of Z tokens × D; the defaults are the paper's (appendix E).

    Args:
        backbone: the update f(m_t, x_{t+1}): "transformer" (bidirectional over memory and input), "mlp" (over the
            flattened memory and the input) or "gru" (a stack of Z GRU layers, one for each memory token).
        num_hidden_layers: N, layers of the update; 8 by default. With "gru" it is always Z.
        num_readout_layers: Transformer layers of the readout.
        causal_readout: causal attention in the readout, which makes it the teacher's decoder before its first future
            token. The paper's text calls its readout bidirectional, but fills it with the causal decoder's weights.
        memory_norm: as in [`SmtConfig`]; by default on, but off with "gru", whose residual structure it would
            undermine.
        pooling: input of a sequence classifier's head, the "mean" over the steps or the "last" step.
        use_cache: return the state from `forward` by default.

    See [`SmtConfig`] and [`ContextConfig`] for the other fields.

    Raises:
        ValueError: as [`SmtConfig`] and [`ContextConfig`]; `backbone` or `pooling` is unknown, or `memory_norm` is on
            with "gru".
    """

    model_type = "smt_rnn"
    keys_to_ignore_at_inference = ["state"]  # noqa: RUF012 (transformers' own name and form)

    backbone: str = "transformer"
    num_hidden_layers: int = 8
    num_readout_layers: int = 4
    causal_readout: bool = True
    memory_norm: bool | None = None
    pooling: str = "mean"
    use_cache: bool = True

    def __post_init__(self, **kwargs):
        check_positive(self, "num_hidden_layers", "num_readout_layers", most=MOST_PARTS)
        check_choice(self, "backbone", BACKBONES)
        check_choice(self, "pooling", POOLINGS)
        if self.backbone == "gru":
            if self.memory_norm:
                raise ValueError(
                    f"`memory_norm` is {self.memory_norm!r}, but a norm would undermine the residual structure of "
                    '`backbone="gru"`; it must be False or left out there.'
                )
            self.num_hidden_layers = self.num_memory_tokens
        if self.memory_norm is None:
            self.memory_norm = self.backbone != "gru"
        super().__post_init__(**kwargs)
