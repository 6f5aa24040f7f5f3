"""What all tests share. Being here, it also puts this folder on the import path: `import report_records`."""

import fcntl
import gc
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import real_speechbrain
from hypothesis import settings

pytest_plugins = ["tiers"]

# So many examples of each law, the same ones in CI; more with `--hypothesis-profile=thorough`.
for profile, examples in (("thorough", 300), ("few", 25)):
    settings.register_profile(profile, max_examples=examples, deadline=None)
settings.load_profile("few")

# Many tests start processes, each of which would compile all that it imports.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Their tests share what takes seconds to make: a process that has PyTorch, a trainer's import, a browser. They come
# first and in this order, since xdist deals out the tests in order, and evens out from the end of each process's share.
TOGETHER = (
    "cli/",
    "loaders/test_loader_worker.py",
    "probe/",
    "exports/test_framework_snippets.py",
    "test_sampler_frameworks.py",
    "test_same_step_sampler.py",
    "scripts/",
    "workloads/",
    "reports/test_html_in_chromium.py",
)


def pytest_collection_modifyitems(items):
    def place(item):
        path = os.path.relpath(item.path, Path(__file__).parent)
        return next(
            (place for place, part in enumerate(TOGETHER) if path.startswith(part)),
            len(TOGETHER),
        )

    items.sort(key=place)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Thousands of tests stay to the end: the collector, which many of them call, need not look through them then."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        # Modules begin with a collection of their own; few more are needed, which imports would call for by hundreds.
        gc.set_threshold(100_000)
        if torch := sys.modules.get("torch"):
            # More wait for each other, and spin meanwhile where other programs run.
            torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def temporary_folder_of_this_process(tmp_path_factory):
    """Gives this process, and all that it starts, a temporary folder of its own.

    The lock of a device lies there, and test processes that run side by side must not wait for each other.
    """
    folder = tmp_path_factory.mktemp("tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        yield


@pytest.fixture(scope="module")
def folder_of_module(tmp_path_factory):
    return tmp_path_factory.mktemp("module")


@pytest.fixture
def tmp_path(folder_of_module):
    """A folder of each test, beside few others: pytest lists them all to name one, and a scratch links to them all."""
    return Path(tempfile.mkdtemp(dir=folder_of_module))


@pytest.fixture(scope="session", autouse=True)
def nothing_waits_for_the_disk():
    """No power is lost while tests run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(scope="module", autouse=True)
def little_to_collect():
    """What earlier modules imported stays, too: each trial calls the collector, which would look through it all."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def interrupts_reach_what_is_started():
    """A shell starts background jobs with SIGINT ignored, and all that they start would ignore it too."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def one_nursery():
    """All workers of a module's probes in this process come from one nursery, which imports PyTorch once."""
    from shared_nursery import SHARED

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("batchtune.probe.supervisor.Nursery", lambda *_: SHARED)
        yield


@pytest.fixture(scope="session")
def made_once(tmp_path_factory):
    """`made_once(name, make)`: a folder that `make` has filled, once for all test processes; not to be written to."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent

    def folder_of(name, make):
        folder, done = root / f"once-{name}", root / f"once-{name}.done"
        with (root / f"once-{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                done.touch()
        return folder

    return folder_of


@pytest.fixture
def torchaudio_or_none(monkeypatch):
    real_speechbrain.torchaudio_or_none(monkeypatch)
