"""The count memory of an exported learner: the source of the compiled kernel itself, with its tables as constants."""

import re
from pathlib import Path

import numpy as np
import torch

import hf_recurrent.kernels
from hf_recurrent.export.c_tables import Table
from hf_recurrent.modeling.contexts.count_memory import CountMemory
from hf_recurrent.modeling.contexts.count_memory_layout import Rates
from hf_recurrent.modeling.contexts.count_memory_mixing import CELL_RATES, COUNT_LEVELS, SQUASHED, STRETCHED

_LEARNING = Rates(learns=True, inserts=True)
TABLE_BYTES = 25_600  # constants that the kernel computes when it is loaded
BEGINS_BYTES = 8  # after the state: whether the last byte is the first of its episode


class CountPlan:
    """Where the count memory of a model lies in the bytes of a learner.

    Args:
        memory: of the model.

    Attributes:
        offsets: name of an array → its first byte; the state of the stream is "state".
        learned_bytes: of the arrays, without the state.
        size: bytes of all, a multiple of 8.
    """

    def __init__(self, memory: CountMemory):
        self.memory, self.offsets, at = memory, {}, 0
        for name, array in memory.arrays().items():
            self.offsets[name] = at
            at += -(-array.nbytes // 8) * 8
        self.learned_bytes = self.offsets["state"] = at
        self.size = at + memory.state_bytes + BEGINS_BYTES

    def learned(self) -> bytes:
        """The arrays as they are."""
        return b"".join(a.tobytes().ljust(-(-a.nbytes // 8) * 8, b"\0") for a in self.memory.arrays().values())

    def encoded(self, state: torch.Tensor, begins: bool) -> bytes:
        """All of it, with the state of a stream."""
        return self.learned() + state.numpy().tobytes() + int(begins).to_bytes(BEGINS_BYTES, "little")

    def decode(self, content: bytes, state: torch.Tensor) -> bool:
        """Continue from what [`encoded`] wrote; returns whether the last byte begins an episode."""
        for name in self.memory.arrays():
            part = self.memory.get_buffer(name).view(torch.uint8).view(-1)
            part.copy_(torch.frombuffer(bytearray(content[self.offsets[name] :][: len(part)]), dtype=torch.uint8))
        at = self.offsets["state"]
        state.copy_(torch.frombuffer(bytearray(content[at:-BEGINS_BYTES]), dtype=torch.uint8).view_as(state))
        return content[-BEGINS_BYTES] == 1

    def source(self) -> str:
        """C text before the functions of a learner."""
        shape, arrays = self.memory.shape, self.memory.arrays()
        sizes = shape.slots, shape.text, arrays["index"].shape[1]
        numbers = *(size.bit_length() - 1 for size in sizes), shape.match_bits, shape.window, shape.rows
        pointers = ", ".join(
            f"({kind} *)(void *)(counts + {self.offsets[name]})" for name, kind in zip(arrays, _KINDS, strict=True)
        )
        rates = ", ".join(f"{float(rate)!r}f" for rate in _LEARNING[:4])
        texts = {
            "SIZES": ", ".join(map(str, numbers)),
            "POINTERS": pointers,
            "RATES": f"{rates}, {_LEARNING.least_cell}, {_LEARNING.refinement}",
            "STATE_BYTES": str(self.memory.state_bytes),
            "STATE": str(self.offsets["state"]),
        }
        interface = re.sub(r"\b(SIZES|POINTERS|RATES|STATE_BYTES|STATE)\b", lambda m: texts[m[1]], _INTERFACE)
        return _kernel_source() + interface


def count_plan(model: torch.nn.Module) -> CountPlan | None:
    """Of the count memory of a model, if it has one."""
    memory = getattr(model, "count_memory", None)
    return None if memory is None else CountPlan(memory)


_KINDS = ("struct slot", "uint8_t", "uint32_t", "struct cell", "float", "float", "uint16_t", "int64_t")

_INTERFACE = """
/* Read `byte`, mix the network's prediction of the next one, `target`, and learn: `nats` gets its loss. Or, if `all`
 * is not null, write the log probabilities of all bytes and learn nothing; the state changes as in reading. */
static void NAME_count(unsigned char *counts, unsigned char *state, int begins, int byte, int target,
                       const float *network, float *nats, float *all) {
    struct memory m = {SIZES, POINTERS};
    const struct rates rates = {RATES, all ? 0 : LEARNS | INSERTS};
    const uint8_t read = (uint8_t)byte, flags = (uint8_t)(REAL_STEP | (begins ? RESET_STEP : 0));
    const int32_t next = target;
    const struct block b = {1, 1, 256, 0, 0, &read, &flags, &next, network, nats, 0, all, 0, 0};
    read_stream_base(&m, (struct stream *)(void *)state, &rates, 0, &b);
}

/* Log probabilities of all bytes after `byte`; `copy` has room for a state. */
static void NAME_mix(struct NAME_learner *learner, int byte, float *logits) {
    unsigned char *counts = (unsigned char *)learner->saved.counts;
    memcpy(learner->copy, counts + STATE, STATE_BYTES);
    memcpy(learner->network, logits, sizeof learner->network);
    NAME_count(counts, (unsigned char *)learner->copy, counts[STATE + STATE_BYTES], byte, -1, learner->network, 0,
               logits);
}
"""


def _kernel_source() -> str:
    """The kernel that reads a stream, without its tables, which are computed here, and for one instruction set.

    The parts of large memories are left out.
    """
    folder = Path(hf_recurrent.kernels.__file__).parent

    def text(name: str) -> str:
        return (folder / f"count_memory{name}").read_text(encoding="utf-8")

    sizes = re.sub(r"static void make_tables\(void\)\n\{.*?\n\}\n", "", text(".h"), flags=re.DOTALL)
    for kind, name, values in (
        ("uint16_t", "squashed", SQUASHED),
        ("int16_t", "stretched", STRETCHED * 256),
        ("uint8_t", "level_of", COUNT_LEVELS),
        ("int32_t", "cell_rate", CELL_RATES),
    ):
        table = Table(kind, name, torch.from_numpy(values.astype(np.int64))).definition()
        sizes, found = re.subn(rf"static {kind} {name}\[.*?\];.*", lambda _, table=table: table, sizes)
        assert found == 1, name
    # Of the functions that are left out.
    sizes = re.sub(r"static const int LEVEL_FROM.*\n", "", sizes)
    sizes = re.sub(r"/\* exp of x <= 0.*?\n\}\n", "", sizes, flags=re.DOTALL)
    sizes = re.sub(r"#include.*\n|#define EXPORT.*\n", "", sizes)
    block = re.search(r"/\* Blocks of streams.*?\n\};\n", text("_cpu.c"), flags=re.DOTALL)[0]
    parts = (sizes, text("_contexts.h"), block, text("_mixing.h"), text("_reading.h"))
    source = re.sub(r"#ifdef LARGE\n.*?(?:#else\n(.*?))?#endif\n", r"\1", "\n".join(parts), flags=re.DOTALL)
    source = re.sub(r"\bNAME\((\w+)\)", r"\1_base", source)
    return re.sub(r"\bTARGET ", "", source)
