"""An exported learner, compiled for this machine and called through ctypes."""

import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hf_recurrent.cli.main import main as hf_recurrent


class CompiledLearner:
    """A new learner in C.

    Args:
        export: arguments of `hf-recurrent export`, without the format and the folder.

    Attributes:
        memory: bytes of RAM and of flash, the code for a Cortex-M estimated.
    """

    def __init__(self, *export: str):
        compiler = shutil.which(os.environ.get("CC", "cc"))
        if compiler is None:
            raise SystemExit("A C compiler is missing: install gcc or clang, or name one in the variable CC.")
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent, "learner")
            hf_recurrent(["export", *export, "--format", "c", "--learn", "--output_dir", os.fspath(folder)])
            flags = ["-std=c99", "-O2", "-fno-math-errno", "-shared", "-fPIC"]
            command = [compiler, *flags, "model.c", "-o", "model.so", "-lm"]
            subprocess.run(command, cwd=folder, check=True)
            self._library = ctypes.CDLL(os.fspath(folder / "model.so"))
            header, weights = (folder / "model.h").read_text(), (folder / "model.weights").read_bytes()
        self._sizes = {name: int(size) for name, size in re.findall(r"#define MODEL_(\w+) (\d+)", header)}
        code = float(re.search(r"about ([\d.]+) kB of code", header)[1]) * 1000
        self.memory = int(self._sizes["LEARNER_BYTES"] + self._sizes["TABLE_BYTES"] + len(weights) + code)
        self._learner = ctypes.create_string_buffer(self._sizes["LEARNER_BYTES"] + 8)
        self._result = ctypes.c_float()
        self._pointer = ctypes.byref(self._result)
        if self._library.model_init(self._learner, weights, ctypes.c_size_t(len(weights))):
            raise SystemExit("The weights do not belong to the learner.")

    def learn(self, token: int) -> float:
        """Read a byte and learn from it: its loss before, in nats."""
        self._check(self._library.model_learn(self._learner, token, self._pointer))
        return self._result.value

    def learn_values(self, values: Sequence[float]) -> float:
        """Read a vector and learn from it: how unexpected it was; 1 is usual."""
        self._check(self._library.model_learn(self._learner, (ctypes.c_float * len(values))(*values), self._pointer))
        return self._result.value

    def predict(self) -> np.ndarray:
        """Logits of the next byte, or the next vector."""
        found = np.empty(self._sizes.get("VOCAB_SIZE") or self._sizes["INPUTS"], dtype=np.float32)
        self._check(self._library.model_predict(self._learner, found.ctypes.data_as(ctypes.c_void_p)))
        return found

    def _check(self, outcome: int) -> None:
        if outcome:
            raise RuntimeError(f"The learner returned the error {outcome}; its header says which.")
