"""The small networks that learn from nothing beside the counts, for archives that need no model file."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SEED = 0
# 152,000 dense weights: on texts up to a megabyte, four times as many save nothing, and take three times as long.
_SIZES = {"hidden_size": 64, "state_size": 96, "num_hidden_layers": 2, "intermediate_size": 192}
_TABLES = {"ngram_orders": [2, 3, 4, 5, 6], "ngram_rows": 1 << 16}
# By the number in the settings of archives: the first had no tables of n-grams.
_SIZES_OF = {1: _SIZES, 2: _SIZES | _TABLES}
NEWEST = 2


def new_network(number: int = NEWEST) -> "PreTrainedModel":
    """A `memora-tiny` of half its width with new weights, always the same.

    Args:
        number: which one; archives name it.

    Raises:
        ValueError: there is no network of this number.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from hf_recurrent.presets import config_from_preset

    if number not in _SIZES_OF:
        raise ValueError(f"`number` is {number!r}; it must be one of {', '.join(map(str, _SIZES_OF))}.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        return AutoModelForCausalLM.from_config(config_from_preset("memora-tiny", **_SIZES_OF[number])).eval()
