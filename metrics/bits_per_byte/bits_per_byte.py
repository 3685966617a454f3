"""Bits per byte for the `evaluate` library: `evaluate.load("metrics/bits_per_byte")`.

Works without a network and without the rest of this repository. `evaluate` finds a module's requirements line by
line, so every import below has a line of its own.
"""

import math

import datasets
import evaluate
import numpy as np

_DESCRIPTION = """\
Bits per byte: the bits that a language model needs, on average, to encode one byte of a document.

    bits per byte = total nats / ln 2 / number of document bytes

It does not depend on the tokenizer: byte-level and subword models can be compared with each other, and with gzip and
xz (eight times compressed size over size). Lower is better; a uniform guess over bytes scores 8.
"""

_KWARGS_DESCRIPTION = """
Args:
    predictions (list of list of float): for each document, the negative log-likelihood in nats of each token that the
        model predicted, including the end token if the model predicts one.
    references (list of str, or list of list of int): the documents, all as text (counted in UTF-8 bytes) or all as
        byte values 0 to 255 (also for documents that are not valid UTF-8).
    byte_level (bool, default False): the tokens are bytes. A document of n bytes then has n - 1 predictions (neither
        first byte nor end predicted), n (one of the two) or n + 1 (both); any other number is an error.

Returns:
    bits_per_byte (float): total bits over total bytes, so that long documents weigh more.
    nats (float): sum of all predictions.
    num_bytes (int): bytes of all documents.
    num_documents (int): number of documents.

Examples:

    >>> metric = evaluate.load("metrics/bits_per_byte")
    >>> results = metric.compute(predictions=[[0.7, 0.7, 0.7, 0.7]], references=["word"])
    >>> round(results["bits_per_byte"], 4)
    1.0099
"""

_CITATION = ""


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _KWARGS_DESCRIPTION)
class BitsPerByte(evaluate.Metric):
    """Total nats of the predictions, in bits, over the number of bytes of the references."""

    def _info(self) -> evaluate.MetricInfo:
        nats = datasets.Sequence(datasets.Value("float64"))
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_KWARGS_DESCRIPTION,
            features=[
                datasets.Features({"predictions": nats, "references": datasets.Value("string")}),
                datasets.Features({"predictions": nats, "references": datasets.Sequence(datasets.Value("int64"))}),
            ],
        )

    def _compute(self, predictions: list, references: list, byte_level: bool = False) -> dict[str, float | int]:
        total, num_bytes = [], 0
        for index, (nats, document) in enumerate(zip(predictions, references, strict=True)):
            length = _num_bytes(document, index)
            _check_nats(nats, index)
            if byte_level and not length - 1 <= len(nats) <= length + 1:
                raise ValueError(
                    f"`predictions[{index}]` has {len(nats)} values for a document of {length} bytes; with "
                    f"`byte_level=True` there must be {max(length - 1, 0)}, {length} or {length + 1}."
                )
            total.extend(nats)
            num_bytes += length
        if not num_bytes:
            raise ValueError("`references` holds no bytes: bits per byte is not defined for empty documents.")
        nats = math.fsum(total)
        return {
            "bits_per_byte": nats / math.log(2) / num_bytes,
            "nats": nats,
            "num_bytes": num_bytes,
            "num_documents": len(references),
        }


def _num_bytes(document: str | list[int], index: int) -> int:
    if isinstance(document, str):
        return len(document.encode("utf-8"))
    values = np.asarray(document)
    if values.size and (values.min() < 0 or values.max() > 255):
        wrong = values[(values < 0) | (values > 255)][0]
        raise ValueError(f"`references[{index}]` holds {wrong}; byte values are 0 to 255.")
    return values.size


def _check_nats(nats: list[float], index: int) -> None:
    values = np.asarray(nats, dtype=np.float64)
    if np.isnan(values).any():
        raise ValueError(f"`predictions[{index}]` holds a NaN; it must hold negative log-likelihoods in nats.")
    if (values < 0).any():
        raise ValueError(
            f"`predictions[{index}]` holds {values[values < 0][0]:g}, but a negative log-likelihood is never below 0; "
            "negate log-probabilities first."
        )
