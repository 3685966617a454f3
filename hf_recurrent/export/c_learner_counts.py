"""The count memory of an exported learner: the source of the compiled kernel itself, with its tables as constants."""

import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch

import hf_recurrent.kernels
from hf_recurrent.export.c_tables import Table
from hf_recurrent.modeling.contexts.count_memory import CountMemory
from hf_recurrent.modeling.contexts.count_memory_layout import MemoryShape, Rates
from hf_recurrent.modeling.contexts.count_memory_mixing import CELL_RATES, COUNT_LEVELS, SQUASHED, STRETCHED

_LEARNING = Rates(learns=True, inserts=True)
TABLE_BYTES = 23_552  # constants that the kernel computes when it is loaded
COPIED_CODE = 4_900  # of functions that compilers copy to where they are called
STACK_BYTES = 13_000  # of a prediction of all bytes
BEGINS_BYTES = 8  # after the state: whether the last byte is the first of its episode


class CountPlan:
    """Layout of a model's count memory in the bytes of a learner.

    Attributes:
        offsets: name of an array → its first byte; the state of the stream is "state".
        learned_bytes: of the arrays, without the state.
        size: bytes of all, a multiple of 8.
        is_empty: nothing was learned, so that C begins as Python does, and a file of weights has no arrays.
        copy_bytes: the first part of a state, which a prediction puts back.
    """

    def __init__(self, memory: CountMemory):
        self.memory, self.offsets, at = memory, {}, 0
        for name, array in memory.arrays().items():
            self.offsets[name] = at
            at += -(-array.nbytes // 8) * 8
        self.learned_bytes = self.offsets["state"] = at
        self.size = at + memory.state_bytes + BEGINS_BYTES
        fresh = CountMemory(memory.shape).arrays()
        self.is_empty = all(np.array_equal(array, fresh[name]) for name, array in memory.arrays().items())
        self.copy_bytes = memory.shape.stream.fields["ring"][1]

    @property
    def file_bytes(self) -> int:
        """Bytes of the file of weights."""
        return 0 if self.is_empty else self.learned_bytes

    @property
    def start(self) -> str:
        """C text that copies the arrays from `payload`, or makes empty ones."""
        if not self.is_empty:
            return f"memcpy(learner->saved.counts, payload, {self.learned_bytes});"
        return "NAME_forget_counts(learner);"

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
            "FORGET": _FORGET if self.is_empty else "",
            "BEGIN": str(self.size - BEGINS_BYTES),
        }
        interface = re.sub(rf"\b({'|'.join(texts)})\b", lambda m: texts[m[1]], _INTERFACE)
        return _kernel_source(shape, not self.is_empty) + interface


def count_plan(model: torch.nn.Module) -> CountPlan | None:
    """The plan of the count memory of a model, if it has one."""
    memory = getattr(model, "count_memory", None)
    return None if memory is None else CountPlan(memory)


_KINDS = ("struct slot", "uint8_t", "uint32_t", "struct cell", "float", "float", "uint16_t", "int64_t")

_INTERFACE = """
static struct memory NAME_memory(unsigned char *counts) {
    const struct memory m = {SIZES, POINTERS};
    return m;
}
FORGET

/* Read `byte`, mix the network's prediction of the next one, `target`, and learn: `nats` gets its loss. Or, if `all`
 * is not null, write the log probabilities of all bytes and learn nothing; the state changes as in reading. */
static void NAME_count(struct NAME_learner *learner, int byte, int target, const float *network, float *nats,
                       float *all) {
    unsigned char *counts = (unsigned char *)learner->saved.counts;
    struct memory m = NAME_memory(counts);
    const struct rates rates = {RATES, all ? 0 : LEARNS | INSERTS};
    const uint8_t read = (uint8_t)byte, flags = REAL_STEP;
    const int32_t next = target;
    const struct block b = {1, 1, 256, 0, 0, &read, &flags, &next, network, nats, 0, all, 0, 0};
    read_stream_base(&m, (struct stream *)(void *)(counts + STATE), &rates, 0, &b);
}

/* An episode begins: the end of the last one is learned from, and the state is zero. */
static void NAME_begin_episode(struct NAME_learner *learner) {
    unsigned char *counts = (unsigned char *)learner->saved.counts;
    struct memory m = NAME_memory(counts);
    const struct rates rates = {RATES, LEARNS | INSERTS};
    const struct block b = {0};
    struct path path;
    struct found found;
    path.valid = 0;
    end_document_base(&m, (struct stream *)(void *)(counts + STATE), &rates, &path, &found, 0, &b);
    memset(counts + STATE, 0, STATE_BYTES);
    counts[BEGIN] = 0;
}

/* Log probabilities of all bytes after `byte`. What reading it changes in the state is put back: its first part, a
 * byte of the ring, and what the short-term memory knows here. */
static void NAME_mix(struct NAME_learner *learner, int byte, float *logits) {
    unsigned char *counts = (unsigned char *)learner->saved.counts;
    const struct memory m = NAME_memory(counts);
    struct stream *s = (struct stream *)(void *)(counts + STATE);
    uint8_t *replaced = ring_of(&m, s) + (s->history.position & (ring_size(&m) - 1)), *place = replaced;
    const uint8_t before = *replaced;
    const int has_recent = !without_recent(&m, s);
    const size_t width = wide_positions(&m) ? 4 : 2;
    struct slot buckets[RECENT_CONTEXTS][WAYS], *recent[RECENT_CONTEXTS];
    unsigned char link[4];
    memcpy(learner->copy, s, sizeof learner->copy);
    memcpy(learner->network, logits, sizeof learner->network);
    if (has_recent) {
        struct hashes hashes;
        find_hashes(&s->history, ring_of(&m, s), ring_size(&m) - 1, &hashes);
        for (int k = 0; k < RECENT_CONTEXTS; k++) {
            recent[k] = recent_bucket(&m, s, k, recent_hash(&hashes, k));
            memcpy(buckets[k], recent[k], sizeof buckets[k]);
        }
        place = (uint8_t *)match_index_of(&m, s) + match_place(&m, &hashes) * width;
        memcpy(link, place, width);
    }
    NAME_count(learner, byte, -1, learner->network, 0, logits);
    if (has_recent) {
        for (int k = 0; k < RECENT_CONTEXTS; k++) memcpy(recent[k], buckets[k], sizeof buckets[k]);
        memcpy(place, link, width);
    }
    *replaced = before;
    memcpy(s, learner->copy, sizeof learner->copy);
}
"""


_FORGET = """
static void NAME_forget_counts(struct NAME_learner *learner) {
    struct memory m = NAME_memory((unsigned char *)learner->saved.counts);
    begin_memory(&m);
}
"""


def _kernel_source(shape: MemoryShape, keeps: bool) -> str:
    """The kernel that reads a stream, for one instruction set, after its tables, which are computed here."""
    tables = (
        ("uint16_t", "squashed", SQUASHED),
        ("int16_t", "stretched", STRETCHED * 256),
        ("uint8_t", "level_of", COUNT_LEVELS),
        ("uint16_t", "cell_rate", CELL_RATES),
    )
    texts = [
        Table(kind, name, torch.from_numpy(values.astype(np.int64))).definition() for kind, name, values in tables
    ]
    defined = {"EXPORTED", *["SMALL"] * shape.small, *["KEEPS_COUNTS"] * keeps}
    folder = Path(hf_recurrent.kernels.__file__).parent
    for name in ("", "_contexts", "_mixing", "_all_bytes", "_reading"):
        text = (folder / f"count_memory{name}.h").read_text(encoding="utf-8")
        texts.append("\n".join(_selected(text.splitlines(), defined)))
    source = re.sub(r"\bNAME\((\w+)\)", r"\1_base", "\n".join(texts))
    return re.sub(r"\bTARGET ", "", source)


def _selected(lines: Iterable[str], defined: Collection[str]) -> Iterator[str]:
    """The lines that a preprocessor keeps where only these names are defined, without the conditions themselves."""
    kept: list[bool] = []  # for each open condition
    for line in lines:
        word, *names = line.split(maxsplit=2)[:2] or [""]
        if word in ("#ifdef", "#ifndef"):
            kept.append((names[0] in defined) == (word == "#ifdef"))
        elif word == "#else":
            kept[-1] = not kept[-1]
        elif word == "#endif":
            kept.pop()
        elif word in ("#if", "#elif"):
            raise AssertionError(line)
        elif all(kept):
            yield line
