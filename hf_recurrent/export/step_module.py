"""A model's `forward` as a function of plain tensors: inputs and state in a fixed order, the same state back.

Shape letters: B streams, T steps, V vocabulary, I inputs of a linear map.
"""

import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from transformers import PreTrainedModel

from hf_recurrent.modeling.block.recurrent_backbone import RecurrentBackbone, RecurrentPreTrainedModel


class StepModule(nn.Module):
    """(token ids (B,), state …) → (logits (B, V), new state …).

    A base model returns its last hidden state in place of logits, a classifier the logits of this step; a sequence has
    their mean over its steps or the last ones, by `config.pooling`.

    Args:
        model: a recurrent model of this package.
        takes_blocks: read T steps: token ids (B, T) → logits (B, T, V).

    Raises:
        TypeError: the model is of another kind.
    """

    def __init__(self, model: PreTrainedModel, takes_blocks: bool = False):
        super().__init__()
        if not isinstance(model, RecurrentPreTrainedModel):
            raise TypeError(f"`model` is a {type(model).__name__}; it must be a recurrent model of this package.")
        self.takes_blocks = takes_blocks
        self.backbone: RecurrentBackbone = model if isinstance(model, RecurrentBackbone) else model.model
        self.head = None
        if self.backbone is not model:
            self.head = model.lm_head if hasattr(model, "lm_head") else model.score
        self.state_names = list(self.backbone.state_shapes(1))
        # Real-valued inputs go to a linear encoder, tokens to an embedding.
        self.reads_values = getattr(model.config, "input_size", None) is not None

    def example_inputs(self, batch_size: int, steps: int) -> tuple[torch.Tensor, ...]:
        """Inputs and a zero state of that many streams."""
        shape = (batch_size, steps) if self.takes_blocks else (batch_size,)
        weight = next(self.backbone.parameters())
        if self.reads_values:
            inputs = torch.zeros(*shape, self.backbone.config.input_size, dtype=weight.dtype)
        else:
            inputs = torch.zeros(shape, dtype=torch.long)
        state = self.backbone.init_state(batch_size)
        return inputs.to(weight.device), *(state[name] for name in self.state_names)

    def forward(self, inputs: torch.Tensor, *state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = inputs if self.takes_blocks else inputs.unsqueeze(1)
        name = "input_values" if self.reads_values else "input_ids"
        output = self.backbone(
            **{name: inputs}, state=dict(zip(self.state_names, state, strict=True)), use_cache=True, return_dict=True
        )
        hidden = output.last_hidden_state if self.takes_blocks else output.last_hidden_state[:, 0]
        outputs = hidden if self.head is None else self.head(hidden)
        return outputs, *(output.state[name] for name in self.state_names)


class StepLoop(nn.Module):
    """A block by its steps, one after another: (inputs (B, T), state …) → (outputs (B, T, V), new state …).

    Args:
        step: (inputs (B,), state …) → (outputs (B, V), new state …).
    """

    def __init__(self, step: nn.Module):
        super().__init__()
        self.step = step

    def forward(self, inputs: torch.Tensor, *state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        def read(state, inputs):
            outputs, *new = self.step(inputs, *state)
            # The loop refuses results that share memory.
            return [part.clone() for part in new], outputs.clone()

        new, outputs = scan(read, list(state), inputs.transpose(0, 1).contiguous())
        return outputs.transpose(0, 1).contiguous(), *new
