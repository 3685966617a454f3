"""The teacher of Supervised Memory Training: memories of contexts, learned by predicting their futures.

The encoder turns a context x_{t-Tc+1} … x_t into the memory m_t; the decoder predicts y_t, y_{t+1}, … from m_t and
the future inputs x_{t+1}, … (SMT, section 2.2 and appendix E).

Shape letters: B batch, Tc context, Tf future, M model width, V vocabulary, Z memory tokens, D width of a memory token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..block.causal_lm_loss import causal_lm_loss
from ..block.linear_maps import linear_map
from ..block.saved_code import SavedCode
from ..block.tensor_checks import check_mask, check_tensor, check_token_ids, has_values
from .configuration_smt_teacher import SmtTeacherConfig
from .memory_transformer import (
    MemoryDecoder,
    MemoryTransformer,
    init_memory_weights,
    normalize_memory,
    rotary_tables,
    width_map,
)


@dataclass
class SmtTeacherOutput(ModelOutput):
    """Output of a teacher.

    Args:
        loss: the decoding loss L_dec in nats per target, if there are labels.
        logits: (B, Tf, V).
        memory: (B, Z, D).
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    memory: Tensor | None = None


class MemoryEncoder(nn.Module):
    """A bidirectional Transformer over the context and then Z learned registers, which become the memory."""

    def __init__(self, config: SmtTeacherConfig):
        super().__init__()
        self.config = config
        self.registers = nn.Embedding(config.num_memory_tokens, config.hidden_size)
        self.transformer = MemoryTransformer(config, config.num_encoder_layers)
        self.memory_proj = width_map(config.hidden_size, config.memory_size)

    def forward(self, embeds: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Embeddings (B, Tc, M) and mask (B, Tc) → the memory (B, Z, D)."""
        registers = self.registers.weight.to(embeds.dtype).expand(len(embeds), -1, -1)
        hidden = torch.cat([embeds, registers], dim=1)
        key_mask = None
        if attention_mask is not None:
            key_mask = nn.functional.pad(attention_mask != 0, (0, registers.shape[1]), value=True)
        rotary = rotary_tables(self.config, hidden.shape[1], hidden)
        memory = self.transformer(hidden, rotary, key_mask, num_outputs=registers.shape[1])[-1]
        return normalize_memory(self.memory_proj(memory), self.config)


class SmtTeacherModel(SavedCode, PreTrainedModel):
    """Encoder of contexts into memories and decoder of memories into futures, with one embedding."""

    config_class = SmtTeacherConfig
    main_input_name = "context_ids"
    _auto_class = "AutoModel"
    supports_gradient_checkpointing = True
    _no_split_modules = ["MemoryTransformerLayer"]  # noqa: RUF012 (transformers' own name and form)
    _tied_weights_keys = {"lm_head.weight": "embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: SmtTeacherConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.encoder = MemoryEncoder(config)
        self.decoder = MemoryDecoder(config, config.num_decoder_layers)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        init_memory_weights(module, self.config)

    def encode(self, input_ids: torch.LongTensor, attention_mask: Tensor | None = None) -> Tensor:
        """The memory (B, Z, D) of every context, in the type of states.

        Args:
            input_ids: (B, Tc); the last one is x_t.
            attention_mask: (B, Tc), 0 where a position is padding, on the left, and has no effect. A context may
                be padding only.

        Raises:
            ValueError: a shape does not match, there is padding after a real position, or a token id is outside the
                vocabulary.
        """
        embeds = self._embed("input_ids", input_ids)
        if attention_mask is not None:
            check_mask("attention_mask", attention_mask, *input_ids.shape)
            _check_left_padding(attention_mask)
        return self.encoder(embeds, attention_mask)

    def decode(self, memory: Tensor, input_ids: torch.LongTensor) -> Tensor:
        """Logits (B, Tf, V): those at i predict y_{t+i} from the memory m_t and the inputs x_{t+1} … x_{t+i}.

        Args:
            memory: (B, Z, D).
            input_ids: (B, Tf), x_{t+1} … x_{t+Tf}; the last one is not needed and not read.

        Raises:
            ValueError: a shape does not match, or a token id is outside the vocabulary.
        """
        embeds = self._embed("input_ids", input_ids)[:, :-1]
        expected = (len(input_ids), self.config.num_memory_tokens, self.config.memory_size)
        check_tensor("memory", memory)
        if memory.shape != expected:
            raise ValueError(f"`memory` has shape {tuple(memory.shape)}; these inputs need {expected}.")
        return linear_map(self.lm_head, self.decoder(memory, embeds)[-1])

    def forward(
        self,
        context_ids: torch.LongTensor,
        context_mask: Tensor | None = None,
        future_ids: torch.LongTensor | None = None,
        labels: torch.LongTensor | None = None,
        return_dict: bool | None = None,
        **kwargs,
    ) -> SmtTeacherOutput | tuple:
        """Encode contexts and, where there are futures, decode them.

        Args:
            context_ids: (B, Tc).
            context_mask: (B, Tc), 0 where a position is padding, on the left.
            future_ids: (B, Tf), x_{t+1} …; without them there are no logits.
            labels: (B, Tf), y_t …: the target of every prediction, not shifted; -100 is ignored.
            return_dict: False for a plain tuple.
            kwargs: `num_items_in_batch`, by which the summed loss is divided; others are ignored.

        Raises:
            ValueError: a shape does not match, there is padding after a real position, a token id is outside the
                vocabulary, or there are labels without futures.
        """
        return_dict = self.config.return_dict if return_dict is None else return_dict
        memory = self.encode(context_ids, context_mask)
        logits = loss = None
        if future_ids is not None:
            logits = self.decode(memory, future_ids)
        if labels is not None:
            if logits is None:
                raise ValueError("`labels` are given without `future_ids`; the decoder needs both.")
            loss = causal_lm_loss(logits, None, labels, kwargs.get("num_items_in_batch"))
        output = SmtTeacherOutput(loss=loss, logits=logits, memory=memory)
        return output if return_dict else output.to_tuple()

    def _embed(self, name: str, ids: Tensor) -> Tensor:
        check_token_ids(name, ids, self.config.vocab_size)
        return self.embed_tokens(ids)


def _check_left_padding(attention_mask: Tensor) -> None:
    if attention_mask.is_cpu and has_values(attention_mask):
        late = (attention_mask[:, :-1] != 0) & (attention_mask[:, 1:] == 0)
        if late.any():
            row = int(late.any(1).nonzero()[0])
            raise ValueError(
                f"`attention_mask` has padding after a real position in row {row}; contexts are padded on the left."
            )
