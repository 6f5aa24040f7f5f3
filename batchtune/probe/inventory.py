"""What a machine offers, told by a process of its own: a broken torch or driver may take that down and nothing else.

`python -m batchtune.probe.inventory` writes one JSON document a line, each as soon as it is known: what the driver
says of the GPUs, then what torch says.
"""

from __future__ import annotations

import os
import warnings

import msgspec

from batchtune.probe.nvml import all_gpus
from batchtune.results import DeviceProcess, DoctorTorch


class SeenGpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU, or an instance of one, as the driver or torch describes it; None for what it does not tell."""

    name: str | None
    uuid: str | None
    total_bytes: int | None
    device: str | None = None
    capability: str | None = None
    free_bytes: int | None = None
    processes: list[DeviceProcess] | None = None
    mig: bool | None = None
    ecc: bool | None = None
    sm_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    throttle_reasons: list[str] | None = None


class DriverFacts(msgspec.Struct, frozen=True, kw_only=True, tag="driver"):
    """What NVML says; `problem` tells why it can't be asked."""

    driver: str | None
    gpus: list[SeenGpu]
    problem: str | None


class TorchFacts(msgspec.Struct, frozen=True, kw_only=True, tag="torch"):
    """What torch says."""

    torch: DoctorTorch
    gpus: list[SeenGpu]


_lines: msgspec.json.Decoder[DriverFacts | TorchFacts] = msgspec.json.Decoder(DriverFacts | TorchFacts)
decode_line = _lines.decode


def main() -> None:
    """Tells all of it on stdout; what libraries print goes to stderr."""
    told = os.dup(1)
    os.dup2(2, 1)
    os.write(told, msgspec.json.encode(_driver_facts()) + b"\n")
    os.write(told, msgspec.json.encode(_torch_facts()) + b"\n")
    os._exit(0)  # nothing that a library does at its end can spoil it


def _driver_facts() -> DriverFacts:
    gpus, problem = all_gpus()
    facts = [gpu.facts() for gpu in gpus]
    seen = [
        SeenGpu(
            name=one.name,
            uuid=one.uuid,
            total_bytes=one.total_bytes,
            free_bytes=one.free_bytes,
            processes=one.processes,
            mig=one.mig,
            ecc=one.ecc,
            sm_clock_mhz=one.sm_clock_mhz,
            max_sm_clock_mhz=one.max_sm_clock_mhz,
            throttle_reasons=one.throttle_reasons,
        )
        for one in facts
    ]
    return DriverFacts(driver=next((one.driver for one in facts if one.driver), None), gpus=seen, problem=problem)


def _torch_facts() -> TorchFacts:
    """Raises whatever the import of torch raises: the traceback on stderr is told."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = torch.cuda.is_available()
    cudnn = torch.backends.cudnn.version() if found else None  # type: ignore[no-untyped-call]  # torch's
    return TorchFacts(
        torch=DoctorTorch(
            version=str(torch.__version__),
            cuda=torch.version.cuda,
            hip=torch.version.hip,
            cudnn=None if cudnn is None else str(cudnn),
            problem=str(caught[0].message).splitlines()[0] if caught and not found else None,
        ),
        gpus=[_torch_gpu(index) for index in range(torch.cuda.device_count() if found else 0)],
    )


def _torch_gpu(index: int) -> SeenGpu:
    """Without using the device: what is free on it, torch could only tell by taking memory there."""
    import torch

    from batchtune.probe.cuda_meter import cuda_identity

    properties = torch.cuda.get_device_properties(index)
    identity, name = cuda_identity(index)
    return SeenGpu(
        name=name,
        uuid=identity,
        total_bytes=int(properties.total_memory),
        device=f"cuda:{index}",
        capability=f"{properties.major}.{properties.minor}",
    )


if __name__ == "__main__":
    main()
