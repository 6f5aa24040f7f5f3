"""One process that stands for all ranks: its memory is that of a real rank, and what it can't do is refused."""

import pytest
from msgspec.structs import replace
from test_gang import LENGTHS, MIB, settings

from batchtune.errors import WorkloadError
from batchtune.probe.supervisor import Supervisor
from batchtune.probe.worker import NCCL_BYTES, reserve_of
from batchtune.results import BatchShape, ProbedWith

SIZES = {"size": "tiny", "dim": 256, "layers": 4, "heads": 4, "vocab": 8192}


def simulated(real, world_size):
    return replace(real, nproc_per_node=None, simulate_world_size=world_size)


@pytest.mark.process
@pytest.mark.usefixtures("one_nursery")
def test_ddp_is_refused_with_what_to_do():
    message = r"DistributedDataParallel.*\n.*--set parallel=fsdp2"
    with (
        Supervisor(simulated(settings(), 8), lengths=LENGTHS) as supervisor,
        pytest.raises(WorkloadError, match=message),
    ):
        supervisor.start()


def test_room_for_nccl_is_kept_on_gpus():
    ranks = ProbedWith(simulate_world_size=64)
    assert reserve_of(ranks, "cuda") == NCCL_BYTES
    assert reserve_of(ranks, "cpu") == 0
    assert reserve_of(replace(ranks, reserve_bytes=5), "cuda") == 5
    assert reserve_of(ProbedWith(), "cuda") == 0


def peaks(probed_with):
    """In MiB, of batches of 2 and 8 examples."""
    with Supervisor(probed_with, lengths=LENGTHS) as supervisor:
        device = supervisor.start()
        trials = [
            supervisor.measure(BatchShape(size, 128.0), 0).trial for size in (2, 8)
        ]
    assert device.simulated == (probed_with.nproc_per_node is None)
    return [trial.peak_bytes / MIB for trial in trials]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_simulated_rank_takes_the_memory_of_a_real_one(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as torchrun's ranks have
    real = settings(
        "builtin:transformer-lm",
        **{"memory_mib": 1500, "parallel": "fsdp2", "dropout": 0.0, **SIZES},
    )
    of_real, of_two, of_64 = (
        peaks(probed_with)
        for probed_with in (real, simulated(real, 2), simulated(real, 64))
    )
    differences = [ours - theirs for ours, theirs in zip(of_two, of_real, strict=True)]
    # What gloo and its threads take is the same for all batches.
    assert max(differences) - min(differences) < 1
    assert -40 < differences[0] < 0
    # 7.3 million parameters, with their gradients and AdamW's two moments.
    assert 20 < of_two[0] - of_64[0] < 60
