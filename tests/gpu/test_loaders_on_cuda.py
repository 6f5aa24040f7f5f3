"""Loaders whose batches go to a CUDA device."""

import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "loaders"))

from test_loader_worker import ProcessAsker


def epoch(device, arguments):
    with closing(ProcessAsker()) as asker:
        opened = asker.open("arguments", arguments, device=device)
        return opened, asker.take(digests=True)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_batches_arrive_as_they_were_made(pinned, context):
    arguments = {
        "num_workers": 2,
        "pin_memory": pinned,
        "multiprocessing_context": context,
    }
    opened, there = epoch("cuda:0", arguments)
    _, here = epoch("cpu", {"num_workers": 2})
    assert opened.device_name == torch.cuda.get_device_name(0)
    assert there.complete
    assert there.digests == here.digests
    assert there.batches == here.batches
