"""Quality of sampled Python: does it parse, is it copied from the training text, does it repeat itself."""

import ast
import codeop
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hf_recurrent.data.corpus import Corpus
from hf_recurrent.data.episode_losses import evaluation_mode
from hf_recurrent.evaluation.byte_windows import KnownWindows, is_repeated, window_hashes

COPIED, REPEATED = 30, 20  # bytes of a window
_HEADER = re.compile(rb"^(?:async )?def \w+\([^\n]*\)[^\n]*:\n", re.MULTILINE)
# Parse a beginning of a program, and say whether an error is only its end.
_BEGINNING = ast.PyCF_ONLY_AST | codeop.PyCF_ALLOW_INCOMPLETE_INPUT | codeop.PyCF_DONT_IMPLY_DEDENT
_BATCH = 50


def function_headers(corpus: Corpus, count: int) -> list[bytes]:
    """The first lines, with the line end, of at most `count` functions outside of classes, evenly spread.

    Only headers that are one line and parse.
    """
    found = [header for episode in corpus for header in _HEADER.findall(episode.tobytes())]
    headers = [header for header in dict.fromkeys(found) if parses(header + b"    pass\n")]
    places = np.linspace(0, len(headers), min(count, len(headers)), endpoint=False).astype(int)
    return [headers[place] for place in places]


def parses(text: bytes) -> bool:
    """True if `ast.parse` accepts a text after its unfinished end has been removed.

    The last line goes if it has no line end. Further lines go, from the last on, as long as the parser says that the
    text only lacks its end, such as the body of an `if` or a closing bracket. Of what remains, the first statement
    must have a body. So a string that opens early and does not end leaves nothing, which does not parse.
    """
    lines = text.decode("utf-8", "replace").split("\n")[:-1]
    while lines:
        source = "\n".join(lines) + "\n"
        try:
            ast.parse(source)
            return True
        except (SyntaxError, ValueError):
            pass
        try:
            compile(source, "sample", "exec", _BEGINNING)
        except (SyntaxError, ValueError) as error:
            if "incomplete input" not in str(error):
                return False
        lines.pop()
    return False


def sample_continuations(
    model: Any, prompts: Sequence[bytes], length: int, *, temperature: float = 0.8, seed: int = 0
) -> list[bytes]:
    """Sampled continuations of prompts, of `length` bytes or up to the end of the document.

    torch's random state and the model's mode are restored.
    """
    found = []
    with evaluation_mode(model), torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        for first in range(0, len(prompts), _BATCH):
            batch = prompts[first : first + _BATCH]
            longest = max(map(len, batch))
            rows = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in batch])
            mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in batch])
            options = {"max_new_tokens": length, "do_sample": True, "temperature": temperature, "top_k": 0}
            ids = {"eos_token_id": 0, "pad_token_id": 0}
            output = model.generate(
                input_ids=rows.to(model.device), attention_mask=mask.to(model.device), **options, **ids
            )
            found += [bytes(row).partition(b"\0")[0] for row in output[:, longest:].tolist()]
    return found


def measure_samples(prompts: Sequence[bytes], samples: Sequence[bytes], training: KnownWindows) -> dict[str, float]:
    """Share of texts that parse, of windows of 30 bytes from the training text, and of windows of 20 bytes that repeat
    an earlier one of their sample."""
    copied = [training.contains(window_hashes(sample, COPIED)) for sample in samples]
    repeated = [is_repeated(window_hashes(sample, REPEATED)) for sample in samples]
    parsing = [np.array([parses(prompt + sample)]) for prompt, sample in zip(prompts, samples, strict=True)]
    measured = {"parses": parsing, "copied": copied, "repeated": repeated}
    joined = {name: np.concatenate(parts) for name, parts in measured.items()}
    return {name: float(values.mean()) if len(values) else 0.0 for name, values in joined.items()}
