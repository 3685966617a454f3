"""From counts to the probability of a byte.

A byte is eight binary decisions, from its highest bit on. They are nodes of a tree: the root is number 1, and after a
zero or a one at node k comes node 2k or 2k + 1. At each node:

1. Each *source* (a context of one of the memories) has counts of the bytes below the node with a zero and with a one.
   Rounded to levels, they select a *cell*: an adaptive probability (indirect contexts).
2. Each *set* of weights has rows, and a small context selects one. It mixes the logits of the cells and of the network
   to one logit, y = Σ w x (logistic mixing). A second layer mixes the logits of the sets.
3. Tables *refine* the probability: in a small context, they map it to the observed one, interpolated between knots
   (secondary symbol estimation, SSE).

Cells, weights and knots learn online. Source: Mahoney, "Data Compression Explained" (2013). A probability is an
integer, 65536 times the probability of a one. Numbers are float32 and integers in the order of
`hf_recurrent/kernels/count_memory_mixing.h`, so that both give the same bits.

Shape letters: B streams, T steps. Here n stands for nodes: the 8 on the way to a byte, or all 255.
"""

from dataclasses import dataclass

import numpy as np

from .count_memory_contexts import Arrays, CountStream, FoundCounts, hash_of_two, scrambled
from .count_memory_layout import KNOTS, LANES, LEARNED, LEVELS, MemoryShape, Rates

ONE_HALF = 32768  # of a probability
LOGIT_LIMIT = 3072  # logits in steps of 1/256, below this
INNER_LIMIT = 2047  # logits that are refined, likewise
LEVEL_STARTS = (0, 1, 2, 3, 4, 5, 7, 10, 15, 25, 50)  # the smallest count of each level
MOST_COUNT = 1023
MOST_LOGIT = 11.9
NODE_DEPTHS = np.array([0, *(node.bit_length() - 1 for node in range(1, 256))])


# ---- arithmetic ----------------------------------------------------------------------------------------------------


def _squashed_logits() -> np.ndarray:
    """65536 times the probability of each logit from -LOGIT_LIMIT to LOGIT_LIMIT - 1, in steps of 1/256."""
    steps = np.full(LOGIT_LIMIT, 1.003913889338347573443609603903460281898813)  # exp(1 / 256)
    steps[0] = 1
    e = np.multiply.accumulate(steps)
    upper = np.minimum((e / (1 + e) * 65536 + 0.5).astype(np.int64), 65535)
    lower = 65536 - upper[:0:-1]
    return np.concatenate([lower[:1], lower, upper])


SQUASHED = _squashed_logits()  # (2 * LOGIT_LIMIT,)
# The logit of each probability, of 4096 steps: the least whose probability is not below.
STRETCHED = np.searchsorted(
    SQUASHED[LOGIT_LIMIT - INNER_LIMIT : LOGIT_LIMIT + INNER_LIMIT], np.arange(4096) * 16 + 8
).astype(np.float32) / np.float32(256) - np.float32(INNER_LIMIT / 256)
COUNT_LEVELS = np.searchsorted(LEVEL_STARTS, np.arange(MOST_COUNT + 1), side="right") - 1
# A cell learns at 1 / (1.5 + its number of errors) of the error, so that it begins as their mean; of 65536.
CELL_RATES = 131072 // (2 * np.arange(MOST_COUNT + 1) + 3)


def _clipped(x: np.ndarray, least: float, most: float) -> np.ndarray:
    """NaN becomes `least`."""
    least, most = np.float32(least), np.float32(most)
    return np.where(x > least, np.where(x < most, x, most), least)


def _logit_index(x: np.ndarray) -> np.ndarray:
    """A logit in steps of 1/256, toward zero."""
    return _clipped(x * np.float32(256), 1 - LOGIT_LIMIT, LOGIT_LIMIT - 1).astype(np.int64)


def _quotient(a: np.ndarray, b: int) -> np.ndarray:
    """Integer division toward zero, as in C."""
    return np.sign(a) * (np.abs(a) // b)


def _polynomial(x: np.ndarray, coefficients: tuple[float, ...]) -> np.ndarray:
    value = np.float32(coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + np.float32(coefficient)
    return value


def exp_negative(x: np.ndarray) -> np.ndarray:
    """exp of x <= 0, not below exp(-40); relative error 2e-6."""
    y = _clipped(x, -40, 0) * np.float32(1.4426950408889634)
    k = y.astype(np.int32)
    coefficients = (
        0.00010938752529909834, 0.0012757162330672145, 0.009580058045685291, 0.05549103394150734,
        0.24022436141967773, 0.6931470632553101, 1.0,
    )  # fmt: skip
    return _polynomial(y - k.astype(np.float32), coefficients) * ((k + 127) << 23).view(np.float32)


def log_positive(x: np.ndarray) -> np.ndarray:
    """Natural logarithm of positive normal numbers; absolute error 1e-7 near 1."""
    bits = np.ascontiguousarray(x, np.float32).view(np.int32)
    k = (bits - 0x3F3504F3) >> 23  # the mantissa begins at sqrt(1/2)
    t = (bits - (k << 23)).view(np.float32) - np.float32(1)
    coefficients = (
        0.08743945509195328, -0.14377330243587494, 0.14949095249176025, -0.16560696065425873,
        0.19956977665424347, -0.2500215470790863, 0.3333418369293213, -0.49999988079071045, 1.0,
    )  # fmt: skip
    return _polynomial(t, coefficients) * t + k.astype(np.float32) * np.float32(0.6931471805599453)


# ---- tree of a byte ------------------------------------------------------------------------------------------------


def nodes_on_the_way(byte: int) -> np.ndarray:
    """The 8 nodes (8,) at which the bits of a byte are decided."""
    return (256 | byte) >> np.arange(8, 0, -1)


def bits_of(byte: int) -> np.ndarray:
    """The bits (8,) of a byte, the highest first."""
    return byte >> np.arange(7, -1, -1) & 1


def tree_sums(leaves: np.ndarray) -> np.ndarray:
    """Sums below each node of the tree of a byte: (..., 256) by byte → (..., 512) by node, the leaves second."""
    sums = np.zeros((*leaves.shape[:-1], 512), leaves.dtype)
    sums[..., 256:] = leaves
    for first in (128, 64, 32, 16, 8, 4, 2, 1):
        children = sums[..., 2 * first : 4 * first]
        sums[..., first : 2 * first] = children[..., ::2] + children[..., 1::2]
    return sums


def _predicted_bits(bytes_: np.ndarray | int, nodes: np.ndarray) -> np.ndarray:
    """The bit that each byte has at each node, plus 1; 0 if it is not below the node, or -1. Shapes are broadcast."""
    depths = NODE_DEPTHS[nodes]
    is_below = (np.asarray(bytes_) | 256) >> (8 - depths) == nodes
    return np.where(is_below, 1 + (bytes_ >> (7 - depths) & 1), 0)


def network_nodes(logits: np.ndarray) -> np.ndarray:
    """The network's logits of all nodes (256,), of which [0] is 1, from its logits of all bytes (256,)."""
    most = logits[0] if np.isnan(logits[0]) else np.fmax.reduce(logits)
    sums = tree_sums(exp_negative(logits - most))
    nodes = np.ones(256, np.float32)
    nodes[1:] = log_positive(sums[3::2] / sums[2::2])
    return nodes


def byte_log_probabilities(refined: np.ndarray) -> np.ndarray:
    """Log probabilities of all bytes (256,) float32, from the probabilities (255,) of a one at all nodes."""
    logs = np.empty(512, np.float32)
    logs[2::2] = log_positive((65536 - refined).astype(np.float32) * np.float32(1 / 65536))
    logs[3::2] = log_positive(refined.astype(np.float32) * np.float32(1 / 65536))
    logs[1] = 0
    for first in (2, 4, 8, 16, 32, 64, 128, 256):
        logs[first : 2 * first] = np.repeat(logs[first // 2 : first], 2) + logs[first : 2 * first]
    return logs[256:]


# ---- prediction ----------------------------------------------------------------------------------------------------


@dataclass
class NodePredictions:
    """Predictions at n nodes, and what learns from their bits."""

    cells: np.ndarray  # (n, sources) flat indices of the cells; -1 without counts
    inputs: np.ndarray  # (n, inputs) float32, of the mixer
    rows: np.ndarray  # (n, sets) rows of weights
    outputs: np.ndarray  # (n, sets) float32, the logit of each set
    final_rows: np.ndarray  # (n, finals) rows of the weights of the second layer
    final_probabilities: np.ndarray  # (n, finals) of its mixers
    probabilities: np.ndarray  # (n,) of their mean
    knots: np.ndarray  # (n, refinements) flat indices of the knots below
    parts: np.ndarray  # (n,) distance from them to the next ones, of 128
    refined: np.ndarray  # (n,) 65536 times the probability of a one


def _cell_at(depths, source, recent, depth, zeros, ones):
    """Flat index of a cell in (sources, 3, depths, LEVELS, LEVELS)."""
    return (((source * 3 + recent) * depths + depth * depths // 8) * LEVELS + zeros) * LEVELS + ones


def _find_cells(found: FoundCounts, nodes: np.ndarray, told: int) -> np.ndarray:
    """Cells (n, sources) of the sources at nodes (n,), -1 without counts.

    The cells of a context are selected by its counts of zeros and ones, and by the newest byte after it in the window:
    elsewhere, a zero, or a one. The cells of a match are selected by its length and its bit. `told` is the number of
    depths that cells tell apart.
    """
    sums, depths = tree_sums(found.counts), NODE_DEPTHS[nodes, None]
    zeros, ones = sums[:, 2 * nodes].T, sums[:, 2 * nodes + 1].T
    recent = _predicted_bits(found.recent, nodes[:, None])
    levels = [COUNT_LEVELS[np.minimum(counts, MOST_COUNT)] for counts in (zeros, ones)]
    cells = np.where(zeros + ones > 0, _cell_at(told, np.arange(len(found.counts)), recent, depths, *levels), -1)
    for source, byte, length in (
        (len(found.counts) - 2, found.long_byte, found.long_length),
        (len(found.counts) - 1, found.match_byte, found.match_length),
    ):
        level = length if length < 16 else min(16 + (length - 16) // 4, 20)
        bits = _predicted_bits(byte, nodes)
        at = _cell_at(told, source, level // LEVELS, depths[:, 0], level % LEVELS, bits - 1)
        cells[:, source] = np.where(bits > 0, at, -1)
    return cells


def _inputs_of(shape: MemoryShape, cells: np.ndarray, all_cells: np.ndarray, network: np.ndarray | None) -> np.ndarray:
    """Inputs (n, inputs) of the mixer: logit and probability of each source, a constant, both of the network (n,)."""
    p = all_cells[np.maximum(cells, 0), 0].astype(np.int64)
    inputs = np.zeros((len(cells), shape.inputs), np.float32)
    inputs[:, : shape.bias : 2] = np.where(cells < 0, 0, STRETCHED[p >> 4])
    inputs[:, 1 : shape.bias : 2] = np.where(
        cells < 0, 0, (p - ONE_HALF).astype(np.float32) * np.float32(1 / ONE_HALF)
    )
    inputs[:, shape.bias] = 0.4
    if network is not None:
        probabilities = SQUASHED[LOGIT_LIMIT + _logit_index(network)] - ONE_HALF
        inputs[:, shape.bias + 1] = network
        inputs[:, shape.bias + 2] = probabilities.astype(np.float32) * np.float32(1 / ONE_HALF)
    return inputs


def _select_rows(stream: CountStream, found: FoundCounts, nodes: np.ndarray) -> tuple[np.ndarray, ...]:
    """Rows of weights (n, sets), of the second layer (n, finals), and first knots (n, refinements) as flat indices."""
    history, depths = stream.history, NODE_DEPTHS[nodes]
    match_bits, long_bits = (_predicted_bits(byte, nodes) for byte in (found.match_byte, found.long_byte))
    match_levels = 1 + np.searchsorted((6, 8, 12, 16, 24, 32), found.match_length, side="right")
    match_levels = np.where(match_bits, match_levels, 0)
    long_levels = np.where(long_bits, 1 + np.searchsorted((16, 32), found.long_length, side="right"), 0)
    agreement = np.where((match_bits > 0) & (long_bits > 0), np.where(match_bits == long_bits, 1, 2), 0)
    network = np.zeros_like(nodes)
    if stream["network"][0] > 0:
        network = 12 + (_clipped(stream["network"][nodes], -5.5, 5.5) * np.float32(2)).astype(np.int64)
    place, column = found.order * 5 + found.recent_order, history.column
    if stream.shape.small:
        selected = (place, depths * 8 + match_levels, min(column, 63), history.last >> 3, network)
    else:
        selected = (
            nodes,
            history.last,
            place,
            ((depths * 8 + match_levels) * 4 + long_levels) * 3 + agreement,
            min(column, 23) * 24 + min(history.indent, 23),
            history.last * 8 + depths,
            network * 8 + match_levels,
        )
    final_rows = nodes[:, None]
    contexts = (history.last, found.hashes.contexts[0], (found.match_byte + 1 + 256 * match_levels).astype(np.uint64))
    if stream.shape.large:
        more_rows, more_finals, more_contexts = history.select_more(
            found, nodes, match_bits, match_levels, long_levels
        )
        selected, contexts = selected + more_rows, contexts + more_contexts
        final_rows = np.stack([nodes, more_finals], axis=1)
    firsts = np.cumsum((0, *stream.shape.set_sizes[:-1]))
    rows = np.stack(np.broadcast_arrays(*selected), axis=1) + firsts
    trees, bits = nodes.astype(np.uint64), stream.shape.refinement_bits
    refined = np.stack([hash_of_two(context, trees) for context in contexts], axis=1) >> (32 - bits)
    tables = np.arange(stream.shape.refinements) << bits
    return rows, final_rows, (tables + refined.astype(np.int64)) * KNOTS


def _row_places(rows: np.ndarray, shape: MemoryShape) -> np.ndarray:
    """The slot of each row of weights in a stream's changes; some rows share a slot."""
    return (scrambled(rows.astype(np.uint64)) & (shape.rows - 1)).astype(np.int64)


def _mixed(weights: np.ndarray, inputs: np.ndarray) -> np.ndarray:
    """Sums over inputs of weights (n, sets, inputs) times inputs (n, inputs), by lanes as vector code does."""
    products = weights * inputs[:, None]
    lanes = np.zeros((*products.shape[:2], LANES), np.float32)
    for first in range(0, inputs.shape[-1], LANES):
        lanes = lanes + products[..., first : first + LANES]
    halves = lanes[..., : LANES // 2] + lanes[..., LANES // 2 :]
    return (halves[..., 0] + halves[..., 2]) + (halves[..., 1] + halves[..., 3])


def predict_nodes(
    arrays: Arrays, stream: CountStream, found: FoundCounts, nodes: np.ndarray, *, skips: bool = False
) -> NodePredictions:
    """Predict the bits at nodes (n,). With `skips`, inputs without counts are skipped, whatever their weights are."""
    shape = stream.shape
    cells = _find_cells(found, nodes, shape.depths)
    network = None
    if stream["network"][0] > 0:
        network = _clipped(stream["network"][nodes], -MOST_LOGIT, MOST_LOGIT)
    inputs = _inputs_of(shape, cells, arrays["cells"].reshape(-1, 2), network)
    rows, final_rows, first_knots = _select_rows(stream, found, nodes)
    weights = arrays["weights"][rows]
    if shape.rows and not stream.no_recent:
        weights = weights + stream["rows"][_row_places(rows, shape)]
    if skips:
        is_empty = (cells < 0).all(1)
        weights[is_empty, :, : shape.bias] = weights[is_empty, :, shape.bias + 3 :] = 0
    outputs = _clipped(_mixed(weights, inputs), -MOST_LOGIT, MOST_LOGIT)
    finals, final_weights = np.zeros(final_rows.shape, np.float32), arrays["final_weights"][final_rows]
    for k in range(len(shape.set_sizes)):
        finals = finals + outputs[:, k, None] * (final_weights[..., k] + stream["final_rows"][k])
    final_probabilities = SQUASHED[LOGIT_LIMIT + _logit_index(finals)]
    index = _logit_index(finals.sum(1) * np.float32(1 / shape.finals))
    position = np.clip(index, -INNER_LIMIT, INNER_LIMIT) + INNER_LIMIT + 1
    probabilities, knots, parts = SQUASHED[LOGIT_LIMIT + index], first_knots + (position >> 7)[:, None], position & 127
    q = arrays["refinement"].reshape(-1)[knots[..., None] + (0, 1)].astype(np.int64)
    refinements = (q[..., 0] * (128 - parts[:, None]) + q[..., 1] * parts[:, None]) >> 7
    refined = np.clip((2 * probabilities + refinements.sum(1)) // (2 + shape.refinements), 1, 65535)
    return NodePredictions(
        cells, inputs, rows, outputs, final_rows, final_probabilities, probabilities, knots, parts, refined
    )


# ---- learning ------------------------------------------------------------------------------------------------------


def learn_bits(arrays: Arrays, stream: CountStream, rates: Rates, path: NodePredictions, byte: int) -> None:
    """After a byte is known: the stream's own weights adapt; the shared arrays learn if `rates.learns`.

    Weights take a gradient step on the coding cost of their set or layer, node by node, since nodes may share a row.
    """
    shape = stream.shape
    scale, final_rate = np.float32(1 / 65536), np.float32(rates.final)
    targets = bits_of(byte) * 65535
    errors = (targets - path.probabilities).astype(np.float32) * scale
    set_probabilities = SQUASHED[LOGIT_LIMIT + _logit_index(path.outputs)]
    set_errors = (targets[:, None] - set_probabilities).astype(np.float32) * scale
    final_errors = (targets[:, None] - path.final_probabilities).astype(np.float32) * scale
    if rates.learns:
        learned = arrays["counters"][LEARNED].astype(np.float32) * np.float32(1 / 256)
        rate = np.float32(rates.weights) + np.float32(rates.first_weights) / (np.float32(1) + learned)
        for rows, steps, outputs in zip(path.final_rows, final_errors * final_rate, path.outputs, strict=True):
            arrays["final_weights"][rows] += steps[:, None] * outputs
        for rows, steps, inputs in zip(path.rows, set_errors * rate, path.inputs, strict=True):
            arrays["weights"][rows] += steps[:, None] * inputs
        # Nodes one after another where they may share a cell.
        parts = [slice(None)] if shape.depths == 8 else [slice(node, node + 1) for node in range(8)]
        for part in parts:
            _learn_cells(arrays["cells"].reshape(-1, 2), path.cells[part], targets[part], rates.least_cell)
        _learn_refinements(arrays["refinement"].reshape(-1), path, targets, rates.refinement)
        arrays["counters"][LEARNED] += 1
    if shape.rows and not stream.no_recent:
        final_steps = (errors * final_rate)[:, None] * path.outputs
        places, steps = _row_places(path.rows, shape), set_errors * np.float32(rates.rows)
        own_rows, final_rows = stream["rows"], stream["final_rows"]
        for depth, inputs in enumerate(path.inputs):
            for place, step in zip(places[depth], steps[depth], strict=True):
                own_rows[place] += step * inputs
            final_rows[:] += final_steps[depth]


def _learn_cells(all_cells: np.ndarray, cells: np.ndarray, targets: np.ndarray, least_rate: int) -> None:
    """Move cells (n, sources) toward the bits (n,), fast at first."""
    used, targets = cells[cells >= 0], np.broadcast_to(targets[:, None], cells.shape)[cells >= 0]
    p, n = all_cells[used].astype(np.int64).T
    rates = np.maximum(CELL_RATES[n & MOST_COUNT], least_rate)
    all_cells[used, 0] = np.clip(p + _quotient((targets - p) * rates, 65536), 16, 65519)
    all_cells[used, 1] = n + (n < MOST_COUNT)


def _learn_refinements(knots: np.ndarray, path: NodePredictions, targets: np.ndarray, divisor: int) -> None:
    """Move the nearer knot of each table toward the bit, by the error divided by `divisor`."""
    for below, part, target in zip(path.knots, path.parts, targets, strict=True):
        for knot in below + (part > 63):
            q = int(knots[knot])
            knots[knot] = q + _quotient(target - q, divisor)


def begin_mixing(arrays: Arrays, shape: MemoryShape) -> None:
    """Values before the first byte: cells expect their counts, sets trust all sources alike, tables refine nothing."""
    starts = np.array(LEVEL_STARTS)
    zeros, ones = starts[:, None], starts
    arrays["cells"][..., 0] = (ones * 5 + 2) * 65535 // ((zeros + ones) * 5 + 4)
    arrays["cells"][shape.long_match :, ..., 0] = np.where(np.arange(LEVELS) == 1, 58000, 7500)
    arrays["cells"][..., 1] = 0
    arrays["weights"][:] = 0
    arrays["weights"][:, : shape.bias] = 0.15
    arrays["weights"][:, shape.bias + 1] = 0.3
    arrays["final_weights"][:] = np.float32(1) / np.float32(len(shape.set_sizes))
    logits = np.clip((np.arange(KNOTS) - 16) * 128, -INNER_LIMIT, INNER_LIMIT)
    arrays["refinement"][:] = SQUASHED[LOGIT_LIMIT + logits]
