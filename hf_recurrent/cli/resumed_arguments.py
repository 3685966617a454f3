"""Arguments of `pretrain` that differ when a run is resumed: the effect of each."""

from enum import Enum

from hf_recurrent.trainers.resumed_arguments import EFFECTS as _OF_TRAINERS
from hf_recurrent.trainers.resumed_arguments import Effect


class SourceEffect(Enum):
    """Effect of an argument that chooses data or models."""

    DATA = "refused if the training data differ, by their fingerprint"
    MODEL = "refused if the configuration of the model or teacher differs; its weights are those of the checkpoint"
    SECOND_PHASE = "acts if DMT after SMT has not begun, and then as for a resumed run"


_NAMES = {
    Effect.APPLIED: "recipe trust_remote_code validation_corpus max_eval_bytes threads user_code",
    SourceEffect.DATA: """
        corpus text_column dataset_split dataset_config streaming binary max_corpus_bytes validation_fraction
        split_seed tokenizer
    """,
    SourceEffect.MODEL: "model config_overrides teacher teacher_overrides",
    SourceEffect.SECOND_PHASE: "dmt_steps dmt_learning_rate dmt_batch_size dmt_rollout_length",
}
# Of every argument of `pretrain`.
EFFECTS = _OF_TRAINERS | {name: effect for effect, names in _NAMES.items() for name in names.split()}
