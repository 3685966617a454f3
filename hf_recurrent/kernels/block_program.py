"""The graph of one block as the words that block_cpu.c runs."""

from .step_graph import Buffer, Node, StepGraph, Value
from .step_program import StepWords, _bits

_FIRST = 100  # MATMUL in block_cpu.c
_OPERATIONS = (
    "matmul", "broadcast", "scan", "scan_backward", "norm_backward", "pick", "pick_backward", "look_up",
    "look_up_backward", "sensitivities", "finite",
)  # fmt: skip


class BlockWords(StepWords):
    """The words of a graph of one block of one stream; spans say whose operations they are.

    Args:
        graph: of the block.
        outputs: name → value.
        guards: see [`StepWords`].
        effects: values of nodes that run for what they change.
    """

    operations = StepWords.operations | {name: _FIRST + number for number, name in enumerate(_OPERATIONS)}

    def __init__(self, graph: StepGraph, outputs: dict[str, Value], guards: list, effects: list[Value]):
        self._effects = [value.buffer for value in effects]
        super().__init__(graph, outputs, guards)

    def _schedule(self, needed: list[Buffer]) -> None:
        super()._schedule([*needed, *self._effects])

    def _chain_spans(self) -> list[tuple[int, int, bool]]:
        ours = [step.operation in _OPERATIONS for step in self.steps]
        begins = [n for n in range(len(ours)) if n == 0 or ours[n] != ours[n - 1]]
        self._of_step = [not ours[begin] for begin in begins]
        return [(begin, end, False) for begin, end in zip(begins, [*begins[1:], len(ours)], strict=True)]

    def _write(self) -> None:
        super()._write()
        pairs = zip(self.spans, self._of_step, strict=True)
        self.spans = [(begin, end, int(of_step)) for (begin, end, _), of_step in pairs]

    def _emit_node(self, node: Node, *memory: Buffer, **fields) -> None:
        reads = [buffer for buffer, _ in filter(None, node.operands)]
        self._emit(node.kind, reads, [node.output, *memory], node=node, **fields)

    _emit_broadcast = _emit_scan = _emit_scan_backward = _emit_norm_backward = _emit_pick = _emit_node
    _emit_pick_backward = _emit_look_up = _emit_look_up_backward = _emit_sensitivities = _emit_finite = _emit_node

    def _emit_matmul(self, node: Node) -> None:
        f = node.fields
        packs = f["b_width"] != 1
        packed = Buffer(f["depth"] * (f["rows"] + _MOST_LANES) if packs else 0)
        self._emit_node(node, packed, packed=packed)

    def _words(self, node: Node, *names: str) -> list[int]:
        """Fields of a node, its operands and its result."""
        operands = [*node.operands, (node.output, 0)]
        return [node.fields[name] for name in names] + [word for place in operands for word in self._operand(place)]

    def _write_matmul(self, node: Node, packed: Buffer) -> list[int]:
        words = self._words(node, "rows", "depth", "width", "a_row", "a_depth", "b_depth", "b_width")
        return [*words, *self._operand((packed, 0))]

    def _write_broadcast(self, node: Node) -> list[int]:
        return self._words(node, "outer", "count", "inner")

    def _write_scan(self, node: Node) -> list[int]:
        return self._words(node, "steps", "width")

    _write_scan_backward = _write_scan

    def _write_norm_backward(self, node: Node) -> list[int]:
        count, width, *operands = self._words(node, "count", "width")
        return [count, width, _bits(node.fields["eps"]), *operands]

    def _write_pick(self, node: Node) -> list[int]:
        steps, width, *operands = self._words(node, "steps", "width")
        return [steps, width, node.fields.get("one_grad", 0), *operands]

    _write_pick_backward = _write_pick

    def _write_look_up(self, node: Node) -> list[int]:
        return self._words(node, "steps", "height", "width")

    _write_look_up_backward = _write_look_up

    def _write_sensitivities(self, node: Node) -> list[int]:
        words = self._words(node, "steps", "channels", "rows", "groups", "columns")
        if node.operands[-1] is None:  # no gradient: its place is not written
            words[-4:] = [-1, 0, 0, 0]
        return words

    def _write_finite(self, node: Node) -> list[int]:
        return self._words(node)[:4]


_MOST_LANES = 16  # of a vector in block_cpu.c
