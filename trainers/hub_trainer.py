"""`HubTrainer`: model card and uploads to the Hub."""

import os
from typing import Any

from accelerate.utils import broadcast_object_list
from huggingface_hub import HfApi
from transformers.trainer_utils import HubStrategy
from transformers.utils import PushInProgress

from hf_recurrent.trainers.agreement import same_error
from hf_recurrent.trainers.recording_trainer import RecordingTrainer


class HubTrainer(RecordingTrainer):
    """A `Trainer` that writes this package's model card and uploads models without pickled files."""

    def init_hf_repo(self, *arguments: Any, **options: Any) -> None:
        """The method of `Trainer`; if the Hub refuses the first process, all raise its sentence as a ValueError."""
        with same_error():
            super().init_hf_repo(*arguments, **options)
        # Sharded models are saved for the Hub by all processes, so all of them know what it knows.
        self.push_in_progress = None
        if self.args.world_size > 1:
            self.hub_model_id = broadcast_object_list([self.hub_model_id])[0]

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
        if not self.takes_part_in_saving:
            return
        from hf_recurrent.checkpoints.privacy import last_part
        from hf_recurrent.checkpoints.provenance_files import write_provenance
        from hf_recurrent.hub.model_card import Statements, save_model_card

        provenance = self.record()
        if recipe is not None and provenance.phases and provenance.phases[-1].recipe is None:
            provenance.phases[-1].recipe = last_part(recipe)
        if not self.is_in_train:
            with self.sharding.joined():
                if self.is_world_process_zero():
                    self.record_sample()
        if not self.is_world_process_zero():
            return
        os.makedirs(self.args.output_dir, exist_ok=True)
        write_provenance(provenance, self.args.output_dir)
        statements = Statements(
            repo_id=self.hub_model_id,
            model_name=model_name,
            license=license,
            language=language,
            tags=[tags] if isinstance(tags, str) else tags or [],
        )
        save_model_card(self.trained_model, self.args.output_dir, provenance, statements)

    @property
    def takes_part_in_saving(self) -> bool:
        """True if this process writes the model, or holds a part of it."""
        return self.args.should_save or self.sharding.is_sharded

    def _decided_by_first(self, value: bool) -> bool:
        """`value` of the first process, if several take part in saving."""
        return bool(broadcast_object_list([value])[0]) if self.sharding.is_sharded else value

    def record_sample(self) -> None:
        """Record a text of the trained model in `provenance`, for the card."""

    def push_to_hub(self, *arguments: Any, **options: Any) -> Any:
        """The method of `Trainer`, for all processes: those that hold a part of the model take part in saving it.

        Raises:
            OSError: in all processes, if the Hub refuses the first.
        """
        try:
            with same_error():
                result = super().push_to_hub(*arguments, **options)
                if not self.is_world_process_zero():
                    self.create_model_card()  # as the first process has done inside
        except ValueError as error:
            raise error if self.is_world_process_zero() else OSError(str(error)) from error
        return result

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Upload the saved model, and by `hub_strategy` the checkpoint, in the background."""
        args = self.args
        if not self.takes_part_in_saving or args.hub_strategy == HubStrategy.END:
            return
        busy = self.push_in_progress is not None and not self.push_in_progress.is_done()
        if self._decided_by_first(busy and not args.hub_always_push):
            return
        if self.is_world_process_zero():
            self.callback_handler.on_push_begin(args, self.state, self.control)
        self._save(args.output_dir)
        self.create_model_card()
        if not self.is_world_process_zero():
            return
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
