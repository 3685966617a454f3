"""Test helpers import each other by name from their own folder; files side by side take a thread each."""

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in what tests start
sys.path.insert(0, str(Path(__file__).parent / "modeling"))
