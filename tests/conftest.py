"""Settings of every test process: no Hub, and one thread where processes run side by side."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in what tests start
