"""One label for a whole sequence: the classifier that all recurrent families share.

Shape letters: B batch, T steps, M model width.
"""

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput

from .recurrent_backbone import RecurrentBackbone, RecurrentPreTrainedModel
from .recurrent_state import upcast
from .tensor_checks import has_values

# The public name of a classifier's output; its logits are (B, number of labels).
RecurrentSequenceClassifierOutput = SequenceClassifierOutput


def pool_steps(hidden: Tensor, attention_mask: Tensor | None, pooling: str) -> Tensor:
    """The "mean" over the real steps, or the "last" real one: (B, T, M) → (B, M).

    Raises:
        ValueError: a row has no real step.
    """
    if attention_mask is None:
        return hidden.mean(1) if pooling == "mean" else hidden[:, -1]
    real = attention_mask != 0
    if has_values(real) and not bool(real.any(1).all()):
        row = int((~real.any(1)).nonzero()[0])
        raise ValueError(f"`attention_mask` masks all of row {row}; a sequence needs at least one real step.")
    if pooling == "mean":
        return (hidden * real.unsqueeze(-1)).sum(1) / real.sum(1, keepdim=True)
    last = (real * torch.arange(real.shape[1], device=real.device)).argmax(1)
    return hidden[torch.arange(len(hidden), device=hidden.device), last]


class RecurrentForSequenceClassification(RecurrentPreTrainedModel):
    """A recurrent model and a linear classifier without bias over its pooled outputs.

    A family gives its `backbone_class`. `config.num_labels` is the number of classes; `config.pooling` is "mean"
    over the real steps (the default) or "last".
    """

    backbone_class: type[RecurrentBackbone]
    _auto_class = "AutoModelForSequenceClassification"

    def __init__(self, config):
        super().__init__(config)
        self.model = self.backbone_class(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        input_values: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs,
    ) -> RecurrentSequenceClassifierOutput | tuple:
        """Read whole sequences, each from the zero state.

        Args:
            input_ids: (B, T).
            attention_mask: (B, T), 0 where a step is padding.
            inputs_embeds: (B, T, M), in place of `input_ids`.
            input_values: real, (B, T, `config.input_size`), in place of `input_ids`, for the families that read them.
            labels: (B,), the class of each sequence.
            use_cache: without effect: a classifier returns no state.
            kwargs: other inputs of the family's model; `num_items_in_batch`, by which the summed loss is divided.

        Raises:
            TypeError: an unknown argument.
            ValueError: a shape does not match, or a row has no real step.
        """
        return_dict = self.config.return_dict if return_dict is None else return_dict
        num_items_in_batch = kwargs.pop("num_items_in_batch", None)
        if input_values is not None:
            kwargs["input_values"] = input_values
        outputs = self.model(
            **kwargs,
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            use_cache=False,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        hidden = outputs.last_hidden_state
        pooled = pool_steps(upcast(hidden), attention_mask, self.config.pooling)
        logits = self.score(pooled.to(self.score.weight.dtype))
        loss = None
        if labels is not None:
            loss = self.sequence_loss(hidden, logits, labels, attention_mask, num_items_in_batch)
        output = RecurrentSequenceClassifierOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states)
        return output if return_dict else output.to_tuple()

    def sequence_loss(
        self,
        hidden: Tensor,
        logits: Tensor,
        labels: Tensor,
        attention_mask: Tensor | None,
        num_items_in_batch: Tensor | int | None,
    ) -> Tensor:
        """The loss from the model's outputs `hidden` (B, T, M) or the logits (B, number of labels)."""
        return self.loss_function(
            labels=labels, pooled_logits=upcast(logits), config=self.config, num_items_in_batch=num_items_in_batch
        )
