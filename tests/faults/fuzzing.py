"""Judgement of one call with drawn arguments: it returns what the plain code returns, or is refused in clear words."""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor

from hf_recurrent.modeling.scan import linear_scan
from hf_recurrent.modeling.step import single_step

_OWN_FOLDERS = ("/modeling/", "/hf_recurrent/")
_REFUSALS = (ValueError, TypeError, RuntimeError, IndexError)
_TOLERANCES = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
_COARSE = 0.06  # of bfloat16 and float16


class Failed(Exception):
    """A call that did not do what it must."""


class Case(NamedTuple):
    """One call.

    Args:
        what: names everything that was drawn.
        call: returns tensors, by name.
        expected: the same from plain code and valid arguments; None if there is nothing to compare with.
        verdict: "accept", "refuse" or "either".
        dtype: of the numbers, for the tolerance.
    """

    what: str
    call: Callable[[], dict[str, Tensor]]
    expected: Callable[[], dict[str, Tensor]] | None
    verdict: str
    dtype: torch.dtype


@contextmanager
def plain_code() -> Iterator[None]:
    """No compiled kernel runs inside."""
    with (
        mock.patch.object(single_step, "_STEP_CLASSES", {}),
        mock.patch.object(linear_scan, "_backend_functions", lambda *_: linear_scan._TORCH_BACKEND),
    ):
        yield


def judge(case: Case) -> str:
    """`accepted` or `refused: TYPE`; raises [`Failed`] if that is wrong, or a result differs from the plain one."""
    try:
        results = case.call()
    except Exception as error:
        _check_refusal(error)
        if case.verdict == "accept":
            raise Failed(f"refused, but its arguments are valid: {type(error).__name__}: {error}") from error
        return f"refused: {type(error).__name__}"
    if case.verdict == "refuse":
        raise Failed("accepted, but an argument is not valid")
    if case.expected is not None:
        with plain_code():
            expected = case.expected()
        for name, tensor in expected.items():
            _compare(name, results[name], tensor, case.dtype)
    return "accepted"


def _check_refusal(error: Exception) -> None:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(frame.filename).name}:{frame.lineno}"
    text = f"{type(error).__name__} at {place}: {error}"
    foreign = "/transformers/" in frame.filename or "/torch/" in frame.filename
    if foreign and isinstance(error, (AttributeError, NotImplementedError, AssertionError, KeyError)):
        return  # a mistake that another library finds first, in its own words
    if isinstance(error, ImportError) and "is not installed" in str(error):
        return
    if not isinstance(error, _REFUSALS) or "INTERNAL ASSERT" in str(error):
        raise Failed(f"not a refusal: {text}") from error
    own = not foreign and any(folder in frame.filename for folder in _OWN_FOLDERS)
    if own and isinstance(error, (ValueError, TypeError)) and frame.line and frame.line.startswith("raise"):
        sentence = str(error)
        if len(sentence) < 20 or not ("`" in sentence or sentence.split()[0].isidentifier()):
            raise Failed(f"an unclear refusal: {text}") from error
    elif own and isinstance(error, TypeError):
        raise Failed(f"no check found it: {text}") from error


def _compare(name: str, actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    if actual.shape != expected.shape:
        raise Failed(f"{name} has shape {tuple(actual.shape)}, in plain code {tuple(expected.shape)}")
    if not expected.numel():
        return
    wide = torch.complex128 if expected.is_complex() else torch.float64
    actual, expected = (tensor.detach().resolve_neg().resolve_conj().to(wide) for tensor in (actual, expected))
    if not torch.equal(actual.isnan(), expected.isnan()):
        raise Failed(f"{name} has NaN elsewhere than in plain code")
    actual, expected = actual.nan_to_num(), expected.nan_to_num()
    difference = (actual - expected).abs().max() / expected.abs().max().clamp(min=1e-2)
    if difference > _TOLERANCES.get(dtype, _COARSE):
        raise Failed(f"{name} differs by {difference:.2g} from plain code")
