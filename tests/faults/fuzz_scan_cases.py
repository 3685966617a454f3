"""Random calls of `linear_scan`, of its operators, and of the pass over sensitivities."""

import random

import torch
from fuzzing import Case
from hostile_tensors import same_values, unreadable
from torch import Tensor

from hf_recurrent.learning_rules import sensitivities
from hf_recurrent.modeling.scan.linear_scan import available_backends, linear_scan, linear_scan_reference

_TYPES = (*[torch.float32] * 3, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)
_SHAPES = ((1, 1, 1), (2, 1, 5), (1, 7, 1), (2, 9, 3), (3, 5, 70), (1, 40, 16), (2, 300, 3), (1, 1100, 2), (25, 2, 33))


def _draw_inputs(draw: random.Random, dtype: torch.dtype) -> dict[str, Tensor]:
    shape = draw.choice(_SHAPES)
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    wide = torch.promote_types(dtype, torch.float32)

    def random_of(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, dtype=wide)

    inputs = {"a": random_of(*shape).abs().clamp(max=1).to(dtype), "b": random_of(*shape).to(dtype)}
    if draw.random() < 0.6:
        inputs["initial_state"] = random_of(shape[0], shape[2])
    if draw.random() < 0.5:
        inputs["reset_mask"] = torch.rand(shape[:2], generator=generator) < 0.3
    return inputs


def _odd(draw: random.Random, name: str, tensor: Tensor) -> tuple[str, object]:
    if name == "reset_mask":
        return draw.choice([("integers", tensor.long()), ("long", torch.cat([tensor, tensor[:, :1]], 1))])
    return draw.choice(
        [
            ("integers", tensor.abs().long()),
            ("bool", tensor.real != 0),
            ("wide", torch.cat([tensor, tensor[..., :1]], -1)),
            ("of no width", tensor[..., :0]),
        ]
    )


def scan_case(draw: random.Random) -> Case:
    dtype = draw.choice(_TYPES)
    valid = _draw_inputs(draw, dtype)
    backend = draw.choice(["auto", "auto", "auto", "cpu", "cpu", "torch", "reference", "triton", "bogus"])
    arguments, done, verdict = dict(valid), [], "accept"
    for _ in range(draw.choice([0, 1, 1, 2])):
        name = draw.choice(list(arguments))
        choice = draw.random()
        if choice < 0.45:
            what, arguments[name] = same_values(arguments[name], draw)
            verdict = "either" if what == "from inference mode" else verdict  # torch refuses it for gradients
        elif choice < 0.6:
            what, arguments[name] = _odd(draw, name, arguments[name])
        else:
            what, arguments[name] = unreadable(arguments[name], draw)
        done.append(f"{name} {what}")
        if choice >= 0.45:
            verdict = "refuse"
            break
    if backend == "bogus" or (backend == "triton" and "triton" not in available_backends()):
        verdict = "refuse"
    gradients = verdict == "accept" and draw.random() < 0.5

    def call(given: dict[str, Tensor], scan, **options) -> dict[str, Tensor]:
        given = dict(given)
        leaves = [] if not gradients else [given[name] for name in ("a", "b")]
        for tensor in leaves:
            if not tensor.requires_grad:
                tensor.requires_grad_()
        h, final = scan(**given, **options)
        results = {"h": h, "final": final}
        if gradients:
            loss = (h * h.detach().conj()).real.float().sum() + final.abs().float().sum()
            results |= {f"gradient {place}": g for place, g in enumerate(torch.autograd.grad(loss, leaves))}
        return results

    if gradients:
        # Gradients stop at leaves, which a view is not: take the values of this form, in the form of a leaf.
        arguments = {name: t.detach() if isinstance(t, Tensor) else t for name, t in arguments.items()}
        if any(tensor.is_inference() for tensor in arguments.values()):
            gradients = False
    return Case(
        f"linear_scan {dtype} {tuple(valid['a'].shape)} {backend} gradients={gradients} {sorted(valid)} {done}",
        lambda: call(arguments, linear_scan, backend=backend),
        lambda: call(valid, linear_scan_reference),
        verdict,
        dtype,
    )


def operator_case(draw: random.Random) -> Case:
    """The operators that compiled graphs call: anybody may call them with anything."""
    dtype = draw.choice(_TYPES)
    inputs = _draw_inputs(draw, dtype)
    a = inputs["a"]
    wide = torch.promote_types(dtype, torch.float32)
    state = inputs.get("initial_state", torch.zeros(a.shape[0], a.shape[2], dtype=wide))
    forward = [a, inputs["b"], state, inputs.get("reset_mask")]
    backward = [a, inputs["b"], state, inputs.get("reset_mask"), inputs["b"], draw.choice([None, state])]
    given = draw.choice([forward, backward])
    done = "as it is"
    if draw.random() < 0.8:
        place = draw.choice([place for place, tensor in enumerate(given) if tensor is not None])
        but = ("a list", "an array", "text")
        change = draw.choice([unreadable, unreadable, same_values, None])
        if change is None:
            other = _draw_inputs(draw, draw.choice(_TYPES))
            what, given[place] = "of another scan", draw.choice(list(other.values()))
        else:
            what, given[place] = (
                change(given[place], draw, but) if change is unreadable else change(given[place], draw)
            )
        done = f"argument {place} {what}"
    function = torch.ops.hf_recurrent.linear_scan if given is forward else torch.ops.hf_recurrent.linear_scan_backward
    backend = draw.choice(["auto", "cpu"])

    def call() -> dict[str, Tensor]:
        with torch.no_grad():
            return {str(place): tensor for place, tensor in enumerate(function(*given, backend))}

    what = f"operator of {len(given)} tensors {dtype} {tuple(a.shape)} {backend} {done}"
    return Case(what, call, None, "either", dtype)


def sensitivities_case(draw: random.Random) -> Case:
    kernel = sensitivities.sensitivities_cpu
    dtype = draw.choice([torch.float32, torch.float64])
    streams, rows, groups, columns = (draw.choice([1, 2, 5, 19]) for _ in range(4))
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    shapes = {
        "carried": (streams, 1, rows, groups, columns),
        "transition": (streams, 1, 1, groups),
        "of_rows": (streams, 1, 1, rows, groups),
        "inputs": (streams, 1, columns),
        "grad_state": (streams, 1, groups),
        "gradient": (rows, groups, columns),
    }
    valid = {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}
    arguments = {name: tensor.clone() for name, tensor in valid.items()}
    if draw.random() < 0.4:
        valid |= {"grad_state": None, "gradient": None}
        arguments |= {"grad_state": None, "gradient": None}
    done, verdict = "as it is", "accept"
    name = draw.choice([name for name, tensor in valid.items() if tensor is not None])
    if draw.random() < 0.7:
        if draw.random() < 0.4:
            what, arguments[name] = same_values(arguments[name], draw)
            verdict = "either"
        else:
            what, arguments[name] = unreadable(arguments[name], draw, ("a list", "an array", "text", "nested"))
            verdict = "refuse"
        done = f"{name} {what}"

    def advance(given: dict, function) -> dict[str, Tensor]:
        with torch.no_grad():
            function(*given.values())
        return {name: given[name] for name in ("carried", "gradient") if given[name] is not None}

    def plain(carried, transition, of_rows, inputs, grad_state, gradient):
        if gradient is not None:
            gradient += torch.einsum("bcg,bcrgi->rgi", grad_state, carried)
        carried.copy_(
            transition[:, :, :, None, :, None][:, 0] * carried + torch.einsum("bcdrg,bdi->bcrgi", of_rows, inputs)
        )

    what = f"sensitivities {dtype} {streams}x{rows}x{groups}x{columns} {done}"
    return Case(what, lambda: advance(arguments, kernel.advance), lambda: advance(valid, plain), verdict, dtype)
