"""Loaders whose batches go to a CUDA device."""

import os
from pathlib import Path

import pytest
import torch

from batchtune.loaders.worker import LoaderReply, Open, Opened, Take, Taken
from batchtune.processes.worker import Failed, Nursery

USERS = Path(__file__).parents[1] / "loaders" / "loaders_of_users.py"


def epoch(nursery, device, arguments):
    nursery.start_worker()
    asked = {
        "spec": f"{USERS}:arguments",
        "options": {},
        "kind": None,
        "seed": 1,
    }
    request = Open(
        arguments=arguments,
        processors=sorted(os.sched_getaffinity(0)),
        device=device,
        **asked,
    )
    opened = nursery.ask(request, (Opened, Failed), 120.0)
    assert isinstance(opened, Opened), opened
    taken = nursery.ask(
        Take(batches=None, seconds=60.0, digests=True), (Taken, Failed), 120.0
    )
    assert isinstance(taken, Taken), taken
    nursery.end_worker()
    return opened, taken


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_batches_arrive_as_they_were_made(pinned, context):
    arguments = {
        "num_workers": 2,
        "pin_memory": pinned,
        "multiprocessing_context": context,
    }
    nursery = Nursery("batchtune.loaders.worker", LoaderReply, {})
    try:
        opened, there = epoch(nursery, "cuda:0", arguments)
        _, here = epoch(nursery, "cpu", {"num_workers": 2})
    finally:
        nursery.close()
    assert opened.device_name == torch.cuda.get_device_name(0)
    assert there.complete
    assert there.digests == here.digests
    assert there.batches == here.batches
