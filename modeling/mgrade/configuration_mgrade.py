"""Configuration of mGRADE."""

from ..block.configuration_recurrent import (
    MOST_PARTS,
    RealValuedConfig,
    check_above_zero,
    check_choice,
    check_positive,
)

SPACINGS = ("learned", "constant", "exponential")
POSITION_INITS = ("dilated", "uniform")


class MgradeConfig(RealValuedConfig):
    """Configuration of mGRADE and, by leaving one of its two memories out, of its baselines.

    | model | spacing | recurrent_unit |
    |---|---|---|
    | mGRADE-L, -CD, -EID | `"learned"`, `"constant"`, `"exponential"` | `"mingru"` |
    | TCN-CD, TCN-EID | `"constant"`, `"exponential"` | None |
    | minGRU | None | `"mingru"` |

    Defaults that differ from the other families': the embedding is the encoder of appendix B and not tied to the
    head, the MLP's inner width is 2·M, and the state is as wide as the model.

    Args:
        spacing: positions of the taps: "learned" (real parameters), "constant" (p_i = d·i), "exponential"
            (p_i = d·2^l·i in layer l = 0, 1, …), None for no convolution.
        conv_kernel: K, taps of the convolution.
        dilation: d; for "exponential" in the first layer. With "learned" the distance of the taps at the start of
            training, Γ/K by default; 1 by default otherwise.
        receptive_field: Γ, the largest position that a tap may be moved to, with "learned" only; d·(K-1) by default.
        position_init: "dilated" (p_i = d·i in every channel) or "uniform" (drawn from [0, Γ] for every tap and
            channel); with "learned" only.
        interpolation_width: σ of the Gaussian around a learned position.
        recurrent_unit: the recurrent unit, with biases; None for no recurrence.
        mlp_layers: 2; 1 is one linear map and the activation; 0 leaves the MLP out (section 4).
        hidden_act: activation of the MLP.
        layer_norm: every layer ends with LayerNorm (section 4 leaves it out).
        input_size: H_in for real-valued inputs, which an encoder without bias reads; None for tokens.

    Raises:
        ValueError: a size is not an integer of at least 1, a name is unknown, a tap lies outside the receptive
            field, or there is neither convolution nor recurrence.
    """

    model_type = "mgrade"
    default_mlp_ratio = 2

    hidden_size: int = 64
    state_size: int | None = None
    num_hidden_layers: int = 3
    recurrent_unit: str | None = "mingru"
    spacing: str | None = "learned"
    conv_kernel: int = 8
    dilation: int | None = None
    receptive_field: int | None = None
    position_init: str = "dilated"
    interpolation_width: float = 0.5
    mlp_layers: int = 2
    hidden_act: str = "gelu"
    layer_norm: bool = True
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs):
        if self.state_size is None:
            self.state_size = self.hidden_size
        super().__post_init__(**kwargs)
        if self.state_size != self.hidden_size:
            raise ValueError(
                f"`state_size` is {self.state_size} and `hidden_size` {self.hidden_size}; in mGRADE they are the same."
            )
        if self.mlp_layers not in (0, 1, 2):
            raise ValueError(f"`mlp_layers` is {self.mlp_layers!r}; it must be 0, 1 or 2.")
        if self.spacing is None and self.recurrent_unit is None:
            raise ValueError(
                "`spacing` and `recurrent_unit` are both None; a layer needs a convolution, a recurrence or both."
            )
        check_choice(self, "position_init", POSITION_INITS)
        if self.spacing is not None:
            check_choice(self, "spacing", SPACINGS)
            self._check_convolution()

    def _check_convolution(self) -> None:
        check_positive(self, "conv_kernel", most=MOST_PARTS)
        if self.dilation is not None:
            check_positive(self, "dilation")
        check_above_zero(self, "interpolation_width")
        if self.receptive_field is not None:
            check_positive(self, "receptive_field")
            if self.spacing != "learned":
                raise ValueError(
                    f"`receptive_field` is {self.receptive_field}, but with `spacing={self.spacing!r}` it follows "
                    "from `conv_kernel` and `dilation`; leave it out."
                )
        last, receptive_field = self.tap_positions(0)[-1], self.receptive_fields()[0]
        if last > receptive_field:
            raise ValueError(
                f"A tap of the convolution is at position {last}, outside the receptive field [0, {receptive_field}]; "
                "lower `conv_kernel` or `dilation`, or raise `receptive_field`."
            )

    def tap_positions(self, layer_index: int) -> list[float]:
        """p_0 … p_{K-1} of a layer (equations 9 and 10); with learned spacings, where "dilated" puts them at first."""
        dilation = 1 if self.dilation is None else self.dilation
        if self.spacing == "exponential":
            dilation *= 2**layer_index
        elif self.spacing == "learned" and self.dilation is None and self.receptive_field is not None:
            return [tap * self.receptive_field / self.conv_kernel for tap in range(self.conv_kernel)]
        return [dilation * tap for tap in range(self.conv_kernel)]

    def receptive_fields(self) -> list[int]:
        """Γ_l of every layer: the steps before the current one that its convolution sees (appendix B)."""
        if self.spacing is None:
            return [0] * self.num_hidden_layers
        if self.receptive_field is not None:
            return [self.receptive_field] * self.num_hidden_layers
        return [int(self.tap_positions(layer)[-1]) for layer in range(self.num_hidden_layers)]
