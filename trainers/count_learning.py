"""`CountLearning`: fills the count memory of a model in the same pass over the data that trains its network."""

import math
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from hf_recurrent.kernels.thread_count import beside_kernels
from hf_recurrent.modeling.block.causal_lm_loss import IGNORE_INDEX
from hf_recurrent.modeling.contexts.count_memory import CountMemory
from hf_recurrent.modeling.contexts.document_learning import DocumentLearning

if TYPE_CHECKING:
    from hf_recurrent.trainers.stream_trainer import StreamTrainer


class CountLearning:
    """The count memory learns from every block with the network's predictions, in a thread next to the backward pass.

    All processes gather the blocks of all streams and learn the same, in the order of the streams, so the memory does
    not depend on the number of processes or micro-batches.
    """

    def __init__(self, trainer: "StreamTrainer"):
        self.trainer = trainer
        self._thread = ThreadPoolExecutor(1, "count-learning")
        self._running: Future[tuple[float, int]] | None = None
        self.reset()

    @property
    def memory(self) -> CountMemory | None:
        """The memory of the trained model; None if it has none."""
        return getattr(self.trainer.trained_model, "count_memory", None)

    def reset(self) -> None:
        """Begin a run: no stream has read anything."""
        if self._running is not None:  # of a run that was interrupted
            self._running.exception()
            self._running = None
        self._blocks: list[dict[str, torch.Tensor]] = []
        self._documents: DocumentLearning | None = None  # until the first block
        self._nats, self._bytes = 0.0, 0

    def buffer_names(self, model: torch.nn.Module) -> list[str]:
        """Names of the memory's tensors in the module that is trained."""
        own = [] if self.memory is None else [*self.memory.buffers()]
        return [name for name, buffer in model.named_buffers() if any(buffer is each for each in own)]

    def add(self, batch: dict[str, Any], logits: list[torch.Tensor] | None) -> None:
        """Take a micro-batch and the network's logits (B, T, V) of its parts; learn after the last of a step."""
        if self.memory is None:
            return
        reset_mask = batch["reset_mask"].clone()
        if self.trainer.args.regime == "iid":
            reset_mask[:, 0] = True
        block = {name: batch[name] for name in ("input_ids", "shift_labels")} | {
            "reset_mask": reset_mask,
            "streams": torch.as_tensor(batch["stream_indices"], device=reset_mask.device),
        }
        if logits:
            block["network"] = torch.cat(logits, dim=1)[:, -reset_mask.shape[1] :].float()
        self._blocks.append(block)
        if len(self._blocks) == self.trainer.args.gradient_accumulation_steps:
            self._learn()

    def wait(self) -> None:
        """Wait until the block is learned; only then may the memory be read."""
        if self._running is not None:
            running, self._running = self._running, None
            nats, count = running.result()
            self._nats += nats
            self._bytes += count

    def _learn(self) -> None:
        joined = {name: torch.cat([block[name] for block in self._blocks]) for name in self._blocks[0]}
        self._blocks.clear()
        if self.trainer.args.world_size > 1:
            joined = {name: self.trainer.accelerator.gather(tensor) for name, tensor in joined.items()}
        order = joined.pop("streams").argsort()
        block = {name: tensor[order].cpu() for name, tensor in joined.items()}
        if self._documents is None:
            self._documents = DocumentLearning(self.memory, len(order))
        self._running = self._thread.submit(self._read, block)

    def _read(self, block: dict[str, torch.Tensor]) -> tuple[float, int]:
        """Learn a block; returns the nats of its targets and their number."""
        with beside_kernels():
            nats = self._documents.read(block, block.get("network"))
        return float(nats.sum(dtype=torch.float64)), int((block["shift_labels"] != IGNORE_INDEX).sum())

    def metrics(self) -> dict[str, float]:
        """Bits per byte of network and memory together since the last log; then counting starts again."""
        if not self._bytes:
            return {}
        bits = self._nats / math.log(2) / self._bytes
        self._nats, self._bytes = 0.0, 0
        return {"mixed_bits_per_byte": bits}

    def finish(self) -> None:
        """Count the documents that still run when training ends."""
        if self._documents is not None:
            self._documents.finish()

    def state_dict(self) -> dict[str, Any]:
        """Tensors that streams carry, and sums since the last log, for a checkpoint: the same in all processes."""
        tensors = {} if self._documents is None else self._documents.tensors
        return {**tensors, "nats": self._nats, "bytes": self._bytes}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """Continue from [`state_dict`]."""
        if "state" in values:
            self._documents = DocumentLearning(self.memory, len(values["state"]))
            self._documents.tensors = {name: values[name] for name in self._documents.tensors}
        self._nats, self._bytes = values["nats"], values["bytes"]
