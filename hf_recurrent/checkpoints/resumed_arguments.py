"""Arguments that differ when a run is resumed: each acts, is refused, or is named as without effect."""

import json
import os
from enum import Enum
from typing import Any

from transformers import TrainingArguments

from hf_recurrent.checkpoints.files import read_json
from hf_recurrent.checkpoints.training_files import ARGUMENTS_FILE, TRAINER_STATE_FILE, shareable_arguments


class Effect(Enum):
    """Effect of a changed argument on a resumed run."""

    APPLIED = "acts from the resumed step on"
    SCHEDULE = "acts from the resumed step on: its learning rate follows the new schedule at this step"
    LENGTH = "the same, but a finished run whose schedule ends with it is not made longer"
    STREAMS = "acts as long as the number of streams stays the same"
    FIXED = "refused"
    IGNORED = "without effect, and named"


_NAMES = {
    Effect.SCHEDULE: "learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps warmup_ratio",
    Effect.LENGTH: "max_steps train_bytes num_train_epochs",
    Effect.STREAMS: "per_device_train_batch_size gradient_accumulation_steps streams",
    Effect.FIXED: """
        auto_find_batch_size bf16_full_eval block_size context_length data_seed deepspeed fp16_full_eval fsdp
        fsdp_config future_length greater_is_better ignore_data_skip label_names label_smoothing_factor
        logging_nan_inf_filter method metric_for_best_model optim optim_args optim_target_modules parallelism_config
        regime rollout_length seed start_share timesteps
    """,
    Effect.IGNORED: """
        average_tokens_across_devices batch_eval_metrics dataloader_drop_last dataloader_in_order
        dataloader_multiprocessing_context do_eval do_predict do_train eval_accumulation_steps eval_do_concat_batches
        eval_use_gather_object group_by_length include_for_metrics length_column_name prediction_loss_only
        remove_unused_columns train_sampling_strategy
    """,
    Effect.APPLIED: """
        accelerator_config activation_checkpointing activation_checkpointing_kwargs adam_beta1 adam_beta2 adam_epsilon
        bf16 dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor
        ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout
        debug decoder_weight detached disable_tqdm dynamics_weight enable_jit_checkpoint eval_block_size
        eval_carry_state eval_delay eval_on_start eval_steps eval_strategy eval_windows fp16 full_determinism
        gradient_checkpointing gradient_checkpointing_kwargs gradient_steps hub_always_push hub_model_id
        hub_private_repo hub_revision hub_strategy hub_token include_num_input_tokens_seen liger_kernel_config
        load_best_model_at_end local_rank log_level log_level_replica log_on_each_node logging_dir logging_first_step
        logging_steps logging_strategy max_grad_norm neftune_noise_alpha on_divergence output_dir
        per_device_eval_batch_size project push_to_hub report_to restore_callback_states_from_checkpoint
        resume_from_checkpoint run_name sample_bytes sample_every sample_prompts save_on_each_node save_on_signal
        save_only_model save_steps save_strategy save_total_limit skip_memory_metrics stride tf32 torch_compile
        torch_compile_backend torch_compile_mode torch_empty_cache_steps trackio_bucket_id trackio_space_id
        trackio_static_space_id uniformity_over uniformity_weight use_cache use_cpu use_liger_kernel weight_decay
    """,
}
# Of every argument of a trainer. One that a newer version of transformers adds counts as fixed.
EFFECTS = {name: effect for effect, names in _NAMES.items() for name in names.split()}


class SourceEffect(Enum):
    """Effect of an argument of `pretrain` that chooses data or models."""

    DATA = "refused if the training data differ, by their fingerprint"
    MODEL = "refused if the configuration of the model or teacher differs; its weights come from the checkpoint"
    SECOND_PHASE = "acts if DMT after SMT has not begun, and then as for a resumed run"


_PRETRAIN_NAMES = {
    Effect.APPLIED: "recipe trust_remote_code validation_corpus max_eval_bytes threads user_code",
    SourceEffect.DATA: """
        corpus text_column dataset_split dataset_config streaming binary max_corpus_bytes validation_fraction
        split_seed tokenizer
    """,
    SourceEffect.MODEL: "model config_overrides teacher teacher_overrides",
    SourceEffect.SECOND_PHASE: "dmt_steps dmt_learning_rate dmt_batch_size dmt_rollout_length",
}
# Of every argument of `pretrain`, its trainers' included.
PRETRAIN_EFFECTS = EFFECTS | {name: effect for effect, names in _PRETRAIN_NAMES.items() for name in names.split()}

# Hyperparameters of an optimizer's groups, as the current arguments set them.
HYPERPARAMETERS = {"weight_decay": "weight_decay", "betas": "adam_beta1 adam_beta2", "eps": "adam_epsilon"}
# Schedules that do not depend on the number of steps.
_ENDLESS = ("constant", "constant_with_warmup")


def changed_arguments(checkpoint: str | os.PathLike, args: TrainingArguments) -> dict[str, tuple[Any, Any]]:
    """Arguments with another value than in a checkpoint: name → (value there, value now).

    Empty for a checkpoint of an earlier version, which has no file of arguments.
    """
    path = os.path.join(checkpoint, ARGUMENTS_FILE)
    if not os.path.isfile(path):
        return {}
    before, now = read_json(path), json.loads(json.dumps(shareable_arguments(args)))
    if not isinstance(before, dict):
        raise ValueError(f"The checkpoint file `{path}` is damaged: it must be an object.")
    return {name: (before[name], now[name]) for name in now if name in before and before[name] != now[name]}


def check_changes(checkpoint: str | os.PathLike, changes: dict[str, tuple[Any, Any]]) -> None:
    """Raise a ValueError if an argument has changed that must not."""
    for name, (before, now) in changes.items():
        if EFFECTS.get(name, Effect.FIXED) is Effect.FIXED:
            raise ValueError(
                f"`{name}` is {now!r}, but the checkpoint {os.fspath(checkpoint)!r} was trained with {before!r}; a "
                f"resumed run cannot change it. {new_run_hint(checkpoint)}"
            )


def describe_changes(changes: dict[str, tuple[Any, Any]], is_finished: bool) -> str:
    """Sentences that name the changed arguments, those without effect as such.

    Args:
        is_finished: the run has no step left.
    """
    ignored = [f"`{name}`" for name in sorted(changes) if EFFECTS[name] is Effect.IGNORED]
    applied = [
        f"`{name}` {now!r} (before: {before!r})"
        for name, (before, now) in sorted(changes.items())
        if EFFECTS[name] is not Effect.IGNORED
    ]
    begin = "The resumed run continues with"
    if is_finished:
        begin = "The run is finished, so only changed arguments of evaluation and output act:"
    sentences = [f"{begin} {', '.join(applied)}."] if applied else []
    return " ".join([*sentences, f"Without effect on a resumed run: {', '.join(ignored)}."] if ignored else sentences)


def check_length(checkpoint: str | os.PathLike, args: TrainingArguments, steps: int) -> bool:
    """True if the number of steps has changed.

    Raises:
        ValueError: there are fewer than the checkpoint has done, or a finished run cannot be made longer.
    """
    state = read_json(os.path.join(checkpoint, TRAINER_STATE_FILE))
    done, before = state["global_step"], state["max_steps"]
    if steps == before:
        return False
    name = "max_steps" if args.max_steps > 0 else "train_bytes" if args.train_bytes else "num_train_epochs"
    given = f"`{name}` is {getattr(args, name):g}, which is {steps:,} steps"
    if steps < done:
        raise ValueError(f"{given}; the checkpoint {os.fspath(checkpoint)!r} is at step {done:,}.")
    if done >= before and args.lr_scheduler_type.value not in _ENDLESS:
        raise ValueError(
            f"{given}, but the run of {os.fspath(checkpoint)!r} has ended after {before:,}, and its learning rate "
            f"with it. {new_run_hint(checkpoint)}"
        )
    return True


def new_run_hint(checkpoint: str | os.PathLike) -> str:
    """How to train the model of a checkpoint with other settings."""
    directory = os.path.dirname(os.path.normpath(checkpoint)) or os.curdir
    return f"To train its model further, start a new run with --model {directory}"


def touches_schedule(changes: dict[str, tuple[Any, Any]]) -> bool:
    """True if a changed argument changes the schedule of learning rates."""
    return any(EFFECTS.get(name) is Effect.SCHEDULE for name in changes)
