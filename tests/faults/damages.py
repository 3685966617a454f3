"""Damages of files: accidents (missing, cut, flipped bits) and attacks (hostile JSON, tensors of other shapes)."""

import json
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Damage = Callable[[Path], None]
_HOSTILE = (
    None,
    True,
    -1,
    2**63,
    10**400,
    1e308,
    float("nan"),
    "",
    "../../etc/passwd",
    "x" * 10_000,
    [],
    {},
    [[]],
    {"": {}},
)
_SHAPES = ((), (0,), (1,), (7, 3), (1 << 20,))


def accidents(path: Path, draw: random.Random) -> Iterator[tuple[str, Damage]]:
    """Damages of any file by a disk, an interrupted copy or a mix-up, endlessly varied, each with a name."""
    size = path.stat().st_size
    yield "missing", Path.unlink
    yield "empty", lambda file: file.write_bytes(b"")
    yield "a directory", lambda file: (file.unlink(), file.mkdir())
    yield "zeros", lambda file: file.write_bytes(bytes(size))
    yield "longer", lambda file: file.write_bytes(file.read_bytes() + b"\0")
    while True:
        cut = draw.randrange(size)
        yield f"cut at {cut}", lambda file, cut=cut: file.write_bytes(file.read_bytes()[:cut])
        for _ in range(4):
            place, bit = draw.randrange(size), draw.randrange(8)
            yield f"bit {bit} of byte {place} flipped", lambda file, place=place, bit=bit: _flip(file, place, bit)


def attacks(path: Path, draw: random.Random) -> Iterator[tuple[str, Damage]]:
    """Damages of JSON and safetensors files that keep the format, endlessly varied, each with a name."""
    if path.suffix == ".json":
        yield "not UTF-8", lambda file: file.write_bytes(b"\xff\xfe{}")
        yield "deep", lambda file: file.write_text("[" * 100_000 + "]" * 100_000)
        yield "a list", lambda file: file.write_text("[]")
        yield "an empty object", lambda file: file.write_text("{}")
        while True:
            seed = draw.random()
            yield f"a value replaced ({seed})", lambda file, seed=seed: _change_json(file, random.Random(seed))
    if path.suffix == ".safetensors":
        yield (
            "a header of 2**60 bytes",
            lambda file: file.write_bytes(struct.pack("<Q", 1 << 60) + file.read_bytes()[8:]),
        )
        yield "no tensors", lambda file: save_file({}, file)
        while True:
            seed = draw.random()
            yield f"a tensor changed ({seed})", lambda file, seed=seed: _change_tensor(file, random.Random(seed))


def copy_with(source: Path, target: Path, name: str, damage: Damage) -> Path:
    """A copy of a directory in which one file is damaged; returns the damaged file."""
    shutil.copytree(source, target)
    damage(target / name)
    return target / name


def _flip(file: Path, place: int, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1 << bit
    file.write_bytes(data)


def _change_json(file: Path, draw: random.Random) -> None:
    """Replace or remove one value at any depth."""
    content = json.loads(file.read_text())
    places: list[tuple] = []

    def visit(value: object) -> None:
        entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in entries:
            places.append((value, key))
            visit(item)

    visit(content)
    if not places:
        content = draw.choice(_HOSTILE)
    else:
        container, key = draw.choice(places)
        if draw.random() < 0.25:
            del container[key]
        else:
            container[key] = draw.choice(_HOSTILE)
    file.write_text(json.dumps(content))


def _change_tensor(file: Path, draw: random.Random) -> None:
    """Replace, remove or add one tensor."""
    tensors = load_file(file)
    name = draw.choice(sorted(tensors)) if tensors else "weight"
    tensor = tensors.pop(name, torch.zeros(3))
    match draw.randrange(5):
        case 0:  # removed
            pass
        case 1:
            tensors |= {name: tensor, f"{name}.another": torch.zeros(3)}
        case 2:
            tensors[name] = torch.zeros(draw.choice(_SHAPES), dtype=tensor.dtype)
        case 3:
            tensors[name] = tensor.to(
                draw.choice((torch.int8, torch.int64, torch.float64, torch.bfloat16, torch.bool))
            )
        case _:
            values = tensor.clone().flatten()
            if len(values):
                extreme = torch.iinfo(values.dtype).max if not values.is_floating_point() else float("nan")
                values[draw.randrange(len(values))] = True if values.dtype == torch.bool else extreme
            tensors[name] = values.reshape(tensor.shape)
    save_file(tensors, file)
