"""`HubTrainer`: model card and uploads to the Hub."""

import os

from huggingface_hub import HfApi
from transformers.trainer_utils import HubStrategy
from transformers.utils import PushInProgress

from hf_recurrent.trainers.recording_trainer import RecordingTrainer


class HubTrainer(RecordingTrainer):
    """A `Trainer` that writes this package's model card and uploads models without pickled files."""

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        recipe: str | None = None,
        **kwargs,
    ) -> None:
        """Write README.md from `provenance`, and provenance.json; `Trainer` would write "fine-tuned version of"."""
        if not self.is_world_process_zero():
            return
        from hf_recurrent.hub.model_card import save_model_card
        from hf_recurrent.provenance.files import write_provenance
        from hf_recurrent.provenance.privacy import last_part

        provenance = self.record()
        if recipe is not None and provenance.phases and provenance.phases[-1].recipe is None:
            provenance.phases[-1].recipe = last_part(recipe)
        if not self.is_in_train:
            self.record_sample()
        os.makedirs(self.args.output_dir, exist_ok=True)
        write_provenance(provenance, self.args.output_dir)
        save_model_card(
            self.trained_model,
            self.args.output_dir,
            provenance,
            repo_id=self.hub_model_id,
            model_name=model_name,
            license=license,
            language=language,
            tags=[tags] if isinstance(tags, str) else tags,
        )

    def record_sample(self) -> None:
        """Record a text of the trained model in `provenance`, for the card."""

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Upload the saved model, and by `hub_strategy` the checkpoint, in the background."""
        args = self.args
        if not self.is_world_process_zero() or args.hub_strategy == HubStrategy.END:
            return
        busy = self.push_in_progress is not None and not self.push_in_progress.is_done()
        if busy and not args.hub_always_push:
            return
        self.callback_handler.on_push_begin(args, self.state, self.control)
        self._save(args.output_dir)
        self.create_model_card()
        message = f"Training in progress, step {self.state.global_step}"
        ignored = ["_*", "checkpoint-*"]
        uploads = [{"folder_path": args.output_dir, "commit_message": message, "ignore_patterns": ignored}]
        if args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            last = args.hub_strategy == HubStrategy.CHECKPOINT
            folder = "last-checkpoint" if last else os.path.basename(checkpoint_folder)
            message = f"{message}, checkpoint"
            uploads.append({"folder_path": checkpoint_folder, "path_in_repo": folder, "commit_message": message})
        api = HfApi(token=args.hub_token)
        target = {"repo_id": self.hub_model_id, "run_as_future": True, "revision": args.hub_revision}
        jobs = [api.upload_folder(**upload, **target) for upload in uploads]
        if busy:
            self.push_in_progress.jobs.extend(jobs)
        else:
            self.push_in_progress = PushInProgress(jobs)
