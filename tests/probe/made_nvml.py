"""GPUs for the real `pynvml`: a stub of NVML (`stub_nvml.c`) answers, fails, or lacks a call, as real ones do."""

import atexit
import ctypes
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

GIB = 1 << 30
# NVML's codes of errors.
NOT_SUPPORTED, NO_PERMISSION, DRIVER_NOT_LOADED, FUNCTION_NOT_FOUND, LOST = (
    3,
    4,
    9,
    13,
    15,
)


@dataclass
class MadeGpu:
    """What one GPU (or instance) answers; `fails` are the calls that fail, with NVML's code."""

    uuid: str = "GPU-aaaaaaaa"
    name: str = "Made GPU"
    total: int = 80 * GIB
    free: int = 79 * GIB
    compute: list = field(default_factory=list)  # of process ids and their bytes
    graphics: list = field(default_factory=list)
    mig: bool | None = None
    ecc: bool = True
    clock: int = 1500
    reasons: int = 0
    pci: str = "0000:65:00.0"
    instances: list = field(default_factory=list)
    fails: dict = field(default_factory=dict)

    def lines(self, kind="gpu"):
        """Its description for the stub."""
        yield kind
        for fact in ("uuid", "name", "total", "free", "clock", "reasons"):
            yield f"{fact} {getattr(self, fact)}"
        if kind == "gpu":
            yield f"pci {self.pci}"
        yield f"mode {-1 if self.mig is None else int(self.mig)}\necc {int(self.ecc)}"
        yield from (f"compute {pid} {used}" for pid, used in self.compute)
        yield from (f"graphics {pid} {used}" for pid, used in self.graphics)
        yield from (f"fail {call} {code}" for call, code in self.fails.items())
        for instance in self.instances:
            yield from instance.lines("mig")


@dataclass
class MadeNvml:
    """The driver and its GPUs."""

    gpus: list
    fails: dict = field(default_factory=dict)

    def described(self):
        """All of it for the stub, as `STUB_NVML`."""
        failures = [f"fail {call} {code}" for call, code in self.fails.items()]
        return "\n".join(
            [
                "driver 570.86",
                *failures,
                *(line for gpu in self.gpus for line in gpu.lines()),
            ]
        )

    def install(self, patch):
        """Make `pynvml` ask the stub until the test ends."""
        import pynvml

        patch.setattr(pynvml, "nvmlLib", ctypes.CDLL(stub_library()))
        patch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        patch.setenv("STUB_NVML", "")
        self.show()

    def show(self):
        """Tell the stub what has changed."""
        os.environ["STUB_NVML"] = self.described()

    def environment(self):
        """Variables with which another process asks the stub, loaded as the library itself is."""
        return {
            "STUB_NVML": self.described(),
            "LD_LIBRARY_PATH": str(stub_library().parent),
        }


@cache
def stub_library():
    """Compile the stub, once a process; without a compiler the test is skipped."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler (cc) for the stub of NVML")
    folder = Path(tempfile.mkdtemp(prefix="stub-nvml-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = folder / "libnvidia-ml.so.1"
    source = Path(__file__).with_name("stub_nvml.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def divided_gpu(*uuids, **facts):
    """A GPU with one instance for each UUID."""
    instances = [
        MadeGpu(uuid=uuid, name="Made GPU 1g", total=10 * GIB, free=9 * GIB)
        for uuid in uuids
    ]
    return MadeGpu(mig=True, instances=instances, **facts)


# When it is imported, and so in no test: unit tests start no process.
if shutil.which("cc") is not None:
    stub_library()
