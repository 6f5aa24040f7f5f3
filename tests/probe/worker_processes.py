"""Finds the processes of this process's supervisors, wherever they are by now."""

import os
import subprocess
import sys
import time
from pathlib import Path

from shared_nursery import OF_LOADERS, SHARED

from batchtune.probe.settings import ProbeSettings
from batchtune.probe.supervisor import Supervisor
from batchtune.processes.worker import MARK

FAULTY = Path(__file__).parent / "faulty_workload.py"


def supervise(
    name,
    *,
    shared=True,
    memory_bytes=1 << 30,
    **options,
):
    """A supervisor of one of the faulty workloads.

    If its workers need other variables of the environment, they can't be `shared` with other tests.
    """
    settings = ProbeSettings(
        workload=f"{FAULTY}:{name}",
        options=options,
        device="cpu",
        memory_bytes=memory_bytes,
        memory_fraction=1.0,
    )
    supervisor = Supervisor(settings)
    if shared:
        supervisor._nursery = SHARED
    return supervisor


def start_python(code, folder):
    """A process that runs the code in a folder, and may import the tests' modules."""
    tests = [str(path) for path in Path(__file__).parents[:2]]
    code = f"import sys; sys.path[:0] = {tests}\n{code}"
    return subprocess.Popen([sys.executable, "-c", code], cwd=folder)


def processes_of(supervisor):
    """All processes that a supervisor's process started, and all that those started, by their environment."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:  # it has ended
            continue
        if f"\0{MARK}={supervisor}-".encode() in b"\0" + environment:
            found.add(int(entry.name))
    return found


def comes_true(condition, seconds=60.0):
    """Whether it does, within the time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def gone(supervisor):
    """Whether they all end."""
    return comes_true(lambda: not processes_of(supervisor))


def ours():
    """The processes of this process's supervisors, but for what tests share."""
    return processes_of(os.getpid()) - SHARED.pids() - OF_LOADERS.pids()
