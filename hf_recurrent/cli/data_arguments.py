"""Data that `pretrain` and `evaluate` read: the same arguments, so that the same values give the same split."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_recurrent.data.corpus import Corpus
    from hf_recurrent.data.episode_source import EpisodeSource

TASK_PREFIX = "task:"
CORPUS_HELP = (
    "python (the standard library's source), files, globs, directories, hub:owner/name, images as pixels "
    "(mnist:FOLDER in IDX format, images:FOLDER), or task:NAME,FIELD=VALUE,..."
)


@dataclass
class DataArguments:
    """Where episodes come from, and which of them are held out."""

    corpus: list[str] = field(
        default_factory=lambda: ["python"],
        metadata={
            "help": f"{CORPUS_HELP}. Examples: --corpus my_notes/ 'books/**/*.txt', --corpus stories.jsonl.gz, "
            "--corpus hub:roneneldan/TinyStories, --corpus mnist:digits/, --corpus task:retrieval,length=128"
        },
    )
    text_column: str = field(default="text", metadata={"help": "Where rows of JSONL, Parquet and datasets have text."})
    dataset_split: str = field(default="train", metadata={"help": "Split of a dataset, or of images, to read."})
    dataset_config: str | None = field(
        default=None, metadata={"help": "Configuration of a Hub dataset. Example: --dataset_config sample-10BT"}
    )
    streaming: bool = field(
        default=False, metadata={"help": "Read a Hub dataset over the network instead of downloading it first."}
    )
    binary: bool = field(default=False, metadata={"help": "Byte 0 is data; episodes have no end byte."})
    max_corpus_bytes: float | None = field(
        default=None, metadata={"help": "How much of the corpus to read. Example: --max_corpus_bytes 1e9"}
    )
    validation_fraction: float = field(default=0.05, metadata={"help": "Share of the documents that is held out."})
    split_seed: int = field(default=0, metadata={"help": "Decides which documents are held out."})
    max_eval_bytes: float | None = field(
        default=None,
        metadata={
            "help": "Evaluate on whole held-out documents while they fit in. Example: 2e6",
            "aliases": ["--max_bytes"],
        },
    )

    def __post_init__(self):
        for name in ("max_corpus_bytes", "max_eval_bytes"):
            value = getattr(self, name)
            if value is not None and not (value >= 1 and value == int(value)):
                raise ValueError(f"`{name}` is {value}; it must be a whole number of at least 1.")


def token_vocabulary(corpus: Sequence[str]) -> int | None:
    """V where images or a task bring tokens of their own, none of which ends an episode; None for text.

    Raises:
        ValueError: images or a task beside something else.
    """
    from hf_recurrent.data.pixel_readers import pixel_format

    tokens = _task(corpus) or pixel_format(corpus)
    return None if tokens is None else tokens.vocab_size


def load_training_sources(
    arguments: DataArguments, tokenizer: Any, validation_corpus: Sequence[str] = ()
) -> "tuple[EpisodeSource, EpisodeSource]":
    """Training and held-out data.

    Args:
        validation_corpus: held-out data of its own; then nothing of `arguments.corpus` is held out.

    Raises:
        FileNotFoundError, ValueError, ImportError: one sentence that names the problem.
    """
    task = _task(arguments.corpus)
    if task is not None:
        held_out = _task(validation_corpus or arguments.corpus)
        if held_out is None:
            raise ValueError(f"`--validation_corpus` is {validation_corpus}, but `--corpus` is a task.")
        # The number of validation examples is part of a task's fingerprint, by which checkpoints know it.
        return _limited(task, arguments), _limited(held_out, arguments)
    if validation_corpus:
        train, held_out = (_documents(arguments, names, tokenizer) for names in (arguments.corpus, validation_corpus))
    else:
        train, held_out = _split_documents(arguments, tokenizer)
    return train, _limited(held_out, arguments)


def load_evaluation_source(arguments: DataArguments, tokenizer: Any, split: str) -> "EpisodeSource":
    """Data to evaluate: the split "validation", "train" or "all"; a task is always asked its validation examples."""
    source = _task(arguments.corpus)
    if source is None and split == "all":
        source = _documents(arguments, arguments.corpus, tokenizer)
    elif source is None:
        source = _split_documents(arguments, tokenizer)[split == "validation"]
    return _limited(source, arguments)


def _task(corpus: Sequence[str]) -> "EpisodeSource | None":
    if not any(name.startswith(TASK_PREFIX) for name in corpus):
        return None
    if len(corpus) > 1:
        raise ValueError(f"`--corpus` is {' '.join(corpus)}; a {TASK_PREFIX} cannot be combined with other sources.")
    from hf_recurrent.tasks.task_names import task_from_name

    return task_from_name(corpus[0].removeprefix(TASK_PREFIX))


def _documents(arguments: DataArguments, names: Sequence[str], tokenizer: Any) -> "Corpus":
    from hf_recurrent.data.loading import load_corpus

    return load_corpus(*_one(names), tokenizer=tokenizer, **_loading_options(arguments))


def _split_documents(arguments: DataArguments, tokenizer: Any) -> "tuple[Corpus, Corpus]":
    from hf_recurrent.data.loading import load_splits

    return load_splits(
        *_one(arguments.corpus),
        validation_fraction=arguments.validation_fraction,
        split_seed=arguments.split_seed,
        tokenizer=tokenizer,
        **_loading_options(arguments),
    )


def _one(names: Sequence[str]) -> list:
    # A single source goes by its name, which is what a corpus of it is called.
    return [names[0] if len(names) == 1 else names]


def _loading_options(arguments: DataArguments) -> dict[str, Any]:
    limit = arguments.max_corpus_bytes
    return {
        "text_column": arguments.text_column,
        "split": arguments.dataset_split,
        "config_name": arguments.dataset_config,
        "streaming": arguments.streaming,
        "max_bytes": None if limit is None else int(limit),
        "binary": arguments.binary,
    }


def _limited(source: "EpisodeSource", arguments: DataArguments) -> "EpisodeSource":
    return source if arguments.max_eval_bytes is None else source.limit(int(arguments.max_eval_bytes))
