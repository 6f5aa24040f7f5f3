"""The keeper by itself, with small commands in the worker's place."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the keeper needs Linux")

# A grandchild in a session of its own, which the shell's process group does not hold; it says who it is.
DAEMON = "setsid sh -c 'echo $$ > daemon; exec sleep 1000' & while [ ! -s daemon ]; do sleep 0.01; done; "

# A keeper of a command, which gets the descriptors CONTROL and CHANNEL and watches the process SUPERVISOR.
KEEPER = """
import os, socket, sys
from batchtune.probe.keeper import keep
from batchtune.probe.nursery import ends_of
control, supervisor, channel = map(int, sys.argv[1:4])
os.set_inheritable(channel, True)
keep(socket.socket(fileno=control), ends_of(supervisor), channel, lambda: os.execv(sys.argv[4], sys.argv[4:]))
"""

Keep = Callable[..., "tuple[subprocess.Popen[bytes], socket.socket]"]


@pytest.fixture
def keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Keep]:
    """`keep("exit 3")`: a keeper of a shell in an empty folder, and our end of its control socket."""
    monkeypatch.chdir(tmp_path)
    started: list[tuple[subprocess.Popen[bytes], socket.socket]] = []

    def run(script: str, program: str = "/bin/sh", **options: Any) -> tuple[subprocess.Popen[bytes], socket.socket]:
        control, theirs = socket.socketpair()
        channel, workers = socket.socketpair()
        with theirs, channel, workers:
            numbers = [str(theirs.fileno()), str(os.getpid()), str(workers.fileno())]
            process = subprocess.Popen(
                [sys.executable, "-c", KEEPER, *numbers, program, "-c", script],
                pass_fds=[theirs.fileno(), workers.fileno()],
                start_new_session=True,
                **options,
            )
        started.append((process, control))
        return process, control

    yield run
    for process, control in started:
        process.kill()
        process.wait()
        control.close()


def said(control: socket.socket) -> int:
    """The exit code that the keeper tells, after its own process id."""
    control.settimeout(20)
    with control.makefile("rb") as lines:
        assert int(lines.readline()) > 1
        return int(lines.readline())


def daemon() -> int:
    deadline = time.monotonic() + 20
    while not (text := Path("daemon").read_text() if Path("daemon").exists() else ""):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return int(text)


def ends(pid: int) -> bool:
    """Whether a process ends soon."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 0", 0), ("exit 3", 3), ("kill -SEGV $$", -signal.SIGSEGV), ("kill -KILL $$", -signal.SIGKILL)],
)
def test_the_workers_end_is_told_as_it_was(keep: Keep, script: str, code: int) -> None:
    process, control = keep(script)
    assert said(control) == code
    assert process.wait(20) == 0


def test_a_worker_that_can_not_be_started_is_told(keep: Keep) -> None:
    process, control = keep("", program="/nothing", stderr=subprocess.PIPE)
    assert said(control) == 1
    assert process.stderr is not None
    with process.stderr:
        assert b"FileNotFoundError" in process.stderr.read()


def test_what_left_its_session_ends_with_the_worker(keep: Keep) -> None:
    _, control = keep(DAEMON + "exit 3")
    assert said(control) == 3
    assert ends(daemon())


def test_all_has_ended_when_the_exit_code_is_told(keep: Keep) -> None:
    _, control = keep(DAEMON + "kill -KILL $$")
    assert said(control) == -signal.SIGKILL
    assert not Path(f"/proc/{daemon()}").exists()


def test_what_starts_more_and_more_processes_is_ended(keep: Keep) -> None:
    _, control = keep(DAEMON + "(while :; do setsid sleep 1000 & sleep 0.005; done) & sleep 0.1; exit 4")
    assert said(control) == 4
    assert ends(daemon())


@pytest.mark.parametrize("how", ["closed", "shut down"])
def test_all_ends_when_the_supervisor_lets_go(keep: Keep, how: str) -> None:
    process, control = keep(DAEMON + "sleep 1000")
    last = daemon()
    if how == "closed":
        control.close()
    else:
        control.shutdown(socket.SHUT_WR)
        assert said(control) == -signal.SIGKILL
    assert process.wait(20) == 0
    assert ends(last)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_all_ends_when_the_keeper_is_asked_to(keep: Keep, number: signal.Signals) -> None:
    process, _ = keep(DAEMON + "sleep 1000")
    last = daemon()
    process.send_signal(number)
    assert process.wait(20) == 0
    assert ends(last)


def test_ctrl_c_is_the_supervisors(keep: Keep) -> None:
    process, control = keep(DAEMON + "while [ ! -e stop ]; do sleep 0.01; done; exit 5")
    daemon()
    process.send_signal(signal.SIGINT)
    Path("stop").touch()
    assert said(control) == 5


def test_the_worker_ends_with_its_keeper(keep: Keep) -> None:
    process, _ = keep("echo $$ > daemon; sleep 1000 & wait")
    worker = daemon()
    process.kill()
    assert ends(worker)


def test_the_supervisors_end_is_seen_though_a_child_of_it_holds_the_socket(keep: Keep) -> None:
    """Such a child has the socket by fork alone, without an exec that would close it."""
    code = f"""
import os, socket, subprocess, sys, time
control, theirs = socket.socketpair()
channel, workers = socket.socketpair()
numbers = [str(theirs.fileno()), str(os.getpid()), str(workers.fileno())]
command = [sys.executable, "-c", {KEEPER!r}, *numbers, "/bin/sh", "-c", {DAEMON + "sleep 1000"!r}]
subprocess.Popen(command, pass_fds=[theirs.fileno(), workers.fileno()], start_new_session=True)
theirs.close()
child = os.fork()
if child == 0:
    time.sleep(1000)
print(child, flush=True)
time.sleep(1000)
"""
    supervisor = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert supervisor.stdout is not None
    child = int(supervisor.stdout.readline())
    last = daemon()
    supervisor.kill()
    supervisor.wait()
    try:
        assert ends(last)
    finally:
        os.kill(child, signal.SIGKILL)
        supervisor.stdout.close()


def test_the_worker_gets_no_descriptor_but_its_channel(keep: Keep) -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading) as lines:
        _, control = keep("ls /proc/$$/fd", stdout=writing)
        os.close(writing)
        assert said(control) == 0
        assert len(lines.read().split()) == 4  # the standard streams and the channel
