"""The linear recurrence h_t = a_t * h_{t-1} + b_t, element by element, with gradients to everything.

One operator, several backends that give the same numbers:

* `reference`: a plain loop under autograd. Slow, obviously correct.
* `torch`: plain torch with a hand-written backward; needs no compiler. Many channels run one fused operation per
  step; few channels and many steps run in blocks that fit the cache, each cut into chunks that advance side by side.
* `cpu`: a compiled kernel of the `hf_recurrent` package, where the package was installed with a C compiler.
* `triton`: GPU kernels of the `hf_recurrent` package, imported the first time that they are used.

All of them multiply and add: a form through logarithms cannot hold a decay of zero and loses the gradient to `a`.
Sums are kept in float32 or wider, whatever the inputs are.

Shape letters: B streams or batch, T steps, S state width.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable
from functools import cache
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor

from ..block.tensor_checks import PLAIN_TENSORS, check_tensor
from .torch_scan import torch_scan_backward, torch_scan_forward

# Backends in modules of their own: name -> (module, how to install it). A module offers scan_forward, scan_backward
# and unsupported_reason with the signatures of the functions below.
_BACKEND_MODULES = {
    "cpu": (
        "hf_recurrent.kernels.linear_scan_cpu",
        "install a C compiler (GCC or Clang), then run `pip install --no-build-isolation --no-deps -e .` in the "
        "folder of hf-recurrent's sources",
    ),
    "triton": ("hf_recurrent.kernels.linear_scan_triton", "pip install hf-recurrent triton"),
}
_BACKENDS = ("reference", "torch", *_BACKEND_MODULES)


def linear_scan(
    a: Tensor,
    b: Tensor,
    initial_state: Tensor | None = None,
    reset_mask: Tensor | None = None,
    *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Run h_t = a_t * h_{t-1} + b_t over T steps, channels last.

    Args:
        a: decay (B,T,S), real or complex, any floating type, any strides, T, B and S at least 1.
        b: input (B,T,S).
        initial_state: h before the first step (B,S); zeros when None.
        reset_mask: bool (B,T); where true, h_{t-1} is replaced by zero before step t, whatever it held.
        backend: "auto" (the fastest that works here), or one of `available_backends()`.

    Returns:
        h (B,T,S) in the promoted type of `a` and `b`, and the final state (B,S) in that type or float32, whichever
        is wider. Gradients flow from both to `a`, `b` and `initial_state`. Autocast changes nothing: the inputs keep
        their types and promote as usual.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: an unknown backend, shapes, types or devices that do not match, T < 1, or a tensor that is not
            strided or whose memory was freed.
        ImportError: the backend's package is not installed.
        RuntimeError: the backend is installed but cannot run on these tensors.
    """
    _check_inputs(a, b, initial_state, reset_mask)
    if backend != "auto" and backend not in _BACKENDS:
        raise ValueError(f"backend is {backend!r}; it must be 'auto' or one of {', '.join(map(repr, _BACKENDS))}")
    if backend == "reference":
        return linear_scan_reference(a, b, initial_state, reset_mask)
    dtype, initial_state = _types_of(a, b, initial_state)
    functions = None
    if not torch.compiler.is_compiling():  # the operator itself looks again when it runs
        functions = _backend_functions(backend, a.device.type, dtype)
    if a.shape[1] == 1 and not _takes_single_steps(functions, a, reset_mask):
        return _single_step(a, b, initial_state, reset_mask, dtype)
    a, b = a.to(dtype), b.to(dtype)
    if functions is None or _is_recorded() or not _is_plain(a, b, initial_state, reset_mask):
        return torch.ops.hf_recurrent.linear_scan(a, b, initial_state, reset_mask, backend)
    needs_grad = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad or initial_state.requires_grad)
    if needs_grad or _is_transformed():
        scan = _LinearScan if _is_transformed() else _LinearScanInEagerMode
        return scan.apply(a, b, initial_state, reset_mask, backend)
    with torch.no_grad():
        return functions.scan_forward(a, b, initial_state, reset_mask)


def linear_scan_reference(
    a: Tensor, b: Tensor, initial_state: Tensor | None = None, reset_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The recurrence as a loop over time under autograd; arguments, results and errors as in `linear_scan`."""
    _check_inputs(a, b, initial_state, reset_mask)
    dtype, state = _types_of(a, b, initial_state)
    state_dtype = state.dtype
    outputs = []
    # unbind, because the gradient of every a[:, t] would be a tensor of a's size: T squared.
    for t, (a_t, b_t) in enumerate(zip(a.unbind(1), b.unbind(1), strict=True)):
        if reset_mask is not None:
            state = state.masked_fill(reset_mask[:, t, None], 0)
        state = a_t.to(state_dtype) * state + b_t.to(state_dtype)
        outputs.append(state)
    return torch.stack(outputs, dim=1).to(dtype), state


def _types_of(a: Tensor, b: Tensor, initial_state: Tensor | None) -> tuple[torch.dtype, Tensor]:
    """The type of h, and the initial state in that type or float32, whichever is wider."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    if initial_state is None:
        return dtype, a.new_zeros(a.shape[0], a.shape[2], dtype=wide)
    return dtype, initial_state.to(wide)


def available_backends() -> tuple[str, ...]:
    """Names that `linear_scan(backend=...)` can run here, found without importing any of their packages."""
    return tuple(name for name in _BACKENDS if name not in _BACKEND_MODULES or _may_run(name))


def _check_inputs(a: Tensor, b: Tensor, initial_state: Tensor | None, reset_mask: Tensor | None) -> None:
    given = {"a": a, "b": b, "initial_state": initial_state, "reset_mask": reset_mask}
    given = {name: tensor for name, tensor in given.items() if tensor is not None or name in "ab"}
    for name, tensor in given.items():
        check_tensor(name, tensor)
        if name != "reset_mask" and not (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(f"{name} has type {tensor.dtype}; it must be a floating or complex type")
        if tensor.device != a.device:
            raise ValueError(f"{name} is on {tensor.device}; it must be on the device of a, {a.device}")
    if a.dim() != 3:
        raise ValueError(f"a has shape {tuple(a.shape)}; it must be (batch, steps, width)")
    if b.shape != a.shape:
        raise ValueError(f"b has shape {tuple(b.shape)}; it must equal the shape of a, {tuple(a.shape)}")
    batch, steps, width = a.shape
    if steps < 1 or batch < 1 or width < 1:
        raise ValueError(f"a has shape {tuple(a.shape)}; batch, steps and width must each be at least 1")
    if initial_state is not None:
        if initial_state.shape != (batch, width):
            raise ValueError(
                f"initial_state has shape {tuple(initial_state.shape)}; it must be (batch, width) = {(batch, width)}"
            )
        if initial_state.is_complex() and not (a.is_complex() or b.is_complex()):
            raise ValueError("initial_state is complex; it must be real, as a and b are")
    if reset_mask is not None:
        if reset_mask.dtype != torch.bool:
            raise ValueError(f"reset_mask has type {reset_mask.dtype}; it must be torch.bool")
        if reset_mask.shape != (batch, steps):
            raise ValueError(
                f"reset_mask has shape {tuple(reset_mask.shape)}; it must be (batch, steps) = {(batch, steps)}"
            )


# ---- Choosing a backend ----


@cache
def _may_run(name: str) -> bool:
    """True where the backend's module is installed and this machine has its device."""
    if name == "cpu":  # cheap to import, and only that tells whether its kernel was built
        try:
            importlib.import_module(_BACKEND_MODULES[name][0])
        except ImportError:
            return False
        return True
    try:
        installed = importlib.util.find_spec(_BACKEND_MODULES[name][0]) is not None
    except ImportError:
        installed = False
    installed = installed and importlib.util.find_spec(name) is not None
    return installed and (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1")


def _backend_functions(backend: str, device_type: str, dtype: torch.dtype) -> ModuleType | SimpleNamespace:
    """The functions of a backend for tensors of this kind; raises the reason why it cannot run."""
    if backend == "auto":
        kernel = "triton" if device_type == "cuda" else "cpu"
        backend = kernel if device_type in ("cpu", "cuda") and _may_run(kernel) else "torch"
        if backend != "torch" and _backend_module(backend).unsupported_reason(device_type, dtype) is not None:
            backend = "torch"
    if backend == "torch":
        return _TORCH_BACKEND
    module = _backend_module(backend)
    reason = module.unsupported_reason(device_type, dtype)
    if reason is not None:
        raise RuntimeError(f"linear_scan backend {backend!r} cannot run here: {reason}")
    return module


def _backend_module(backend: str) -> ModuleType:
    module_name, install = _BACKEND_MODULES[backend]
    try:
        return importlib.import_module(module_name)
    except ImportError as error:
        raise ImportError(f"linear_scan backend {backend!r} is not installed ({error}); try: {install}") from error


def _takes_single_steps(functions: ModuleType | SimpleNamespace | None, a: Tensor, reset_mask: Tensor | None) -> bool:
    """True where a backend declares itself faster than autograd's own formulas at T = 1."""
    takes_single_steps = getattr(functions, "takes_single_steps", None)
    if takes_single_steps is None or _is_transformed():
        return False
    return takes_single_steps(a.numel(), reset_mask is not None)


# ---- Plain torch ----


def _single_step(
    a: Tensor, b: Tensor, state: Tensor, reset_mask: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """T = 1: autograd's own formulas are already the best ones, and a compiler can fuse them."""
    if reset_mask is not None:
        state = state.masked_fill(reset_mask, 0)
    state = torch.addcmul(b[:, 0].to(state.dtype), a[:, 0].to(state.dtype), state)
    # A copy even when the types agree: the caller may change h in place and must not change the state with it.
    return state.unsqueeze(1).to(dtype, copy=True), state


_TORCH_BACKEND = SimpleNamespace(scan_forward=torch_scan_forward, scan_backward=torch_scan_backward)


# ---- Autograd, the compiler and function transforms ----


def _save_for_backward(ctx, inputs, output) -> None:
    a, _, state, reset_mask, ctx.backend = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(a, output[0], state, reset_mask)


def _backward(ctx, grad_h: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_h is None and grad_final is None:
        return None, None, None, None, None
    args = (*ctx.saved_tensors, grad_h, grad_final)
    if _is_transformed() or _is_recorded() or not _is_plain(*args):
        return *torch.ops.hf_recurrent.linear_scan_backward(*args, ctx.backend), None, None
    a = args[0]
    return *_backend_functions(ctx.backend, a.device.type, a.dtype).scan_backward(*args), None, None


def _vmapped(scan: Callable) -> Callable:
    """The rule of vmap for `scan`: the dimension that is mapped over joins the batch, (n,B,...) -> (n*B,...)."""

    def run(info, in_dims, *args):
        *tensors, backend = args
        folded = []
        for tensor, dim in zip(tensors, in_dims[:-1], strict=True):
            if tensor is not None:
                tensor = tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
                tensor = tensor.flatten(0, 1)
            folded.append(tensor)
        outputs = scan(*folded, backend)
        return tuple(x.unflatten(0, (info.batch_size, -1)) for x in outputs), (0,) * len(outputs)

    return run


class _LinearScan(torch.autograd.Function):
    """For torch.func, which cannot differentiate an operator that is defined in Python."""

    @staticmethod
    def forward(a, b, state, reset_mask, backend):
        return _backend_functions(backend, a.device.type, a.dtype).scan_forward(a, b, state, reset_mask)

    setup_context = staticmethod(_save_for_backward)
    backward = staticmethod(torch.autograd.function.once_differentiable(_backward))

    @staticmethod
    def vmap(info, in_dims, *args):
        return _vmapped(_LinearScan.apply)(info, in_dims, *args)


class _LinearScanInEagerMode(torch.autograd.Function):
    """As [`_LinearScan`], without its `setup_context`, for which torch inspects the signature of `forward` each time.

    Calling the operator costs more than twice as much.
    """

    @staticmethod
    def forward(ctx, a, b, state, reset_mask, backend):
        output = _LinearScan.forward(a, b, state, reset_mask, backend)
        _save_for_backward(ctx, (a, b, state, reset_mask, backend), output)
        return output

    backward = staticmethod(torch.autograd.function.once_differentiable(_backward))


def _is_transformed() -> bool:
    """True inside torch.func, whose tensors are wrappers that no kernel can read."""
    return torch._C._are_functorch_transforms_active()


def _is_recorded() -> bool:
    """True inside a dispatch mode, which sees operators but not what a kernel writes."""
    return torch._C._len_torch_dispatch_stack() > 0


def _is_plain(*tensors: Tensor | None) -> bool:
    """True where all tensors hold numbers: not fake, not on the meta device, no subclass."""
    return all(t is None or (type(t) in PLAIN_TENSORS and t.device.type != "meta") for t in tensors)


def _operator_forward(
    a: Tensor, b: Tensor, initial_state: Tensor, reset_mask: Tensor | None, backend: str
) -> tuple[Tensor, Tensor]:
    _check_inputs(a, b, initial_state, reset_mask)
    a, b, initial_state, reset_mask = _without_subclass(a, b, initial_state, reset_mask)
    return _backend_functions(backend, a.device.type, a.dtype).scan_forward(a, b, initial_state, reset_mask)


def _operator_backward(
    a: Tensor,
    h: Tensor,
    initial_state: Tensor,
    reset_mask: Tensor | None,
    grad_h: Tensor | None,
    grad_final: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_inputs(a, h, initial_state, reset_mask)
    _check_inputs(a, h if grad_h is None else grad_h, grad_final, reset_mask)
    tensors = _without_subclass(a, h, initial_state, reset_mask, grad_h, grad_final)
    return _backend_functions(backend, a.device.type, a.dtype).scan_backward(*tensors)


def _without_subclass(*tensors: Tensor | None) -> list[Tensor | None]:
    """The same memory as plain tensors, which kernels read."""
    return [t if t is None or type(t) is Tensor else t.as_subclass(Tensor) for t in tensors]


def _register_operators() -> None:
    """Define hf_recurrent::linear_scan and its backward once per process.

    A checkpoint brings this file along, so a process may load it again under another name: the operator is then
    kept. A change of its arguments needs a new name.
    """
    if hasattr(torch.ops.hf_recurrent, "linear_scan"):
        return
    backward_operator = torch.library.custom_op(
        "hf_recurrent::linear_scan_backward", _operator_backward, mutates_args=()
    )
    operator = torch.library.custom_op("hf_recurrent::linear_scan", _operator_forward, mutates_args=())

    @operator.register_fake
    def _(a, b, initial_state, reset_mask, backend):
        return a.new_empty(a.shape), initial_state.new_empty(initial_state.shape)

    @backward_operator.register_fake
    def _(a, h, initial_state, reset_mask, grad_h, grad_final, backend):
        return a.new_empty(a.shape), h.new_empty(h.shape), initial_state.new_empty(initial_state.shape)

    operator.register_autograd(_backward, setup_context=_save_for_backward)
    operator.register_vmap(_vmapped(operator))
    backward_operator.register_vmap(_vmapped(backward_operator))


_register_operators()
