"""Meters: the CPU's under its real limit, CUDA's over a made torch.cuda and a made NVML."""

import json
import mmap
import os
import subprocess
import sys
from contextlib import contextmanager, nullcontext

import pytest
import torch
from probe.made_cuda import MIB, MadeCuda
from probe.made_nvml import GIB, LOST, MadeGpu

from batchtune.errors import ProbeError
from batchtune.probe.devices import backend_for
from batchtune.probe.requests import Prepare, Ready
from batchtune.probe.worker import Worker
from batchtune.results import DeviceProcess, ProbedWith

UNKNOWN = {"outside_bytes": None, "sm_clock_mhz": None, "throttle_reasons": None}


@pytest.fixture
def cuda(monkeypatch):
    return MadeCuda(MadeGpu()).install(monkeypatch)


def open_meter(device="cuda", memory=None, fraction=1.0, limit=None):
    wanted = ProbedWith(memory_bytes=memory, memory_fraction=fraction)
    return backend_for(device).open(device, wanted, limit)


def identify(device):
    return backend_for(device).identify(device)


def settled(
    memory=None,
    fraction=1.0,
    limit=None,
    reserve=0,
    ddp=0,
):
    meter = open_meter("cuda", memory, fraction, limit)
    meter.limit()
    meter.settle(reserve, ddp)
    return meter


@pytest.mark.parametrize(
    ("others", "given", "limit"),
    [
        (0, {"memory": 10 * GIB, "fraction": 0.5}, 5 * GIB),
        (0, {"fraction": 0.9}, int(80 * GIB * 0.9)),  # of the whole device
        # Memory outside the allocator is left out.
        (30 * GIB, {"fraction": 0.9}, 50 * GIB - 700 * MIB),
        # What is to be kept free lowers it by just that.
        (0, {"reserve": 3 * GIB, "ddp": GIB}, 76 * GIB - 700 * MIB),
        (0, {"memory": 10 * GIB, "fraction": 0.9, "reserve": 3 * GIB}, 6 * GIB),
        # That of a run that is continued stays.
        (0, {"limit": 10 * GIB, "reserve": 3 * GIB, "ddp": GIB}, 10 * GIB),
    ],
)
def test_the_limit_is_what_is_asked_for_and_free(cuda, others, given, limit):
    cuda.others = others
    cuda.show()
    device = settled(**given).device
    assert device.limit_bytes == limit == cuda.limit()
    assert device.outside_bytes == 700 * MIB
    assert device.reserve_bytes == given.get("reserve", 0)
    assert device.ddp_bytes == given.get("ddp", 0)


def test_a_limit_no_longer_free_is_refused_before_the_setup(cuda):
    cuda.others = 75 * GIB
    with pytest.raises(
        ProbeError,
        match=r"measured with a limit of 10 GiB, but only 4\.51 GiB of the device are free",
    ):
        open_meter(limit=10 * GIB)


def test_no_memory_left_for_batches_is_reported_with_its_users(cuda):
    meter = open_meter(memory=8 * GIB)
    cuda.reserved = cuda.allocated = 5 * GIB
    message = "^no memory is left for batches: the workload itself holds 5 GiB, with 4 GiB kept free and "
    with pytest.raises(ProbeError, match=message):
        meter.settle(3 * GIB, GIB)


def test_the_device_is_described_by_the_driver(cuda):
    cuda.others = 2 * GIB
    cuda.show()
    device = settled().device
    assert (device.uuid, device.driver, device.ecc, device.mig) == (
        "GPU-aaaaaaaa",
        "570.86",
        True,
        None,
    )
    assert device.processes == [DeviceProcess(pid=4711, used_bytes=2 * GIB)]
    assert (device.other_processes, device.free_bytes) == (1, 78 * GIB)
    assert settled().switches()["cudnn_benchmark"] is False


def test_without_nvml_the_limit_is_the_same_and_the_rest_unknown(monkeypatch):
    MadeCuda(MadeGpu(), others=30 * GIB).install(monkeypatch, [])
    meter = settled()
    device = meter.device
    assert device.limit_bytes == 50 * GIB - 700 * MIB
    assert device.driver is device.processes is device.other_processes is None
    assert device.free_bytes is device.outside_bytes is None
    assert device.uuid == "GPU-aaaaaaaa"
    assert meter.surroundings() == UNKNOWN


@pytest.mark.parametrize(
    "own_pid", [os.getpid(), None], ids=["by its own figure", "by what is free"]
)
def test_memory_outside_the_allocator_is_followed_as_it_grows(monkeypatch, own_pid):
    made = MadeCuda(MadeGpu(), others=2 * GIB, own_pid=own_pid).install(monkeypatch)
    meter = settled()
    made.reserved = 9 * GIB
    made.take(300 * MIB)
    assert meter.surroundings()["outside_bytes"] == 1000 * MIB


def test_figures_of_a_whole_gpu_are_not_those_of_an_instance(monkeypatch):
    MadeCuda(MadeGpu(total=160 * GIB), own_pid=None).install(monkeypatch)
    device = settled().device
    assert (device.free_bytes, device.outside_bytes) == (None, None)


def test_the_clock_and_why_it_is_held_down_are_told(cuda):
    meter = settled()
    cuda.gpu.clock, cuda.gpu.reasons = 900, 0x20
    cuda.show()
    meter.note_clock()
    cuda.gpu.clock, cuda.gpu.reasons = 210, 0x1
    cuda.show()
    found = meter.surroundings()
    assert (found["sm_clock_mhz"], found["throttle_reasons"]) == (
        900,
        ["thermal slowdown by the driver"],
    )


def test_cuda_without_a_gpu_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ProbeError, match="sees no CUDA device here"):
        identify("cuda")
    assert identify("auto").id == "cpu"


def test_a_gpu_by_its_number_is_the_current_one_of_the_workload(monkeypatch):
    second = MadeGpu(uuid="GPU-bbbbbbbb", pci="0000:66:00.0", clock=1980)
    made = MadeCuda(second, others=GIB, uuids=("aaaaaaaa", "bbbbbbbb")).install(
        monkeypatch, [MadeGpu(), second]
    )
    assert [identify(f"cuda:{number}").id for number in (0, 1)] == [
        "GPU-aaaaaaaa",
        "GPU-bbbbbbbb",
    ]
    assert made.outside == 0  # it is not used for that
    meter = open_meter("cuda:1")
    meter.note_clock()
    assert (meter.torch_device, made.current) == (torch.device("cuda", 1), 1)
    assert meter.device.processes == [DeviceProcess(pid=4711, used_bytes=GIB)]
    assert meter.surroundings()["sm_clock_mhz"] == 1980


def test_the_gpu_is_chosen_before_the_workload_is_imported(monkeypatch, tmp_path):
    made = MadeCuda(
        MadeGpu(uuid="GPU-bbbbbbbb"), uuids=("aaaaaaaa", "bbbbbbbb")
    ).install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: made.current)
    (tmp_path / "users.py").write_text(USERS)
    wanted = ProbedWith(device="cuda:1", memory_bytes=GIB)
    spec = f"{tmp_path / 'users.py'}:Workload"
    request = Prepare(
        workload=spec, options={}, settings=wanted, limit_bytes=None, examples=10
    )
    worker = Worker()
    reply = worker.answer(request)
    assert isinstance(reply, Ready), reply
    assert worker._session._workload.at_import == 1


USERS = """
import torch

imported_on = torch.cuda.current_device()

class Workload:
    at_import = imported_on

    def setup(self, device): ...
    def make_batch(self, shape): ...
    def step(self, batch): ...
"""


def test_a_gpu_that_is_lost_leaves_facts_unknown_and_no_error(cuda):
    meter = settled()
    for call in (
        "MemoryInfo",
        "ClockInfo",
        "CurrentClocksEventReasons",
        "CurrentClocksThrottleReasons",
    ):
        cuda.gpu.fails[f"nvmlDeviceGet{call}"] = LOST
    cuda.show()
    meter.note_clock()
    assert meter.surroundings() == UNKNOWN


@pytest.mark.parametrize(
    "name", ["PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING"]
)
@pytest.mark.parametrize("value", ["1", "0", ""])
def test_an_allocator_that_is_off_is_refused(cuda, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(
        ProbeError, match=f"{name} is set: PyTorch then allocates past its allocator"
    ):
        open_meter()
    assert cuda.outside == 0


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_lower_limit_in_the_allocators_settings_holds(cuda, monkeypatch, name):
    monkeypatch.setenv(
        name, "expandable_segments:True,per_process_memory_fraction:0.25"
    )
    assert (
        settled(fraction=0.9, reserve=GIB).device.limit_bytes
        == 19 * GIB
        == cuda.limit()
    )
    assert settled(memory=10 * GIB).device.limit_bytes == 10 * GIB


@pytest.mark.parametrize("when", ["import", "setup"])
def test_a_lower_limit_that_the_workload_sets_holds(cuda, when):
    meter = open_meter(fraction=0.9)
    if when == "import":
        torch.cuda.set_per_process_memory_fraction(0.5)
    meter.limit()
    if when == "setup":
        torch.cuda.set_per_process_memory_fraction(0.5)
    meter.settle(0, 0)
    assert meter.device.limit_bytes == 40 * GIB == cuda.limit()
    assert meter.switches()["per_process_memory_fraction"] == 0.5


def test_a_continued_limit_above_the_users_own_is_refused(cuda, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "per_process_memory_fraction:0.25")
    with pytest.raises(
        ProbeError,
        match=r"limit of 30 GiB, but per_process_memory_fraction now allows 20 GiB",
    ):
        open_meter(limit=30 * GIB)


# The CPU's limit is one of the process: a process of its own takes it, forked from one that has imported torch.
CPU = """
import json, os, resource, sys, torch
from batchtune.errors import ProbeError
from batchtune.probe.devices import backend_for
from batchtune.results import ProbedWith

def found(memory, limit, reserve, ddp):
    meter = backend_for("cpu").open("cpu", ProbedWith(memory_bytes=memory, memory_fraction=1.0), limit)
    try:
        meter.limit()
        meter.settle(reserve, ddp)
    except ProbeError as error:
        return [error.message, error.hint]
    device = meter.device
    try:
        torch.ones(memory - reserve - ddp, dtype=torch.uint8)
        outcome = "fits"
    except RuntimeError as error:
        outcome = "out of memory"
    return [device.limit_bytes, resource.getrlimit(resource.RLIMIT_DATA)[0], device.reserve_bytes, device.ddp_bytes,
          list(meter.surroundings()), device.free_bytes > 0, meter.switches()["threads"] > 0, outcome]

for case in json.loads(sys.argv[1]):
    if os.fork():
        assert os.wait()[1] == 0, case
        continue
    print(json.dumps(found(*case)), flush=True)
    os._exit(0)
"""


def printed_by(code, *arguments, env=None):
    command = [sys.executable, "-c", code, *arguments]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return ran.stdout


@pytest.mark.process
def test_on_the_cpu_the_limit_is_lowered_and_real():
    cases = [
        [2 * GIB, None, 300 * MIB, 200 * MIB],
        [2 * GIB, GIB, 300 * MIB, 0],  # continued
        [GIB, None, GIB - 20 * MIB, 0],  # too little left
        [50 * MIB, None, 0, 0],  # too little for PyTorch
    ]
    printed = printed_by(CPU, json.dumps(cases)).splitlines()
    fresh, continued, (message, hint), (first_message, _) = map(json.loads, printed)
    lowered = 2 * GIB - 500 * MIB
    assert fresh == [
        lowered,
        lowered,
        300 * MIB,
        200 * MIB,
        ["other_processors"],
        True,
        True,
        "out of memory",
    ]
    assert continued[:3] == [GIB, GIB, 300 * MIB]
    assert message.startswith(
        "a memory limit of 20 MiB is too small, with 1,004 MiB kept free: with the workload"
    )
    assert "--reserve" in hint
    assert "Python, PyTorch and your code hold" in first_message


# What a training process holds for its data, and what a worker holds in its place.
HELD = """
import sys, torch
from batchtune.probe.devices import backend_for
from batchtune.results import ProbedWith

examples, place = int(sys.argv[1]), sys.argv[2]
meter = backend_for("cpu").open("cpu", ProbedWith(), None)
meter.limit()
before = meter.in_use()
if place == "worker":
    meter.hold(examples)
else:
    import numpy
    from torch.utils.data import DataLoader
    from batchtune import PooledBatchSampler
    sampler = PooledBatchSampler(numpy.ones(examples), pool_size=1000, bucket_boundaries=[1], bucket_batch_sizes=[9])
    batches = iter(DataLoader(range(examples), batch_sampler=sampler))
    next(batches)
print(meter.in_use() - before)
"""


@pytest.mark.slow
def test_on_the_cpu_a_worker_holds_what_training_holds():
    environment = {**os.environ, **backend_for("cpu").WORKER_ENVIRONMENT}
    worker, training = (
        int(printed_by(HELD, "300000", place, env=environment))
        for place in ("worker", "training")
    )
    assert worker - 32 * MIB < training < worker


def peak_mib(held):
    """By how many MiB what is held raises the peak of the CPU's meter above what was in use before."""
    meter = open_meter("cpu")
    meter.reset()
    before = meter.in_use()
    with held:
        return round((meter.peak() - before) / MIB)


@contextmanager
def pages_of_a_file(path):
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages,
    ):
        sum(pages[::4096])
        yield


@contextmanager
def new_memory(mib, *, touched):
    """New pages: what an earlier test freed may still be the process's own."""
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, mib * MIB, flags=anonymous) as pages:
        if touched:
            pages[::4096] = bytes(mib * MIB // 4096)
    yield


def test_on_the_cpu_the_peak_is_of_data_and_not_of_files(tmp_path):
    library = tmp_path / "library"
    library.write_bytes(bytes(64 * MIB))
    assert abs(peak_mib(pages_of_a_file(library))) < 8
    assert abs(peak_mib(new_memory(64, touched=True)) - 64) < 8


def test_on_the_cpu_memory_that_nothing_touches_counts():
    """As it does against the limit: an LSTM's step takes scratch memory of which it uses a part."""
    sizes = [96, 64, 96]  # a smaller peak after a larger one shows too
    assert [peak_mib(new_memory(size, touched=False)) for size in sizes] == sizes
    assert peak_mib(nullcontext()) == 0


def test_on_the_cpu_holes_of_the_heap_are_not_allocated():
    meter = open_meter("cpu")
    blocks = [bytes(4000) for _ in range(20_000)]
    before = meter.allocated()
    del blocks[::2]
    assert meter.in_use() - meter.allocated() > 32 * MIB
    assert before - meter.allocated() > 32 * MIB
