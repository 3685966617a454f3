"""`PhaseRecords`: records how a trainer trains its weights, while it happens."""

from math import isfinite, nan
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from hf_recurrent.checkpoints.files import checkpoint_number
from hf_recurrent.checkpoints.fingerprints import adapter_weights, weights_fingerprint
from hf_recurrent.checkpoints.provenance_files import (
    CHANGED,
    base_of,
    find_provenance,
    read_provenance,
    remember_provenance,
)
from hf_recurrent.checkpoints.recorder import PhaseRecorder, schedule_settings
from hf_recurrent.checkpoints.records import Data, Phase, Provenance, thin_out
from hf_recurrent.data.episode_source import EpisodeSource

if TYPE_CHECKING:
    from hf_recurrent.trainers.stream_trainer import StreamTrainer


class PhaseRecords:
    """Phases, settings and results of a trainer, in a [`Provenance`] that is saved with every model.

    Training from the beginning adds a phase to the model's; a resumed run extends the phase of its checkpoint.
    """

    def __init__(self, trainer: "StreamTrainer"):
        self.trainer = trainer
        self.recipe: str | None = None  # name of the recipe of the next phase
        self.tokens_read = 0  # since the recorder was made, by all processes
        self._provenance: Provenance | None = None
        self._recorder: PhaseRecorder | None = None

    @property
    def provenance(self) -> Provenance:
        """Provenance of the weights of the trained model, up to the last call of [`record`]."""
        if self._provenance is None:
            self._provenance = find_provenance(self.trainer.trained_model)
        return self._provenance

    def record(self) -> Provenance:
        """Bring `provenance` up to date with the weights, and return it."""
        provenance, recorder, model = self.provenance, self._recorder, self.trainer.trained_model
        weights = weights_fingerprint(model)
        if recorder is not None:
            recorder.update(self.trainer.state.global_step, self.tokens_read, self._settings())
            curve = [
                [entry["bytes_seen"], round(entry["bits_per_byte"], 4)]
                for entry in self.trainer.state.log_history
                if "bytes_seen" in entry and isfinite(entry.get("bits_per_byte", nan))
            ]
            recorder.phase.curve = thin_out(curve)
            for data in recorder.phase.data:
                data.read = recorder.phase.read
        elif provenance.weights not in (None, weights):
            provenance.gaps = list(dict.fromkeys([*provenance.gaps, CHANGED]))
        provenance.weights = weights
        remember_provenance(model, provenance)
        return provenance

    def continue_with(self, later: Provenance) -> None:
        """Take over the provenance after another trainer has trained the same model further."""
        self.close()
        self._provenance = later

    def return_to(self, checkpoint: str) -> None:
        """Take over the phases of an earlier checkpoint, whose weights have replaced the last ones."""
        earlier = read_provenance(checkpoint)
        if earlier is not None:
            earlier.results = self.provenance.results
            self.continue_with(earlier)

    def find_beginning(self, checkpoint: str | None) -> None:
        """Find the provenance of the weights that training begins with."""
        self.close()
        model = self.trainer.trained_model
        if checkpoint is None:
            if self._provenance is None or self._provenance.weights != weights_fingerprint(model):
                self._provenance = find_provenance(model)
            return
        self._provenance = read_provenance(checkpoint)
        if self._provenance is None:
            steps = checkpoint_number(checkpoint)
            self._provenance = Provenance(gaps=[f"The first {steps:,} steps were not recorded."] if steps else [])

    def begin(self) -> None:
        """Record the optimizer's steps from now on."""
        trainer, phases, step = self.trainer, self.provenance.phases, self.trainer.state.global_step
        extends = step > 0 and phases and phases[-1].method == trainer.method.name
        phase, args = phases[-1] if extends else self._new_phase(), trainer.args
        self.tokens_read, trainer.guard.clipped_to = 0, None
        self._recorder = PhaseRecorder(
            self.provenance, phase, trainer.optimizer, step, args.world_size, args.device.type
        )

    def close(self) -> None:
        """Stop recording: later changes of the weights do not belong to this training."""
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None

    def add_result(self, source: EpisodeSource, metrics: dict[str, float], **settings: Any) -> None:
        """Add an evaluation of the current weights."""
        provenance = self.record()
        trained_on = {data.fingerprint for phase in provenance.phases for data in phase.data}
        is_seen = source.unit != "symbol" and source.fingerprint in trained_on  # a task has its own held-out examples
        settings |= {"precision": self._precision, "split": "train" if is_seen else "validation"}
        provenance.add_metrics(provenance.weights, Data.of(source), metrics, settings)

    # ---- Facts ----

    def _settings(self) -> dict[str, Any]:
        """Settings that act in the current step, as JSON values."""
        trainer, args = self.trainer, self.trainer.args
        own = {
            "optimizer": self._recorder.optimizer_name,
            "schedule": schedule_settings(trainer.lr_scheduler),
            "max_grad_norm": trainer.guard.clipped_to,
            "precision": self._precision,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "seed": args.seed,
            "regime": args.regime,
            "streams": args.num_streams,
            "block_size": args.block_size,
            "state_carried": trainer.method.carries_state,
            "data_seed": args.stream_seed,
        }
        return own | trainer.method.settings() | trainer.count_learning.settings()

    @property
    def _precision(self) -> str:
        mixed = str(self.trainer.accelerator.mixed_precision)
        weight = next(self.trainer.model.parameters(), None)
        kind = "float32" if weight is None else str(weight.dtype).removeprefix("torch.")
        return kind if mixed == "no" else f"{kind}, {mixed} autocast"

    def _new_phase(self) -> Phase:
        trainer, model = self.trainer, self.trainer.trained_model
        phase = Phase(
            method=trainer.method.name,
            data=[Data.of(trainer.train_dataset)],
            base=base_of(model),
            parameters=model.num_parameters(),
            adapter=_describe_adapter(model),
            recipe=self.recipe,
        )
        trainer.method.begin_phase(phase, self.provenance)
        return phase


def _describe_adapter(model: PreTrainedModel) -> dict[str, Any] | None:
    """Type and main settings of an adapter."""
    if adapter_weights(model) is None:
        return None
    config = next(iter(model.peft_config.values())).to_dict()
    found = {"type": str(getattr(config["peft_type"], "value", config["peft_type"]))}
    for name in ("r", "lora_alpha", "lora_dropout", "use_dora", "num_virtual_tokens"):
        if config.get(name):
            found[name] = config[name]
    if targets := config.get("target_modules"):
        found["target_modules"] = sorted(targets) if isinstance(targets, set | list) else targets
    return found
