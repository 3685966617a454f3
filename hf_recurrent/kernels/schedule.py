"""The order of a graph's nodes, with element-wise nodes deferred and fused: they run a tile at a time.

A map is deferred until another node needs one of its elements; then it runs together with all maps of its width that
can.
"""

from collections.abc import Callable, Iterable

from .step_graph import Buffer, Node, StepGraph

MAX_TEMPORARIES = 24  # MOST_TEMPORARIES in map.h


class Schedule:
    """The order of the nodes that compute `needed`.

    Args:
        graph: of a step or block.
        needed: buffers that are read afterwards.
        emit: called with every other node in order.
        emit_maps: called with every group of maps that run together, and the temporary in which each result that is
            not stored lies.
    """

    def __init__(
        self,
        graph: StepGraph,
        needed: Iterable[Buffer],
        emit: Callable[[Node], None],
        emit_maps: Callable[[list[Node], dict[Buffer, int]], None],
    ):
        self._needed, self._emit_maps = set(needed), emit_maps
        self._deferred: list[Node] = []
        self._users: dict[Buffer, list[Node]] = {}
        nodes = _moves_first(graph.live_nodes(self._needed))
        for node in nodes:
            for buffer, _ in filter(None, node.operands):
                self._users.setdefault(buffer, []).append(node)
        for node in nodes:
            if node.kind == "map":
                self._deferred.append(node)
                continue
            for buffer, _ in filter(None, node.operands):
                self._flush(buffer)
            emit(node)
        while self._deferred:
            self._flush(self._deferred[0].output)

    def _flush(self, buffer: Buffer) -> None:
        """Run the deferred maps that a buffer waits for, and all others of that width that can run with them."""
        if buffer.node not in self._deferred:
            return
        waiting = set(self._deferred)
        chosen: set[Node] = set()
        self._choose(buffer.node, waiting, chosen)
        for node in self._deferred:
            if node.output.width == buffer.width and node not in chosen and self._can_join(node, waiting, chosen):
                chosen.add(node)
        group = [node for node in self._deferred if node in chosen]
        self._deferred = [node for node in self._deferred if node not in chosen]
        if group:
            self._emit_maps(group, self._temporaries(group))

    def _choose(self, node: Node, waiting: set[Node], chosen: set[Node]) -> None:
        for buffer, offset in filter(None, node.operands):
            if buffer.node not in waiting or buffer.node in chosen:
                continue
            if buffer.width == node.output.width and not offset:
                self._choose(buffer.node, waiting, chosen)
            else:
                self._flush(buffer)
                waiting.intersection_update(self._deferred)
        if node in waiting:
            chosen.add(node)

    def _can_join(self, node: Node, waiting: set[Node], chosen: set[Node]) -> bool:
        return all(
            buffer.node not in waiting or (buffer.node in chosen and not offset and buffer.width == node.output.width)
            for buffer, offset in filter(None, node.operands)
        )

    def _temporaries(self, group: list[Node]) -> dict[Buffer, int]:
        """Results that only this group reads, as long as there are temporaries."""
        inside = set(group)
        stored = {
            node for node in group
            if node.output in self._needed or any(user not in inside for user in self._users.get(node.output, ()))
        }  # fmt: skip
        last = {buffer: number for number, node in enumerate(group) for buffer, _ in filter(None, node.operands)}
        free, temporary = list(range(MAX_TEMPORARIES))[::-1], {}
        for number, node in enumerate(group):
            for buffer, _ in filter(None, node.operands):
                if buffer in temporary and last[buffer] == number and buffer.node in inside:
                    free.append(temporary[buffer])
            free = list(dict.fromkeys(free))
            if node not in stored and free:
                temporary[node.output] = free.pop()
        return temporary


def _moves_first(nodes: list[Node]) -> list[Node]:
    """Nodes in the order of `forward`, but moves as soon as they can run: a state's old and new memory are then used
    close to one another."""
    done: set[Node] = set()
    kept = set(nodes)
    ordered: list[Node] = []
    moves = [node for node in nodes if node.kind == "move"]
    for node in nodes:
        if node in done:
            continue
        ordered.append(node)
        done.add(node)
        for move in moves:
            sources = [buffer.node for buffer, _ in filter(None, move.operands)]
            if move not in done and all(source is None or source in done or source not in kept for source in sources):
                ordered.append(move)
                done.add(move)
    return ordered
