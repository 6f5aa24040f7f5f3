"""Ranks in an NCCL process group, one on each GPU."""

import pytest
import torch
from gpu.on_cuda import settings

from batchtune.lengths import Lengths
from batchtune.probe.flow import run_probe

LENGTHS = Lengths.of([16.0, 64.0, 128.0] * 20, unit="tokens")
LM = "builtin:transformer-lm"
SMALL = {"size": "tiny"}


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_ranks_are_probed_over_nccl(parallel, tmp_path):
    ranks = min(2, torch.cuda.device_count())
    probe = run_probe(
        LENGTHS,
        settings(LM, {**SMALL, "parallel": parallel}, nproc_per_node=ranks),
        tmp_path,
    )
    device = probe.device
    assert (device.backend, device.world_size) == ("nccl", ranks)
    assert [rank.rank for rank in device.ranks] == list(range(ranks))
    limits = [rank.limit_bytes for rank in device.ranks]
    assert device.limit_bytes <= min(limits)
    # The context, and NCCL's buffers, lie outside torch.
    assert all((rank.outside_bytes or 0) > 0 for rank in device.ranks)
    assert probe.is_proven
