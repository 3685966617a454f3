"""Recurrent units with a decay for every channel that is the same at all steps, and a dense read-out."""

import math

import torch

from ..block.recurrent_state import upcast
from .recurrent_unit import ComplexRecurrentUnit, DenseReadOut, copy_log, input_normalizer


class RealLRU(DenseReadOut):
    """Linear recurrent unit with real eigenvalues (Orvieto et al. 2023, section 3; Memora, section 5.6).

    r = exp(-e^ν),  γ = sqrt(1 - r²),  h_t = r ∘ h_{t-1} + γ ∘ (B u),  y_t = C h_t.
    """

    input_maps = ("input_projection",)
    vectors = ("nu",)

    def reset_parameters(self) -> None:
        copy_log(self.nu, self.sample_rate(self.nu))

    def coefficients(self, projection):
        projection, nu = map(upcast, (projection, self.nu))
        decay, normalizer = self.decay_and_normalizer(-torch.exp(nu))
        return decay, normalizer * projection


class ComplexLRU(DenseReadOut, ComplexRecurrentUnit):
    """Linear recurrent unit (Orvieto et al. 2023, section 3).

    λ = exp(-e^ν + i e^θ),  γ = sqrt(1 - |λ|²),  h_t = λ ∘ h_{t-1} + γ ∘ (B u),  y_t = Re(C h_t), B and C complex.

    As in the counts of Memora's Table 2, γ follows from λ and is not a parameter, and the block's gate replaces the
    direct path D u.
    """

    input_maps = ("input_projection",)
    vectors = ("nu", "theta")

    def reset_parameters(self) -> None:
        copy_log(self.nu, self.sample_rate(self.nu))
        copy_log(self.theta, self.sample_phase(self.theta))

    def coefficients(self, projection):
        projection, nu, theta = map(upcast, (projection, self.nu, self.theta))
        log_decay = -torch.exp(nu)
        normalizer = self.of_all_channels(input_normalizer(log_decay))
        real, imaginary = projection.chunk(2, -1)
        eigenvalue = self.eigenvalue(torch.exp(log_decay), torch.exp(theta))
        return eigenvalue, torch.complex(normalizer * real, normalizer * imaginary)


class ComplexLRUConjugate(ComplexLRU):
    """LRU whose eigenvalues come in conjugate pairs (Memora, appendix G.5)."""

    conjugate_pairs = True


class LRU(ComplexRecurrentUnit):
    """Linear recurrent unit with a learned normalisation (Zucchet et al. 2023, appendix A.1).

    λ = exp(-e^ν + i e^θ),  h_t = λ ∘ h_{t-1} + γ ∘ (B u).

    γ starts as sqrt(1 - |λ|²) and is then learned as its logarithm. The layer computes Re(C h) + D u from h.

    Args:
        r_min: smallest |λ| at initialisation.
        r_max: largest |λ| at initialisation; λ is uniform on the ring between the two, on the disk for 0 and 1.
        max_phase: phases of λ are uniform between 0 and this at initialisation.
    """

    input_maps = ("input_projection",)
    vectors = ("nu", "theta", "log_gamma")

    def __init__(
        self,
        input_size: int,
        state_size: int,
        *,
        r_min: float = 0.0,
        r_max: float = 1.0,
        max_phase: float = 2 * math.pi,
        **options,
    ):
        super().__init__(input_size, state_size, **options)
        self.r_min, self.r_max, self.max_phase = r_min, r_max, max_phase

    def reset_parameters(self) -> None:
        # Without the ends of the interval: |λ| = 0, |λ| = 1 and a phase of 0 have no logarithm.
        u, v = torch.rand(2, self.channel_groups, dtype=torch.float64, device=self.nu.device).clamp(1e-7, 1 - 1e-7)
        copy_log(self.nu, -0.5 * torch.log(u * (self.r_max**2 - self.r_min**2) + self.r_min**2))
        copy_log(self.theta, self.max_phase * v)
        copy_log(self.log_gamma, input_normalizer(-torch.exp(self.nu)))

    def coefficients(self, projection):
        projection, nu, theta, log_gamma = map(upcast, (projection, self.nu, self.theta, self.log_gamma))
        normalizer = torch.exp(log_gamma)
        real, imaginary = projection.chunk(2, -1)
        eigenvalue = self.eigenvalue(torch.exp(-torch.exp(nu)), torch.exp(theta))
        return eigenvalue, torch.complex(normalizer * real, normalizer * imaginary)
