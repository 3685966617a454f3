"""Arguments of [`RollingWindowTrainer`]: the stream trainer's, and the length of the window."""

from dataclasses import dataclass

from hf_recurrent.argument_checks import argument
from hf_recurrent.trainers.multi_stream_arguments import MultiStreamTrainingArguments


@dataclass
class RollingWindowTrainingArguments(MultiStreamTrainingArguments):
    """[`MultiStreamTrainingArguments`] for windows that overlap: `block_size` is the stride S, the new bytes of an
    update.

    Own fields: `window`.

    Raises:
        ValueError: `window` is no multiple of `block_size`, or the regime is "iid".
    """

    window: int = argument(
        512, "T, bytes of each stream that an update learns from; a multiple of --block_size, which are the new ones."
    )

    def __post_init__(self):
        if self.window < self.block_size or self.window % self.block_size:
            raise ValueError(
                f"`window` is {self.window}; it must be a multiple of `block_size`, which is {self.block_size}."
            )
        if self.regime != "multi_stream":
            raise ValueError(f"`regime` is {self.regime!r}; it must be 'multi_stream', where windows overlap.")
        super().__post_init__()
