"""Numbers in C."""

import torch


def literal(value: float) -> str:
    if value != value:
        return "NAN"
    if value in (float("inf"), float("-inf")):
        return "INFINITY" if value > 0 else "(-INFINITY)"
    is_float = float(torch.tensor(value, dtype=torch.float32)) == value
    text = f"{value:.9g}" if is_float else repr(float(value))
    text = text if any(mark in text for mark in ".e") else f"{text}.0"
    return f"({text}f)" if value < 0 else f"{text}f"
