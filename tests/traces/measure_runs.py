"""Measures of models as they are: bits per byte, answers, gradients of the learning rules; and data."""

import gzip
import json
import struct
from pathlib import Path

import numpy as np
import torch
from fixed_text import NUMBERS, PASSAGES, binary_corpora, text_corpora
from trace_values import Trace, of_content, of_each, of_json, of_tensors
from trainer_runs import COPYING, RETRIEVAL, SELECTIVE, TASK_VOCABULARY, build_model, build_pair

from hf_recurrent import (
    ByteTokenizer,
    Corpus,
    SequenceRule,
    evaluate_bits_per_byte,
    evaluate_task,
    gradient_alignment,
    load_corpus,
    load_splits,
    task_from_name,
    task_names,
)

UNITS = (
    "glru", "complex_glru", "complex_glru_conjugate", "rg_lru", "real_lru", "complex_lru", "complex_lru_conjugate",
    "mingru", "hgrn", "qrnn", "s5", "lru", "indrnn", "gru", "dense_linear",
)  # fmt: skip
DENSE = ("gru", "dense_linear")
DIGITS = np.random.Generator(np.random.Philox(3)).integers(0, 256, (6, 28, 28)).astype(np.uint8)


def bits_per_byte(folder: Path) -> Trace:
    held_out, (binary, _) = text_corpora()[1], binary_corpora()
    cases = {
        "carried": (build_model(), held_out, {"num_streams": 3, "block_size": 20}),
        "at once": (build_model("hawk-tiny"), held_out, {}),
        "windows": (build_model(), held_out, {"num_streams": 4, "block_size": 17, "carry_state": False}),
        "lru": (build_model("lru-tiny"), held_out, {"num_streams": 2, "block_size": 64}),
        "bfloat16": (build_model().bfloat16(), held_out, {"block_size": 64}),
        "float64": (build_model().double(), held_out, {"block_size": 64}),
        "llama": (build_model("llama-s0"), held_out, {"num_streams": 4, "block_size": 32}),
        "binary": (build_model(), binary, {"num_streams": 4, "block_size": 50}),
        "memory": (build_pair()[0], held_out.select([0, 1]), {"block_size": 30}),
    }
    trace: Trace = {}
    for name, (model, corpus, options) in cases.items():
        trace |= of_json(name, evaluate_bits_per_byte(model, corpus, progress=False, **options))
    return trace


def answers(folder: Path) -> Trace:
    model, llama = build_model(vocab_size=16), build_model("llama-s0", **TASK_VOCABULARY)
    trace = of_json("copying", evaluate_task(model, COPYING, batch_size=7))
    trace |= of_json("blocks", evaluate_task(model, SELECTIVE, 30, 8, block_size=5, split="test"))
    trace |= of_json("llama", evaluate_task(llama, RETRIEVAL, 12, split="train"))
    return trace


def _batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(2, 9) bytes, the next ones, and resets."""
    tokens = torch.tensor([list(NUMBERS[:10]), list(NUMBERS[50:60])])
    resets = torch.zeros(2, 9, dtype=torch.bool)
    resets[0, 0] = resets[1, 5] = True
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), resets


def alignment(folder: Path) -> Trace:
    """In float64, where the close ones are close to the last bits."""
    trace: Trace = {}
    for unit in UNITS:
        model = build_model(recurrent_unit=unit, hidden_size=8, state_size=8).double()
        others = (("truncated", 4), ("spatial", 3)) if unit in ("glru", "gru", "lru") else ()
        for rule, stride in (("snap1" if unit in DENSE else "rtrl", 1), *others):
            rows = gradient_alignment(model, *_batch(), rule=rule, stride=stride)
            for measure in ("cosine", "norm_ratio"):
                values = torch.tensor([getattr(row, measure) for row in rows], dtype=torch.float64)
                trace |= of_each(f"{unit}/{rule}/", {measure: values})
    return trace


def sequence_rules(folder: Path) -> Trace:
    """Gradients of one pass over whole sequences, in float32."""
    inputs, labels, resets = _batch()
    trace: Trace = {}
    for unit in UNITS:
        model = build_model(recurrent_unit=unit, state_size=16)
        for rule in ("bptt", "snap1" if unit in DENSE else "rtrl", "truncated", "spatial"):
            with SequenceRule(rule, model).block():
                output = model(inputs, shift_labels=labels, reset_mask=resets)
            output.loss.backward()
            gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
            trace |= {f"{unit}/{rule}/loss": output.loss.item().hex(), f"{unit}/{rule}": of_tensors(gradients)}
            model.zero_grad()
    return trace


def tasks(folder: Path) -> Trace:
    trace: Trace = {}
    for name in task_names():
        task = task_from_name(name)
        for split in ("train", "validation"):
            inputs, targets = task.examples(np.array([0, 5, 2]), split)
            arrays = {"inputs": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}
            trace[f"{name}/{split}"] = of_tensors(arrays)
        trace |= {f"{name}/length": task.length, f"{name}/vocab_size": task.vocab_size}
    return trace


def write_digits(folder: Path) -> Path:
    """Made-up images in the format of MNIST."""
    folder.mkdir(parents=True)
    for name, images in (("train-images-idx3-ubyte", DIGITS[:4]), ("t10k-images-idx3-ubyte", DIGITS[4:])):
        header = struct.pack(">BBBB3I", 0, 0, 8, 3, *images.shape)
        (folder / name).write_bytes(header + images.tobytes())
    return folder


def write_texts(folder: Path) -> Path:
    """The passages as files of a folder."""
    folder.mkdir(parents=True)
    for number, passage in enumerate(PASSAGES):
        (folder / f"{number:02}.txt").write_text(passage, encoding="utf-8")
    return folder


def _of_corpus(prefix: str, corpus: Corpus) -> Trace:
    episodes = [np.asarray(episode).tobytes() for episode in corpus]
    facts = {"episodes": len(corpus), "vocab_size": corpus.vocab_size, "end": corpus.end_token_id}
    return of_json(prefix, facts) | {prefix: of_content(b"".join(b"%d:%s" % (len(e), e) for e in episodes))}


def corpora(folder: Path) -> Trace:
    """Documents as they are read, split and told apart."""
    texts, digits, cache = write_texts(folder / "texts"), write_digits(folder / "digits"), folder / "cache"
    lines = "".join(json.dumps({"text": passage, "other": 1}) + "\n" for passage in PASSAGES)
    (folder / "lines.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    options = {"tokenizer": ByteTokenizer(), "cache_dir": cache}
    trace = _of_corpus("files", load_corpus(str(texts / "*.txt"), **options))
    trace |= _of_corpus("folder", load_corpus(str(texts), max_bytes=700, **options))
    trace |= _of_corpus("lines", load_corpus(str(folder / "lines.jsonl.gz"), **options))
    for number, part in enumerate(load_splits(str(texts), validation_fraction=0.3, split_seed=4, **options)):
        trace |= _of_corpus(f"split {number}", part)
    for number, part in enumerate(load_splits(f"mnist:{digits}", **options)):
        trace |= _of_corpus(f"digits {number}", part)
    for name, (train, held_out) in {"text": text_corpora(), "binary": binary_corpora()}.items():
        trace |= {f"{name}/fingerprint": train.fingerprint, f"{name}/held out/fingerprint": held_out.fingerprint}
    return trace


MEASURE_RUNS = {
    "bits per byte": bits_per_byte,
    "answers": answers,
    "gradient alignment": alignment,
    "sequence rules": sequence_rules,
    "tasks": tasks,
    "corpora": corpora,
}
