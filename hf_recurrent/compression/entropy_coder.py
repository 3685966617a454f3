"""Range coding of bytes with given probabilities, by the `constriction` library.

Shape letters: B streams, V vocabulary.
"""

from typing import Any

import numpy as np


def require_coder() -> Any:
    """The library's stream coders; an ImportError says what to install if they are missing."""
    try:
        from constriction import stream
    except ImportError as error:
        raise ImportError(
            "compression needs the package constriction; install it with `pip install hf-recurrent[compress]`."
        ) from error
    return stream


class Encoder:
    """Encodes symbols as they come; `finish` returns the code and starts the next one."""

    def __init__(self) -> None:
        self._stream = require_coder()
        self._family = self._stream.model.Categorical(perfect=False)
        self._encoder = self._stream.queue.RangeEncoder()

    @property
    def size(self) -> int:
        """Bytes of code so far."""
        return 4 * self._encoder.num_words()

    def encode(self, symbols: np.ndarray, probabilities: np.ndarray) -> None:
        """Append symbols (B,) that were predicted with probabilities (B, V), float64."""
        self._encoder.encode(np.asarray(symbols, np.int32), self._family, probabilities)

    def finish(self) -> bytes:
        """The code of all symbols since the last call."""
        code = self._encoder.get_compressed().astype("<u4").tobytes()
        self._encoder = self._stream.queue.RangeEncoder()
        return code


class Decoder:
    """Decodes the code of one [`Encoder.finish`]."""

    def __init__(self, code: bytes):
        stream = require_coder()
        self._family = stream.model.Categorical(perfect=False)
        self._decoder = stream.queue.RangeDecoder(np.frombuffer(code, "<u4").astype(np.uint32))

    def decode(self, probabilities: np.ndarray) -> np.ndarray:
        """The next symbols (B,), given the probabilities (B, V) with which they were encoded."""
        return self._decoder.decode(self._family, probabilities)
