"""Agreement of processes: an error of one is an error of all, and a difference between them is found before training.

Otherwise the processes without an error would wait for the others in their next common operation.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import gather_object, reduce
from torch import nn
from transformers import TrainingArguments

from hf_recurrent.checkpoints.resumed_arguments import shareable_arguments
from hf_recurrent.data.episode_source import check_window


def check_sources(model: nn.Module, args: Any, train_corpus: Any, eval_corpus: Any, carries_state: bool) -> None:
    """Raise a ValueError if the model cannot be trained or evaluated on the sources."""
    if train_corpus is not None:
        train_corpus.check_training(args, carries_state)
    evaluated = eval_corpus.values() if isinstance(eval_corpus, dict) else (eval_corpus,)
    sources = [("train_corpus", train_corpus), *(("eval_corpus", source) for source in evaluated)]
    for argument, source in sources:
        if source is not None:
            source.check_model(argument, model, args.eval_block_size)
    check_window("block_size", args.block_size, model)


# Arguments that may differ between processes.
_OF_A_PROCESS = {"dataloader_num_workers", "log_level", "log_level_replica", "disable_tqdm"}
_ERRORS = (ImportError, OSError, ValueError)


@contextmanager
def same_error() -> Iterator[None]:
    """Inside the block, an ImportError, OSError or ValueError in one process becomes a ValueError in the others too.

    All processes enter and leave the block, and do nothing in it that needs the others.
    """
    own: BaseException | None = None
    try:
        yield
    except _ERRORS as error:
        own = error
    errors = gathered(None if own is None else str(own) or type(own).__name__)
    if own is not None:
        raise own
    for rank, error in enumerate(errors):
        if error is not None:
            raise ValueError(f"{error} (in process {rank} of {len(errors)})")


def check_same(facts: dict[str, Any]) -> None:
    """Raise a ValueError in all processes that names the first of the `facts`, by argument, in which they differ."""
    everywhere = gathered(facts)
    for name in facts:
        values = [other.get(name) for other in everywhere]
        for rank, value in enumerate(values):
            if value != values[0]:
                raise ValueError(
                    f"`{name}` is {values[0]!r} in process 0 and {value!r} in process {rank}; all processes need the "
                    "same arguments and data."
                )


def check_same_run(args: TrainingArguments, model: torch.nn.Module, sources: dict[str, Any]) -> None:
    """[`check_same`] for the arguments, the configuration of the model, and the sources by argument."""
    facts = {}
    for argument, source in sources.items():  # data first: arguments may be derived from them
        parts = source.items() if isinstance(source, dict) else [("", source)]
        facts |= {f"{argument} {name}".strip(): part and (part.name, part.fingerprint) for name, part in parts}
    facts |= {name: value for name, value in shareable_arguments(args).items() if name not in _OF_A_PROCESS}
    config = model.config.to_dict() if hasattr(model, "config") else {}
    check_same(facts | {f"{name} of the model": value for name, value in config.items()})


def gathered(value: Any) -> list[Any]:
    """An object of each process."""
    return gather_object([value]) if dist.is_initialized() else [value]


def total(value: float, device: torch.device) -> float | int:
    """Sum of a number over all processes, which call this together; in float64 where the device has it."""
    dtype = torch.float64 if isinstance(value, float) and device.type != "mps" else None
    return reduce(torch.tensor([value], dtype=dtype, device=device), reduction="sum").item()
