"""`PhaseRecorder`: writes a phase of training into a `Provenance` while it happens."""

import time
from typing import Any

from hf_recurrent.checkpoints.environment import describe_hardware, now, versions
from hf_recurrent.checkpoints.rates import RateMeter, join_rates
from hf_recurrent.checkpoints.records import Phase, Provenance, Segment


class PhaseRecorder:
    """Records the steps of one optimizer as a segment of a phase.

    The segment is joined with the one before if nothing but the steps differs. A phase without steps is not added.

    Args:
        provenance: the record that the phase belongs to.
        phase: a new phase, or the last one of `provenance` to extend it.
        optimizer: its rates are read at every step.
        step: number of finished steps.
        num_processes, device_type: hardware of the segment.
    """

    def __init__(
        self,
        provenance: Provenance,
        phase: Phase,
        optimizer: Any,
        step: int,
        num_processes: int = 1,
        device_type: str | None = None,
    ):
        self.provenance, self.phase = provenance, phase
        self._meter, self._begin = RateMeter(optimizer), time.monotonic()
        self._earlier = list(phase.segments)
        self._segment = Segment(
            first_step=step,
            last_step=step,
            read=0,
            processes=num_processes,
            settings={},
            rates=[],
            versions=versions(),
            hardware=describe_hardware(num_processes, device_type),
            started=now(),
        )
        phase.trained_parameters = self._meter.trained_parameters

    @property
    def optimizer_name(self) -> str:
        """Class of the optimizer."""
        return self._meter.name

    def read_rates(self) -> None:
        """Note the present learning rates, where steps bypass the optimizer's `step`."""
        self._meter.read()

    def update(self, step: int, read: int, settings: dict[str, Any]) -> None:
        """Record the steps since the recorder was made.

        Args:
            step: number of finished steps of the phase.
            read: tokens that were trained on since the recorder was made.
            settings: the settings in effect.
        """
        new = self._segment
        if step <= new.first_step:
            return
        new.last_step, new.read, new.settings, new.rates = step, read, settings, self._meter.rates()
        new.seconds = round(time.monotonic() - self._begin, 3)
        if self._earlier and _conditions(self._earlier[-1]) == _conditions(new):
            self.phase.segments = [*self._earlier[:-1], _joined(self._earlier[-1], new)]
        else:
            self.phase.segments = [*self._earlier, new]
        if not any(phase is self.phase for phase in self.provenance.phases):
            self.provenance.phases.append(self.phase)

    def close(self) -> None:
        """Stop reading rates."""
        self._meter.close()


def _conditions(segment: Segment) -> tuple:
    groups = [(rate.parameters, rate.settings) for rate in segment.rates]
    return segment.processes, segment.settings, groups, segment.versions, segment.hardware


def _joined(earlier: Segment, later: Segment) -> Segment:
    return Segment(
        first_step=earlier.first_step,
        last_step=later.last_step,
        read=earlier.read + later.read,
        processes=later.processes,
        settings=later.settings,
        rates=join_rates(earlier.rates, later.rates),
        versions=later.versions,
        hardware=later.hardware,
        started=earlier.started,
        seconds=round(earlier.seconds + later.seconds, 3),
        resumed=earlier.resumed + 1,
    )
