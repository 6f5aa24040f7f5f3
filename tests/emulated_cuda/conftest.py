"""The emulated CUDA device: skipped, by name, without torch's CUDA build. `.ci/cuda` makes its environment."""

import os
from pathlib import Path

import pytest
from emulated_cuda.build import compile_into, what_is_missing
from emulated_cuda.machine import Machine
from without_device import module_without

MISSING = what_is_missing()
BUILT = "EMULATED_CUDA_BUILT"
"""Environment variable: the folder of a device that was built before."""


def pytest_pycollect_makemodule(module_path, parent):
    if MISSING is None:
        return None
    return module_without(f"the emulated CUDA device {MISSING}", module_path, parent)


@pytest.fixture
def emulated_cuda(made_once, tmp_path):
    """Runs a program on emulated devices that no other test uses."""
    if BUILT in os.environ:
        built = Path(os.environ[BUILT])
    else:
        built = made_once("emulated-cuda", compile_into)
    return Machine(built, tmp_path / "state")
