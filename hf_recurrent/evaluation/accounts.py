"""Accounts of a model: bits per byte of counts alone, the network alone and both, next to compressors.

Every method is measured on the same held-out documents. Counts and PPMd read the same training bytes.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from hf_recurrent.data.corpus import Corpus
from hf_recurrent.data.episode_losses import has_count_memory
from hf_recurrent.data.episode_source import EvaluationShare
from hf_recurrent.evaluation.compressors import compressed_bits_per_byte, ppmd_bits_per_byte
from hf_recurrent.evaluation.counts_alone import CountsAlone, TrainingBytes, frozen, frozen_memory, learn_counts
from hf_recurrent.modeling.contexts.count_memory_layout import MemoryShape

Row = dict[str, float | None]
ALONE, AFTER = "each file alone", "after the same bytes"


def measure_accounts(
    model: Any, held_out: Corpus, share: EvaluationShare, metrics: dict[str, float], read: TrainingBytes | str
) -> dict[str, Any]:
    """Measure what the metrics of a model lack: the model frozen, counts alone, and compressors.

    Args:
        model: a language model, with or without a count memory.
        held_out: the documents.
        share: how `metrics` were measured, on all documents.
        metrics: of the model, from [`Corpus.evaluation_metrics`].
        read: the bytes that the model was trained on, or a sentence that says why they are not known.

    Returns:
        Values for JSON: `rows`, {method: {"adapting": bits per byte or None, "frozen": likewise}}; `ppmd_orders`,
        {protocol: {order: bits per byte}}; `notes`, sentences about what was not measured; `train_bytes`, of the
        network, and `counted_bytes`, of counts and PPMd, or None; `num_bytes` and `num_episodes`.
    """
    known = isinstance(read, TrainingBytes)
    notes = [] if known else [f"Counts and PPMd were not measured {AFTER}: {read}"]
    with ThreadPoolExecutor(max_workers=2) as pool:  # counts and compressors take one core each
        compressed = pool.submit(_measure_compressors, held_out, b"".join(read.documents()) if known else b"", notes)
        counted = None
        if known and has_count_memory(model):
            counted = pool.submit(_measure_counts, model.count_memory.shape, held_out, share, read)
        rows = _measure_model(model, held_out, share, metrics)
        if counted is not None:
            rows = {"counts alone": counted.result()} | rows
        others, orders = compressed.result()
    sizes = {name: metrics[name] for name in ("num_bytes", "num_episodes")}
    train_bytes, counted_bytes = (read.num_bytes, read.num_counted_bytes) if known else (None, None)
    amounts = {"train_bytes": train_bytes, "counted_bytes": counted_bytes}
    return {"rows": rows | others, "ppmd_orders": orders, "notes": notes} | amounts | sizes


def _measure_counts(shape: MemoryShape, held_out: Corpus, share: EvaluationShare, read: TrainingBytes) -> Row:
    """Counts alone."""
    memory = learn_counts(shape, read, progress=False)
    alone = {"adapting": CountsAlone(memory), "frozen": CountsAlone(frozen_memory(memory))}
    silent = replace(share, progress=False)
    return {name: _bits(counts, held_out, silent) for name, counts in alone.items()}


def _measure_model(model: Any, held_out: Corpus, share: EvaluationShare, metrics: dict[str, float]) -> dict[str, Row]:
    """Rows of the network and of both."""
    if not has_count_memory(model):
        return {"network": dict.fromkeys(("adapting", "frozen"), metrics["bits_per_byte"])}
    with frozen(model):
        both = {"adapting": metrics["bits_per_byte"], "frozen": _bits(model, held_out, share)}
    return {"network alone": dict.fromkeys(("adapting", "frozen"), metrics["network_bits_per_byte"]), "both": both}


def _bits(model: Any, held_out: Corpus, share: EvaluationShare) -> float:
    return held_out.evaluation_metrics(held_out.evaluate(model, share))["bits_per_byte"]


def _measure_compressors(
    held_out: Corpus, before: bytes, notes: list[str]
) -> tuple[dict[str, Row], dict[str, dict[int, float]]]:
    """Rows of compressors, and of PPMd every order; if it is missing or fails, `notes` get the reason."""
    orders = {}
    try:
        for name, data in (((AFTER, before),) if before else ()) + ((ALONE, b""),):
            orders[name] = ppmd_bits_per_byte(held_out, data)
    except (ImportError, RuntimeError) as error:
        notes.append(f"{error}")
    best = {name: min(found, key=found.get) for name, found in orders.items()}
    bits = {f"PPMd order {best[name]}, {name}": found[best[name]] for name, found in orders.items()}
    others = compressed_bits_per_byte(held_out, progress=False)
    bits |= {f"{name}, {ALONE}": others[name] for name in ("xz -9", "gzip -9")}
    return {name: {"adapting": value, "frozen": None} for name, value in bits.items()}, orders
