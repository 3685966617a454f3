"""The run of `hf-recurrent generate`: texts are read, continued, printed and saved."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, TextStreamer

from hf_recurrent.generation.constraints import Constraint
from hf_recurrent.generation.speculative import generate_speculative
from hf_recurrent.generation.text_state import (
    TextState,
    continue_texts,
    load_text_state,
    read_texts,
    repeat_text,
    save_text_state,
    until_end,
)
from hf_recurrent.modeling.tokenizer.byte_streamer import ByteStreamer


@dataclass(frozen=True)
class GenerateOptions:
    """Options of a run, with the names and meanings of the command's flags."""

    prompt: Sequence[str]
    prompt_file: Path | None
    state: Path | None
    save_state: Path | None
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    num_beams: int
    greedy: bool
    num_continuations: int
    draft_tokens: int
    quiet: bool
    json: bool

    def sampling(self) -> dict[str, Any]:
        """Arguments of `generate()` and [`generate_speculative`]."""
        is_sampled = self.temperature > 0 and not self.greedy and self.num_beams == 1
        options = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p} if is_sampled else {}
        return {"do_sample": is_sampled, "max_new_tokens": self.max_new_tokens} | options


class TextGenerator:
    def __init__(
        self, options: GenerateOptions, model: PreTrainedModel, tokenizer: Any, constraint: Constraint | None = None
    ):
        self._options, self._model, self._tokenizer, self._constraint = options, model, tokenizer, constraint

    def generate_recurrent(self, draft: PreTrainedModel | None = None) -> None:
        """Continue the state, the file and the prompts, and save the state after the new text."""
        options, text = self._options, self._read(self._model)
        if all(token is None for token in text.pending):
            raise ValueError("The text in `--state` ends with the end byte; give a --prompt to begin a new text.")
        if options.num_continuations > 1:
            if len(text.pending) > 1:
                raise ValueError(f"`--num_continuations` is for one text; there are {len(text.pending)}.")
            text = repeat_text(text, options.num_continuations)
        if options.max_new_tokens:
            streamer = self._streamer(len(text.pending), ByteStreamer)
            if draft is not None:
                text = self._continue_with_draft(text, draft, streamer)
            else:
                new, text = continue_texts(self._model, text, streamer=streamer, **self._generation_arguments())
                if streamer is None:
                    self._show(new)
        elif options.json:
            self._show([torch.tensor([], dtype=torch.long)] * len(text.pending))
        if options.save_state is not None:
            save_text_state(self._model, text, options.save_state)

    def generate_stock(self) -> None:
        """The same for a model without a state: file and prompt are in the cache of every new text."""
        options = self._options
        book = options.prompt_file.read_bytes() if options.prompt_file else b""
        texts = [book.decode("utf-8", "surrogateescape") + prompt for prompt in options.prompt or [""]]
        rows = [torch.as_tensor(self._tokenizer(text)["input_ids"], dtype=torch.long) for text in texts]
        size = self._model.config.vocab_size
        for text, row in zip(texts, rows, strict=True):
            if not len(row):
                raise ValueError("`--prompt` is empty; it must have at least one byte.")
            if row.max() >= size:
                raise ValueError(f"The text {text[:20]!r} has the token {row.max()}; the model has {size}.")
        inputs = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left")
        lengths, longest = torch.tensor([len(row) for row in rows]), inputs.shape[1]
        mask = (torch.arange(longest) >= longest - lengths[:, None]).long()
        streamer = self._streamer(
            len(rows), ByteStreamer if hasattr(self._tokenizer, "decode_bytes") else TextStreamer
        )
        output = self._model.generate(
            inputs.to(self._model.device),
            attention_mask=mask.to(self._model.device),
            streamer=streamer,
            **self._generation_arguments(),
        )
        if streamer is None:
            end = self._model.generation_config.eos_token_id
            self._show([until_end(row[longest:].cpu(), end) for row in output])

    def _read(self, model: PreTrainedModel) -> TextState:
        """The state, then the file, then the prompts, read by a model."""
        options = self._options
        text = load_text_state(model, options.state) if options.state else None
        if options.prompt_file:
            if not options.prompt_file.stat().st_size:
                raise ValueError(f"`--prompt_file` is {str(options.prompt_file)!r}; it must not be empty.")
            if text is not None and len(text.pending) > 1:
                raise ValueError(f"`--state` has {len(text.pending)} texts; with --prompt_file, it must have one.")
            file = _FileTokens(options.prompt_file, self._tokenizer)
            text = read_texts(model, [file], text, progress=not options.quiet)
        if options.prompt:
            # Arguments from the shell that are not UTF-8 hold surrogate escapes (PEP 383).
            data = [prompt.encode("utf-8", "surrogateescape") for prompt in options.prompt]
            if text is not None and len(text.pending) == 1:
                text = repeat_text(text, len(data))
            elif text is not None and len(text.pending) != len(data):
                raise ValueError(f"`--state` has {len(text.pending)} texts; `--prompt` must have as many, or one.")
            text = read_texts(model, [self._tokenizer.encode_bytes(each) for each in data], text)
        return text

    def _continue_with_draft(self, text: TextState, draft: PreTrainedModel, streamer: Any) -> TextState:
        output = generate_speculative(
            self._model,
            torch.tensor([text.pending]),
            draft=draft,
            draft_tokens=self._options.draft_tokens,
            state=text.state,
            draft_state=self._read(draft).state,
            constraint=self._constraint,
            streamer=streamer,
            **self._options.sampling(),
        )
        if streamer is None:
            self._show([until_end(output.sequences[0, 1:].cpu(), self._model.generation_config.eos_token_id)])
        counts = f"{output.accepted} of {output.proposed} proposed bytes accepted, {output.forwards} forward passes"
        print(counts, file=sys.stderr)
        last = int(output.sequences[0, -1])
        if last == self._model.generation_config.eos_token_id:  # a new episode begins with a zero state
            return TextState(self._model.init_state(1), [None])
        return TextState(output.pending_state, [last])

    def _generation_arguments(self) -> dict[str, Any]:
        processors = {} if self._constraint is None else {"logits_processor": [self._constraint]}
        return self._options.sampling() | {"num_beams": self._options.num_beams} | processors

    def _streamer(self, rows: int, kind: type[TextStreamer]) -> TextStreamer | None:
        """Prints new text as it comes; None for several texts, beams and JSON, which are printed at the end."""
        if rows > 1 or self._options.num_beams > 1 or self._options.json:
            return None
        return kind(self._tokenizer, skip_prompt=True, skip_special_tokens=True)

    def _show(self, rows: Sequence[torch.Tensor]) -> None:
        prompts = self._options.prompt
        if self._options.json:
            texts = [self._tokenizer.decode(ids, skip_special_tokens=True) for ids in rows]
            named = prompts if len(prompts) == len(rows) else [prompts[0] if prompts else None] * len(rows)
            values = [{"prompt": prompt, "text": text} for prompt, text in zip(named, texts, strict=True)]
            print(json.dumps({"texts": values}))
            return
        for row, ids in enumerate(rows):
            if len(rows) > 1:
                print(f"=== {repr(prompts[row]) if len(prompts) == len(rows) else f'text {row}'}")
            print(self._tokenizer.decode(ids, skip_special_tokens=True), flush=True)


class _FileTokens:
    """Token ids of a file, encoded slice by slice: the file is never in memory as a whole."""

    def __init__(self, path: Path, tokenizer: Any) -> None:
        self._bytes, self._tokenizer = np.memmap(path, dtype=np.uint8, mode="r"), tokenizer

    def __len__(self) -> int:
        return len(self._bytes)

    def __getitem__(self, index: slice) -> np.ndarray:
        return self._tokenizer.encode_bytes(self._bytes[index])
