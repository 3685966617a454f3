"""The data arguments that `pretrain` and `evaluate` share, so that the same values give the same split."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_recurrent.argument_checks import argument, check_probabilities
from hf_recurrent.cli.flags import named

if TYPE_CHECKING:
    from hf_recurrent.data.corpus import Corpus
    from hf_recurrent.data.episode_source import EpisodeSource
    from hf_recurrent.data.streamed_documents import StreamedDocuments

TASK_PREFIX = "task:"


@dataclass
class DataArguments:
    """The source of episodes, and the part of them that is held out."""

    corpus: list[str] = argument(
        ["python"],
        "python (the standard library's source), files, globs, directories, hub:owner/name, images as pixels "
        "(mnist:FOLDER in IDX format, images:FOLDER), task:NAME,FIELD=VALUE,..., or NAME:TEXT of a user-defined "
        "source (--import). Examples: --corpus my_notes/ 'books/**/*.txt', --corpus stories.jsonl.gz, "
        "--corpus hub:roneneldan/TinyStories, --corpus mnist:digits/, --corpus task:retrieval,length=128",
    )
    corpus_probabilities: list[float] = argument(
        [], "Share of the streams that reads each source of --corpus. Example: 0.7 0.3"
    )
    text_column: str = argument("text", "Column with the text in JSONL, Parquet and datasets.")
    dataset_split: str = argument("train", "Split of a dataset, or of images, to read.")
    dataset_config: str | None = argument(None, "Configuration of a Hub dataset. Example: sample-10BT")
    streaming: bool = argument(False, "Stream a Hub dataset instead of downloading it first.")
    packing: bool = argument(
        True,
        "Pack the corpus first. False reads a Hub dataset, JSONL or Parquet as it streams, without a copy; "
        "needs --max_steps or --train_bytes.",
    )
    binary: bool = argument(False, "Byte 0 is data; episodes have no end byte.")
    max_corpus_bytes: float | None = argument(None, "Bytes of the corpus to read at most. Example: 1e9")
    validation_fraction: float = argument(0.05, "Share of the documents to hold out.")
    split_seed: int = argument(0, "Seed of the choice of held-out documents.")
    max_eval_bytes: float | None = argument(None, "Bytes of whole held-out documents to evaluate. Example: 2e6")

    def __post_init__(self):
        for name in ("max_corpus_bytes", "max_eval_bytes"):
            value = getattr(self, name)
            if value is not None and not (value >= 1 and value == int(value)):
                raise ValueError(f"`--{name}` is {value}; it must be a whole number of at least 1.")
        if not self.packing and self.max_corpus_bytes is not None:
            raise ValueError("`--max_corpus_bytes` has no effect with `--packing false`; leave one of them out.")
        if self.corpus_probabilities:
            check_probabilities("--corpus_probabilities", self.corpus_probabilities, len(self.corpus))


def token_vocabulary(corpus: Sequence[str]) -> int | None:
    """V of images, tasks and user-defined token sources; None for text."""
    from hf_recurrent.data.pixel_readers import pixel_format

    tokens = episode_source(corpus) or pixel_format(corpus)
    return None if tokens is None else tokens.vocab_size


def load_training_sources(
    arguments: DataArguments, tokenizer: Any, validation_corpus: Sequence[str] = ()
) -> "tuple[EpisodeSource, EpisodeSource]":
    """Training and held-out data; with a separate `validation_corpus`, all of `arguments.corpus` is training data."""
    task = episode_source(arguments.corpus)
    if task is not None:
        held_out = episode_source(validation_corpus or arguments.corpus)
        if held_out is None:
            raise ValueError(f"`--validation_corpus` is {validation_corpus}; if `--corpus` is a task, it must be one.")
        # The number of validation examples is part of a task's fingerprint, which checkpoints compare.
        return _limited(task, arguments), _limited(held_out, arguments)
    if validation_corpus:
        train = _whole(arguments, tokenizer)
        with named(source="--validation_corpus"):
            held_out = _documents(arguments, validation_corpus, tokenizer)
    else:
        train, held_out = _split_documents(arguments, tokenizer)
    return train, _limited(held_out, arguments)


def load_evaluation_source(arguments: DataArguments, tokenizer: Any, split: str) -> "EpisodeSource":
    """Data to evaluate: the split "validation", "train" or "all"; of a task, always its validation examples."""
    source = episode_source(arguments.corpus)
    if source is None and split == "all":
        source = _whole(arguments, tokenizer)
    elif source is None:
        source = _split_documents(arguments, tokenizer)[split == "validation"]
    return _limited(source, arguments)


def episode_source(corpus: Sequence[str]) -> "EpisodeSource | None":
    """A task, or a registered source other than a corpus; None for documents."""
    from hf_recurrent.data.sources import own_episode_source

    if any(name.startswith(TASK_PREFIX) for name in corpus) and len(corpus) > 1:
        raise ValueError(f"`--corpus` is {' '.join(corpus)}; a {TASK_PREFIX} cannot be combined with other sources.")
    if len(corpus) != 1 or not corpus[0].startswith(TASK_PREFIX):
        return own_episode_source(corpus[0]) if len(corpus) == 1 else None
    from hf_recurrent.tasks.task_names import task_from_name

    return task_from_name(corpus[0].removeprefix(TASK_PREFIX))


def _documents(arguments: DataArguments, names: Sequence[str], tokenizer: Any) -> "Corpus | StreamedDocuments":
    from hf_recurrent.data.loading import load_corpus, stream_documents

    options = _loading_options(arguments, tokenizer)
    if arguments.packing:
        return load_corpus(names, **options)
    for name in ("streaming", "max_bytes"):  # they have no meaning without packing
        del options[name]
    return stream_documents(names, **options)


def _whole(arguments: DataArguments, tokenizer: Any) -> "EpisodeSource":
    """All documents of `--corpus`, mixed if there are probabilities."""
    return _mixed(arguments, [_documents(arguments, names, tokenizer) for names in _parts(arguments)])


def _split_documents(arguments: DataArguments, tokenizer: Any) -> "tuple[EpisodeSource, EpisodeSource]":
    """Training and held-out documents; of a mixture, a share of each source is held out."""
    from hf_recurrent.data.loading import load_splits

    parts, share, seed = _parts(arguments), arguments.validation_fraction, arguments.split_seed
    if arguments.packing:
        options = _loading_options(arguments, tokenizer) | {"validation_fraction": share, "split_seed": seed}
        pairs = [load_splits(names, **options) for names in parts]
    else:
        pairs = [_documents(arguments, names, tokenizer).split(share, seed) for names in parts]
    train, held_out = zip(*pairs, strict=True)
    return _mixed(arguments, train), _mixed(arguments, held_out)


def _parts(arguments: DataArguments) -> list[list[str]]:
    """The names of `--corpus`, each source of a mixture alone."""
    return [[name] for name in arguments.corpus] if arguments.corpus_probabilities else [arguments.corpus]


def _mixed(arguments: DataArguments, sources: "Sequence[EpisodeSource]") -> "EpisodeSource":
    """The mixture of sources if there are probabilities; without, there is one source."""
    from hf_recurrent.data.mixture import Mixture

    return Mixture(sources, arguments.corpus_probabilities) if arguments.corpus_probabilities else sources[0]


def _loading_options(arguments: DataArguments, tokenizer: Any) -> dict[str, Any]:
    limit = arguments.max_corpus_bytes
    return {
        "tokenizer": tokenizer,
        "text_column": arguments.text_column,
        "split": arguments.dataset_split,
        "config_name": arguments.dataset_config,
        "streaming": arguments.streaming,
        "max_bytes": None if limit is None else int(limit),
        "binary": arguments.binary,
    }


def _limited(source: "EpisodeSource", arguments: DataArguments) -> "EpisodeSource":
    return source if arguments.max_eval_bytes is None else source.limit(int(arguments.max_eval_bytes))
