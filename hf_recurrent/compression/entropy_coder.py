"""Range coding of bytes with given probabilities, by the `constriction` library.

Shape letters: B streams, V vocabulary.
"""

from typing import Any

import numpy as np

_INSTALL = "compression needs the package constriction; install it with `pip install hf-recurrent[compress]`."


def _library() -> Any:
    try:
        import constriction
    except ImportError as error:
        raise ImportError(_INSTALL) from error
    return constriction


def require_coder() -> None:
    """Raise an ImportError that says what to install if the library is missing."""
    _library()


class Encoder:
    """Encodes symbols as they come; `finish` returns the code and begins anew."""

    def __init__(self) -> None:
        self._library = _library()
        self._family = self._library.stream.model.Categorical(perfect=False)
        self._begin()

    def _begin(self) -> None:
        self._encoder = self._library.stream.queue.RangeEncoder()

    @property
    def size(self) -> int:
        """Bytes of code so far."""
        return 4 * self._encoder.num_words()

    def encode(self, symbols: np.ndarray, probabilities: np.ndarray) -> None:
        """Append symbols (B,) that were predicted with probabilities (B, V), float64."""
        self._encoder.encode(np.asarray(symbols, np.int32), self._family, probabilities)

    def finish(self) -> bytes:
        """The code; the next symbols belong to another one."""
        code = self._encoder.get_compressed().astype("<u4").tobytes()
        self._begin()
        return code


class Decoder:
    """Decodes the code of one [`Encoder.finish`]."""

    def __init__(self, code: bytes):
        library = _library()
        self._family = library.stream.model.Categorical(perfect=False)
        self._decoder = library.stream.queue.RangeDecoder(np.frombuffer(code, "<u4").astype(np.uint32))

    def decode(self, probabilities: np.ndarray) -> np.ndarray:
        """The next symbols (B,), given the probabilities (B, V) with which they were encoded."""
        return self._decoder.decode(self._family, probabilities)
