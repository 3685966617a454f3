"""Multi-stream training on windows of T bytes that move on by S ≤ T (Memora, section 3)."""

import torch

from hf_recurrent.modeling.block.causal_lm_loss import IGNORE_INDEX
from hf_recurrent.modeling.block.recurrent_state import RecurrentState, detach_state
from hf_recurrent.trainers.carried_state import CarriedState
from hf_recurrent.trainers.multi_stream_trainer import MultiStreamTrainer

# Parts of a batch that a window keeps of its last T - S steps, by their names in the carried tensors.
_KEPT = {"window.input_ids": "input_ids", "window.shift_labels": "shift_labels", "window.reset_mask": "reset_mask"}


class RollingWindowTrainer(MultiStreamTrainer):
    """A [`MultiStreamTrainer`] whose updates see each byte T / S times, in windows that start S bytes apart.

    A window starts from the state before its first byte, which the pass over the window before has reached with the
    weights of that time. Its loss is the mean over its T bytes. With T = S it is a [`MultiStreamTrainer`]. An update
    costs as much as one with blocks of T, and a forward pass over S bytes.

    Args:
        model: a causal language model with a state.
        args: [`RollingWindowTrainingArguments`].

    Raises:
        ValueError: see [`MultiStreamTrainer`], or the model has no state.
    """

    method = "bptt_rolling_window"

    def carries_state(self, model, args) -> bool:
        if not super().carries_state(model, args):
            raise ValueError(f"`model` is a {type(model).__name__}, which has no state; windows overlap by states.")
        return True

    def build_carried(self) -> CarriedState:
        return CarriedState(self._zero, self.args.device)

    def learn_block(self, model, inputs, num_items_in_batch) -> torch.Tensor:
        """Learn from the window that ends with this block (B, S), and carry the state S bytes on."""
        args = self.args
        group = int(inputs["stream_indices"][0])
        carried = self.carried.get(group, len(inputs["stream_indices"]))
        state = {name: value for name, value in carried.items() if name not in _KEPT}
        window = {name: torch.cat([carried[kept], inputs[name]], dim=1) for kept, name in _KEPT.items()}
        first = {name: value[:, : args.block_size] for name, value in window.items()}
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs = model(first["input_ids"], reset_mask=first["reset_mask"], state=state, use_cache=True)
        # The loss is a mean over T bytes of each stream; only S of them have been counted.
        count = None if num_items_in_batch is None else num_items_in_batch * (args.window // args.block_size)
        loss = super(MultiStreamTrainer, self).learn_block(model, {**window, "state": state}, count)
        self._final_state = None
        kept = {kept: window[name][:, args.block_size :] for kept, name in _KEPT.items()}
        self.carried.set(group, {**detach_state(outputs.state), **kept})
        return loss

    def _zero(self, batch_size: int, device: torch.device | str) -> RecurrentState:
        """Zero states, and windows without targets; the first byte of a stream begins an episode."""
        shape = (batch_size, self.args.window - self.args.block_size)
        return self.model.init_state(batch_size, device) | {
            "window.input_ids": torch.zeros(shape, dtype=torch.long, device=device),
            "window.shift_labels": torch.full(shape, IGNORE_INDEX, dtype=torch.long, device=device),
            "window.reset_mask": torch.zeros(shape, dtype=torch.bool, device=device),
        }
