"""The model "hf-recurrent" of lm-evaluation-harness: documents of any length, read with the state carried.

Importing this module registers it; `hf-recurrent lm-eval` is the command line of lm-eval with it.
"""

from typing import Any

import numpy as np
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm

from hf_recurrent.data.token_encoding import TokenEncoding
from hf_recurrent.evaluation.scores import score_blocks
from hf_recurrent.modeling.block.recurrent_state import supports_recurrent_state
from hf_recurrent.stock_models.with_state import with_state

_LONGEST = 1 << 40  # tokens: a state has no longest context


@register_model("hf-recurrent")
class RecurrentLM(HFLM):
    """A recurrent model with a byte tokenizer; all other arguments are as for lm-eval's model "hf".

    Args:
        pretrained: directory, repository or model.
        block_size: tokens per forward pass of `loglikelihood_rolling`; changes memory and speed, not results (beyond
            rounding).
        max_length: longest context in tokens of multiple choice and generation; by default none is cut.

    Raises:
        ValueError: the model has no state, its tokenizer has other tokens than bytes, or `batch_size` is "auto".
    """

    def __init__(self, pretrained: Any, block_size: int = 1024, max_length: int | None = None, **options: Any) -> None:
        if str(options.get("batch_size", 1)).startswith("auto"):
            raise ValueError(f"`batch_size` is {options['batch_size']!r}; it must be a number.")
        self._longest = max_length or _LONGEST
        super().__init__(pretrained, max_length=max_length, **options)
        if not supports_recurrent_state(with_state(self.model)):
            raise ValueError(
                f"`pretrained` is a {type(self.model).__name__} without a recurrent state; use --model hf."
            )
        if not hasattr(self.tokenizer, "encode_bytes"):
            raise ValueError(f"The tokenizer is a {type(self.tokenizer).__name__}; it must be a byte tokenizer.")
        self.block_size = int(block_size)

    @property
    def max_length(self) -> int:
        """The longest context, in tokens."""
        return self._longest

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each document in nats, as in `hf-recurrent score`.

        The first byte is given, and the end byte is predicted; an empty document has 0.

        Raises:
            ValueError: a document has byte 0, which is the end of a document.
        """
        texts = [request.args[0] for request in requests]
        totals = np.zeros(len(texts))
        documents = ((str(number), [text.encode()]) for number, text in enumerate(texts))
        size = sum(len(text.encode()) for text in texts)
        hidden = disable_tqdm or self.rank != 0
        with tqdm(total=size, unit="B", unit_scale=True, disable=hidden) as bar:
            for block, scores in score_blocks(self.model, documents, TokenEncoding(self.tokenizer), self.block_size):
                np.add.at(totals, np.array(block.names, dtype=np.int64), scores)
                bar.update(len(scores))
        for text, total in zip(texts, totals.tolist(), strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals.tolist()
