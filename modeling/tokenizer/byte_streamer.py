"""Streamers for `generate()` that emit each character when its last byte arrives."""

import codecs
from typing import Any

from transformers import TextIteratorStreamer, TextStreamer


class ByteStreamer(TextStreamer):
    """`TextStreamer` for byte tokenizers: prints whole UTF-8 characters, each as soon as it is complete.

    The stock streamers wait for a space, and decode everything since the last line end again at each token. This one
    keeps at most three bytes, so time and memory per byte do not grow. Bytes that are not UTF-8 print as U+FFFD.

    Args:
        tokenizer: a tokenizer with `decode_bytes`, such as `ByteTokenizer`; any other raises a ValueError.
        skip_prompt: do not print the prompt.
        decode_kwargs: `skip_special_tokens` (do not print the end byte) and `errors` (default "replace").
    """

    def __init__(self, tokenizer: Any, skip_prompt: bool = False, **kwargs: Any) -> None:
        if not hasattr(tokenizer, "decode_bytes"):
            raise ValueError(
                f"`tokenizer` is of type {type(tokenizer).__name__}; it must have `decode_bytes`, like ByteTokenizer."
            )
        super().__init__(tokenizer, skip_prompt, **kwargs)
        self._skip_special_tokens = bool(self.decode_kwargs.get("skip_special_tokens", False))
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors=self.decode_kwargs.get("errors", "replace"))

    def put(self, value: Any) -> None:
        """Take new ids: first the prompt (1, T), then (1,) per step. Raises a ValueError for more than one row."""
        if value.ndim > 1 and value.shape[0] > 1:
            raise ValueError(f"`value` has {value.shape[0]} rows; it must be a batch of 1.")
        is_prompt, self.next_tokens_are_prompt = self.next_tokens_are_prompt, False
        if is_prompt and self.skip_prompt:
            return
        data = self.tokenizer.decode_bytes(value, skip_special_tokens=self._skip_special_tokens)
        if text := self._decoder.decode(data):
            self.on_finalized_text(text)

    def end(self) -> None:
        """Emit the rest of an incomplete character, and end the stream."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self.next_tokens_are_prompt = True
        self.on_finalized_text(text, stream_end=True)


class ByteIteratorStreamer(ByteStreamer, TextIteratorStreamer):
    """`ByteStreamer` to iterate over in another thread than `generate()`, like `TextIteratorStreamer`."""
