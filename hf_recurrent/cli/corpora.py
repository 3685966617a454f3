"""What `--corpus` names, the same for every command: documents, images or a generated task."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_recurrent.tasks.task import Task

TASK_PREFIX = "task:"
CORPUS_HELP = (
    "python (the standard library's source), files, globs, directories, hub:owner/name, images as pixels "
    "(mnist:FOLDER in IDX format, images:FOLDER), or task:NAME,FIELD=VALUE,..."
)


def task_of(corpus: Sequence[str], max_tokens: float | None = None) -> "Task | None":
    """The task that `--corpus` names, which validates on at most so many tokens of whole examples; None for corpora.

    Raises:
        ValueError: no such task or setting, or a task beside something else.
    """
    if not any(name.startswith(TASK_PREFIX) for name in corpus):
        return None
    if len(corpus) > 1:
        raise ValueError(f"--corpus is {' '.join(corpus)}; a {TASK_PREFIX} stands alone.")
    from hf_recurrent.tasks.task_names import task_from_name

    task = task_from_name(corpus[0].removeprefix(TASK_PREFIX))
    if max_tokens is not None:
        fitting = max(int(max_tokens // task.length), 1)
        task = dataclasses.replace(task, num_validation_examples=min(task.num_validation_examples, fitting))
    return task


def source_of(corpus: list[str]) -> str | list[str]:
    """`--corpus` as `load_corpus` takes it: one source by its name."""
    return corpus[0] if len(corpus) == 1 else corpus


def vocabulary_of(corpus: list[str]) -> int | None:
    """V where images or a task bring tokens of their own, none of which ends an episode; None for documents.

    Raises:
        ValueError: images or a task beside something else.
    """
    from hf_recurrent.data.pixel_readers import pixel_format

    tokens = task_of(corpus) or pixel_format(corpus)
    return None if tokens is None else tokens.vocab_size


def loading_options(arguments: Any) -> dict[str, Any]:
    """The options of `load_corpus` that all commands have as arguments of the same names."""
    limit = arguments.max_corpus_bytes
    return {
        "text_column": arguments.text_column,
        "split": arguments.dataset_split,
        "config_name": arguments.dataset_config,
        "streaming": arguments.streaming,
        "max_bytes": None if limit is None else int(limit),
        "binary": arguments.binary,
    }
