"""One process that stands for all ranks of a training, under torch's fake process group, which communicates nothing.

It is rank 0, whose shard is no smaller than another's: FSDP2 cuts the first dimension, and rounds shards up.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from msgspec.structs import replace

from batchtune.errors import WorkloadError

if TYPE_CHECKING:
    from batchtune.results import Device, ProbedWith

NCCL_BYTES = 1 << 30
"""What NCCL takes on each GPU, outside torch's allocator, for the one communicator of FSDP2.

Measured were 688 MiB on four A100 with NVLink (https://github.com/NVIDIA/nccl/issues/964). By NVIDIA it grows with the
number of channels, which a faster GPU has more of, and no longer with the number of GPUs beyond two nodes
(https://github.com/NVIDIA/nccl/issues/864).
"""


def join_fake_group(world_size: int) -> None:
    """Make this process rank 0 of so many."""
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group(
        "fake", store=FakeStore(), rank=0, world_size=world_size
    )


def refuse_ddp() -> None:
    """Raise WorkloadError if a model is wrapped in DDP, whose gradients the fake group can't reduce (torch 2.13)."""
    from torch.nn.parallel import DistributedDataParallel

    # By type, as in `trained_parameters`.
    if any(
        issubclass(type(thing), DistributedDataParallel) for thing in gc.get_objects()
    ):
        raise WorkloadError(
            "the model is wrapped in DistributedDataParallel, which --simulate-world-size can't run",
            "It is for FSDP2 (built-ins: --set parallel=fsdp2). DDP takes the same memory however many ranks there "
            "are: measure a single process with --ddp, or two ranks with --nproc-per-node 2.",
        )


def reserve_of(probed_with: ProbedWith, kind: str) -> int:
    """Return the bytes to keep free: those that the user gave, or NCCL's if ranks on GPUs are simulated."""
    if (
        probed_with.simulate_world_size is not None
        and kind == "cuda"
        and not probed_with.reserve_bytes
    ):
        return NCCL_BYTES
    return probed_with.reserve_bytes


def as_simulated(device: Device, world_size: int | None) -> Device:
    """Return the device as that of each of so many ranks; unchanged without them."""
    if world_size is None:
        return device
    return replace(device, world_size=world_size, backend="fake", simulated=True)
