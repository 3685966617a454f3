"""Finding what is not finite: a loss, a gradient or a weight."""

from torch import nn

from hf_recurrent.checkpoints.sharded_tensors import is_finite
from hf_recurrent.learning_rules.rules import NonFiniteLossError


def check_finite_weights(model: nn.Module, step: int) -> None:
    """Raise a NonFiniteLossError that names the first weight with a NaN or infinite value."""
    for name, weight in model.named_parameters():
        if not is_finite(weight):
            raise NonFiniteLossError(f"Training diverged at step {step}: the weight `{name}` is NaN or infinite.")


def divergence_error(model: nn.Module, step: int, loss: float, norm: float) -> NonFiniteLossError:
    """The error for a step whose loss or norm of the gradient is not finite; its gradients must not be clipped yet."""
    gradients = ((name, weight.grad) for name, weight in model.named_parameters() if weight.grad is not None)
    first = next((name for name, gradient in gradients if not is_finite(gradient)), None)
    causes = [f"the loss is {loss}"] if not _is_finite(loss) else []
    if first is not None:
        causes.append(f"the gradient of `{first}` is NaN or infinite")
    elif not _is_finite(norm):
        causes.append(f"the norm of the gradient is {norm}")
    return NonFiniteLossError(f"Training diverged in step {step}: {' and '.join(causes)}. The step was not applied.")


def _is_finite(value: float) -> bool:
    return abs(value) < float("inf")
