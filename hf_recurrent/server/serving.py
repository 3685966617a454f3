"""Putting a server together: model, sessions on disk, learner, scheduler."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_recurrent.checkpoints.files import list_checkpoints
from hf_recurrent.checkpoints.output_lock import output_lock
from hf_recurrent.checkpoints.weight_hashing import weights_hash
from hf_recurrent.checkpoints.weights import load_weights
from hf_recurrent.generation.arguments import end_token_list
from hf_recurrent.modeling.block.recurrent_state import supports_recurrent_state
from hf_recurrent.online.learner import OnlineLearner
from hf_recurrent.online.settings import LearnerSettings
from hf_recurrent.server.adapters import ADAPTER
from hf_recurrent.server.blob_stores import open_blobs
from hf_recurrent.server.cached_steps import CachedSteps
from hf_recurrent.server.model_steps import ModelSteps
from hf_recurrent.server.prefix_database import PrefixDatabase
from hf_recurrent.server.prefix_reuse import PrefixReuse
from hf_recurrent.server.prefix_store import PrefixStore
from hf_recurrent.server.response_store import ResponseStore
from hf_recurrent.server.scheduler import Scheduler
from hf_recurrent.server.session_database import SessionDatabase
from hf_recurrent.server.session_learner import SessionLearner
from hf_recurrent.server.session_store import SessionStore
from hf_recurrent.server.shared_prefixes import SharedPrefixes
from hf_recurrent.stock_models.stock_model import StockModelWithState
from hf_recurrent.stock_models.with_state import with_state

# Properties of a database: the hash of the weights of its states, and the rank of its adapters.
_WEIGHTS, _RANK = "weights", "adapter_rank"


@dataclass(frozen=True)
class Learning:
    """Learning of a served model, with a checkpoint every `save_every` bytes; the last one is continued."""

    settings: LearnerSettings
    directory: Path
    save_every: int = 100_000


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """Options of a served model; most fields are flags of `serve`."""

    session_dir: Path | None = None  # of sessions, and states of other texts; None to forget them at the end
    learning: Learning | None = None  # None for a model that does not change
    max_sessions: int = 20_000
    max_resident: int = 1000
    max_rows: int = 128
    max_waiting: int = 512
    public: bool = False  # the least recently used sessions make room
    prefix_bytes: int = 1 << 28  # of states of texts that are no sessions; 0, and a model that learns, store none
    store: str | None = None  # of responses, and shared states; by default in `session_dir` or memory, and not shared
    store_bytes: int = 1 << 28
    block: int | None = None  # see [`CachedSteps`], for models of transformers
    adapter_rank: int = 0  # see [`ReadoutAdapter`], for models of hf_recurrent that do not learn; 0 for none


@contextmanager
def serving_scheduler(model: PreTrainedModel, tokenizer: Any, **options: Any) -> Iterator[Scheduler]:
    """A running scheduler; when the block ends, jobs are ended and sessions are on disk.

    Args:
        model: a recurrent language model, in evaluation mode.
        tokenizer: its tokenizer; a model that learns has one of bytes.
        options: fields of [`ServingOptions`].

    Raises:
        UnsupportedCache: the model has no recurrent state, or one that cannot be saved.
        ValueError: the model cannot have adapters, the sessions belong to other weights or have another rank,
            or another process uses a directory.
    """
    given = ServingOptions(**options)
    steps = _steps(model, tokenizer, given)
    with _locked(given.session_dir), _locked(given.learning and given.learning.directory):
        scheduler = _scheduler(model, tokenizer, steps, given)
        try:
            yield scheduler
        finally:
            if scheduler.is_alive:
                scheduler.close()


def _scheduler(model: PreTrainedModel, tokenizer: Any, steps: ModelSteps, given: ServingOptions) -> Scheduler:
    own = None if given.session_dir is None else os.path.abspath(given.session_dir / "store")
    blobs = open_blobs(own if given.store is None else given.store, given.store_bytes)
    learner = None if given.learning is None else _learner(model, tokenizer, given.learning)
    database = None if given.session_dir is None else _database(given.session_dir, steps, learner)
    ends, begin = _end_tokens(model, tokenizer), model.generation_config.bos_token_id
    begin = begin if begin is not None else next(iter(ends), None)
    sessions = SessionStore(
        steps.zero,
        database,
        partial(steps.continue_from, begin_token=begin),
        max_states=given.max_sessions,
        max_resident=given.max_resident,
        forgets=given.public,
    )
    computation, reuse = steps.computation(), None
    if learner is None and given.prefix_bytes:
        shared = None if given.store is None else SharedPrefixes(blobs, steps.zero, computation)
        prefixes = None if given.session_dir is None else PrefixDatabase(given.session_dir, computation)
        reuse = PrefixReuse(PrefixStore(steps.zero, given.prefix_bytes, prefixes), steps, shared)
    return Scheduler(
        steps,
        sessions,
        reuse=reuse,
        responses=ResponseStore(blobs, steps.zero, computation),
        learner=learner,
        begin_token=begin,
        end_tokens=frozenset(ends),
        max_rows=given.max_rows,
        max_jobs=given.max_waiting,
    )


def _steps(model: PreTrainedModel, tokenizer: Any, given: ServingOptions) -> ModelSteps:
    """With a state as ours where the model has one; stock models keep their own cache and arithmetic.

    A stock model of bytes was trained here, on the states of [`with_state`], which `generate --state` reads.
    """
    is_ours = supports_recurrent_state(model) and not isinstance(model, StockModelWithState)
    if is_ours or (hasattr(tokenizer, "encode_bytes") and supports_recurrent_state(with_state(model))):
        return ModelSteps(model, given.learning is not None, given.adapter_rank)
    if given.adapter_rank:
        raise ValueError(
            f"`--adapter_rank` is {given.adapter_rank}; it is for models of hf_recurrent, not {type(model).__name__}."
        )
    return CachedSteps(model, given.block)


def _end_tokens(model: PreTrainedModel, tokenizer: Any) -> list[int]:
    """End tokens of the model, such as ends of turns, and of the tokenizer."""
    ends = end_token_list(model.generation_config.eos_token_id)
    own = None if hasattr(tokenizer, "encode_bytes") else getattr(tokenizer, "eos_token_id", None)
    return ends if own is None or own in ends else [*ends, own]


def _locked(directory: Path | None) -> AbstractContextManager:
    return nullcontext() if directory is None else output_lock(directory)


def _learner(model: PreTrainedModel, tokenizer: Any, learning: Learning) -> SessionLearner:
    """The learner of the last checkpoint in the directory, whose weights the model gets, or a new one."""
    checkpoints = list_checkpoints(learning.directory)
    if checkpoints:
        load_weights(model, checkpoints[-1])
        learner = OnlineLearner.load(checkpoints[-1], model, tokenizer, **asdict(learning.settings))
    else:
        learner = OnlineLearner(model, tokenizer, **asdict(learning.settings))
    return SessionLearner(learner, learning.directory, save_every=learning.save_every)


def _database(directory: Path, steps: ModelSteps, learner: SessionLearner | None) -> SessionDatabase:
    """The sessions of a directory, which have to belong to the model."""
    rank = 0 if steps.adapter is None else steps.adapter.rank
    database = SessionDatabase(directory, steps.zero | ({ADAPTER: torch.zeros(1, 0)} if rank else {}))
    kept = database.get_property(_RANK) or (str(rank) if database.get_property(_WEIGHTS) is None else "0")
    if kept != str(rank):
        raise ValueError(
            f"The sessions in {str(directory)!r} were kept with `--adapter_rank {kept}`, and it is {rank} now; give "
            "the same, or choose another directory."
        )
    database.set_property(_RANK, kept)
    own, stored = weights_hash(steps.model), database.get_property(_WEIGHTS)
    if stored not in (None, own) and (learner is None or stored not in learner.known_weights):
        raise ValueError(
            f"The sessions in {str(directory)!r} belong to other weights; a state works only with the model that "
            "saved it. Serve that model, or choose another directory."
        )
    database.set_property(_WEIGHTS, own)
    return database
