"""A layer of Hawk with RG-LRU on a CPU; see `layer_cpu`.

In place of the state of the convolution comes out a block's last inputs to it, at most K - 1.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .chains import Chain
from .layer_cpu import Addresses, LayerKind, Maps, Options, Sizes, mlp, mlp_backward, shared_shapes


class Weights(NamedTuple):
    """Weights of a layer; `convolution`: (K, S)."""

    rate: Tensor
    norm: Tensor
    convolution: Tensor
    gate: Tensor
    input_projection: Tensor
    recurrence_gate: Tensor
    input_gate: Tensor
    out: Tensor
    mlp_norm: Tensor
    mlp_gate: Tensor
    up: Tensor
    down: Tensor


class Epsilons(NamedTuple):
    """Of the layer's RMSNorms."""

    norm: float
    mlp_norm: float


_OF_STATE = ("gate", "projected", "inputs", "recurrence_gate", "input_gate")  # `inputs`: of the recurrence


def _forward(chain: Chain, options: Options, at: Addresses, k: Addresses) -> None:
    sizes, eps, model, state = options.sizes, options.eps, options.sizes.model, options.sizes.state
    normed, gated = chain.local(model), chain.local(state)
    chain.reads(model, at["hidden"])
    chain.rms_norm(eps.norm, model, at["hidden"], at["norm"], normed, k["scales"])
    chain.map(normed, at["gate"], state, model, k["gate"])
    chain.map(normed, at["input_projection"], state, model, k["projected"])
    chain.convolution(
        *(state, sizes.lags, k["projected"], at["taps"], at["convolution"]),
        *(at["resets"], k["inputs"], at["last_taps"]),
    )
    chain.map(k["inputs"], at["recurrence_gate"], state, state, k["recurrence_gate"])
    chain.map(k["inputs"], at["input_gate"], state, state, k["input_gate"])
    chain.recurrence(state, k, at["rate"], at["state"], at["resets"], at["last_state"], sigmoid_gate=True)
    chain.gated_gelu(state, k["gate"], k["states"], gated)
    chain.map(gated, at["out"], model, state, k["hidden"], plus=at["hidden"])
    mlp(chain, options, at, k, normed, partial(chain.gated_gelu, sizes.inner))


def _mlp_backward(chain: Chain, options: Options, at: Addresses, k: Addresses, s: Addresses) -> Maps:
    return mlp_backward(chain, options, at, k, s, partial(chain.gated_gelu_backward, options.sizes.inner))


def _block_backward(chain: Chain, options: Options, at: Addresses, k: Addresses, s: Addresses) -> Maps:
    sizes, eps, model, state = options.sizes, options.eps, options.sizes.model, options.sizes.state
    normed, gated, states = chain.local(model), chain.local(state), chain.local(state)
    chain.reads(state, *(k[name] for name in (*_OF_STATE, "states")))
    chain.reads(model, s["hidden"], at["hidden"])
    chain.map_backward(s["hidden"], at["out"], model, state, gated)
    chain.gated_gelu_backward(state, k["gate"], k["states"], gated, s["gate"], states, s["gated"])
    # Gradients of the inputs take the place of the states', which have been read.
    grads = s | {"last": at["grad_last_state"], "state": at["grad_state"], "inputs": states}
    chain.recurrence_backward(
        *(state, k, grads, at["rate"], at["state"], at["resets"]),
        **{"grad_states": states, "log_decays": gated, "grad_rate": at["grad_rate"], "sigmoid_gate": True},
    )
    chain.map_backward(s["recurrence_gate"], at["recurrence_gate"], state, state, s["inputs"])
    chain.map_backward(s["input_gate"], at["input_gate"], state, state, s["inputs"], add=True, plus=states)
    chain.convolution_backward(
        *(state, sizes.lags, k["projected"], at["taps"], at["convolution"], at["resets"]),
        **{"grad": s["inputs"], "grad_last": at["grad_last_taps"], "grad_inputs": s["projected"]},
        **{"grad_taps": at["grad_taps"], "grad_weight": at["grad_convolution"]},
    )
    chain.map_backward(s["gate"], at["gate"], state, model, normed)
    chain.map_backward(s["projected"], at["input_projection"], state, model, normed, add=True)
    chain.rms_norm_backward(
        *(eps.norm, model, at["hidden"], at["norm"], k["scales"], normed),
        *(at["grad_input"], at["grad_norm"], s["hidden"], s["normed"]),
    )
    return {
        "gate": (s["gate"], state, s["normed"], model),
        "input_projection": (s["projected"], state, s["normed"], model),
        "recurrence_gate": (s["recurrence_gate"], state, k["inputs"], state),
        "input_gate": (s["input_gate"], state, k["inputs"], state),
        "out": (s["hidden"], model, s["gated"], state),
    }


def _shapes(sizes: Sizes) -> tuple[Weights, list, list]:
    (streams, steps), model, state, taps = sizes.rows, sizes.model, sizes.state, sizes.lags - 1
    weights = Weights(
        **shared_shapes(sizes),
        convolution=(sizes.lags, state),
        **dict.fromkeys(("gate", "input_projection"), (state, model)),
        **dict.fromkeys(("recurrence_gate", "input_gate"), (state, state)),
    )
    states = [torch.Size((streams, state)), torch.Size((streams, taps, state))]
    return weights, states, [states[0], torch.Size((streams, min(taps, steps), state))]


KIND = LayerKind(
    weights=Weights,
    states=("state", "taps"),
    shapes=_shapes,
    of_state=_OF_STATE,
    moments=(),
    carried=("states", "projected"),
    forward=_forward,
    backward=(_mlp_backward, _block_backward),
)
