"""What surrounds a CUDA device: the driver's facts, memory outside the allocator, what is kept free, others."""

import json
import subprocess
import sys

import pytest
from gpu.on_cuda import GIB, MIB, supervise

from batchtune.probe.devices.cuda import all_gpus
from batchtune.results import BatchShape

pytestmark = pytest.mark.usefixtures("one_nursery")
GRADIENT_BYTES = (256 * 256 + 256) * 4  # of `Known`

needs_nvml = pytest.mark.skipif(not all_gpus()[0], reason="NVML tells of no GPU here")


@needs_nvml
def test_the_drivers_facts_are_there_and_sane():
    with supervise() as supervisor:
        device = supervisor.start()
        trial = supervisor.measure(BatchShape(8, 64.0), 0).trial
    assert device.driver[0].isdigit()
    assert device.uuid.startswith(("GPU-", "MIG-"))
    assert 0 < device.free_bytes <= 1.05 * device.total_bytes
    if device.processes is not None:
        assert device.other_processes == len(device.processes)
    assert device.settings["cudnn_benchmark"] is False
    assert trial.outcome == "ok"
    assert trial.sm_clock_mhz is None or 100 <= trial.sm_clock_mhz <= 4000


@pytest.mark.parametrize(
    ("reserve", "ddp"), [(300 * MIB, False), (0, True), (300 * MIB, True)]
)
def test_what_is_to_be_kept_free_lowers_the_limit_by_just_that(reserve, ddp):
    with supervise(reserve_bytes=reserve, ddp=ddp) as supervisor:
        device = supervisor.start()
        largest = device.limit_bytes // MIB - 256  # cuBLAS alone may take 64
        fits = supervisor.measure(BatchShape(largest, 1.0), 0).trial
        too_large = supervisor.measure(
            BatchShape(device.limit_bytes // MIB + 1, 1.0), 1
        ).trial
    assert device.ddp_bytes == (GRADIENT_BYTES if ddp else 0)
    assert device.limit_bytes == 2 * GIB - reserve - device.ddp_bytes
    assert (fits.outcome, too_large.outcome) == ("ok", "oom")


IDENTIFY = """
import json, os
from batchtune.probe.devices import backend_for
from batchtune.probe.devices.cuda import find_gpu
first = backend_for("auto").identify("auto")
gpu = find_gpu(first.id, None)
before = gpu.memory()[1] if gpu else None
again = backend_for("cuda:0").identify("cuda:0")
after = gpu.memory()[1] if gpu else None
users = [one.pid for one in gpu.processes() or ()] if gpu else []
print(json.dumps([first.id, again.id, before, after, os.getpid() in users]))
"""


def test_a_device_is_identified_without_using_its_memory():
    ran = subprocess.run(
        [sys.executable, "-c", IDENTIFY], capture_output=True, text=True, check=True
    )
    first, again, before, after, uses_it = json.loads(ran.stdout)
    assert first == again
    assert first.startswith(("GPU-", "MIG-", "PCI-", "cuda:"))
    assert not uses_it
    assert before is None or before - after < 50 * MIB
