"""Images as sequences of tokens and back, and sheets of many images.

Two alphabets: grey levels (V = 256, one pixel per token), and patches of 2 × 2 binary pixels (V = 16), whose bits are
top left, top right, bottom left, bottom right, the first the most significant. Both run row by row from the top left.
"""

import math
import os
from typing import Any

import numpy as np

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
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(f"{purpose} needs the Pillow package: pip install pillow") from error
    return Image
