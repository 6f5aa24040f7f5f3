"""The nursery by itself, with small commands in the worker's place."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from worker_processes import comes_true

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="the nursery needs Linux"),
]

# A grandchild in a session of its own, which the shell's process group does not hold; it says who it is.
DAEMON = "setsid sh -c 'echo $$ > daemon; exec sleep 1000' & while [ ! -s daemon ]; do sleep 0.01; done; "

# A nursery of a command, which gets the descriptor CONTROL and watches the process SUPERVISOR.
NURSERY = """
import os, socket, sys
from batchtune.processes.nursery import serve
def work(channel):
    os.set_inheritable(channel, True)
    os.execv(sys.argv[3], sys.argv[3:])
serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), work)
"""

# A semaphore and a shared memory whose names hold the process id.
SHARING = """
import multiprocessing, os, time
from multiprocessing.shared_memory import SharedMemory
multiprocessing.current_process()._config["semprefix"] = f"/made-{os.getpid()}"
semaphore = multiprocessing.get_context("spawn").Semaphore()
memory = SharedMemory(f"made-{os.getpid()}", create=True, size=1)
print(os.getpid(), file=open("daemon", "w"), flush=True)
time.sleep(1000)
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """`start("exit 3")`: a nursery whose worker is a shell in an empty folder, and our end of its control socket."""
    monkeypatch.chdir(tmp_path)
    started = []

    def run(script, program="/bin/sh", output=2):
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel, workers = socket.socketpair()
        with theirs, channel, workers:
            numbers = [str(theirs.fileno()), str(os.getpid())]
            process = subprocess.Popen(
                [sys.executable, "-c", NURSERY, *numbers, program, "-c", script],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
            started.append((process, control))
            folder = os.open(".", os.O_RDONLY)
            socket.send_fds(control, [b"start"], [workers.fileno(), output, folder])
            os.close(folder)
        control.settimeout(20)
        assert control.recv(64) == b"started"
        return process, control

    yield run
    for process, control in started:
        control.close()
        process.kill()
        process.wait()


def exit_code(control):
    """The worker's exit code, as the nursery reports it."""
    return int(control.recv(64))


def daemon():
    said = Path("daemon")
    assert comes_true(lambda: said.exists() and said.read_text())
    return int(said.read_text())


def ends(pid):
    """Whether a process ends soon."""

    def has_ended():
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return True
        return stat.rpartition(")")[2].split()[0] in "ZX"

    return comes_true(has_ended)


def test_a_worker_that_can_not_be_started_is_told(start):
    reading, writing = os.pipe()
    with os.fdopen(reading) as lines:
        _, control = start("", program="/nothing", output=writing)
        os.close(writing)
        assert exit_code(control) == 1
        assert "FileNotFoundError" in lines.read()


def test_what_starts_more_and_more_processes_is_ended(start):
    _, control = start(
        DAEMON
        + "(while :; do setsid sleep 1000 & sleep 0.005; done) & sleep 0.1; exit 4"
    )
    assert exit_code(control) == 4
    assert ends(daemon())


def test_ctrl_c_is_the_supervisors(start):
    process, control = start(
        DAEMON + "while [ ! -e stop ]; do sleep 0.01; done; exit 5"
    )
    daemon()
    process.send_signal(signal.SIGINT)
    Path("stop").touch()
    assert exit_code(control) == 5


def test_the_supervisors_end_is_seen_despite_an_open_socket(tmp_path, monkeypatch):
    """Such a child has the socket by fork alone, without an exec that would close it."""
    monkeypatch.chdir(tmp_path)
    code = f"""
import os, socket, subprocess, sys, time
control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
channel, workers = socket.socketpair()
numbers = [str(theirs.fileno()), str(os.getpid())]
command = [sys.executable, "-c", {NURSERY!r}, *numbers, "/bin/sh", "-c", {DAEMON + "sleep 1000"!r}]
subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
theirs.close()
socket.send_fds(control, [b"start"], [workers.fileno(), 2, os.open(".", os.O_RDONLY)])
child = os.fork()
if child == 0:
    time.sleep(1000)
print(child, flush=True)
time.sleep(1000)
"""
    supervisor = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    child = int(supervisor.stdout.readline())
    last = daemon()
    supervisor.kill()
    supervisor.wait()
    try:
        assert ends(last)
    finally:
        os.kill(child, signal.SIGKILL)
        supervisor.stdout.close()


def test_the_worker_gets_no_descriptor_but_its_channel(start):
    reading, writing = os.pipe()
    with os.fdopen(reading) as lines:
        _, control = start("ls /proc/$$/fd", output=writing)
        os.close(writing)
        assert exit_code(control) == 0
        assert len(lines.read().split()) == 4  # the standard streams and the channel


def test_what_is_killed_leaves_nothing_in_shared_memory(start):
    _, control = start(SHARING, program=sys.executable)
    names = f"*made-{daemon()}*"
    assert len(list(Path("/dev/shm").glob(names))) == 2
    control.send(b"end")
    assert exit_code(control) == -signal.SIGKILL
    assert not list(Path("/dev/shm").glob(names))
