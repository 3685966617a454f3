"""Recurrent units whose decay depends on the input."""

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ..block.recurrent_state import upcast
from .gate_coefficients import gate_coefficients
from .recurrent_unit import ComplexRecurrentUnit, DenseReadOut, RecurrentUnit, copy_log, copy_values, input_normalizer


def gated_step(
    unit: RecurrentUnit, recurrence_gate, input_gate, inputs, sigmoid_gate: bool = False
) -> tuple[Tensor, Tensor]:
    """a from r = exp(-rate ∘ σ(recurrence_gate)), and b = sqrt(1 - a²) ∘ input_gate ∘ inputs.

    With `sigmoid_gate` σ(input_gate) takes the place of the input gate.
    """
    rate = unit.decay_rate()
    if not unit.allow_negative_eigenvalues:
        return gate_coefficients(recurrence_gate, rate, input_gate, inputs, sigmoid_gate=sigmoid_gate)
    recurrence_gate, input_gate, inputs = map(upcast, (recurrence_gate, input_gate, inputs))
    input_gate = torch.sigmoid(input_gate) if sigmoid_gate else input_gate
    decay, normalizer = unit.decay_and_normalizer(-rate * torch.sigmoid(recurrence_gate))
    return decay, normalizer * input_gate * inputs


class GLRU(RecurrentUnit):
    """Gated linear recurrent unit (Memora, section 4.1).

    r = exp(-3 e^ν ∘ σ(R u)),  γ = sqrt(1 - r²),  h_t = r ∘ h_{t-1} + γ ∘ (G u) ∘ (B u).

    `recurrence_gate` is R, `input_gate` is G (linear, without a sigmoid), `input_projection` is B.
    """

    input_maps = ("recurrence_gate", "input_gate", "input_projection")
    vectors = ("nu",)
    decay_scale = 3.0

    def reset_parameters(self) -> None:
        copy_log(self.nu, self.sample_rate(self.nu))

    def decay_rate(self) -> torch.Tensor:
        return self.decay_scale * torch.exp(upcast(self.nu))

    def coefficients(self, recurrence_gate, input_gate, projection):
        return gated_step(self, recurrence_gate, input_gate, projection)


class RGLRU(RecurrentUnit):
    """Real-gated linear recurrent unit of Hawk (De et al. 2024, equations 1 to 4), with dense gates.

    r = exp(-8 softplus(Λ) ∘ σ(W_a x)),  h_t = r ∘ h_{t-1} + sqrt(1 - r²) ∘ σ(W_x x) ∘ x.

    A reset zeroes the state and nothing else. Raises a ValueError if `input_size` is not `state_size`: the unit
    gates its input channel by channel and cannot expand it.
    """

    input_maps = ("recurrence_gate", "input_gate")
    vectors = ("recurrent_param",)
    decay_scale = 8.0

    def __init__(self, input_size: int, state_size: int, **options):
        super().__init__(input_size, state_size, **options)
        if input_size != state_size:
            raise ValueError(
                f"`recurrent_unit='rg_lru'` needs an input as wide as its state, but the block gives it {input_size} "
                f"channels and `state_size` is {state_size}; use it in Hawk's block, which projects first."
            )

    def reset_parameters(self) -> None:
        # The inverse of softplus, so that softplus(Λ) is the sampled rate.
        copy_log(self.recurrent_param, torch.expm1(self.sample_rate(self.recurrent_param)))

    def project(self, inputs):
        return *super().project(inputs), inputs

    def decay_rate(self) -> torch.Tensor:
        return self.decay_scale * nn.functional.softplus(upcast(self.recurrent_param))

    def coefficients(self, recurrence_gate, input_gate, inputs):
        return gated_step(self, recurrence_gate, input_gate, inputs, sigmoid_gate=True)


class MinGRU(RecurrentUnit):
    """Minimal gated recurrent unit (Feng et al. 2024, section 3.1).

    z = σ(W_z x),  h̃ = W_h x,  h_t = (1 - z) ∘ h_{t-1} + z ∘ h̃.
    """

    input_maps = ("update_gate", "candidate")

    def coefficients(self, update_gate, candidate):
        update_gate, candidate = map(upcast, (update_gate, candidate))
        update = torch.sigmoid(update_gate)
        decay = 1 - 2 * update if self.allow_negative_eigenvalues else torch.sigmoid(-update_gate)
        return decay, update * candidate


class MinLSTM(RecurrentUnit):
    """Minimal long short-term memory, independent of length (Feng et al. 2024, section 3.2).

    f = σ(W_f x),  i = σ(W_i x),  h̃ = W_h x,  h_t = f / (f + i) ∘ h_{t-1} + i / (f + i) ∘ h̃.
    """

    input_maps = ("forget_gate", "input_gate", "candidate")

    def coefficients(self, forget_gate, input_gate, candidate):
        forget_gate, input_gate, candidate = map(upcast, (forget_gate, input_gate, candidate))
        # log f - log i: the ratios are finite where both gates are closed.
        difference = nn.functional.softplus(-input_gate) - nn.functional.softplus(-forget_gate)
        update = torch.sigmoid(-difference)
        decay = 1 - 2 * update if self.allow_negative_eigenvalues else torch.sigmoid(difference)
        return decay, update * candidate


class HGRN(RecurrentUnit):
    """Hierarchically gated recurrent unit with a real state (Qin et al. 2023, section 3).

    f = β_l + (1 - β_l) ∘ σ(W_f x),  h_t = f ∘ h_{t-1} + (1 - f) ∘ SiLU(W_c x).

    The lower bound β_l keeps the memories of upper layers longer. The published one is a cumulative softmax over a
    table that all layers share; here every layer learns its bound inside a band of its own, β_l = (l + σ(b_l)) / N: it
    always rises with depth, starts next to the published l / N, and depends on no other layer.
    """

    input_maps = ("forget_gate", "candidate")
    vectors = ("lower_bound",)
    initial_bound = -4.0

    def reset_parameters(self) -> None:
        init.constant_(self.lower_bound, self.initial_bound)

    def coefficients(self, forget_gate, candidate):
        forget_gate, candidate, lower_bound = map(upcast, (forget_gate, candidate, self.lower_bound))
        lower_bound = (self.layer_index + torch.sigmoid(lower_bound)) / self.num_layers
        update = (1 - lower_bound) * torch.sigmoid(-forget_gate)
        decay = 1 - 2 * update if self.allow_negative_eigenvalues else 1 - update
        return decay, update * nn.functional.silu(candidate)


class QRNN(RecurrentUnit):
    """Quasi-recurrent unit with fo-pooling (Bradbury et al. 2017, equation 4).

    z = tanh(W_z x), f = σ(W_f x), o = σ(W_o x):  c_t = f ∘ c_{t-1} + (1 - f) ∘ z,  h_t = o ∘ c_t; c is the state.

    The published convolution over time has a window of one step here: Hawk's block convolves before the unit.
    """

    input_maps = ("candidate", "forget_gate", "output_gate")

    def coefficients(self, candidate, forget_gate, output_gate):
        candidate, forget_gate = map(upcast, (candidate, forget_gate))
        update = torch.sigmoid(-forget_gate)
        decay = 1 - 2 * update if self.allow_negative_eigenvalues else torch.sigmoid(forget_gate)
        return decay, update * torch.tanh(candidate)

    def read_out(self, states, candidate, forget_gate, output_gate):
        return torch.sigmoid(upcast(output_gate)) * states


class ComplexGLRU(ComplexRecurrentUnit):
    """GLRU with complex eigenvalues in their cosine form (Memora, appendix D).

    λ = r (cos θ + i sin θ) with the real gate r = exp(-3 e^ν ∘ σ(R u)) and a learned phase θ,
    h_t = λ ∘ h_{t-1} + γ ∘ (G u) ∘ (B u), G and B complex, γ = sqrt(1 - r²) as in GLRU (the appendix
    prints |λ| without the square). Here the output is h itself, [`ComplexGLRUReadOut`] has the appendix's map C.
    """

    channel_maps = ("recurrence_gate",)
    input_maps = ("input_gate", "input_projection")
    vectors = ("nu", "theta")
    decay_scale = GLRU.decay_scale

    def reset_parameters(self) -> None:
        copy_log(self.nu, self.sample_rate(self.nu))
        copy_values(self.theta, self.sample_phase(self.theta))

    def coefficients(self, recurrence_gate, input_gate, projection):
        recurrence_gate, input_gate, projection, nu, theta = map(
            upcast, (recurrence_gate, input_gate, projection, self.nu, self.theta)
        )
        log_decay = -self.decay_scale * torch.exp(nu) * torch.sigmoid(recurrence_gate)
        normalizer = self.of_all_channels(input_normalizer(log_decay))
        eigenvalue = self.eigenvalue(torch.exp(log_decay), theta)
        gate_real, gate_imaginary = input_gate.chunk(2, -1)
        real, imaginary = projection.chunk(2, -1)
        return eigenvalue, torch.complex(
            normalizer * (gate_real * real - gate_imaginary * imaginary),
            normalizer * (gate_real * imaginary + gate_imaginary * real),
        )


class ComplexGLRUConjugate(ComplexGLRU):
    """Complex GLRU whose eigenvalues come in conjugate pairs (Memora, appendix G.5)."""

    conjugate_pairs = True


class ComplexGLRUReadOut(DenseReadOut, ComplexGLRU):
    """Complex GLRU with its dense map out, y_t = Re(C h_t) (Memora, appendix D)."""


class ComplexGLRUConjugateReadOut(ComplexGLRUReadOut):
    """Complex GLRU with its dense map out and eigenvalues in conjugate pairs (Memora, appendices D and G.5)."""

    conjugate_pairs = True


class GateLoop(ComplexRecurrentUnit):
    """Fully data-controlled linear recurrence, one channel a head (Katsch 2023, sections 3.1 and 3.2).

    a = σ(W_α x) e^{i W_β x},  h_t = a ∘ h_{t-1} + (W_k x) ∘ (W_v x),  y_t = Re(q ∘ h_t), q = W_q x complex.

    The output has both terms of each real part, q_R ∘ Re h and q_I ∘ Im h, since a linear map follows.
    """

    channel_maps = ("key", "value", "amplitude", "phase")
    input_maps = ("query",)

    def coefficients(self, key, value, amplitude, phase, query):
        key, value, amplitude, phase = map(upcast, (key, value, amplitude, phase))
        product = key * value
        return self.eigenvalue(torch.sigmoid(amplitude), phase), torch.complex(product, 0 * product)

    def read_out(self, states, key, value, amplitude, phase, query):
        return upcast(query) * states
