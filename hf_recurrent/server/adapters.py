"""Low-rank adapters of the readout, one for each session that learns: its own weights, in its own state.

The network's logits are W h, with h the output after the final norm. The adapter adds B A x, where x is h with a root
mean square of 1. It changes neither W nor the recurrent state, so that sessions are isolated from each other, all run
in one compiled step, and the gradient of a block's loss needs nothing of the past: it is exact. The compiled step
gives logits only; h is W⁺ times these, with the pseudoinverse W⁺.

Shape letters: B batch, T steps, V vocabulary, M model width, R rank.
"""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from hf_recurrent.modeling.block.recurrent_state import RecurrentState

ADAPTER = "adapter"  # part of a state, (1, `size`); missing or empty before the session has learned
_RATE, _BLOCK = 0.1, 16  # of Adagrad; tokens of an update
_SEED, _SMALLEST = 0, 1e-8
_RELATIVE = 1e-4  # singular values below this share of the largest are rounding errors of logits


def take_adapter(state: RecurrentState) -> tuple[RecurrentState, torch.Tensor | None]:
    """A state without the adapter's part, and that part; None where there is none."""
    if ADAPTER not in state:
        return state, None
    vector = state[ADAPTER]
    return {name: part for name, part in state.items() if name != ADAPTER}, vector if vector.numel() else None


class ReadoutAdapter:
    """The adapters of a model; all of them have one size. Raises a ValueError if its logits are not such a map."""

    def __init__(self, model: PreTrainedModel, rank: int):
        head = model.get_output_embeddings()
        if not isinstance(head, torch.nn.Linear) or head.bias is not None:
            raise ValueError(f"An adapter needs logits that are a linear map; {type(model).__name__} has others.")
        weight = head.weight.detach()
        # Of the type of logits on the CPU, where a server mixes and draws.
        self._inverse = torch.linalg.pinv(weight.cpu().double(), rtol=_RELATIVE).to(torch.float32).T.contiguous()
        self.rank, (self._vocabulary, self._width) = rank, weight.shape
        self.size = 2 * rank * (self._width + self._vocabulary)  # A, B, and their sums of squared gradients

    def new(self) -> torch.Tensor:
        """An adapter that changes nothing: A is random, always the same, and B is zero."""
        parts = self._parts(vector := torch.zeros(1, self.size))
        generator = torch.Generator().manual_seed(_SEED)
        parts[0].copy_(torch.randn(parts[0].shape, generator=generator) / self._width**0.5)
        for sums in parts[2:]:
            sums.fill_(_SMALLEST)
        return vector

    def check(self, vector: torch.Tensor) -> None:
        """Raise a ValueError unless a part of a state is an adapter of this rank."""
        if vector.dtype != torch.float32 or vector.shape != (1, self.size):
            raise ValueError(
                f"`state['{ADAPTER}']` is {vector.dtype} of shape {tuple(vector.shape)}; with `--adapter_rank "
                f"{self.rank}`, it must be torch.float32 of shape {(1, self.size)}."
            )

    def change(self, logits: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        """The logits (T, V) with an adapter, given the network's."""
        down, up = self._parts(vector)[:2]
        return logits + (self._inputs(logits) @ down.T @ up.T).to(logits)

    def learn(
        self, logits: torch.Tensor, vector: torch.Tensor, targets: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Predict and learn from T tokens, block by block: each is predicted by what was learned before its block.

        Args:
            logits: (T, V) of the network.
            vector: the adapter; not changed.
            targets: the T tokens after them.

        Returns:
            The logits with the adapter, and the new adapter; the old one where an update would not be finite.
        """
        parts = self._parts(new := vector.clone())
        inputs, changed = self._inputs(logits), []
        labels = torch.tensor(targets, device=inputs.device)
        for x, y, plain in zip(*(each.split(_BLOCK) for each in (inputs, labels, logits)), strict=True):
            down, up = parts[:2]
            low = x @ down.T
            changed.append(plain + (low @ up.T).to(plain))
            error = changed[-1].float().softmax(-1)  # the gradient of the block's loss by its logits
            error[torch.arange(len(y)), y] -= 1
            gradients = (error @ up).T @ x, error.T @ low
            for part, sums, gradient in zip(parts[:2], parts[2:], gradients, strict=True):
                sums += gradient.square()
                part -= _RATE * gradient / sums.sqrt()
        return torch.cat(changed), new if bool(new.isfinite().all()) else vector

    def _inputs(self, logits: torch.Tensor) -> torch.Tensor:
        """x (T, M), float32."""
        hidden = logits.float() @ self._inverse.to(logits.device)
        return hidden * hidden.square().mean(-1, keepdim=True).clamp_min(_SMALLEST).rsqrt()

    def _parts(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Views of A, B and their sums of squares."""
        shapes = [(self.rank, self._width), (self._vocabulary, self.rank)] * 2
        pieces = vector[0].split([rows * columns for rows, columns in shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
