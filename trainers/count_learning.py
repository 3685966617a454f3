"""`CountLearning`: fills the count memory of a model in the same pass over the data that trains its network."""

import math
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm

from hf_recurrent.data.corpus import Corpus
from hf_recurrent.evaluation.counts_alone import TrainingBytes
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
        self._discount = trainer.args.count_discount
        self._running: Future[dict[str, float]] | None = None
        self.reset()

    @property
    def memory(self) -> CountMemory | None:
        """The memory of the trained model; None if it has none."""
        return getattr(self.trainer.trained_model, "count_memory", None)

    def reset(self, *, is_new: bool = False) -> None:
        """Begin a run: no stream has read anything, and the memory of a new one reads ahead."""
        if self._running is not None:  # of a run that was interrupted
            self._running.exception()
            self._running = None
        # Of each micro-batch: its tensors, and the network's logits of its parts.
        self._blocks: list[tuple[dict[str, torch.Tensor], list[torch.Tensor]]] = []
        self._documents: DocumentLearning | None = None  # until the first block
        # Since the last log; and the steps of the run before which documents were read ahead.
        self._sums = {"nats": 0.0, "network_nats": 0.0, "bytes": 0, "planned_steps": 0}
        if is_new and self.trainer.args.count_bytes:
            self._read_ahead()

    def _read_ahead(self) -> None:
        """Count documents that no stream will reach."""
        args, corpus = self.trainer.args, self.trainer.train_dataset
        if self.memory is None or not isinstance(corpus, Corpus) or args.regime != "multi_stream":
            return
        self._sums["planned_steps"] = self.trainer.num_training_steps
        counted = self.settings()
        read = TrainingBytes(corpus, args.num_streams, args.block_size, args.stream_seed, steps=0, **counted)
        documents = tqdm(read.ahead, "counting documents", disable=args.disable_tqdm, leave=False)
        self._documents = DocumentLearning(self.memory, args.num_streams)
        self._documents.read_ahead(documents, corpus.end_token_id)

    def settings(self) -> dict[str, float]:
        """For the record, if the memory has read ahead: what determines the documents."""
        steps = self._sums["planned_steps"]
        return {"count_bytes": self.trainer.args.count_bytes, "planned_steps": steps} if steps else {}

    def buffer_names(self, model: torch.nn.Module) -> list[str]:
        """Names of the memory's tensors in the module that is trained."""
        own = [] if self.memory is None else [*self.memory.buffers()]
        return [name for name, buffer in model.named_buffers() if any(buffer is each for each in own)]

    def target_weights(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Weights (B, T) of a micro-batch's targets in the loss of the network, as part of the batch; none without a
        discount.

        A target that the memory alone, before it learns the block, predicts with probability p counts
        1 - `count_discount` p: the network learns most where the counts know least.
        """
        if self.memory is None or not self._discount:
            return {}
        first, size = int(batch["stream_indices"][0]), len(batch["input_ids"])
        states = self.memory.init_state(size)
        if self._documents is not None:
            states = self._documents.tensors["state"][first : first + size]
        block = [batch["input_ids"], states, self._reset_mask(batch), batch["shift_labels"]]
        halves = [*zip(*(tensor.tensor_split(2) for tensor in block), strict=True)]
        other = self._thread.submit(self._predict, *halves[1])
        nats = torch.cat([self._predict(*halves[0]), other.result()])
        return {"target_weights": 1 - self._discount * nats.neg().exp()}

    def _predict(
        self, input_ids: torch.Tensor, states: torch.Tensor, reset_mask: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        """Nats (B, T) of targets by the memory alone, from the states before their block."""
        return self.memory.read(input_ids, states, None, reset_mask, targets=targets)[0]

    def _reset_mask(self, batch: dict[str, Any]) -> torch.Tensor:
        reset_mask = batch["reset_mask"].clone()
        if self.trainer.args.regime == "iid":
            reset_mask[:, 0] = True
        return reset_mask

    def add(self, batch: dict[str, Any], logits: list[torch.Tensor] | None) -> None:
        """Take a micro-batch and the network's logits (B, T, V) of its parts; learn after the last of a step."""
        if self.memory is None:
            return
        block = {name: batch[name] for name in ("input_ids", "shift_labels")} | {"reset_mask": self._reset_mask(batch)}
        block["streams"] = torch.as_tensor(batch["stream_indices"], device=batch["input_ids"].device)
        self._blocks.append((block, list(logits or ())))
        if len(self._blocks) == self.trainer.args.gradient_accumulation_steps:
            self._learn()

    def wait(self) -> None:
        """Wait until the block is learned; only then may the memory be read."""
        if self._running is not None:
            running, self._running = self._running, None
            for name, value in running.result().items():
                self._sums[name] += value

    def _learn(self) -> None:
        blocks, self._blocks = self._blocks, []
        if self._documents is None:
            rows = sum(len(block["streams"]) for block, _ in blocks) * self.trainer.args.world_size
            self._documents = DocumentLearning(self.memory, rows)
        if self.trainer.args.world_size > 1:  # all processes gather in the same order, so not in another thread
            gather = self.trainer.accelerator.gather
            blocks = [({name: gather(tensor) for name, tensor in _joined(blocks).items()}, [])]
        self._running = self._thread.submit(self._read, blocks)

    def _read(self, blocks: list[tuple[dict[str, torch.Tensor], list[torch.Tensor]]]) -> dict[str, float]:
        """Learn the blocks of a step; returns nats, nats of the network with a discount, and the number of targets."""
        with beside_kernels():
            joined = _joined(blocks)
            order = joined.pop("streams").argsort()
            is_ordered = bool((order[1:] > order[:-1]).all())
            block = {name: (tensor if is_ordered else tensor[order]).cpu() for name, tensor in joined.items()}
            labels, network, network_nats = block["shift_labels"], block.get("network"), 0.0
            nats = self._documents.read(block, network)
            if self._discount and network is not None:
                network_nats = float(cross_entropy(network.flatten(0, 1), labels.flatten(), reduction="sum"))
        count = int((labels != IGNORE_INDEX).sum())
        return {"nats": float(nats.sum(dtype=torch.float64)), "network_nats": network_nats, "bytes": count}

    def metrics(self) -> dict[str, float]:
        """Bits per byte of both since the last log, and of the network, where a weighted loss does not tell them.

        Then counting starts again.
        """
        if not self._sums["bytes"]:
            return {}
        mixed, network = (self._sums[name] / math.log(2) / self._sums["bytes"] for name in ("nats", "network_nats"))
        self._sums |= {"nats": 0.0, "network_nats": 0.0, "bytes": 0}
        return ({"bits_per_byte": network} if network else {}) | {"mixed_bits_per_byte": mixed}

    def finish(self) -> None:
        """Count the documents that still run when training ends."""
        if self._documents is not None:
            self._documents.finish()

    def state_dict(self) -> dict[str, Any]:
        """Tensors that streams carry, and sums since the last log, for a checkpoint: the same in all processes."""
        return ({} if self._documents is None else self._documents.tensors) | self._sums

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """Continue from [`state_dict`]."""
        if "state" in values:
            self._documents = DocumentLearning(self.memory, len(values["state"]))
            self._documents.tensors = {name: values[name] for name in self._documents.tensors}
        # Earlier checkpoints lack some.
        self._sums |= {name: values[name] for name in self._sums if name in values}


def _joined(blocks: list[tuple[dict[str, torch.Tensor], list[torch.Tensor]]]) -> dict[str, torch.Tensor]:
    """The tensors of several blocks, one below the other, with the network's logits (B, T, V), if there are any."""
    joined = {name: torch.cat([block[name] for block, _ in blocks]) for name in blocks[0][0]}
    if blocks[0][1]:
        steps = joined["input_ids"].shape[1]
        parts = [logits[0] if len(logits) == 1 else torch.cat(logits, dim=1) for _, logits in blocks]
        joined["network"] = torch.cat([part[:, -steps:] for part in parts]).float()
    return joined
