"""xLSTM (mLSTM blocks) with a state.

Shape letters: B streams or batch, H heads, T steps, Q steps of a chunk, S state width (of a key), P width of a head
(of a value).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers.models.xlstm import modeling_xlstm
from transformers.models.xlstm.modeling_xlstm import xLSTMForCausalLM

from hf_recurrent.modeling.block.recurrent_state import upcast
from hf_recurrent.stock_models.stock_model import CHUNK_STEPS, Block, StatePart, StockModelWithState, same_episode

# Missing where the package `xlstm` is installed, whose layers are others.
_StockBackend = getattr(modeling_xlstm, "xLSTMBackend", nn.Module)


class MatrixMemoryBlock(Block):
    """A [`Block`] that the stock model hands on to the backend of each layer, as the three tensors of its state."""

    seqlen_offset = 0

    @property
    def rnn_state(self) -> "MatrixMemoryBlock":
        """The states of all layers."""
        return self

    def __getitem__(self, layer: int) -> "MatrixMemoryBlock":
        return self

    def __iter__(self) -> Iterator["MatrixMemoryBlock"]:
        return iter((self, self, self))

    def __len__(self) -> int:
        return 0  # the stock model has nothing to copy back


class BackendWithState(StatePart, _StockBackend):
    """The mLSTM recurrence (Beck et al. 2024, section 2.3) from a given state, by the chunks of [`matrix_memory`].

    Stock code copies the state in place, so that gradients end at a block, and knows no resets.
    """

    def part_shapes(self):
        config, heads = self.config, self.config.num_heads
        keys = int(config.hidden_size * config.qk_dim_factor) // heads
        values = int(config.hidden_size * config.v_dim_factor) // heads
        return {"memory": (heads, keys, values), "normalizer": (heads, keys), "maximum": (heads, 1)}

    def forward(self, query, key, value, igate, fgate, c_initial=None, **options):
        if not isinstance(c_initial, Block):
            return super().forward(query, key, value, igate, fgate, c_initial=c_initial, **options)
        block = c_initial
        with torch.autocast(query.device.type, enabled=False):
            inputs = [upcast(tensor) for tensor in (query * query.shape[-1] ** -0.5, key, value, igate)]
            log_forget = nn.functional.logsigmoid(upcast(fgate))
            if block.padding_mask is not None:
                padding = block.padding_mask.unsqueeze(1)  # the state stays as it is
                inputs[3], log_forget = inputs[3].masked_fill(padding, -torch.inf), log_forget.masked_fill(padding, 0)
            state = tuple(self.get_part(block, part) for part in self.part_shapes())
            output, state = matrix_memory(*inputs, log_forget, state, block.reset_mask, self.config.eps)
        for part, tensor in zip(self.part_shapes(), state, strict=True):
            self.set_part(block, part, tensor)
        return output.to(query.dtype), block


def matrix_memory(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    log_input: torch.Tensor,
    log_forget: torch.Tensor,
    state: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    reset_mask: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """C_t = f C_{t-1} + i k v', n_t = f n_{t-1} + i k, h_t = C'q / max(|n·q|, 1), with both scaled by exp(-m_t).

    m_t = max(log f + m_{t-1}, log i) keeps the exponentials finite; a reset sets C, n and m before the step to zero.

    Args:
        queries, keys: (B, H, T, S); queries are scaled.
        values: (B, H, T, P).
        log_input, log_forget: (B, H, T).
        state: C (B, H, S, P), n (B, H, S) and m (B, H, 1) before the block.
        eps: added to the denominator.

    Returns:
        h (B, H, T, P), and the state after the block.
    """
    memory, normalizer, maximum = state
    outputs = []
    resets = [None] * keys.shape[2] if reset_mask is None else reset_mask.split(CHUNK_STEPS, dim=1)
    chunks = zip(*(part.split(CHUNK_STEPS, 2) for part in (queries, keys, values, log_input, log_forget)), strict=True)
    for (query, key, value, admitted, forgotten), reset in zip(chunks, resets, strict=False):
        visible, from_before = (mask.unsqueeze(1) for mask in same_episode(len(key), key.shape[2], reset, key.device))
        total = forgotten.cumsum(-1)  # (B, H, Q)
        # Of the start: the state before the chunk, or the zero state (m = 0) before the last reset.
        start = total - _total_before_reset(total, forgotten, reset) + maximum.masked_fill(~from_before, 0)
        between = (total.unsqueeze(-1) - total.unsqueeze(-2) + admitted.unsqueeze(-2)).masked_fill(
            ~visible, -torch.inf
        )
        peak = torch.maximum(start, between.amax(-1))
        weights = torch.exp(between - peak.unsqueeze(-1))
        since = torch.exp(start - peak).masked_fill(~from_before, 0).unsqueeze(-1)
        scores = query @ key.transpose(-2, -1) * weights
        numerator = scores @ value + since * (query @ memory)
        denominator = scores.sum(-1, keepdim=True) + since * (query @ normalizer.unsqueeze(-1))
        outputs.append(numerator / (torch.maximum(denominator.abs(), torch.exp(-peak).unsqueeze(-1)) + eps))
        kept, left = key * weights[:, :, -1].unsqueeze(-1), since[:, :, -1]
        memory = left.unsqueeze(-1) * memory + kept.transpose(-2, -1) @ value
        normalizer, maximum = left * normalizer + kept.sum(2), peak[..., -1:]
    return torch.cat(outputs, dim=2), (memory, normalizer, maximum)


def _total_before_reset(
    total: torch.Tensor, forgotten: torch.Tensor, reset: torch.Tensor | None
) -> torch.Tensor | int:
    """(B, H, Q): the sum of log f before the last reset; 0 where the chunk has none so far."""
    if reset is None:
        return 0
    steps = torch.arange(reset.shape[1], device=reset.device)
    last = torch.where(reset, steps, -1).cummax(1).values.unsqueeze(1).expand_as(total)
    return (total - forgotten).gather(-1, last.clamp(min=0)).masked_fill(last < 0, 0)


class XlstmWithState(StockModelWithState, xLSTMForCausalLM):
    """A stock xLSTM that takes and returns a state."""

    block_class = MatrixMemoryBlock
    keeps_logits = False

    @classmethod
    def check(cls, model):
        if _StockBackend is nn.Module:
            raise ValueError("xLSTM of the package `xlstm` cannot carry a state here; uninstall that package.")

    def prepare_inputs_for_generation(self, input_ids, state=None, attention_mask=None, **kwargs):
        if attention_mask is not None:
            if state is None:
                raise ValueError(
                    "`attention_mask` is given, but the stock xLSTM has none; leave it out, or give a `state`."
                )
            kwargs["attention_mask"] = attention_mask
        return super().prepare_inputs_for_generation(input_ids, state=state, **kwargs)

    def read_stock(self, input_ids: torch.Tensor, block: MatrixMemoryBlock, **options) -> Any:
        longest = self.config.max_inference_chunksize
        if not self.training and block.steps > longest:  # the stock model would cut the block itself
            raise ValueError(f"`input_ids` has {block.steps} steps; with a state this model reads at most {longest}.")
        return super().read_stock(input_ids, block, **options)


CLASSES = {xLSTMForCausalLM: XlstmWithState, _StockBackend: BackendWithState}
