"""A layer of Memora on a CPU; see `layer_cpu`."""

from typing import NamedTuple

import torch
from torch import Tensor

from .chains import Chain
from .layer_cpu import Addresses, LayerKind, Maps, Options, Sizes, Widths, mlp, mlp_backward


class Weights(NamedTuple):
    """Weights of a layer."""

    rate: Tensor
    norm: Tensor
    recurrence_gate: Tensor
    input_gate: Tensor
    input_projection: Tensor
    gate: Tensor
    out: Tensor
    mlp_norm: Tensor
    mlp_gate: Tensor
    up: Tensor
    down: Tensor


class Epsilons(NamedTuple):
    """Of the layer's norms: two RMSNorms and two gated norms."""

    norm: float
    gated: float
    mlp_norm: float
    mlp_gated: float


_INWARD = {  # result → weight of the maps of the first norm, in the order in which their gradients add up
    "recurrence_gate": "recurrence_gate",
    "input_gate": "input_gate",
    "inputs": "input_projection",
    "gate": "gate",
}


def _forward(chain: Chain, options: Options, at: Addresses, k: Addresses) -> None:
    eps, model, state = options.eps, options.sizes.model, options.sizes.state
    normed, gated = chain.local(model), chain.local(state)
    chain.reads(model, at["hidden"])
    chain.rms_norm(eps.norm, model, at["hidden"], at["norm"], normed, k["scales"])
    for name, weight in _INWARD.items():
        chain.map(normed, at[weight], state, model, k[name])
    chain.recurrence(state, k, at["rate"], at["state"], at["resets"], at["last_state"])
    chain.gated_norm(eps.gated, state, k["gate"], k["states"], gated, k["moments"])
    chain.map(gated, at["out"], model, state, k["hidden"], plus=at["hidden"])

    def gate(gate: int, value: int, to: int) -> None:
        chain.gated_norm(eps.mlp_gated, options.sizes.inner, gate, value, to, k["mlp_moments"])

    mlp(chain, options, at, k, normed, gate)


def _mlp_backward(chain: Chain, options: Options, at: Addresses, k: Addresses, s: Addresses) -> Maps:
    def gate_backward(gate: int, value: int, *gradients: int) -> None:
        eps, inner = options.eps.mlp_gated, options.sizes.inner
        chain.gated_norm_backward(eps, inner, gate, value, k["mlp_moments"], *gradients)

    return mlp_backward(chain, options, at, k, s, gate_backward)


def _block_backward(chain: Chain, options: Options, at: Addresses, k: Addresses, s: Addresses) -> Maps:
    eps, model, state = options.eps, options.sizes.model, options.sizes.state
    normed, gated, states = chain.local(model), chain.local(state), chain.local(state)
    chain.reads(state, k["gate"], k["states"], k["recurrence_gate"], k["input_gate"], k["inputs"])
    chain.reads(model, s["hidden"], at["hidden"])
    chain.map_backward(s["hidden"], at["out"], model, state, gated)
    chain.gated_norm_backward(
        eps.gated, state, k["gate"], k["states"], k["moments"], gated, s["gate"], states, s["gated"]
    )
    grads = s | {"last": at["grad_last_state"], "state": at["grad_state"]}
    chain.recurrence_backward(
        *(state, k, grads, at["rate"], at["state"], at["resets"]),
        **{"grad_states": states, "log_decays": gated, "grad_rate": at["grad_rate"]},
    )
    for number, (name, weight) in enumerate(_INWARD.items()):
        chain.map_backward(s[name], at[weight], state, model, normed, add=number > 0)
    chain.rms_norm_backward(
        *(eps.norm, model, at["hidden"], at["norm"], k["scales"], normed),
        *(at["grad_input"], at["grad_norm"], s["hidden"], s["normed"]),
    )
    inward = {weight: (s[name], state, s["normed"], model) for name, weight in _INWARD.items()}
    return inward | {"out": (s["hidden"], model, s["gated"], state)}


def _kept(sizes: Sizes) -> Widths:
    widths = {"hidden": sizes.model} | dict.fromkeys((*_INWARD, "states"), sizes.state)
    widths |= dict.fromkeys(("mlp_gate", "up"), sizes.inner)
    return widths | {"scales": 1, "mlp_scales": 1, "moments": 6, "mlp_moments": 6}


def _scratch(sizes: Sizes) -> tuple[Widths, Widths]:
    of_mlp = dict.fromkeys(("mlp_gate", "up", "mlp_gated"), sizes.inner) | {"mlp_normed": sizes.model}
    of_block = dict.fromkeys((*_INWARD, "gated"), sizes.state) | {"normed": sizes.model}
    hidden = {"hidden": sizes.model}
    return hidden | of_mlp, hidden | of_block


def _shapes(sizes: Sizes) -> tuple[Weights, list, list]:
    model, state, inner = sizes.model, sizes.state, sizes.inner
    weights = Weights(
        **{"rate": (state,), "norm": (model,), "mlp_norm": (model,)},
        **dict.fromkeys(_INWARD.values(), (state, model)),
        **{"out": (model, state), "mlp_gate": (inner, model), "up": (inner, model), "down": (model, inner)},
    )
    states = [torch.Size((sizes.rows.streams, state))]
    return weights, states, states


KIND = LayerKind(Weights, ("state",), _shapes, _kept, _scratch, _forward, (_mlp_backward, _block_backward))
