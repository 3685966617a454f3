"""Language models with a count memory: its predictions, mixed with the network's.

Shape letters: B streams or batch, T steps, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..block.block_inputs import Padding
from ..block.recurrent_state import RecurrentState, state_dtype, upcast
from .count_memory import STATE_PART, CountMemory
from .count_memory_layout import MemoryShape


class TokenLosses(NamedTuple):
    """Negative log-likelihoods (B, T) in nats, 0 where there is no target, and the state after the block."""

    nats: Tensor  # of the model
    network: Tensor  # of the network without its count memory; the same tensor if it has none
    state: RecurrentState


def build_count_memory(config) -> CountMemory | None:
    """The empty count memory that a configuration asks for; None without one."""
    if not config.count_memory_slots:
        return None
    sizes = {name: getattr(config, f"count_memory_{name}") for name in ("slots", "text", "window", "rows", "small")}
    return CountMemory(MemoryShape(**sizes))


def take_counts(
    state: RecurrentState | None, memory: CountMemory | None
) -> tuple[RecurrentState | None, Tensor | None]:
    """A state without the count memory's part, and that part; None where there is none."""
    if memory is None or not isinstance(state, dict) or STATE_PART not in state:
        return state, None
    return {name: part for name, part in state.items() if name != STATE_PART}, state[STATE_PART]


def chosen_bytes(model: nn.Module) -> dict[str, bool]:
    """Arguments of `forward` for bytes that the model has chosen itself: a count memory would learn to repeat them."""
    return {} if getattr(model, "count_memory", None) is None else {"sampled": True}


def init_network_state(model: nn.Module, batch_size: int, device: torch.device | str | None = None) -> RecurrentState:
    """The zero state of a model's network alone, without the part of its count memory."""
    state = model.init_state(batch_size, device)
    state.pop(STATE_PART, None)
    return state


class CountedPredictions:
    """For a language model with a `count_memory`, None or a [`CountMemory`].

    In evaluation mode, logits are the log probabilities of the mixture. In training mode, as dropout is on only there,
    they are the network's, since the memory learns separately; the state of the memory is passed on unchanged. A state
    without the memory's part ([`init_network_state`]) is read by the network alone.
    """

    count_memory: CountMemory | None

    def mix_counts(
        self,
        input_ids: Tensor | None,
        counts: Tensor | None,
        logits: Tensor,
        kept: slice | Tensor,
        reset_mask: Tensor | None = None,
        padding: Padding | None = None,
        sampled: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Mix the network's logits (B, T, V) of a block with the predictions of the count memory.

        Returns the log probabilities of the `kept` steps, whose gradient is passed to the network's logits as it is,
        and the new state of the count memory. Without a state `counts`, it begins at zeros.

        Raises:
            ValueError: there are no `input_ids`, or the state is of another memory.
        """
        counts = self._counts(input_ids, counts)
        first = kept.indices(input_ids.shape[1])[0] if isinstance(kept, slice) else 0
        _, mixed, counts = self.count_memory.read(
            input_ids, counts, logits, reset_mask, _real(padding), logits_from=first, sampled=sampled
        )
        if not isinstance(kept, slice):
            mixed = mixed[:, kept]
        mixed = mixed.to(logits.device, state_dtype(logits.dtype))
        if logits.requires_grad:
            network = logits[:, kept].to(mixed.dtype)
            mixed = mixed + (network - network.detach())
        return mixed, counts

    @torch.no_grad()
    def token_losses(
        self,
        input_ids: Tensor,
        shift_labels: Tensor,
        state: RecurrentState | None = None,
        reset_mask: Tensor | None = None,
    ) -> TokenLosses:
        """Losses of a block's targets, as from `forward`, at a fraction of the cost of all probabilities.

        The arguments are `forward`'s; `shift_labels` (B, T) are -100 for no target.
        """
        options = {"state": state, "reset_mask": reset_mask, "use_cache": True, "return_dict": True}
        outputs = self(input_ids, shift_labels=shift_labels, per_token=True, **options)
        return TokenLosses(outputs.token_losses, outputs.network_losses, outputs.state)

    def mixed_losses(
        self,
        input_ids: Tensor,
        counts: Tensor | None,
        logits: Tensor,
        shift_labels: Tensor,
        reset_mask: Tensor | None,
        padding: Padding | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Losses (B, T) of the targets by model and by network alone, in nats, and the new state of the count memory.

        Arguments as for [`mix_counts`]; without a memory, both losses are the same tensor.
        """
        wide = upcast(logits.detach())
        network = nn.functional.cross_entropy(wide.transpose(1, 2), shift_labels.to(wide.device), reduction="none")
        if self.count_memory is None:
            return network, network, None
        nats, _, counts = self.count_memory.read(
            input_ids, self._counts(input_ids, counts), logits, reset_mask, _real(padding), targets=shift_labels
        )
        return nats, network, counts

    def _counts(self, input_ids: Tensor | None, counts: Tensor | None) -> Tensor:
        if input_ids is None:
            raise ValueError("Give `input_ids`: the count memory cannot read `inputs_embeds`.")
        return self.count_memory.init_state(len(input_ids), input_ids.device) if counts is None else counts


def _real(padding: Padding | None) -> Tensor | None:
    return None if padding is None else ~padding.unpack(padding.mask)
