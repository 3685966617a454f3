"""Configuration of Memora."""

from .configuration_recurrent import RecurrentConfig


class MemoraConfig(RecurrentConfig):
    """Configuration of a Memora model; the defaults are Memora-S0 of the paper's Table 4 on bytes.

    Args:
        norm_after_contraction: put a parameter-free LayerNorm also behind the map back to the residual stream.
            The paper's text says that LN follows each linear map, its initialisation only matters without; off.
    """

    model_type = "memora"

    recurrent_unit: str = "glru"
    norm_after_contraction: bool = False


MemoraConfig.register_for_auto_class()
