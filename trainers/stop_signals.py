"""`StopSignals`: Ctrl-C and SIGTERM end training after the current step, with a checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from accelerate.utils import reduce
from torch import nn

from hf_recurrent.interruption import StopRequest, stop_on_signals
from hf_recurrent.trainers.agreement import total
from hf_recurrent.trainers.sharding import EarlyStop, Replication


class TrainingInterrupted(KeyboardInterrupt):
    """Training was stopped by a signal, after saving `checkpoint`."""

    def __init__(self, stop: StopRequest, checkpoint: str):
        self.number, self.checkpoint = stop.number, checkpoint
        super().__init__(f"stopped by {stop.number.name}; saved {checkpoint}")


class EvaluationStopped(Exception):
    """A signal arrived during an evaluation inside training."""


class StopSignals:
    """Signals that ask a run to stop; all processes agree on the step. If not `enabled`, signals stay as they are."""

    def __init__(self, enabled: bool, sharding: Replication, device: torch.device, num_processes: int):
        self.enabled, self.sharding, self.device, self.num_processes = enabled, sharding, device, num_processes
        self.request: StopRequest | None = None
        self._agreed = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside the block, signals are requests to stop."""
        self._agreed = False
        if not self.enabled:
            yield
            return
        with stop_on_signals(repeatable=self.num_processes > 1) as self.request:
            try:
                yield
            finally:
                self.request = None

    @property
    def is_requested(self) -> bool:
        """True after a signal to this process."""
        return self.request is not None and self.request.is_set()

    @property
    def stop_is_due(self) -> bool:
        """True if training has to end after this step; the same in all processes."""
        return self._agreed if self.num_processes > 1 else self.is_requested

    def sum_and_agree(self, count: int) -> torch.Tensor:
        """Sum of a count over all processes, which at the same time agree whether to stop after this step."""
        sums = reduce(torch.tensor([count, self.is_requested], device=self.device), reduction="sum")
        if self.num_processes > 1:
            self._agreed = bool(sums[1])
        return sums[0]

    @contextmanager
    def stoppable(self, model: nn.Module) -> Iterator[None]:
        """An evaluation that a signal ends early if it runs inside training; for all processes together."""

        def check(*_) -> None:
            if self.is_requested:
                raise EarlyStop

        stopped, hook = False, nullcontext()
        if not self.sharding.is_sharded:  # otherwise processes agree before every pass
            hook = model.register_forward_pre_hook(check)
        try:
            with hook, self.sharding.joined(lambda: self.is_requested):
                yield
        except EarlyStop:
            stopped = True
        if self.request is not None and total(int(stopped), self.device):
            self._agreed = True
            raise EvaluationStopped
