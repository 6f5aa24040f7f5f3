"""Describes a machine's devices in a process of its own: a broken torch or driver may end that, and nothing else.

It writes one JSON document a line, each as soon as it is known: the devices by the
driver, then by torch.
"""

from __future__ import annotations

import os
import warnings

import msgspec

from batchtune.probe.devices import backends
from batchtune.results import DoctorGpu, DoctorTorch


class DriverFacts(msgspec.Struct, frozen=True, kw_only=True, tag="driver"):
    """The driver's own description; `problem` says why it can't be asked."""

    driver: str | None
    gpus: list[DoctorGpu]
    problem: str | None


class TorchFacts(msgspec.Struct, frozen=True, kw_only=True, tag="torch"):
    """Torch, and the devices that it sees."""

    torch: DoctorTorch
    gpus: list[DoctorGpu]


decode_line = msgspec.json.Decoder[DriverFacts | TorchFacts](DriverFacts | TorchFacts).decode


def main() -> None:
    """Write all of it to stdout; what libraries print goes to stderr."""
    answers = os.dup(1)
    os.dup2(2, 1)
    os.write(answers, msgspec.json.encode(_driver_facts()) + b"\n")
    os.write(answers, msgspec.json.encode(_torch_facts()) + b"\n")
    os._exit(0)  # nothing that a library does at its end can spoil it


def _driver_facts() -> DriverFacts:
    driver = None
    problem = None
    gpus: list[DoctorGpu] = []
    for backend in backends():
        its_gpus, its_driver, its_problem = backend.seen_by_driver()
        gpus += its_gpus
        driver = driver or its_driver
        problem = problem or its_problem
    return DriverFacts(driver=driver or None, gpus=gpus, problem=problem or None)


def _torch_facts() -> TorchFacts:
    """Raise whatever the import of torch raises: the traceback on stderr is shown."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gpus: list[DoctorGpu] = []
        for backend in backends():
            gpus += backend.seen_by_torch()
    cudnn = torch.backends.cudnn.version() if gpus else None  # type: ignore[no-untyped-call]  # torch's
    return TorchFacts(
        torch=DoctorTorch(
            version=str(torch.__version__),
            cuda=torch.version.cuda,
            hip=torch.version.hip,
            cudnn=None if cudnn is None else str(cudnn),
            problem=str(caught[0].message).splitlines()[0] if caught and not gpus else None,
        ),
        gpus=gpus,
    )
