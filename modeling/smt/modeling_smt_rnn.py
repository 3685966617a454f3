"""The RNNs of Supervised Memory Training: m_{t+1} = f(m_t, x_{t+1}), and a readout of the memory (SMT, appendix E).

The update f is a Transformer, an MLP or a stack of GRU layers; the readout is a Transformer over the memory tokens
whose last one predicts. A memory is Z tokens × D, zero at the start of an episode, and the whole state of the model.

Shape letters: B streams, T steps, M model width, V vocabulary, Z memory tokens, D width of a memory token.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..block.block_inputs import Padding
from ..block.recurrent_backbone import NGRAMS, RecurrentBackbone, RecurrentPreTrainedModel
from ..block.recurrent_causal_lm import RecurrentForCausalLM
from ..block.recurrent_sequence_classification import RecurrentForSequenceClassification
from ..block.recurrent_state import RecurrentState, check_state, state_dtype
from ..block.tensor_checks import check_mask, check_token_ids
from .configuration_smt_rnn import SmtRnnConfig
from .memory_transformer import (
    MemoryDecoder,
    MemoryTransformer,
    MemoryTransformerBlock,
    Rotary,
    init_memory_weights,
    normalize_memory,
    rotary_tables,
    width_map,
)


class TransformerUpdate(nn.Module):
    """A bidirectional Transformer over the memory tokens, followed by the input token."""

    def __init__(self, config: SmtRnnConfig):
        super().__init__()
        self.config = config
        self.memory_in = width_map(config.memory_size, config.hidden_size)
        self.memory_out = width_map(config.hidden_size, config.memory_size)
        # Gradient checkpointing recomputes whole runs of steps here.
        self.transformer = MemoryTransformer(config, config.num_hidden_layers, block_class=MemoryTransformerBlock)

    def prepare(self, embeds: Tensor) -> tuple[Tensor, Rotary]:
        """The part without the memory, for all steps at once: inputs (…, M) and the tables of positions."""
        return embeds, rotary_tables(self.config, self.config.num_memory_tokens + 1, embeds)

    def forward(self, memory: Tensor, inputs: Tensor, rotary: Rotary) -> Tensor:
        hidden = self.memory_in(memory)
        hidden = torch.cat([hidden, inputs.unsqueeze(1).to(hidden.dtype)], dim=1)
        return self.memory_out(self.transformer(hidden, rotary)[-1][:, :-1])


class MlpUpdate(nn.Module):
    """An MLP of N hidden layers over the flattened memory and the input.

    The paper leaves the rest open. Here a hidden layer is a linear map, RMSNorm, which keeps eight layers trainable,
    and GELU; the first map is in two parts with separate fan-in, so that the input weighs as much as the memory.
    """

    def __init__(self, config: SmtRnnConfig):
        super().__init__()
        width, flat = config.intermediate_size, config.num_memory_tokens * config.memory_size
        self.memory_proj = nn.Linear(flat, width, bias=False)
        self.input_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.hidden_proj = nn.ModuleList(
            [nn.Linear(width, width, bias=False) for _ in range(config.num_hidden_layers - 1)]
        )
        self.norms = nn.ModuleList([nn.RMSNorm(width, eps=config.norm_eps) for _ in range(config.num_hidden_layers)])
        self.out_proj = nn.Linear(width, flat, bias=False)

    def prepare(self, embeds: Tensor) -> tuple[Tensor, None]:
        """The part without the memory, for all steps at once: the inputs' share of the first map, (…, width)."""
        return self.input_proj(embeds), None

    def forward(self, memory: Tensor, inputs: Tensor, _: None) -> Tensor:
        hidden = self.memory_proj(memory.flatten(1)) + inputs
        hidden = nn.functional.gelu(self.norms[0](hidden))
        for projection, norm in zip(self.hidden_proj, self.norms[1:], strict=True):
            hidden = nn.functional.gelu(norm(projection(hidden)))
        return self.out_proj(hidden).view_as(memory)


class GruUpdate(nn.Module):
    """A stack of Z GRU layers: layer l keeps memory token l and reads the new token of the layer below."""

    def __init__(self, config: SmtRnnConfig):
        super().__init__()
        widths = [config.hidden_size] + [config.memory_size] * (config.num_memory_tokens - 1)
        self.cells = nn.ModuleList([nn.GRUCell(width, config.memory_size) for width in widths])

    def prepare(self, embeds: Tensor) -> tuple[Tensor, None]:
        """The part without the memory: the inputs."""
        return embeds, None

    def forward(self, memory: Tensor, inputs: Tensor, _: None) -> Tensor:
        tokens = []
        for cell, token in zip(self.cells, memory.unbind(1), strict=True):
            inputs = cell(inputs, token)
            tokens.append(inputs)
        return torch.stack(tokens, dim=1)


_UPDATES = {"transformer": TransformerUpdate, "mlp": MlpUpdate, "gru": GruUpdate}


class SmtRnnPreTrainedModel(RecurrentPreTrainedModel):
    """Initialisation, loading and saving of SMT's RNNs."""

    config_class = SmtRnnConfig
    _no_split_modules = ["MemoryTransformerLayer", "TransformerUpdate", "MlpUpdate", "GruUpdate"]  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        init_memory_weights(module, self.config)


class SmtRnnModel(SmtRnnPreTrainedModel, RecurrentBackbone):
    """Embedding, update of the memory and the readout's Transformer, without a head.

    `hidden_states` are the embedding and the outputs of the readout's layers at the last memory token.
    """

    def __init__(self, config: SmtRnnConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.memory_update = _UPDATES[config.backbone](config)
        self.decoder = MemoryDecoder(config, config.num_readout_layers, config.causal_readout)
        self.gradient_checkpointing = False
        self.post_init()

    def layer_layout(self) -> dict[str, tuple[int, ...]]:
        return {"memory": (self.config.num_memory_tokens, self.config.memory_size)}

    def update(self, memory: Tensor, input_ids: torch.LongTensor, ngrams: Tensor | None = None) -> Tensor:
        """One step for any number of memories: memory (…, Z, D) and input (…) → the next memory (…, Z, D).

        The new memory has the type of states. `ngrams` (…, largest order - 1) is that part of the states before, for a
        model with n-grams; by default, the inputs are the first of their episodes.

        Raises:
            ValueError: the memory is not (…, Z, D), or there is not one input for each memory.
        """
        self._check_memory(memory)
        if memory.shape[:-2] != input_ids.shape:
            raise ValueError(
                f"`input_ids` has shape {tuple(input_ids.shape)}, but there are {tuple(memory.shape[:-2])} memories."
            )
        embedded = self._embed(input_ids.reshape(-1, 1), None if ngrams is None else ngrams.flatten(0, -2))
        inputs, constants = self.memory_update.prepare(embedded.squeeze(1))
        return self._step(memory.flatten(0, -3), inputs, constants).view(memory.shape)

    def unroll(
        self,
        memory: Tensor,
        input_ids: torch.LongTensor,
        reset_mask: Tensor | None = None,
        ngrams: Tensor | None = None,
    ) -> Tensor:
        """Step by step from `memory` (B, Z, D) through `input_ids` (B, T): the memory after each, (B, T, Z, D).

        `reset_mask` (B, T) bool is true where the memory is set to zero first; `ngrams` is as for [`update`]. With
        gradient checkpointing the steps between √T memories are recomputed in the backward pass.

        Raises:
            ValueError: a shape does not match.
        """
        check_token_ids("input_ids", input_ids, self.config.vocab_size)
        shape = torch.Size((len(input_ids), *self.layer_layout()["memory"]))
        check_state({"memory": memory}, {"memory": shape})
        if reset_mask is not None:
            reset_mask = check_mask("reset_mask", reset_mask, *input_ids.shape).bool()
        return self._unroll(memory, self._embed(input_ids, ngrams, reset_mask), reset_mask, None)[0]

    def readout_states(self, memory: Tensor) -> Tensor:
        """The input of the head, (…, M), from memories (…, Z, D)."""
        self._check_memory(memory)
        return self.decoder(memory.flatten(0, -3))[-1].view(*memory.shape[:-2], -1)

    def read_block(self, hidden, state, reset_mask, padding: Padding | None, kept, output_hidden_states):
        padded = None if padding is None else padding.unpack(padding.mask)
        memories, memory = self._unroll(state["memory"], hidden, reset_mask, padded)
        new_state: RecurrentState = {"memory": memory}
        if not output_hidden_states:
            return self.readout_states(memories[:, kept]), new_state, None
        outputs = self.decoder(memories.flatten(0, 1), output_hidden_states=True)
        hidden_states = [hidden, *(output.view(*hidden.shape[:2], -1) for output in outputs)]
        return hidden_states[-1][:, kept], new_state, hidden_states

    def _embed(self, input_ids: Tensor, ngrams: Tensor | None, reset_mask: Tensor | None = None) -> Tensor:
        """The inputs (B, T, M) of a block after the last bytes `ngrams`."""
        state = {}
        if self.embed_ngrams is not None:
            zeros = self.init_state(len(input_ids), input_ids.device)[NGRAMS]
            state[NGRAMS] = zeros if ngrams is None else ngrams
            check_state(state, {NGRAMS: zeros.shape}, input_ids.device)
        return self.embed_inputs(input_ids, state, reset_mask).hidden

    def _check_memory(self, memory: Tensor) -> None:
        shape = (self.config.num_memory_tokens, self.config.memory_size)
        if memory.dim() < 3 or memory.shape[-2:] != shape:
            raise ValueError(f"`memory` has shape {tuple(memory.shape)}; it must be (…, {shape[0]}, {shape[1]}).")

    def _step(self, memory: Tensor, inputs: Tensor, constants: Rotary | None) -> Tensor:
        memory = self.memory_update(memory.to(inputs.dtype), inputs, constants)
        return normalize_memory(memory, self.config)

    def _unroll(
        self, memory: Tensor, embeds: Tensor, reset_mask: Tensor | None, padded: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The memories after every step (B, T, Z, D), unchanged where `padded` (B, T) is true, and after the last."""
        inputs, constants = self.memory_update.prepare(embeds)
        memory = memory.to(state_dtype(inputs.dtype))
        if reset_mask is not None and padded is not None:
            reset_mask = reset_mask & ~padded
        steps = inputs.shape[1]
        checkpointing = self.gradient_checkpointing and self.training
        length = math.isqrt(steps - 1) + 1 if checkpointing else steps
        chunks = []
        for start in range(0, steps, length):
            chunk = (
                None if part is None else part[:, start : start + length] for part in (inputs, reset_mask, padded)
            )
            run = self._unroll_chunk
            if checkpointing:
                run = partial(self._gradient_checkpointing_func, run)
            memories, memory = run(memory, *chunk, constants)
            chunks.append(memories)
        return torch.cat(chunks, dim=1) if len(chunks) > 1 else chunks[0], memory

    def _unroll_chunk(self, memory, inputs, reset_mask, padded, constants) -> tuple[Tensor, Tensor]:
        memories = []
        for step in range(inputs.shape[1]):
            if reset_mask is not None:
                memory = memory.masked_fill(reset_mask[:, step, None, None], 0)
            updated = self._step(memory, inputs[:, step], constants)
            memory = updated if padded is None else torch.where(padded[:, step, None, None], memory, updated)
            memories.append(memory)
        return torch.stack(memories, dim=1), memory


class SmtRnnForCausalLM(SmtRnnPreTrainedModel, RecurrentForCausalLM):
    """An RNN of SMT with a head over its readout; tied to the embedding only with `config.tie_word_embeddings`."""

    backbone_class = SmtRnnModel

    def update(self, memory: Tensor, input_ids: torch.LongTensor, ngrams: Tensor | None = None) -> Tensor:
        """See [`SmtRnnModel.update`]."""
        return self.model.update(memory, input_ids, ngrams)

    def unroll(
        self,
        memory: Tensor,
        input_ids: torch.LongTensor,
        reset_mask: Tensor | None = None,
        ngrams: Tensor | None = None,
    ) -> Tensor:
        """The memory (B, T, Z, D) after each of `input_ids` (B, T). See [`SmtRnnModel.unroll`]."""
        return self.model.unroll(memory, input_ids, reset_mask, ngrams)

    def readout(self, memory: Tensor) -> Tensor:
        """Logits (…, V) of the output that follows each memory (…, Z, D)."""
        return self.compute_logits(self.model.readout_states(memory))

    @torch.no_grad()
    def load_readout(self, teacher: PreTrainedModel) -> None:
        """Copy the decoder of a teacher, an `SmtTeacherModel`, into the readout.

        With `config.causal_readout` the first prediction from any memory then equals the teacher's.

        Raises:
            ValueError: the configurations do not match, or the head is tied to this model's embedding, which the copy
                would overwrite.
        """
        if self.config.tie_word_embeddings:
            raise ValueError(
                "`tie_word_embeddings` is True; a teacher's head would overwrite the embedding that it is tied to."
            )
        check_readout_match(self.config, teacher.config)
        self.model.decoder.load_state_dict(teacher.decoder.state_dict())
        self.lm_head.load_state_dict(teacher.lm_head.state_dict())


# Fields of the student → of the teacher that must be equal for the decoder to become the readout.
_EQUAL_NAMES = (
    "vocab_size", "hidden_size", "num_memory_tokens", "memory_size", "num_attention_heads", "intermediate_size",
    "norm_eps", "rope_theta",
)  # fmt: skip
_SHARED_FIELDS = dict(zip(_EQUAL_NAMES, _EQUAL_NAMES, strict=True)) | {"num_readout_layers": "num_decoder_layers"}


def teacher_fields(student: SmtRnnConfig) -> dict[str, Any]:
    """Fields for a teacher that matches a student; its encoder is as deep as the student's update."""
    fields = {theirs: getattr(student, mine) for mine, theirs in _SHARED_FIELDS.items()}
    return fields | {
        "num_encoder_layers": student.num_hidden_layers,
        "memory_norm": student.memory_norm or student.backbone == "gru",
        "initializer_range": student.initializer_range,
        "pad_token_id": student.pad_token_id,
    }


def check_readout_match(student: SmtRnnConfig, teacher) -> None:
    """Raise a ValueError that names every field in which a student and its teacher, an `SmtTeacherConfig`, differ."""
    differences = [
        f"`{mine}` is {getattr(student, mine)} and the teacher's `{theirs}` {getattr(teacher, theirs)}"
        for mine, theirs in _SHARED_FIELDS.items()
        if getattr(student, mine) != getattr(teacher, theirs)
    ]
    if differences:
        raise ValueError(f"The student does not match its teacher: {'; '.join(differences)}.")


class SmtRnnForSequenceClassification(SmtRnnPreTrainedModel, RecurrentForSequenceClassification):
    """An RNN of SMT that gives a whole sequence one label."""

    backbone_class = SmtRnnModel
