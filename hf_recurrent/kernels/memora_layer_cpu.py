"""A layer of Memora on a CPU; see `layer_cpu`."""

from typing import NamedTuple

import torch
from torch import Tensor

from .chains import Chain
from .layer_cpu import Addresses, LayerKind, Maps, Options, Sizes, mlp, mlp_backward, shared_shapes


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


def _shapes(sizes: Sizes) -> tuple[Weights, list, list]:
    inward = dict.fromkeys(_INWARD.values(), (sizes.state, sizes.model))
    states = [torch.Size((sizes.rows.streams, sizes.state))]
    return Weights(**shared_shapes(sizes), **inward), states, states


KIND = LayerKind(
    weights=Weights,
    states=("state",),
    shapes=_shapes,
    of_state=tuple(_INWARD),
    moments=(("moments", 6), ("mlp_moments", 6)),
    carried=("states",),
    forward=_forward,
    backward=(_mlp_backward, _block_backward),
)
