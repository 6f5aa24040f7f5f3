"""The supervisor, with made answers in the place of its worker processes."""

import math
import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from made_devices import made_device
from made_trials import ran
from msgspec.structs import replace

from batchtune.errors import BatchtuneError, OptionError, ProbeError, WorkloadError
from batchtune.probe.devices import DeviceBusy, DeviceIdentity, lock_device
from batchtune.probe.requests import Identified, Identify, Prepare, Ran, Ready, RunTrial
from batchtune.probe.settings import ProbeSettings
from batchtune.probe.supervisor import Supervisor, worker_program
from batchtune.processes.worker import (
    Connection,
    Failed,
    Nursery,
    WorkerLost,
    encode,
)
from batchtune.results import BatchShape, DeviceProcess

SHAPE = BatchShape(2, 3.0)
SETTINGS = ProbeSettings(
    workload="train.py:Mine",
    options={},
    device="cpu",
    trial_timeout_seconds=15.0,
    setup_timeout_seconds=60.0,
)
DEVICE = made_device()
STACK = 'Traceback:\n  File "/me/train.py", line 12, in step\n    wait()\n'
PLACE = "it hangs at train.py, line 12, in step"
GPU = DeviceIdentity("GPU-made", "GPU")
CPU = DeviceIdentity("cpu", "the CPU", shared=True)


class MadeNursery:
    """Gives the answers in turn, after one for each start; raises those that are exceptions."""

    device = CPU
    ready = Ready(device=DEVICE)
    started = 0
    ended = 0

    def __init__(self, *answers):
        self.answers = [*answers]

    def start_worker(self):
        self.started += 1

    def ask(self, request, kinds, timeout_seconds):
        if isinstance(request, Identify):
            answer = Identified(device=self.device)
        elif isinstance(request, Prepare):
            answer = self.ready
        else:
            assert request.timeout_seconds == 15.0
            answer = self.answers.pop(0)
        if isinstance(answer, WorkerLost):
            raise answer
        return answer

    def end_worker(self):
        self.ended += 1

    def close(self): ...


def supervised(nursery):
    supervisor = Supervisor(SETTINGS)
    supervisor._nursery = nursery
    return supervisor


@pytest.mark.parametrize("outcome", ["oom", "ok", "error"])
def test_what_ends_a_script_without_a_word_is_watched_for_an_oom(outcome):
    """Errors are noted in all steps of a second try: a script may swallow one after the first step."""
    silent = replace(
        ran(SHAPE, "error", error="it ended"), renew=True, unexplained=True
    )
    again = ran(SHAPE, outcome, error=outcome)
    nursery = MadeNursery(silent, again)
    with supervised(nursery) as supervisor:
        found = supervisor.measure(SHAPE, 3).trial
    expected = again.trial if outcome == "oom" else silent.trial
    assert (found.outcome, found.error) == (expected.outcome, expected.error)
    assert (found.index, nursery.started, nursery.answers) == (3, 2, [])


@pytest.mark.parametrize("single", [False, True], ids=["trial", "single step"])
@pytest.mark.parametrize(
    ("answer", "outcome", "error", "renewed"),
    [
        (ran(SHAPE), "ok", None, False),
        (ran(SHAPE, "oom", error="MemoryError"), "oom", "MemoryError", False),
        (
            replace(ran(SHAPE, "error", error="ValueError: no"), renew=True),
            "error",
            "ValueError: no",
            True,
        ),
        (
            WorkerLost("timeout", "hangs", STACK),
            "timeout",
            f"no answer within 15 s; {PLACE}",
            True,
        ),
        (WorkerLost("timeout", "hangs"), "timeout", "no answer within 15 s", True),
        (
            WorkerLost("crash", "was killed by SIGKILL"),
            "crash",
            "the worker process was killed by SIGKILL",
            True,
        ),
        (
            WorkerLost("oom", "was killed by SIGABRT", "1\n2\n3\nstd::bad_alloc\n"),
            "oom",
            "the worker process was killed by SIGABRT: 2\n3\nstd::bad_alloc",
            True,
        ),
    ],
)
def test_a_failure_is_an_answer_and_costs_the_worker_if_it_must(
    answer, single, outcome, error, renewed
):
    nursery = MadeNursery(answer, ran(SHAPE))
    with supervised(nursery) as supervisor:
        supervisor.start()
        if single:
            first = supervisor.step(SHAPE).trial
        else:
            first = supervisor.measure(SHAPE, 7).trial
            assert first.index == 7
        second = supervisor.measure(SHAPE, 8).trial
    assert (first.outcome, first.error) == (outcome, error)
    assert (first.worker, second.worker) == (1, 1 + renewed)
    assert second.outcome == "ok"
    assert nursery.started == nursery.ended == 1 + renewed


@pytest.mark.parametrize(
    ("reply", "kind", "message", "hint"),
    [
        (
            Failed(stage="device", message="no GPU", hint="Take the CPU."),
            ProbeError,
            "no GPU",
            "Take the CPU.",
        ),
        (
            Failed(stage="options", message="layers: must be 1", hint="It takes 2."),
            OptionError,
            "layers: must be 1",
            "It takes 2.",
        ),
        (
            Failed(stage="import", message="no such module"),
            WorkloadError,
            "no such module",
            None,
        ),
        (
            Failed(stage="setup", message="ValueError: no such checkpoint"),
            WorkloadError,
            "train.py:Mine: its setup failed: ValueError: no such checkpoint",
            None,
        ),
        (
            Failed(stage="step", message="rank 1: ValueError: tokens differ"),
            WorkloadError,
            "train.py:Mine: its first step failed: rank 1: ValueError: tokens differ",
            None,
        ),
        (
            Failed(stage="setup", outcome="oom", message="rank 1: RuntimeError: no"),
            ProbeError,
            "the memory limit is too small: train.py:Mine ran out of it in its setup, before any batch "
            "(rank 1: RuntimeError: no)",
            "Give more with --memory, or take a smaller model with --set.",
        ),
        (
            WorkerLost("oom", "was killed by SIGKILL"),
            ProbeError,
            "the memory limit is too small: train.py:Mine ran out of it in its setup, before any batch "
            "(was killed by SIGKILL)",
            "Give more with --memory, or take a smaller model with --set.",
        ),
        (
            WorkerLost("timeout", "hangs", STACK),
            WorkloadError,
            f"train.py:Mine: its setup took longer than 1 min 00 s; {PLACE}",
            "If it needs longer, to download or to compile, allow that with --setup-timeout SECONDS.",
        ),
        (
            WorkerLost("crash", "was killed by SIGABRT", "last words"),
            WorkloadError,
            "train.py:Mine: the worker process was killed by SIGABRT while it built the workload",
            "Its last output may say why. If something outside kills it (a job's or a container's limit), it needs "
            "less memory or time, or a higher limit there.",
        ),
    ],
)
def test_a_worker_that_is_not_ready_is_one_message(reply, kind, message, hint):
    nursery = MadeNursery()
    nursery.ready = reply
    with pytest.raises(BatchtuneError) as caught, supervised(nursery) as supervisor:
        supervisor.start()
    assert type(caught.value) is kind
    assert (caught.value.message, caught.value.hint) == (message, hint)
    if isinstance(reply, WorkerLost) and kind is WorkloadError:
        assert caught.value.traceback == reply.output
    assert nursery.started == nursery.ended == 1


# One probe at a time on a device


@pytest.fixture
def supervisor():
    with supervised(MadeNursery(ran(SHAPE))) as made:
        yield made


def test_a_gpu_is_probed_by_one_at_a_time_from_start_to_end(supervisor):
    supervisor._nursery.device = GPU
    with lock_device(GPU.id, GPU.name):
        message = rf"another probe \(process {os.getpid()}\) is using GPU\n.*--wait"
        with pytest.raises(DeviceBusy, match=message):
            supervisor.start()
    assert supervisor.start() == DEVICE
    supervisor.measure(SHAPE, 0, fresh=True)
    with pytest.raises(DeviceBusy):
        lock_device(GPU.id, GPU.name)
    supervisor.__exit__(None, None, None)
    lock_device(GPU.id, GPU.name).close()


def test_a_gpu_in_use_can_be_waited_for(supervisor):
    notes = []
    lock = lock_device(GPU.id, GPU.name)

    def on_note(text):
        notes.append(text)
        lock.close()

    supervisor._nursery.device = GPU
    supervisor._settings = replace(SETTINGS, wait_seconds=math.inf)
    supervisor._note = on_note
    assert supervisor.start() == DEVICE
    assert notes == [
        f"Waiting for it to end: another probe (process {os.getpid()}) is using GPU."
    ]


def test_a_second_probe_on_the_cpu_knows_of_the_first(supervisor):
    with lock_device(CPU.id, CPU.name):
        other = DeviceProcess(pid=os.getpid(), used_bytes=None)
        assert supervisor.start().processes == [other]
    assert supervisor.start().processes is None


# What a workload does to the channel


class MadeWorker(Nursery):
    """Of its worker there is only the channel, whose other end is `far`."""

    def __init__(self):
        super().__init__(*worker_program())
        channel, self.far = socket.socketpair()
        self._connection = Connection(channel)

    def _ended(self, seconds=0.0):
        return None


@pytest.fixture
def worker():
    made = MadeWorker()
    yield made
    made.far.close()
    made._connection.channel.close()


RUN = RunTrial(shape=SHAPE)


@pytest.mark.parametrize(
    ("unasked", "words"),
    [
        # It forges a reply to another question.
        (b"", encode(Identified(device=CPU)) + b"\n"),
        # It gives one more than was asked for.
        (encode(ran(SHAPE)) + b"\n", b""),
    ],
)
def test_what_a_workload_writes_to_the_channel_is_a_crash(worker, unasked, words):
    def answer():
        assert worker.far.recv(1 << 16) == encode(RUN) + b"\n"
        worker.far.sendall(words)

    worker.far.sendall(unasked)
    with (
        ThreadPoolExecutor() as threads,
        pytest.raises(WorkerLost, match="over its channel") as lost,
    ):
        if words:
            threads.submit(answer)
        worker.ask(RUN, (Ran,), 20.0)
    assert lost.value.outcome == "crash"
