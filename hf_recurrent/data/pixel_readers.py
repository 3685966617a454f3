"""Images as episodes of pixels, for models that learn to draw: `mnist:FOLDER` and `images:FOLDER`.

Their tokens are pixels or patches whatever the tokenizer. All ids are data: episodes have no end id.
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hf_recurrent.argument_checks import expand_home, import_optional
from hf_recurrent.data.decompression import read_chunks
from hf_recurrent.data.documents import Document, Source, file_stamp
from hf_recurrent.data.token_encoding import TokenEncoding

GREY_LEVELS, PATCHES = 256, 16
_BITS = np.array([8, 4, 2, 1], dtype=np.uint8)
_SHEET_GREY = 128


def binary_patches(ink: np.ndarray) -> np.ndarray:
    """Tokens of a binary image: (height, width) bool, both even, → (T,) uint8 below 16, T = height · width / 4."""
    rows, columns = (size // 2 for size in ink.shape)
    patches = ink.reshape(rows, 2, columns, 2).transpose(0, 2, 1, 3).reshape(-1, 4)
    return patches.astype(np.uint8) @ _BITS


def tokens_to_images(tokens: Any, vocab_size: int = GREY_LEVELS) -> np.ndarray:
    """Square images from tokens of `mnist:` and `images:` corpora, read or generated.

    Args:
        tokens: (…, T) integers: an array, a tensor or a list.
        vocab_size: 256 for grey levels (T = 784 → 28 × 28), 16 for patches (T = 1024 → 64 × 64; ones are white).

    Returns:
        (…, height, width) uint8.

    Raises:
        ValueError: another vocabulary, tokens outside it, or a T that is not a square number.
    """
    if vocab_size not in (GREY_LEVELS, PATCHES):
        raise ValueError(
            f"`vocab_size` is {vocab_size}; it must be {GREY_LEVELS} (grey levels) or {PATCHES} (patches)."
        )
    tokens = np.asarray(tokens.detach().cpu() if hasattr(tokens, "detach") else tokens)
    if tokens.dtype.kind not in "iu" or not tokens.size or tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ValueError(
            f"`tokens` is {tokens.dtype} {tokens.shape}; it must hold integers from 0 to {vocab_size - 1}."
        )
    side = math.isqrt(tokens.shape[-1])
    if side**2 != tokens.shape[-1]:
        raise ValueError(f"`tokens` has {tokens.shape[-1]} steps; they must be a square number: a whole image.")
    images = tokens.reshape(*tokens.shape[:-1], side, side).astype(np.uint8)
    if vocab_size == GREY_LEVELS:
        return images
    bits = images[..., None] // _BITS % 2 * np.uint8(255)
    patches = bits.reshape(*images.shape, 2, 2)
    return np.moveaxis(patches, -2, -3).reshape(*images.shape[:-2], 2 * side, 2 * side)


def save_image_sheet(
    images: np.ndarray, path: str | os.PathLike, *, columns: int = 8, scale: int = 2, gap: int = 2
) -> None:
    """Write a grid of images as one PNG.

    Args:
        images: (B, height, width) uint8 grey levels.
        path: the file to write.
        columns: images per row of the grid; the last may have fewer.
        scale: the factor by which pixels are enlarged.
        gap: grey pixels between images.

    Raises:
        ValueError: images of another type or shape, no images, or a number below 1 (`gap`: below 0).
        ImportError: Pillow is missing.
    """
    if images.ndim != 3 or images.dtype != np.uint8 or not images.size:
        raise ValueError(
            f"`images` is {images.dtype} {images.shape}; it must be uint8 (B, height, width), and not empty."
        )
    for name, value, least in (("columns", columns, 1), ("scale", scale, 1), ("gap", gap, 0)):
        if value < least:
            raise ValueError(f"`{name}` is {value}; it must be at least {least}.")
    pillow = import_pillow(f"writing {os.fspath(path)}")
    count, height, width = images.shape
    columns = min(columns, count)
    rows = -(-count // columns)
    large = images.repeat(scale, axis=1).repeat(scale, axis=2)
    height, width = height * scale + gap, width * scale + gap
    sheet = np.full((rows * height + gap, columns * width + gap), _SHEET_GREY, dtype=np.uint8)
    for number, image in enumerate(large):
        row, column = divmod(number, columns)
        top, left = row * height + gap, column * width + gap
        sheet[top : top + image.shape[0], left : left + image.shape[1]] = image
    pillow.fromarray(sheet).save(path, format="PNG")


def import_pillow(purpose: str) -> Any:
    """The module `PIL.Image`; an ImportError that names `purpose` if it is missing."""
    import_optional("PIL", f"{purpose} needs the Pillow package: pip install pillow")
    from PIL import Image

    return Image


_GZIP_MAGIC = b"\x1f\x8b"


def find_idx(directory: str | os.PathLike, stem: str, num_dimensions: int) -> Path:
    """The file `STEM-idxN-ubyte` with N = `num_dimensions`, plain or .gz; some copies have a dot before `idx`."""
    directory = expand_home(directory)
    names = [f"{stem}{mark}idx{num_dimensions}-ubyte{suffix}" for mark in "-." for suffix in ("", ".gz")]
    for name in names:
        if (directory / name).is_file():
            return directory / name
    raise FileNotFoundError(f"file not found: {directory / names[0]} (or .gz)")


def read_idx(path: str | os.PathLike, num_dimensions: int) -> np.ndarray:
    """Read an IDX file of unsigned bytes, plain or compressed with gzip (recognized by its first bytes)."""
    path = Path(path)
    header, magic = 4 * (1 + num_dimensions), bytes([0, 0, 8, num_dimensions])
    if not path.is_file():
        raise FileNotFoundError(f"file not found: {path}")
    with open(path, "rb") as file:
        compression = ".gz" if file.read(2) == _GZIP_MAGIC else ""
    data = b"".join(read_chunks(path, compression))
    if data[:4] != magic:
        raise ValueError(
            f"{path} begins with the magic number 0x{data[:4].hex()}; it must be 0x{magic.hex()} (IDX, unsigned "
            f"bytes, {num_dimensions} dimensions)."
        )
    if len(data) < header:
        raise ValueError(f"{path} is truncated: its header has {len(data)} of {header} bytes.")
    shape = tuple(int.from_bytes(data[begin : begin + 4], "big") for begin in range(4, header, 4))
    expected = header + math.prod(shape)
    if len(data) != expected:
        defect = "truncated" if len(data) < expected else "too long"
        raise ValueError(f"{path} is {defect}: it has {len(data)} bytes, but {expected} by its header.")
    if not math.prod(shape):
        raise ValueError(f"{path} is empty: its shape is {shape}.")
    return np.frombuffer(data, dtype=np.uint8, offset=header).reshape(shape)


_SPLITS = ("train", "test")
_MNIST_NAMES = {"train": "train-images", "test": "t10k-images"}
_MNIST_SHAPE = (28, 28)
_IMAGE_SIZE = (64, 64)
_IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
_INK_BELOW = 128


@dataclass(frozen=True)
class PixelFormat:
    """A kind of source: finds its files in a directory (of one split), reads them, and has V ids."""

    files: Callable[[Path, str], list[Path]]
    read: Callable[[Path], Iterator[Document]]
    vocab_size: int

    def encoding(self) -> TokenEncoding:
        return TokenEncoding(_Tokens(self.vocab_size), binary=True)


@dataclass(frozen=True)
class _Tokens:
    """In place of a tokenizer: the bytes of a document are ids already. Its name is in the keys of packed corpora."""

    vocab_size: int

    def encode_bytes(self, data: bytes) -> np.ndarray:
        return np.frombuffer(data, dtype=np.uint8)


def pixel_format(sources: Iterable[Any]) -> PixelFormat | None:
    """The format of sources of `load_corpus` that are images; None for others, a ValueError if they are mixed."""
    names = _names(sources)
    prefixes = {next((prefix for prefix in PIXEL_FORMATS if name.startswith(prefix)), None) for name in names}
    if len(prefixes) > 1:
        raise ValueError(
            f"`source` is {', '.join(names)}; {' and '.join(PIXEL_FORMATS)} sources must not be mixed with others."
        )
    return PIXEL_FORMATS.get(prefixes.pop()) if prefixes else None


def pixel_sources(name: str, split: str) -> list[Source] | None:
    """The files of `mnist:FOLDER` or `images:FOLDER`; None for other names."""
    kind = pixel_format([name])
    if kind is None:
        return None
    prefix, _, folder = name.partition(":")
    if split not in _SPLITS:
        raise ValueError(f"`split` is {split!r}; for {prefix}: sources it must be one of {', '.join(_SPLITS)}.")
    directory = expand_home(folder)
    if not directory.is_dir():
        raise FileNotFoundError(f"`source` is {name!r}; directory not found: {directory}")
    if kind.read is _read_image:
        import_pillow(f"reading {name}")
    return [
        Source(["pixels", *file_stamp(path), kind.read.__name__], partial(kind.read, path))
        for path in kind.files(directory, split)
    ]


def has_test_files(sources: Iterable[Any]) -> bool:
    """True if all sources are images that have separate files for the split "test"."""
    try:
        return all(pixel_sources(name, "test") is not None for name in _names(sources))
    except FileNotFoundError:
        return False


def _names(sources: Iterable[Any]) -> list[str]:
    return [os.fspath(each) if isinstance(each, str | os.PathLike) else type(each).__name__ for each in sources]


def _read_mnist(path: Path) -> Iterator[Document]:
    images = read_idx(path, num_dimensions=3)
    if images.shape[1:] != _MNIST_SHAPE:
        raise ValueError(
            f"{path} holds images of {images.shape[1]} x {images.shape[2]} pixels; they must be "
            f"{_MNIST_SHAPE[0]} x {_MNIST_SHAPE[1]}."
        )
    for number, image in enumerate(images):
        yield f"{path}, image {number}", [image.tobytes()]


def _image_files(directory: Path, split: str) -> list[Path]:
    """The files below train or test if there are both directories; otherwise all files are for training."""
    if all((directory / each).is_dir() for each in _SPLITS):
        directory = directory / split
    elif split != _SPLITS[0]:
        raise FileNotFoundError(
            f"`split` is {split!r}, but {directory} does not have the directories {' and '.join(_SPLITS)}."
        )
    files = sorted(path for path in directory.rglob("*") if path.suffix.lower() in _IMAGE_SUFFIXES and path.is_file())
    if not files:
        raise FileNotFoundError(f"{directory} holds no images; their names must end in {', '.join(_IMAGE_SUFFIXES)}.")
    return files


def _read_image(path: Path) -> Iterator[Document]:
    """Resize to 64 × 64 with Lanczos, threshold to ink (darker than half) and paper, take patches of 2 × 2.

    From "Supervised Memory Training", appendix E.2. Transparent pixels are paper.
    """
    pillow = import_pillow(f"reading {path}")
    try:
        with pillow.open(path) as file:
            image = file.convert("RGBA")
    except Exception as error:  # the library raises many types for a damaged file
        raise ValueError(f"{path} cannot be read as an image: {error}") from error
    paper = pillow.new("RGBA", image.size, "white")
    paper.alpha_composite(image)
    grey = paper.convert("L").resize(_IMAGE_SIZE, pillow.Resampling.LANCZOS)
    yield str(path), [binary_patches(np.asarray(grey) < _INK_BELOW).tobytes()]


PIXEL_FORMATS = {
    "mnist:": PixelFormat(lambda folder, split: [find_idx(folder, _MNIST_NAMES[split], 3)], _read_mnist, GREY_LEVELS),
    "images:": PixelFormat(_image_files, _read_image, PATCHES),
}
