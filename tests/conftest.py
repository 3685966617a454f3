"""Settings of every test process: no Hub, and one thread where processes run side by side."""

import gc
import os
import zlib
from collections import defaultdict

import hypothesis
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in what tests start


# Each run checks the same examples, here and in CI; `--hypothesis-profile default` looks for new ones.
hypothesis.settings.register_profile("repeated", derandomize=True)
hypothesis.settings.load_profile("repeated")

# Files of few and long tests, the longest first. Processes take whole files in this order, so that none ends alone.
_LONG = (
    "test_docs.py", "test_user_code.py", "test_c_source.py", "test_browser.py", "test_short_forms.py",
    "test_linear_scan_triton.py", "test_checkpointing.py", "test_stop_signals.py", "test_hub_round_trip.py",
    "test_auto_registration.py", "test_experiments.py", "test_packaging.py", "test_pretrain.py",
    "test_learn_resume.py",
)  # fmt: skip


_COMMANDS = pytest.StashKey()
_ON_REQUEST = {"slow": "takes minutes", "long": "takes many seconds, and .ci/run runs it"}


@pytest.hookimpl(tryfirst=True)  # before `-m` deselects
def pytest_collection_modifyitems(config, items):
    _sample(items)
    for item in items:
        marker = next((name for name in _ON_REQUEST if item.get_closest_marker(name)), None)
        if marker and marker not in config.option.markexpr:
            item.add_marker(pytest.mark.skip(reason=f"{_ON_REQUEST[marker]}: pytest -m {marker}"))
    ranks = {name: rank for rank, name in enumerate(_LONG)}
    items.sort(key=lambda item: ranks.get(item.path.name, len(ranks)))


def _sample(items):
    """Leave most cases of a test marked `sampled` to the long run."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled"):
            cases[item.function].append(item)
    for same in cases.values():
        every = same[0].get_closest_marker("sampled").args[0]
        # A stride over the order of parameters would always miss the same values.
        same.sort(key=lambda item: zlib.crc32(item.name.encode()))
        for place, item in enumerate(same):
            if place % every:
                item.add_marker(pytest.mark.long)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    gc.disable()  # nothing becomes garbage while modules are imported
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session):
    _leave_out()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    if nextitem is None or nextitem.path != item.path:
        _leave_out()


def _leave_out():
    """Leave modules and tests out of garbage collection: `Trainer` collects at each run, half a second with them."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # a worker of xdist has a loop of its own, after which no other one begins
def pytest_runtestloop(session):
    """Fork the server of commands, if a test asks for it: after collection, which imports, before the first test."""
    if any("commands" in getattr(item, "fixturenames", ()) for item in session.items):
        from command_server import CommandServer

        session.config.stash[_COMMANDS] = CommandServer()


def pytest_unconfigure(config):
    gc.unfreeze()
    if server := config.stash.get(_COMMANDS, None):
        server.close()


@pytest.fixture(scope="session")
def bare_python(tmp_path_factory):
    """Runs programs in children of a process with torch and transformers, but nothing of the package."""
    from command_server import CommandServer

    home = str(tmp_path_factory.mktemp("bare"))
    server = CommandServer(bare=True, environment={"HF_HOME": home})
    yield server
    server.close()


@pytest.fixture(scope="session")
def commands(pytestconfig):
    """Runs commands of the package in children of this process; a `CommandServer`."""
    return pytestconfig.stash[_COMMANDS]


@pytest.fixture(autouse=True)
def restored_threads():
    """The number of torch's threads, on which the last bits depend, is for each test what it was for the first."""
    import torch  # after the settings above

    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)
