"""Base class of the configurations of the SMT models, RNN and teacher."""

from ..block.configuration_recurrent import MOST_PARTS, ByteConfig, check_above_zero, check_positive


class SmtConfig(ByteConfig):
    """Base class of the configurations of Supervised Memory Training: vocabulary, memory and Transformer blocks.

    The defaults are the paper's, which leaves heads and MLP of the blocks open: 8 heads, and 4·M inside the MLP.
    Defaults that differ from transformers' beyond [`ByteConfig`]: no biases, no dropout, the head is not tied.

    Args:
        hidden_size: M, width of the Transformer blocks and of the token embedding.
        num_memory_tokens: Z, tokens of a memory.
        memory_size: D, width of a memory token; M by default. Another width, such as 2 for pictures of the memory,
            puts a linear map before every block stack that reads the memory and one after each that writes it.
        memory_norm: RMSNorm without parameters on every new memory. The scale is fixed so that a smaller memory cannot
            lower the dynamics loss.
        num_attention_heads: heads of every Transformer block.
        intermediate_size: width inside the MLPs; 4·M by default.
        norm_eps: added to the mean square in every norm.
        rope_theta: base of the rotary position encoding.
        initializer_range: standard deviation of all linear maps; by default 1/√fan-in, and 1/√(2 · fan-in · N) for the
            maps back to the residual stream.

    Raises:
        ValueError: a size is below 1 or too large, or the heads do not divide the width into even parts.
    """

    hidden_size: int = 256
    num_memory_tokens: int = 16
    memory_size: int | None = None
    memory_norm: bool = True
    num_attention_heads: int = 8
    intermediate_size: int | None = None
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    initializer_range: float | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs):
        check_positive(self, "hidden_size", "num_attention_heads")
        check_positive(self, "num_memory_tokens", most=MOST_PARTS)
        if self.memory_size is None:
            self.memory_size = self.hidden_size
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        check_positive(self, "memory_size", "intermediate_size")
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                f"`hidden_size` is {self.hidden_size} and `num_attention_heads` {self.num_attention_heads}; the width "
                "of a head, their quotient, must be an even integer for rotary positions."
            )
        super().__post_init__(**kwargs)
        check_above_zero(self, "norm_eps", "rope_theta", "initializer_range")
