"""Configuration of the LRU model."""

import math

from ..block.configuration_recurrent import RealValuedConfig, check_above_zero


class LruConfig(RealValuedConfig):
    """Configuration of an LRU model and of the baselines of its paper (Zucchet et al. 2023).

    The defaults are the copy task's, of section 4.1. The paper's N complex numbers of state are `state_size` = 2 N
    real ones here; its M is `hidden_size`. Its other layers:

    | layer | fields |
    |---|---|
    | LRU | the defaults |
    | linear RNN | `recurrent_unit="dense_linear"` |
    | GRU | `recurrent_unit="gru", recurrent_bias=True, read_out=False` |

    Args:
        recurrent_unit: the recurrent unit, one of `RECURRENT_UNITS`.
        recurrent_bias: the unit's maps have biases.
        read_out: y = C h + D ∘ u after the unit; without, y = h, for which `state_size` must be `hidden_size`.
        glu: a gated linear unit follows; without, y is added to the residual stream.
        dropout: dropout probability before and after the gated linear unit, in training.
        r_min, r_max: |λ| at initialisation, with the unit `lru`: λ is uniform on the ring between the two.
        max_phase: phases of λ are uniform between 0 and this at initialisation, with the unit `lru`.
        learning_rate_factor: factor of the learning rate of the unit's own vectors (λ and γ).
        input_size: for real-valued inputs, which an encoder with bias reads; None for tokens.
        per_step_loss: train a sequence classifier with the mean loss of all steps' logits, which needs no future step
            (section 4.3), instead of the loss of the mean logits.

    Raises:
        ValueError: a size is not an integer of at least 1, or a number is out of range.
    """

    model_type = "lru"

    hidden_size: int = 128
    state_size: int = 128
    num_hidden_layers: int = 4
    recurrent_unit: str = "lru"
    recurrent_bias: bool = False
    read_out: bool = True
    glu: bool = True
    dropout: float = 0.0
    r_min: float = 0.0
    r_max: float = 1.0
    max_phase: float = 2 * math.pi
    learning_rate_factor: float = 0.5
    per_step_loss: bool = False

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if not 0 <= self.r_min <= self.r_max <= 1 or self.r_max == 0 or self.r_min == 1:
            raise ValueError(
                f"`r_min` is {self.r_min!r} and `r_max` {self.r_max!r}; they must be 0 ≤ r_min ≤ r_max ≤ 1, with "
                "r_max above 0 and r_min below 1."
            )
        check_above_zero(self, "max_phase", "learning_rate_factor")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"`dropout` is {self.dropout!r}; it must be at least 0 and below 1.")
        if not self.read_out and self.state_size != self.hidden_size:
            raise ValueError(
                f"`state_size` is {self.state_size} and `hidden_size` {self.hidden_size}; with `read_out=False` they "
                "must be the same."
            )
