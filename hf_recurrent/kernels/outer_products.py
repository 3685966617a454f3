"""Gradients of matrices in a block of one step: products of two vectors, which need not be written."""

import torch

from .step_graph import Buffer, Slice, StepGraph, Value


def join_products(graph: StepGraph) -> None:
    """Give the sensitivities the factors of gradients that are products of two vectors."""
    for node in graph.nodes:
        if node.kind == "sensitivities" and node.operands[3] is not None and node.operands[5] is not None:
            buffer, offset = node.operands[5]
            factors = _factors_of(buffer)
            if factors is not None and not offset and buffer.width == node.output.width:
                node.operands[5:] = None, *factors


def separate_products(graph: StepGraph, values: dict[str, Value]) -> tuple[dict[str, Value], list[str]]:
    """Replace every value `gradient NAME` that is a product by its factors `rows NAME` and `columns NAME`.

    Returns:
        The values, and the names of those that are replaced.
    """
    results, separated = {}, []
    for key, value in values.items():
        kind, _, name = key.partition(" ")
        factors = None if kind != "gradient" or value.buffer is None else _factors_of(value.buffer)
        if factors is None or value.shape.numel() != value.buffer.width or len(value.shape) != 2:
            results[key] = value
            continue
        for part, factor, width in zip(("rows", "columns"), factors, value.shape, strict=True):
            results[f"{part} {name}"] = _vector(graph, factor, width)
        separated.append(name)
    return results, separated


def _factors_of(buffer: Buffer) -> tuple[Slice, Slice] | None:
    """The vectors a and b of a matrix a bᵀ; None for another one."""
    node = buffer.node
    if node is None or node.kind != "matmul" or [node.fields[n] for n in ("depth", "a_row", "b_width")] != [1, 1, 1]:
        return None
    return node.operands[0], node.operands[1]


def _vector(graph: StepGraph, source: Slice, width: int) -> Value:
    buffer, offset = source
    whole = Value(torch.Size((buffer.width,)), buffer)
    if buffer.width == width:
        return whole
    return Value(torch.Size((width,)), None, graph.index(whole)[offset : offset + width])
