"""Model card and uploads of a trainer."""

import os
from typing import TYPE_CHECKING, Any

from accelerate.utils import broadcast_object_list
from huggingface_hub import HfApi
from transformers.trainer_utils import HubStrategy
from transformers.utils import PushInProgress

from hf_recurrent.checkpoints.privacy import last_part, redact
from hf_recurrent.checkpoints.provenance_files import write_provenance
from hf_recurrent.checkpoints.records import Sample
from hf_recurrent.data.corpus import Corpus
from hf_recurrent.evaluation.samples import generate_samples, prompt_from

if TYPE_CHECKING:
    from hf_recurrent.trainers.stream_trainer import StreamTrainer

# Of the sample on the card.
_SAMPLE_BYTES, _TEMPERATURE = 200, 0.8


def write_model_card(trainer: "StreamTrainer", recipe: str | None = None, **statements: Any) -> None:
    """Write README.md, provenance.json and results as data into `output_dir`; called by all processes.

    `recipe` names the recipe of the last phase, if it has none yet; `statements` are fields of [`Statements`].
    """
    from hf_recurrent.hub.eval_results import write_eval_results
    from hf_recurrent.hub.model_card import Statements, save_model_card

    provenance = trainer.record()
    if recipe is not None and provenance.phases and provenance.phases[-1].recipe is None:
        provenance.phases[-1].recipe = last_part(recipe)
    if not trainer.is_in_train:
        with trainer.sharding.joined():
            if trainer.is_world_process_zero():
                _record_sample(trainer)
    if not trainer.is_world_process_zero():
        return
    os.makedirs(trainer.args.output_dir, exist_ok=True)
    write_provenance(provenance, trainer.args.output_dir)
    statements = Statements(repo_id=trainer.hub_model_id, **statements)
    save_model_card(trainer.trained_model, trainer.args.output_dir, provenance, statements)
    write_eval_results(provenance, trainer.args.output_dir)


def _record_sample(trainer: "StreamTrainer") -> None:
    """Record a continuation of the beginning of a held-out document in the provenance."""
    source, tokenizer = trainer.eval_dataset, trainer.processing_class
    if not isinstance(source, Corpus) or source.unit != "byte" or not hasattr(tokenizer, "decode_bytes"):
        return
    provenance, prompt = trainer.provenance, prompt_from(source, tokenizer)
    before = provenance.sample
    if prompt is None or (before is not None and before.weights == provenance.weights):
        return
    text = generate_samples(trainer.trained_model, tokenizer, [prompt], _SAMPLE_BYTES, temperature=_TEMPERATURE)[0]
    provenance.sample = Sample(redact(prompt), redact(text), provenance.weights, _TEMPERATURE)


def push_checkpoint(trainer: "StreamTrainer", checkpoint: str) -> None:
    """Upload the saved model, and by `hub_strategy` the checkpoint, in the background."""
    args, sharded = trainer.args, trainer.sharding.is_sharded
    if not trainer.takes_part_in_saving or args.hub_strategy == HubStrategy.END:
        return
    busy = trainer.push_in_progress is not None and not trainer.push_in_progress.is_done()
    waits = busy and not args.hub_always_push
    if bool(broadcast_object_list([waits])[0]) if sharded else waits:  # the first process decides for all
        return
    if trainer.is_world_process_zero():
        trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
    trainer.checkpointing.save_models(args.output_dir)
    trainer.create_model_card()
    if not trainer.is_world_process_zero():
        return
    message = f"Training in progress, step {trainer.state.global_step}"
    ignored = ["_*", "checkpoint-*"]
    uploads = [{"folder_path": args.output_dir, "commit_message": message, "ignore_patterns": ignored}]
    if args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
        last = args.hub_strategy == HubStrategy.CHECKPOINT
        folder = "last-checkpoint" if last else os.path.basename(checkpoint)
        message = f"{message}, checkpoint"
        uploads.append({"folder_path": checkpoint, "path_in_repo": folder, "commit_message": message})
    api = HfApi(token=args.hub_token)
    target = {"repo_id": trainer.hub_model_id, "run_as_future": True, "revision": args.hub_revision}
    jobs = [api.upload_folder(**upload, **target) for upload in uploads]
    if busy:
        trainer.push_in_progress.jobs.extend(jobs)
    else:
        trainer.push_in_progress = PushInProgress(jobs)
