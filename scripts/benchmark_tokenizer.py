"""MB/s of encoding and decoding UTF-8 text with ByteTokenizer, compared with other byte-level tokenizers and NumPy.

    python scripts/benchmark_tokenizer.py                 # one text of 10 MB; a tenth of it for the slower peers

The fast tokenizer is transformers' own class over the `tokenizer.json` that ByteTokenizer saves: byte-level BPE
without merges, the same ids. ByT5 has bytes too, as ids 3 to 258. The limit is `numpy.frombuffer` and the UTF-8 codec.
"""

from collections.abc import Callable

import numpy as np
import torch
from benchmarking import CPU, best_seconds, conditions, markdown_table, option_parser, parse_and_set_up
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hf_recurrent import ByteTokenizer

SENTENCE = "The quick brown fox; naïve 中文. "


def tokenizer_calls(tokenizer: PreTrainedTokenizerBase, text: str) -> list[Callable[[], object]]:
    """Encoding to a list, encoding to a tensor, decoding an array."""
    ids = tokenizer(text, add_special_tokens=False, return_tensors="np")["input_ids"][0]
    return [
        lambda: tokenizer(text)["input_ids"],
        lambda: tokenizer(text, return_tensors="pt")["input_ids"],
        lambda: tokenizer.decode(ids),
    ]


def limit_calls(text: str) -> list[Callable[[], object]]:
    """The same with as little as NumPy and Python need."""
    ids = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)
    return [
        lambda: np.frombuffer(text.encode(), dtype=np.uint8).tolist(),
        lambda: torch.from_numpy(np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)),
        lambda: ids.astype(np.uint8).tobytes().decode(),
    ]


def main() -> None:
    parser = option_parser(__doc__, rounds=3)
    parser.add_argument("--megabytes", type=float, default=10.0, help="size of the text (default: %(default)s)")
    parser.set_defaults(threads=1)
    arguments = parse_and_set_up(parser)
    sentences = max(1, round(arguments.megabytes * 1e6 / len(SENTENCE.encode())))
    text, part = SENTENCE * sentences, SENTENCE * -(-sentences // 10)
    fast = PreTrainedTokenizerFast(tokenizer_object=ByteTokenizer().to_tokenizers())
    cases = {
        "limit": (text, limit_calls(text)),
        "ByteTokenizer": (text, tokenizer_calls(ByteTokenizer(), text)),
        "fast tokenizer": (part, tokenizer_calls(fast, part)),
        "ByT5Tokenizer": (part, tokenizer_calls(ByT5Tokenizer(), part)),
    }
    lines = []
    for name, (read, calls) in cases.items():
        size = len(read.encode()) / 1e6
        lines.append([name, *(f"{size / best_seconds(call, arguments.rounds, CPU):.2f}" for call in calls)])
    print(f"{len(text.encode()):,} bytes; {conditions(CPU)}\n")
    print(markdown_table(["MB/s", "encode to a list", "encode to a tensor", "decode"], lines))


if __name__ == "__main__":
    main()
