"""Configuration of Memora."""

from ..block.configuration_recurrent import RecurrentConfig


class MemoraConfig(RecurrentConfig):
    """Configuration of a Memora model; the defaults are Memora-S0 of the paper's Table 4 on bytes.

    Args:
        norm_after_contraction: also put a parameter-free LayerNorm after the map back to the residual stream. Off by
            default: the paper's text has LN after each linear map, but its initialisation has no effect with this one.
    """

    model_type = "memora"

    recurrent_unit: str = "glru"
    norm_after_contraction: bool = False
