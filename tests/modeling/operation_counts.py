"""Work counted in Python operations: the same number on every run, however busy the machine is."""

import gc
import sys
from collections.abc import Callable


def count_operations(call: Callable[[], object]) -> int:
    """Bytecode instructions that `call` executes in this thread; one call into compiled code is one of them."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before, collecting = sys.gettrace(), gc.isenabled()
    gc.disable()  # its callbacks would be counted, whenever they come
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        if collecting:
            gc.enable()
    return count
