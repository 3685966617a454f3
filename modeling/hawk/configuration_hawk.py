"""Configuration of Hawk."""

from ..block.configuration_recurrent import MOST_PARTS, RecurrentConfig, check_positive


class HawkConfig(RecurrentConfig):
    """Configuration of a Hawk model; the defaults are Hawk-S0 of the paper's Table 4 on bytes.

    Args:
        conv_kernel: K, taps of the temporal convolution before the recurrent unit.
    """

    model_type = "hawk"

    recurrent_unit: str = "rg_lru"
    conv_kernel: int = 4

    def __post_init__(self, **kwargs):
        check_positive(self, "conv_kernel", most=MOST_PARTS)
        super().__post_init__(**kwargs)
