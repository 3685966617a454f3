"""Accounts of a model: bits per byte of counts alone, the network alone and both, next to compressors.

Every method is measured on the same held-out documents. Counts and PPMd read the same training bytes as the network.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hf_recurrent.data.corpus import Corpus
from hf_recurrent.data.episode_losses import has_count_memory
from hf_recurrent.data.episode_source import EvaluationShare
from hf_recurrent.evaluation.compressors import compressed_bits_per_byte
from hf_recurrent.evaluation.counts_alone import CountsAlone, frozen, frozen_memory, learn_counts
from hf_recurrent.evaluation.ppmd import ppmd_bits_per_byte
from hf_recurrent.evaluation.training_bytes import TrainingBytes

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
        {protocol: {order: bits per byte}}; `notes`, sentences about what was not measured; `train_bytes`,
        `num_bytes` and `num_episodes`.
    """
    known = isinstance(read, TrainingBytes)
    notes = [] if known else [f"Counts and PPMd were not measured {AFTER}: {read}"]
    with ThreadPoolExecutor(max_workers=1) as pool:  # compressors run while the memory, on one core, counts
        compressed = pool.submit(_measure_compressors, held_out, b"".join(read.documents()) if known else b"", notes)
        rows = _measure_model(model, held_out, share, metrics, read if known else None)
        others, orders = compressed.result()
    sizes = {name: metrics[name] for name in ("num_bytes", "num_episodes")}
    train_bytes = read.num_bytes if known else None
    return {"rows": rows | others, "ppmd_orders": orders, "notes": notes, "train_bytes": train_bytes} | sizes


def _measure_model(
    model: Any, held_out: Corpus, share: EvaluationShare, metrics: dict[str, float], read: TrainingBytes | None
) -> dict[str, Row]:
    """Rows of counts, network and both."""

    def bits(measured: Any) -> float:
        return held_out.evaluation_metrics(held_out.evaluate(measured, share))["bits_per_byte"]

    if not has_count_memory(model):
        return {"network": dict.fromkeys(("adapting", "frozen"), metrics["bits_per_byte"])}
    rows: dict[str, Row] = {}
    if read is not None:
        memory = learn_counts(model.count_memory.shape, read, progress=share.progress)
        rows["counts alone"] = {
            "adapting": bits(CountsAlone(memory)),
            "frozen": bits(CountsAlone(frozen_memory(memory))),
        }
    rows["network alone"] = dict.fromkeys(("adapting", "frozen"), metrics["network_bits_per_byte"])
    with frozen(model):
        rows["both"] = {"adapting": metrics["bits_per_byte"], "frozen": bits(model)}
    return rows


def _measure_compressors(
    held_out: Corpus, before: bytes, notes: list[str]
) -> tuple[dict[str, Row], dict[str, dict[int, float]]]:
    """Rows of compressors, and of PPMd every order; if it is missing or fails, `notes` get the reason."""
    orders = {}
    try:
        for name, data in (((AFTER, before),) if before else ()) + ((ALONE, b""),):
            orders[name] = ppmd_bits_per_byte(held_out, data, progress=False)
    except (ImportError, RuntimeError) as error:
        notes.append(f"{error}")
    best = {name: min(found, key=found.get) for name, found in orders.items()}
    bits = {f"PPMd order {best[name]}, {name}": found[best[name]] for name, found in orders.items()}
    others = compressed_bits_per_byte(held_out, progress=False)
    bits |= {f"{name}, {ALONE}": others[name] for name in ("xz -9", "gzip -9")}
    return {name: {"adapting": value, "frozen": None} for name, value in bits.items()}, orders
