"""Configuration of the teachers of Supervised Memory Training."""

from ..block.configuration_recurrent import MOST_PARTS, check_positive
from .configuration_smt import SmtConfig


class SmtTeacherConfig(SmtConfig):
    """Configuration of a teacher: encoder and decoder of memories; the defaults are the paper's (appendix E).

    Args:
        num_encoder_layers: layers of the bidirectional encoder.
        num_decoder_layers: layers of the causal decoder, as many as the readout of the RNN that is trained with it.

    Raises:
        ValueError: as [`SmtConfig`].
    """

    model_type = "smt_teacher"
    attribute_map = {"num_hidden_layers": "num_encoder_layers"}  # noqa: RUF012 (transformers' own name and form)

    num_encoder_layers: int = 8
    num_decoder_layers: int = 4

    def __post_init__(self, **kwargs):
        check_positive(self, "num_encoder_layers", "num_decoder_layers", most=MOST_PARTS)
        super().__post_init__(**kwargs)
