"""Random calls of models: `forward` of every family and of SMT's teacher, `generate`, and models whose weights change
between two calls."""

import random
import sys
from functools import cache
from pathlib import Path

import torch
from fuzzing import Case
from hostile_tensors import same_values, unreadable
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel

from hf_recurrent import config_from_preset

sys.path.append(str(Path(__file__).parents[1] / "modeling"))
from model_cases import SIGNED, VARIANTS, tiny_model

DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16)
COMPILED = ["memora", "hawk", SIGNED[0]]
MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}


@cache
def model_of(variant: str, dtype: torch.dtype) -> PreTrainedModel:
    return tiny_model(variant, dtype)


@cache
def teacher_of(dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    config = config_from_preset("smt-teacher-tiny", hidden_size=16, num_memory_tokens=3, num_attention_heads=2)
    return AutoModel.from_config(config).to(dtype).eval()


def outputs_of(model: PreTrainedModel, arguments: dict, mode: str, backward: bool = False) -> dict[str, Tensor]:
    with MODES[mode]():
        output = model(**arguments)
    if backward:
        output.logits.float().square().sum().backward()
    results = {name: output[name] for name in ("logits", "loss", "memory") if output.get(name) is not None}
    return results | (output.get("state") or {})


def draw_ids(draw: random.Random, batch_size: int, steps: int) -> Tensor:
    return torch.tensor([[draw.randrange(256) for _ in range(steps)] for _ in range(batch_size)])


def draw_state(draw: random.Random, model: PreTrainedModel, batch_size: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    zero = model.init_state(batch_size)
    return {name: torch.randn(part.shape, generator=generator).to(part) for name, part in zero.items()}


# ---- forward -------------------------------------------------------------------------------------------------------


def draw_arguments(draw: random.Random, model: PreTrainedModel, batch_size: int, steps: int) -> dict:
    """Valid arguments of `forward`."""
    arguments: dict = {}
    if draw.random() < 0.3 and not model.config.ngram_orders:
        generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
        embeds = torch.randn(batch_size, steps, model.config.hidden_size, generator=generator)
        arguments["inputs_embeds"] = embeds.to(model.dtype)
        if draw.random() < 0.1:
            arguments["inputs_embeds"][0, 0, 0] = float("nan")
    else:
        arguments["input_ids"] = draw_ids(draw, batch_size, steps)
    if draw.random() < 0.8:
        arguments["state"] = draw_state(draw, model, batch_size)
    if draw.random() < 0.15:
        mask = torch.ones(batch_size, steps + draw.choice([0, 0, 3]), dtype=draw.choice([torch.int64, torch.bool]))
        if draw.random() < 0.6:
            mask[0, : mask.shape[1] - draw.randint(0, steps)] = 0
        arguments["attention_mask"] = mask
    if draw.random() < 0.15:
        arguments["reset_mask"] = torch.rand(batch_size, steps) < 0.3
    if draw.random() < 0.15:
        arguments[draw.choice(["labels", "shift_labels"])] = draw_ids(draw, batch_size, steps)
    elif draw.random() < 0.2:
        arguments["logits_to_keep"] = draw.choice([0, 1, steps, steps + 4, torch.tensor([0]), torch.tensor([-1, 0])])
    if draw.random() < 0.15:
        arguments["output_hidden_states"] = True
    if draw.random() < 0.1:
        arguments["use_cache"] = draw.random() < 0.5
    return arguments


def odd_value(draw: random.Random, name: str, arguments: dict, model: PreTrainedModel) -> tuple[str, object]:
    """A value for an argument of `forward` that is wrong in itself, not in how its tensor is stored."""
    ids = arguments.get("input_ids", torch.zeros(1, 1, dtype=torch.long))
    inputs = arguments["input_ids"] if "input_ids" in arguments else arguments["inputs_embeds"]
    batch_size, steps = inputs.shape[:2]
    odd: dict[str, dict[str, object]] = {
        "input_ids": {
            "negative": torch.full_like(ids, -1),
            "at the vocabulary's end": torch.full_like(ids, 256),
            "huge": torch.full_like(ids, 1 << 62),
            "smallest": torch.full_like(ids, -(1 << 63)),
            "floating": ids.double(),
            "bytes": ids.to(torch.uint8),
            "bool": ids.bool(),
            "nothing": torch.empty(0, dtype=torch.long),
            "no steps": ids[:, :0],
        },
        "inputs_embeds": {
            "narrow": torch.randn(batch_size, steps, 4, dtype=model.dtype),
            "wide": torch.randn(batch_size, steps, 400, dtype=model.dtype),
            "integer": torch.ones(batch_size, steps, model.config.hidden_size, dtype=torch.long),
            "complex": torch.ones(batch_size, steps, model.config.hidden_size, dtype=torch.complex64),
            "no steps": torch.randn(batch_size, 0, model.config.hidden_size, dtype=model.dtype),
        },
        "attention_mask": {
            "of other streams": torch.ones(batch_size + 1, steps),
            "short": torch.ones(batch_size, steps - 1),
            "a number": 1,
        },
        "reset_mask": {
            "of other streams": torch.ones(batch_size + 1, steps, dtype=torch.bool),
            "long": torch.ones(batch_size, steps + 1, dtype=torch.bool),
            "short": torch.ones(batch_size, steps - 1, dtype=torch.bool),
            "a number": 1,
        },
        "labels": {
            "past the vocabulary": torch.full((batch_size, steps + 1), 256),
            "floating": torch.rand(batch_size, steps + 1),
        },
        "shift_labels": {
            "past the vocabulary": torch.full((batch_size, steps), 256),
            "negative": torch.full((batch_size, steps), -1),
            "of other streams": torch.zeros(batch_size + 1, steps, dtype=torch.long),
        },
        "logits_to_keep": {
            "negative": -3,
            "a fraction": 1.5,
            "text": "all",
            "of two dimensions": torch.zeros(1, 1, dtype=torch.long),
            "of none": torch.tensor(0),
            "past the end": torch.tensor([steps]),
            "bytes": torch.ones(steps, dtype=torch.uint8),
            "floating": torch.ones(1),
        },
        "state": _odd_states(arguments, model, batch_size),
    }
    what = draw.choice(list(odd[name]))
    return what, odd[name][what]


def _odd_states(arguments: dict, model: PreTrainedModel, batch_size: int) -> dict[str, object]:
    state = arguments.get("state") or model.init_state(batch_size)
    return {
        "a list": list(arguments.get("state", {"a": 1}).values()),
        "a tensor": torch.zeros(batch_size, 16),
        "empty": {},
        "unknown part": state | {"more": torch.zeros(batch_size)},
        "called hidden": state | {"hidden": torch.zeros(batch_size, model.config.hidden_size)},
        "of other streams": model.init_state(batch_size + 1),
    }


def spoil(draw: random.Random, arguments: dict, model: PreTrainedModel) -> tuple[str, str]:
    """Change one argument in place; what was done, and the verdict."""
    if draw.random() < 0.35:
        names = ["attention_mask", "reset_mask", "shift_labels", "logits_to_keep", "state"]
        names.append("input_ids" if "input_ids" in arguments else "inputs_embeds")
        name = draw.choice(names)
        what, value = odd_value(draw, name, arguments, model)
        arguments[name] = value
        if name == "shift_labels":
            arguments.pop("logits_to_keep", None)
        return f"{name} {what}", "refuse"
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    parts = [name for name, part in arguments.get("state", {}).items() if part.numel()]
    if parts and (draw.random() < 0.6 or not tensors):
        part = draw.choice(parts)
        if draw.random() < 0.15:
            del arguments["state"][part]
            return f"state without {part}", "refuse"
        holder, name, but = arguments["state"], part, ()
        if draw.random() < 0.15:
            kind = draw.choice([torch.complex64, torch.int64, torch.bool])
            holder[part] = holder[part].to(kind)
            return f"{part} {kind}", "refuse"
    else:
        holder, name = arguments, draw.choice(list(tensors))
        # Masks and indices of other lengths may be valid.
        but = ("of no elements", "quantized") if name in ("logits_to_keep", "attention_mask") else ()
        if name == "logits_to_keep":
            but += ("of one dimension", "without rows", "with a row more", "freed", "shrunk", "meta")
        if name in ("labels", "shift_labels"):
            but += ("of no elements",)
        if name in ("input_ids", "inputs_embeds"):
            but += ("with a row more",)  # another batch, where nothing else has a batch
    if draw.random() < 0.5:
        what, holder[name] = same_values(holder[name], draw)
        return f"{name} {what}", "accept"
    what, holder[name] = unreadable(holder[name], draw, but)
    return f"{name} {what}", "refuse"


def forward_case(draw: random.Random) -> Case:
    variant = draw.choice(COMPILED if draw.random() < 0.5 else VARIANTS)
    dtype = draw.choice(DTYPES)
    model = model_of(variant, dtype)
    batch_size, steps = draw.choice([1, 1, 2, 3, 25]), draw.choice([1, 1, 1, 2, 5])
    mode = draw.choice(["no_grad", "no_grad", "inference", "grad"])
    valid = draw_arguments(draw, model, batch_size, steps)
    arguments = dict(valid)
    if "state" in valid:
        arguments["state"] = dict(valid["state"])
    done, verdict = [], "accept"
    for _ in range(draw.choice([0, 1, 1, 1, 2])):
        what, judged = spoil(draw, arguments, model)
        done.append(what)
        verdict = judged if judged == "refuse" else verdict
        if "from inference mode" in what and mode == "grad" and verdict == "accept":
            verdict = "either"
        if judged == "refuse":
            break  # what comes after may be valid again
    if draw.random() < 0.03:
        arguments = valid | {"input_ids": draw_ids(draw, batch_size, steps)}
        arguments |= {"inputs_embeds": torch.randn(batch_size, steps, model.config.hidden_size, dtype=dtype)}
        done, verdict = ["both inputs"], "refuse"
    backward = mode == "grad" and draw.random() < 0.3
    if backward and (valid.get("use_cache") is False or "logits_to_keep" in valid):
        backward = False
    what = f"forward {variant} {dtype} B={batch_size} T={steps} {mode} {sorted(valid)} {done}"
    return Case(
        what,
        lambda: outputs_of(model, arguments, mode, backward),
        lambda: outputs_of(model, valid, mode),
        verdict,
        dtype,
    )


def teacher_case(draw: random.Random) -> Case:
    dtype = draw.choice([torch.float32, torch.float64])
    model, batch_size = teacher_of(dtype), draw.choice([1, 3])
    valid: dict = {"context_ids": draw_ids(draw, batch_size, draw.choice([1, 4]))}
    if draw.random() < 0.5:
        valid["context_mask"] = torch.ones_like(valid["context_ids"])
    if draw.random() < 0.6:
        valid["future_ids"] = draw_ids(draw, batch_size, 3)
        if draw.random() < 0.5:
            valid["labels"] = draw_ids(draw, batch_size, 3)
    arguments, what, verdict = dict(valid), "as it is", "accept"
    if draw.random() < 0.8:
        name = draw.choice(list(valid))
        if draw.random() < 0.4:
            what, arguments[name] = same_values(valid[name], draw)
            verdict = "either" if what == "from inference mode" else verdict
        else:
            but = ("of no elements", "without rows") if name == "labels" else ("quantized",)
            but += ("with a row more",) if len(valid) == 1 else ()
            what, arguments[name] = unreadable(valid[name], draw, but)
            verdict = "refuse"
        what = f"{name} {what}"
    mode = draw.choice(list(MODES))
    return Case(
        f"teacher {dtype} B={batch_size} {mode} {sorted(valid)} {what}",
        lambda: outputs_of(model, arguments, mode),
        lambda: outputs_of(model, valid, mode),
        verdict,
        dtype,
    )


# ---- generate ------------------------------------------------------------------------------------------------------


def generate_case(draw: random.Random) -> Case:
    variant, dtype = draw.choice(COMPILED[:2] if draw.random() < 0.5 else VARIANTS), torch.float64
    model = model_of(variant, dtype)
    batch_size, steps = draw.choice([1, 1, 2, 25]), draw.choice([1, 2, 5])
    valid: dict = {"inputs": draw_ids(draw, batch_size, steps).clamp(min=1)}
    if draw.random() < 0.5:
        valid["state"] = draw_state(draw, model, batch_size)
    if draw.random() < 0.3:
        mask = torch.ones(batch_size, steps, dtype=torch.int64)
        mask[0, : draw.randrange(steps)] = 0
        valid["attention_mask"] = mask
    options = {"max_new_tokens": draw.choice([1, 3, 4]), "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= draw.choice([{}, {}, {"num_beams": 2}, {"num_beams": 3, "num_return_sequences": 2}])
    arguments, what, verdict = dict(valid), "as it is", "accept"
    choice = draw.random()
    if choice < 0.35:
        name = draw.choice(list(valid))
        holder = arguments[name] = dict(valid["state"]) if name == "state" else valid[name]
        if name == "state":
            part = draw.choice([part for part in holder if holder[part].numel()])
            faulty = draw.random() < 0.5
            form, holder[part] = (unreadable if faulty else same_values)(holder[part], draw)
            what, verdict = f"{part} {form}", "refuse" if faulty else "accept"
        elif draw.random() < 0.6:
            form, arguments[name] = unreadable(holder, draw)
            # generate() itself interprets what it gets: the prompt may be empty or nested.
            what, verdict = f"{name} {form}", "either"
        else:
            form, arguments[name] = same_values(holder, draw)
            what = f"{name} {form}"
    elif choice < 0.5:
        value = draw.choice([-1, 256, 1 << 40])
        arguments["inputs"] = valid["inputs"].clone()
        arguments["inputs"][-1, -1] = value
        what, verdict = f"inputs hold {value}", "refuse"
    elif choice < 0.6:
        arguments["state"] = draw.choice([[1], {}, "state", torch.zeros(3), model.init_state(batch_size + 1)])
        what, verdict = "a wrong state", "refuse"
        if isinstance(arguments["state"], dict) and options.get("num_beams", 1) > 1:
            verdict = "either"

    def call(given: dict) -> dict[str, Tensor]:
        return {"ids": model.generate(**given, **options)}

    # Text has to agree; a subclass of a tensor may stay one.
    expected = (lambda: call(valid)) if verdict == "accept" else None
    more = {name: value for name, value in options.items() if "beam" in name}
    return Case(
        f"generate {variant} B={batch_size} T={steps} {sorted(valid)} {more} {what}",
        lambda: call(arguments),
        expected,
        verdict,
        dtype,
    )


# ---- Weights that change between calls -----------------------------------------------------------------------------


def _square(model: PreTrainedModel) -> list[nn.Parameter]:
    return [p for p in model.model.parameters() if p.dim() == 2 and p.shape[0] == p.shape[1]]


def free(model, weight, draw):
    weight.untyped_storage().resize_(0)
    return "refuse"


def free_all(model, weight, draw):
    for parameter in model.parameters():
        parameter.untyped_storage().resize_(0)
    return "refuse"


def shrink(model, weight, draw):
    size = weight.untyped_storage().nbytes()
    weight.untyped_storage().resize_(0)
    weight.untyped_storage().resize_(size // 2)
    return "refuse"


def free_and_restore(model, weight, draw):
    kept = weight.data.clone()
    weight.untyped_storage().resize_(0)
    weight.untyped_storage().resize_(kept.nbytes)
    weight.data.copy_(kept)
    return "accept"


def change_in_place(model, weight, draw):
    weight.data.mul_(1.5)
    return "accept"


def replace_data(model, weight, draw):
    weight.data = weight.data * 0.5 + 0.01
    return "accept"


def transpose_data(model, weight, draw):
    for square in _square(model) or [weight]:
        square.data = square.data.t() if square.dim() == 2 else square.data
    return "either"


def negate_data(model, weight, draw):
    weight.data = torch._neg_view(weight.data)
    return "accept"


def same_data(model, weight, draw):
    form, data = same_values(weight.data.clone(), draw)
    weight.data = data.data.as_subclass(Tensor)
    return "either" if form == "from inference mode" else "accept"


def cut_data(model, weight, draw):
    weight.data = weight.data[: len(weight) // 2]
    return "refuse"


def replace_parameter(model, weight, draw):
    owner, name = _owner_of(model, weight)
    setattr(owner, name, nn.Parameter(weight.data * 0.3))
    return "accept"


def parameter_of_another_type(model, weight, draw):
    owner, name = _owner_of(model, weight)
    setattr(owner, name, nn.Parameter(weight.data.half()))
    return "either"


def parameter_of_another_shape(model, weight, draw):
    owner, name = _owner_of(model, weight)
    shape = [size + draw.choice([-1, 1, 5]) for size in weight.shape]
    setattr(owner, name, nn.Parameter(torch.randn(shape, dtype=weight.dtype)))
    return "either"


def parameter_of_more_dimensions(model, weight, draw):
    owner, name = _owner_of(model, weight)
    setattr(owner, name, nn.Parameter(weight.data.unsqueeze(draw.choice([0, -1]))))
    return "either"


def empty_parameter(model, weight, draw):
    owner, name = _owner_of(model, weight)
    setattr(owner, name, nn.Parameter(weight.data[..., :0]))
    return "either"


def freed_parameter(model, weight, draw):
    owner, name = _owner_of(model, weight)
    new = nn.Parameter(weight.data.clone())
    new.untyped_storage().resize_(0)
    setattr(owner, name, new)
    return "refuse"


def on_meta(model, weight, draw):
    owner, name = _owner_of(model, weight)
    setattr(owner, name, nn.Parameter(weight.data.to("meta")))
    return "refuse"


def another_type(model, weight, draw):
    model.to(torch.float64)
    return "either"


CHANGES = [
    *(free, free, free_all, shrink, shrink, free_and_restore, change_in_place, replace_data, transpose_data),
    *(negate_data, same_data, cut_data, replace_parameter, parameter_of_another_type, parameter_of_another_shape),
    *(parameter_of_more_dimensions, empty_parameter, freed_parameter, on_meta, another_type),
]


def _owner_of(model: nn.Module, weight: nn.Parameter) -> tuple[nn.Module, str]:
    for module in model.model.modules():
        for name, parameter in module._parameters.items():
            if parameter is weight:
                return module, name
    raise LookupError("no module has this weight")


def changed_weights_case(draw: random.Random) -> Case:
    variant = draw.choice(COMPILED if draw.random() < 0.6 else VARIANTS)
    dtype = draw.choice([torch.float32, torch.float64])
    change, mode, steps = draw.choice(CHANGES), draw.choice(list(MODES)), draw.choice([1, 1, 1, 3])
    ids = draw_ids(draw, draw.choice([1, 2]), steps)
    place = draw.random()

    def changed() -> tuple[PreTrainedModel, dict]:
        model = tiny_model(variant, dtype)
        state = model.init_state(len(ids))
        for _ in range(2):
            outputs_of(model, {"input_ids": ids, "state": state}, mode)
        weights = [p for p in model.model.parameters() if p.numel() and p is not model.model.embed_tokens.weight]
        weight = weights[int(place * len(weights))]
        verdict.append(change(model, weight, random.Random(place)))
        return model, {"input_ids": ids, "state": state}

    verdict: list[str] = []
    model, arguments = changed()
    plain = model if verdict[0] == "accept" else None
    return Case(
        f"{change.__name__} {variant} {dtype} B={len(ids)} T={steps} {mode} weight {place:.3f}",
        lambda: outputs_of(model, arguments, mode),
        None if plain is None else lambda: outputs_of(plain, arguments, mode),
        verdict[0],
        dtype,
    )
