"""What the CUDA tests share: supervisors, settings, and a process that holds memory of the device."""

from pathlib import Path

import pytest
import torch

from batchtune.probe.settings import ProbeSettings
from batchtune.probe.supervisor import Supervisor

WORKLOADS = Path(__file__).parent / "cuda_workload.py"
MIB = 1 << 20
GIB = 1 << 30


def needs_a_real_gpu(reason):
    """Skip a test on the emulated device (tests/emulated_cuda), which does not have what the test needs."""
    emulated = torch.cuda.is_available() and "Emulated" in torch.cuda.get_device_name()
    return pytest.mark.skipif(emulated, reason=f"on the emulated device: {reason}")


def named(workload):
    """A workload of this folder, or any other that is named in full."""
    return workload if ":" in workload else f"{WORKLOADS}:{workload}"


def settings(workload="Known", options=None, **changes):
    """Settings of a probe with a cap of 2 GiB, all of which may be used."""
    values = {
        "device": "cuda",
        "memory_bytes": 2 * GIB,
        "memory_fraction": 1.0,
        "num_lengths": 3,
    }
    return ProbeSettings(
        workload=named(workload), options=options or {}, **{**values, **changes}
    )


def supervise(workload="Known", options=None, **changes):
    """A supervisor with these settings."""
    return Supervisor(settings(workload, options, **changes))
