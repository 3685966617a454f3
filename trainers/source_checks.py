"""Sources of episodes compared with a model and the arguments of its training, before training starts."""

from typing import Any

from torch import nn

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
