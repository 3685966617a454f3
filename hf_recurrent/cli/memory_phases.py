"""`pretrain --method smt` and `dmt`: the teacher, and DMT after SMT."""

import os

from transformers import AutoModel, PreTrainedModel

from hf_recurrent.cli.loading import build_new_model
from hf_recurrent.cli.pretrain_arguments import TeacherArguments
from hf_recurrent.hub.loading import load_model
from hf_recurrent.modeling.smt.configuration_smt_rnn import SmtRnnConfig
from hf_recurrent.modeling.smt.modeling_smt_rnn import teacher_fields
from hf_recurrent.modeling.smt.modeling_smt_teacher import SmtTeacherModel
from hf_recurrent.presets import preset_names
from hf_recurrent.trainers.methods.memory_methods import TEACHER_FOLDER
from hf_recurrent.trainers.public_trainers import DmtTrainer, SmtTrainer
from hf_recurrent.trainers.sharding import CHECKPOINTING_FLAGS
from hf_recurrent.trainers.smt_arguments import DmtTrainingArguments, SmtTrainingArguments

# Folder of the checkpoints of DMT in the output directory of SMT, where its model is saved as well.
DMT_FOLDER = "dmt"
_SHARED_ARGUMENTS = (
    "bf16", "context_length", "data_seed", "dataloader_num_workers", "disable_tqdm", "eval_block_size", "eval_windows",
    "fp16", "gradient_accumulation_steps", "logging_steps", "max_grad_norm",
    "on_divergence", "per_device_eval_batch_size", "report_to", "save_on_signal", "save_steps", "save_strategy",
    "save_total_limit", "seed", "start_share", "use_cpu", "weight_decay",
    CHECKPOINTING_FLAGS[0],
)  # fmt: skip


def build_teacher(
    arguments: TeacherArguments, model: PreTrainedModel, model_name: str, is_new: bool
) -> SmtTeacherModel:
    """The teacher of the RNN `model`: a saved one or, if `is_new`, a preset or by default one that matches."""
    if not isinstance(model.config, SmtRnnConfig):
        raise ValueError(f"`--model` is {model_name!r}; it must be an RNN of SMT, such as smt-rnn-tiny.")
    name, overrides, flag = arguments.teacher, arguments.teacher_overrides, "--teacher_overrides"
    if is_new and name is None:
        # Every field of this preset follows from the RNN.
        return build_new_model(AutoModel, "smt-teacher-paper", flag, overrides, **teacher_fields(model.config))
    if is_new and name in preset_names():
        return build_new_model(AutoModel, name, flag, overrides, vocab_size=model.config.vocab_size)
    if overrides:
        raise ValueError(f"`{flag}` is {overrides}; with a saved teacher it must be empty.")
    name = name or model_name
    folder = os.path.join(name, TEACHER_FOLDER)
    place = folder if os.path.isfile(os.path.join(folder, "config.json")) else name
    teacher = load_model(AutoModel, place, argument="--teacher")
    if not isinstance(teacher, SmtTeacherModel):
        raise ValueError(f"`--teacher` is {name!r}, a {type(teacher).__name__}; it must be a teacher of SMT.")
    return teacher


def second_phase(trainer: SmtTrainer, arguments: TeacherArguments) -> DmtTrainer:
    """The trainer of DMT after a finished [`SmtTrainer`], with the same data, seed and precision."""
    first: SmtTrainingArguments = trainer.args
    args = DmtTrainingArguments(
        output_dir=os.path.join(first.output_dir, DMT_FOLDER),
        max_steps=arguments.dmt_steps,
        learning_rate=arguments.dmt_learning_rate,
        per_device_train_batch_size=arguments.dmt_batch_size or first.per_device_train_batch_size,
        rollout_length=arguments.dmt_rollout_length,
        **{name: getattr(first, name) for name in _SHARED_ARGUMENTS},
    )
    data = trainer.train_dataset, trainer.eval_dataset
    return DmtTrainer(trainer.trained_model, trainer.teacher, args, *data, processing_class=trainer.processing_class)
