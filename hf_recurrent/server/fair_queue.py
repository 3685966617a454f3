"""A queue in which the owners of jobs take turns, so that one with many jobs does not keep the others waiting."""

from collections import OrderedDict, deque
from collections.abc import Iterator
from itertools import islice, zip_longest

from hf_recurrent.server.batch import Progress


class FairQueue:
    """Jobs, each owner's in the order of their arrival, and the owners in turn."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[Progress]] = OrderedDict()  # the next owner first

    def __iter__(self) -> Iterator[Progress]:
        return (progress for queue in self._queues.values() for progress in queue)

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def append(self, progress: Progress) -> None:
        self._queues.setdefault(progress.job.request.owner, deque()).append(progress)

    def remove(self, progress: Progress) -> None:
        """Take a job out; its owner's turn comes after the others'."""
        owner = progress.job.request.owner
        self._queues[owner].remove(progress)
        if self._queues[owner]:
            self._queues.move_to_end(owner)
        else:
            del self._queues[owner]

    def first(self, count: int) -> list[Progress]:
        """The next jobs, which stay."""
        rounds = zip_longest(*self._queues.values())
        return list(islice((progress for turn in rounds for progress in turn if progress is not None), count))

    def popleft(self) -> Progress:
        """Take the next job out."""
        progress = self.first(1)[0]
        self.remove(progress)
        return progress
