"""Settings of every test process: no Hub, and one thread where processes run side by side."""

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in what tests start


@pytest.fixture(autouse=True)
def restored_threads():
    """The number of torch's threads, on which the last bits depend, is for each test what it was for the first."""
    import torch  # after the settings above

    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)
