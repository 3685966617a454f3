"""The scheduler's use of stored states: no text is read twice, not even by jobs that begin at the same time.

A state is stored only where reading the same tokens as a prompt gives it, bit for bit. So a model with a count memory,
which does not learn from its own tokens, keeps no state after an answer; its next turn reads the answer once. A stock
model that reads blocks on a CPU does the same, and keeps states at the ends of whole blocks only.
"""

import sys
from collections import deque
from collections.abc import Callable

from hf_recurrent.modeling.block.recurrent_state import RecurrentState
from hf_recurrent.server.batch import Progress
from hf_recurrent.server.model_steps import ModelSteps
from hf_recurrent.server.prefix_store import PrefixStore
from hf_recurrent.server.shared_prefixes import SharedPrefixes
from hf_recurrent.server.text_hashes import PrefixKey, TextHashes

# Tokens to the first of the states at growing distances.
_FIRST = 64
# Tokens between two states of a long text, and bytes that are stored for each of its tokens at most.
_SPACING, _BYTES_PER_TOKEN = 512, 128


class PrefixReuse:
    """Starts jobs at the longest stored beginning of their text, and stores states while they run."""

    def __init__(self, store: PrefixStore, steps: ModelSteps, shared: SharedPrefixes | None = None):
        self.store, self._steps, self.shared = store, steps, shared
        self.tokens = 0  # that were not read again
        # Equal distances would make the states of a growing cache quadratic in the length of its text.
        self._spacing = sys.maxsize if store.grows else _SPACING
        while self._spacing * _BYTES_PER_TOKEN < store.entry_bytes:
            self._spacing *= 2
        # The job that reads the tokens before a key; others with the same text wait for it.
        self._readers: dict[bytes, Progress] = {}

    def begin(self, progress: Progress) -> None:
        """Skip the longest stored beginning of a text, and plan where to store states."""
        request = progress.job.request
        if request.text is None or request.start is not None:
            return
        last = len(request.tokens) - 1
        if request.scores is None:
            found, known = self.store.find(request.text, last), request.known
            if known is not None and known[0] <= last and (found is None or found[0] < known[0]):
                found = known
                self.store.put(request.text, request.text.key(known[0]), known[1])
            if found is not None:
                self._skip(progress, *found)
        lengths = self._lengths(request.text, last)
        progress.keep_at = deque(request.text.key(length) for length in lengths if length > progress.fed)

    def may_read(self, progress: Progress) -> bool:
        """Skip tokens whose state another job has stored meanwhile; False if another one reads the next tokens."""
        if progress.job.request.scores is not None:
            return True
        while progress.keep_at:
            key = progress.keep_at[0]
            reader = self._readers.get(key.whole)
            if reader is not None:
                return reader is progress
            state = self.store.get(key)
            if state is None:
                self._readers[key.whole] = progress
                return True
            self._skip(progress, key.length, state)
            progress.keep_at.popleft()
        return True

    def after_slice(self, progress: Progress) -> None:
        """Store the state of a text if it is at one of the planned places."""
        if progress.keep_at and progress.fed == progress.keep_at[0].length:
            self.drop(progress)
            key, state = progress.keep_at.popleft(), progress.snapshot.state
            self._put(progress.job.request.text, key, state)
            progress.job.known = key.length, state

    def after_step(self, progress: Progress, state: Callable[[], RecurrentState]) -> None:
        """Remember the state before the last generated token if that may begin a stop sequence."""
        request, output = progress.job.request, progress.job.output
        if self._steps.keeps_answers and request.text is not None and request.held_back(output) == 1:
            progress.before_stop = len(output) - 1, state()

    def end(self, progress: Progress, state: RecurrentState, is_ended: bool, stop: int) -> None:
        """Store the state after an answer, which has not read the end token, or lacks the last one.

        `stop` is the number of tokens of the stop sequence at the end of the output.
        """
        job = progress.job
        text, output = job.request.text, job.output
        # A text that begins with the model's own end token is another one than the client's.
        if not self._steps.keeps_answers or text is None or job.prefix or not (output or is_ended):
            return
        whole = text.followed_by(output if is_ended else output[:-1])
        job.known = len(whole), state
        self._put(whole, whole.key(len(whole)), state)
        if stop > 1 and progress.before_stop is not None and progress.before_stop[0] == len(output) - stop:
            self._put(whole, whole.key(len(text) + len(output) - stop), progress.before_stop[1])

    def drop(self, progress: Progress) -> None:
        """Let others read the next tokens of a job."""
        if progress.keep_at and self._readers.get(progress.keep_at[0].whole) is progress:
            del self._readers[progress.keep_at[0].whole]

    def close(self) -> None:
        self.store.close()
        if self.shared is not None:
            self.shared.close()

    def _lengths(self, text: TextHashes, last: int) -> list[int]:
        """Lengths at which states of a text of `last` tokens are stored: its ends, and growing distances."""
        lengths = {*text.ends, last, *range(self._spacing, last, self._spacing)}
        doubled = _FIRST
        while doubled < min(last, self._spacing):
            lengths.add(doubled)
            doubled *= 2
        lengths = {self._steps.reusable(length) for length in lengths}
        return sorted(length for length in lengths if self._steps.shortest_prefix <= length <= last)

    def _skip(self, progress: Progress, length: int, state: RecurrentState) -> None:
        skipped = progress.skip_to(length, state)
        progress.job.cached_tokens += skipped
        self.tokens += skipped

    def _put(self, text: TextHashes, key: PrefixKey, state: RecurrentState) -> None:
        """Store the state after the first tokens of a text, whose key this is."""
        if key.length >= self._steps.shortest_prefix:
            data = self.store.put(text, key, state)
            if self.shared is not None and data is not None:
                self.shared.put(key, data)
