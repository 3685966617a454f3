"""Caches of transformers as flat dictionaries of tensors, batch first, and back: one class for each cache class.

Shape letters: B streams, T steps, V vocabulary.
"""

import inspect
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, cache_utils
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from hf_recurrent.modeling.block.recurrent_state import RecurrentState
from hf_recurrent.stock_models.stock_model import cache_argument
from hf_recurrent.stock_models.with_state import with_state

POSITION = "position"
_LAYER_CLASSES = (
    getattr(cache_utils, "DummyLayer", None),  # of newer versions
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)


class UnsupportedCache(ValueError):
    """The cache of a model has a part that cannot be saved, or the model is not recurrent."""


class CacheAdapter:
    """The cache of one cache class, given to the stock `forward` and taken from it.

    Args:
        model: of a class that uses this cache.

    Attributes:
        cache_name: name of the cache class.
        recurrent: some part of the cache has a size that does not depend on the length of the text.
        has_attention: some part does depend on it, so that texts of different lengths cannot be one batch.
        reads_blocks: [`MambaAdapter.read_block`] is there.
        stock_blocks: the stock code reads several tokens after others; None to find out.
    """

    cache_name = ""
    argument = ""
    recurrent, has_attention, reads_blocks = True, False, False
    stock_blocks: bool | None = None

    def __init__(self, model: PreTrainedModel):
        self.model = model

    def empty(self, batch_size: int) -> Any:
        """The cache before the first token; None where `forward` makes one."""
        return None

    def fill(self, state: RecurrentState, position: int) -> Any:
        """The cache with the parts of a state after `position` tokens. `forward` may write to these tensors."""
        raise NotImplementedError

    def take(self, cache: Any, output: Any) -> RecurrentState:
        """The parts of the cache after a call of `forward`."""
        raise NotImplementedError


class DynamicCacheAdapter(CacheAdapter):
    """`DynamicCache`: keys and values of attention layers, and states of linear-attention layers."""

    cache_name = "DynamicCache"

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        # The layers of one cache are filled anew for each call, because making them takes longer.
        self._cache = self.empty(1)
        for number, layer in enumerate(self._cache.layers):
            if type(layer) not in _LAYER_CLASSES:
                raise UnsupportedCache(f"layer {number} has a {type(layer).__name__}, which cannot be saved")
        self.recurrent = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in self._cache.layers)
        self.has_attention = any(isinstance(layer, DynamicLayer) for layer in self._cache.layers)
        self.argument = cache_argument(model)

    def empty(self, batch_size):
        return DynamicCache(config=self.model.config)

    def fill(self, state, position):
        for name, tensor in state.items():
            if name != POSITION:
                _, number, part = name.split(".", 2)
                _fill_layer(self._cache.layers[int(number)], part, tensor)
        for layer in self._cache.layers:
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = position
        return self._cache

    def take(self, cache, output):
        state: RecurrentState = {}
        for number, layer in enumerate(cache.layers):
            head = f"layers.{number}"
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                for kind, parts in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
                    state |= {f"{head}.{kind}.{index}": part for index, part in parts.items() if part is not None}
            if isinstance(layer, DynamicLayer) and layer.keys is not None:
                state |= {f"{head}.keys": layer.keys, f"{head}.values": layer.values}
        return state

    def length(self, part: str, position: int) -> int:
        """Size of a growing part after `position` tokens."""
        layer = self._cache.layers[int(part.split(".")[1])]
        return min(position, layer.sliding_window - 1) if isinstance(layer, DynamicSlidingWindowLayer) else position


def _fill_layer(layer: Any, part: str, tensor: torch.Tensor) -> None:
    """Set one tensor of a layer of a `DynamicCache`, as its own update does."""
    layer.dtype, layer.device = tensor.dtype, tensor.device
    if part in ("keys", "values"):
        setattr(layer, part, tensor)
        layer.is_initialized = True
        return
    kind, index = part.split(".")
    index = int(index)
    if kind == "conv":
        layer.conv_states[index], layer.is_conv_states_initialized[index] = tensor, True
        layer.conv_kernel_size[index] = tensor.shape[-1]
        layer.has_previous_state[index] = True
    else:
        layer.recurrent_states[index], layer.is_recurrent_states_initialized[index] = tensor, True


class MambaAdapter(DynamicCacheAdapter):
    """`DynamicCache` of Mamba and FalconMamba, whose stock code begins every block at a zero state."""

    reads_blocks = True

    def read_block(self, input_ids: torch.Tensor, state: RecurrentState) -> tuple[torch.Tensor, RecurrentState]:
        """Logits (B, T, V) and the state after several tokens, by other code than the stock class's."""
        layers = [name.removesuffix(".conv.0") for name in state if name.endswith(".conv.0")]
        given, new = {}, {}
        for layer in layers:
            # The cache has K taps, the oldest of which the next step drops.
            given[f"{layer}.convolution"] = state[f"{layer}.conv.0"][..., 1:].mT
            given[f"{layer}.recurrent"] = state[f"{layer}.recurrent.0"]
        output = with_state(self.model)(input_ids, state=given)
        for layer in layers:
            new[f"{layer}.conv.0"] = torch.nn.functional.pad(output.state[f"{layer}.convolution"].mT, (1, 0))
            new[f"{layer}.recurrent.0"] = output.state[f"{layer}.recurrent"]
        return output.logits, {name: part.to(state[name].dtype) for name, part in new.items()}


class JambaAdapter(DynamicCacheAdapter):
    """`DynamicCache` of Jamba, whose stock code begins every block of its Mamba layers at a zero state."""

    stock_blocks = False


class RecurrentGemmaAdapter(DynamicCacheAdapter):
    """`DynamicCache` for the attention of RecurrentGemma; its recurrent blocks keep their state on themselves."""

    cache_name = "DynamicCache and states on the modules"
    stock_blocks = False  # they drop the convolution's inputs

    def empty(self, batch_size):
        for _, block in self._blocks():
            like = block.linear_x.weight
            block.conv1d_state = like.new_zeros(batch_size, block.lru_width, block.conv1d_width - 1)
            block.rg_lru.recurrent_states = like.new_zeros(batch_size, block.lru_width, dtype=torch.float32)
        return super().empty(batch_size)

    def fill(self, state, position):
        rest = dict(state)
        for number, block in self._blocks():
            block.conv1d_state = rest.pop(f"blocks.{number}.conv")
            block.rg_lru.recurrent_states = rest.pop(f"blocks.{number}.recurrent")
        return super().fill(rest, position)

    def take(self, cache, output):
        state = super().take(cache, output)
        for number, block in self._blocks():
            state |= {
                f"blocks.{number}.conv": block.conv1d_state,
                f"blocks.{number}.recurrent": block.rg_lru.recurrent_states,
            }
        return state

    def _blocks(self) -> list[tuple[int, Any]]:
        blocks = ((number, layer.temporal_block) for number, layer in enumerate(self.model.model.layers))
        return [(number, block) for number, block in blocks if hasattr(block, "rg_lru")]


class XLSTMCacheAdapter(CacheAdapter):
    """`xLSTMCache`: three tensors a layer."""

    cache_name = "xLSTMCache"

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        from transformers.models.xlstm.modeling_xlstm import xLSTMCache

        self.argument = cache_argument(model)
        self._cache = xLSTMCache(model.config, 1, dtype=model.dtype, device=model.device)

    def fill(self, state, position):
        layers = range(len(self._cache.rnn_state))
        self._cache.rnn_state = {
            number: tuple(state[f"layers.{number}.{part}"] for part in range(3)) for number in layers
        }
        return self._cache

    def take(self, cache, output):
        return {
            f"layers.{number}.{part}": tensor
            for number, tensors in output[self.argument].rnn_state.items()
            for part, tensor in enumerate(tensors)
        }


class RwkvStateAdapter(CacheAdapter):
    """The five tensors of RWKV, each with all layers."""

    cache_name, argument = "list of five tensors", "state"

    def fill(self, state, position):
        return [state[f"state.{part}"] for part in range(5)]

    def take(self, cache, output):
        return {f"state.{part}": tensor for part, tensor in enumerate(output.state)}


_ADAPTERS = {
    "falcon_mamba": MambaAdapter,
    "jamba": JambaAdapter,
    "mamba": MambaAdapter,
    "recurrent_gemma": RecurrentGemmaAdapter,
    "rwkv": RwkvStateAdapter,
    "xlstm": XLSTMCacheAdapter,
}
SUPPORTED = (
    "Mamba, Mamba2, FalconMamba, RWKV, xLSTM, RecurrentGemma, and hybrids with a DynamicCache, such as Jamba, Bamba, "
    "FalconH1, Qwen3Next and GraniteMoeHybrid"
)


class CachedModel:
    """A stock model that takes a state and returns another one, through its own cache: `forward` stays as it is.

    A state has the tensors of the cache and `position`, (B, 1) int64: tokens read so far. At position 0, the other
    parts are zeros and not used. Parts of attention grow with the text.

    Args:
        model: a stock language model, in evaluation mode.

    Attributes:
        zero: the state of one stream before its first token; growing parts have length 0.
        bytes_per_token: by which a state grows, until its windows are full.
        continues_blocks: [`forward`] reads several tokens after others as one by one, but for last bits.

    Raises:
        UnsupportedCache: the model is not recurrent, or its state cannot be saved.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        adapter = _ADAPTERS.get(model.config.model_type, DynamicCacheAdapter)
        try:
            self.adapter = adapter(model)
        except UnsupportedCache:
            raise
        except Exception as error:  # a configuration that this cache does not know
            raise UnsupportedCache(f"its cache cannot be built: {error}") from error
        if not self.adapter.recurrent:
            raise UnsupportedCache("its only memory is the keys and values of attention")
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self.zero: RecurrentState = {}
        try:
            with torch.no_grad():
                self._probe()
        except Exception as error:  # such as a class that takes another cache than its configuration says
            raise UnsupportedCache(f"its cache cannot be taken apart: {error}") from error

    def forward(self, input_ids: torch.Tensor, state: RecurrentState) -> tuple[torch.Tensor, RecurrentState]:
        """Read tokens (B, T) after a state, of texts that are all empty or all not; returns logits (B, T, V)."""
        if self.adapter.reads_blocks and input_ids.shape[1] > 1:
            logits, new = self.adapter.read_block(input_ids, state)
            parts = {name: part.contiguous() for name, part in new.items()}
            return logits, {POSITION: state[POSITION] + input_ids.shape[1]} | parts
        return self._call(input_ids, state if int(state[POSITION][0, 0]) > 0 else None)

    def check_state(self, state: RecurrentState) -> None:
        """Raise a ValueError unless a state of one stream has the parts, sizes and types of this model's."""
        position = state.get(POSITION)
        if position is None or position.shape != (1, 1) or position.dtype != torch.long or position.item() < 0:
            raise ValueError(f"`state[{POSITION!r}]` is missing or is not a number of tokens.")
        if state.keys() != self.zero.keys():
            raise ValueError(f"`state` has the parts {sorted(state)}; it needs {sorted(self.zero)}.")
        for name, like in self.zero.items():
            growing = not like.numel()
            shape = (
                [size or self.adapter.length(name, position.item()) for size in like.shape] if growing else like.shape
            )
            if state[name].shape != torch.Size(shape) or state[name].dtype != like.dtype:
                found = f"{tuple(state[name].shape)} and type {state[name].dtype}"
                needed = f"{tuple(shape)} and {like.dtype}"
                raise ValueError(f"`state[{name!r}]` has shape {found}; it needs {needed}.")

    def _probe(self) -> None:
        """Read some tokens to learn the parts of a state, and whether blocks can be read."""
        ids = (
            torch.arange(1, 5, device=self.model.device).unsqueeze(0) % self.model.config.get_text_config().vocab_size
        )
        first, one = self._call(ids[:, :1], None)
        _, two = self._call(ids[:, 1:2], one)
        self.zero = {name: _zero_part(one[name], two[name]) for name in one}
        self.bytes_per_token = sum(two[name].nbytes - one[name].nbytes for name in one)
        known = True if self.adapter.reads_blocks else self.adapter.stock_blocks
        self.continues_blocks = self._reads_as_steps(ids[:, 2:], two, first) if known is None else known

    def _reads_as_steps(self, ids: torch.Tensor, state: RecurrentState, first: torch.Tensor) -> bool:
        """True if the stock code reads tokens (1, 2) after a state as one by one; `first` are other logits."""
        block, _ = self._call(ids, state)
        for column in range(2):
            logits, state = self._call(ids[:, column : column + 1], state)
        tolerance = 1e-4 if logits.dtype in (torch.float32, torch.float64) else 0.1
        spread = float((logits[:, -1] - first[:, -1]).abs().amax())
        return float((block[:, -1] - logits[:, -1]).abs().amax()) <= tolerance * spread

    def _call(self, input_ids: torch.Tensor, state: RecurrentState | None) -> tuple[torch.Tensor, RecurrentState]:
        batch_size, steps = input_ids.shape
        if state is None:
            position = torch.zeros(batch_size, 1, dtype=torch.long, device=input_ids.device)
            cache = self.adapter.empty(batch_size)
        else:
            position = state[POSITION]
            # `forward` writes to some tensors, and others keep the state.
            own = {name: part.clone() for name, part in state.items() if name != POSITION}
            cache = self.adapter.fill(own, int(position[0, 0]))
        options = {}
        if self._takes_positions:
            options["position_ids"] = position + torch.arange(steps, device=input_ids.device)
        output = self.model(input_ids=input_ids, use_cache=True, **{self.adapter.argument: cache}, **options)
        new = self.adapter.take(cache, output)
        # In this layout, as after a restart: another one may change the last bits of the next step.
        return output.logits, {POSITION: position + steps} | {name: part.contiguous() for name, part in new.items()}


def _zero_part(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    """A part of the zero state, given the parts after one and after two tokens: length 0 where it grows."""
    sizes = [0 if first != second else first for first, second in zip(one.shape, two.shape, strict=True)]
    return torch.zeros(sizes, dtype=one.dtype, device=one.device)
