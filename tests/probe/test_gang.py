"""Real ranks over gloo: one result each, whatever goes wrong on one of them, and nothing left behind."""

import os
import signal
from pathlib import Path

import psutil
import pytest
from made_devices import MIB
from msgspec.structs import replace
from worker_processes import comes_true, gone, ours, processes_of, start_python

from batchtune.errors import WorkloadError
from batchtune.lengths import Lengths
from batchtune.probe.gang import environment_of_ranks
from batchtune.probe.settings import ProbeSettings
from batchtune.probe.supervisor import Supervisor
from batchtune.probe.worker import NCCL_BYTES, reserve_of
from batchtune.results import BatchShape, ProbedWith

GANG = Path(__file__).parent / "gang_workload.py"
LENGTHS = Lengths.of([24.0, 100.0, 256.0] * 40, unit="tokens")
SMALL, FAULT = (BatchShape(size, 100.0) for size in (2, 3))


@pytest.fixture(autouse=True)
def no_process_stays():
    yield
    assert not ours()


def settings(
    workload="Shared",
    *,
    memory_mib=460,
    **options,
):
    return ProbeSettings(
        workload=workload if ":" in workload else f"{GANG}:{workload}",
        options=options,
        device="cpu",
        memory_bytes=memory_mib * MIB,
        memory_fraction=1.0,
        num_lengths=2,
        nproc_per_node=2,
    )


def supervise(workload="Shared", **options):
    return Supervisor(settings(workload, **options), lengths=LENGTHS)


@pytest.mark.process
def test_two_ranks_are_one_worker():
    with supervise(ballast_mib=60) as supervisor:
        device = supervisor.start()
        fits, too_large = (
            supervisor.measure(BatchShape(size, 100.0), 0).trial for size in (2, 32)
        )
    assert (device.world_size, device.nnodes, device.backend) == (2, 1, "gloo")
    assert device.limit_bytes == 460 * MIB
    assert [rank.rank for rank in device.ranks] == [0, 1]
    held = device.ranks[1].base_bytes - device.ranks[0].base_bytes
    assert abs(held - 60 * MIB) < 8 * MIB
    assert (fits.outcome, fits.rank, fits.oom_ranks) == ("ok", 1, [])
    assert fits.steps >= 3
    assert fits.parameters_changed
    assert 0 < fits.peak_bytes - device.ranks[1].base_bytes < 30 * MIB
    # Rank 0 has room for it, and waits for the gradients of rank 1.
    assert (too_large.outcome, too_large.rank, too_large.oom_ranks) == ("oom", 1, [1])
    assert too_large.error.startswith("rank 1: RuntimeError: ")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_stays_if_all_above_is_killed(tmp_path):
    """The supervisor is stopped meanwhile, so it can't end what the nursery leaves behind."""
    code = (
        "from pathlib import Path\n"
        "from test_gang import SMALL, FAULT, supervise\n"
        "with supervise(hangs=True) as supervisor:\n"
        "    supervisor.measure(SMALL, 0)\n"
        "    Path('ready').touch()\n"
        "    supervisor.measure(FAULT, 0)\n"
    )
    supervisor = start_python(code, tmp_path)
    assert comes_true((tmp_path / "ready").exists)
    # Nursery, leader, torchrun and its two ranks.
    assert len(processes_of(supervisor.pid)) == 5
    (nursery,) = psutil.Process(supervisor.pid).children()
    supervisor.send_signal(signal.SIGSTOP)
    nursery.kill()
    supervisor.kill()
    supervisor.wait()
    assert gone(supervisor.pid)


def test_a_rank_sees_no_variables_of_another_launcher(monkeypatch):
    """torchrun sets RANK and the like itself."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("HOME", "/me")
    for name in ("SLURM_PROCID", "SLURM_NTASKS", "MASTER_ADDR", "RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "7")
    environment = environment_of_ranks(nproc_per_node=2)
    assert (environment["HOME"], environment["OMP_NUM_THREADS"]) == ("/me", "1")
    assert "7" not in environment.values()
    assert os.environ["SLURM_PROCID"] == "7"


# One process that stands for all ranks


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
        assert device.simulated == (probed_with.nproc_per_node is None)
        return [
            supervisor.measure(BatchShape(size, 128.0), 0).trial.peak_bytes / MIB
            for size in (2, 8)
        ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_simulated_rank_takes_the_memory_of_a_real_one(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as torchrun's ranks have
    real = settings(
        "builtin:transformer-lm",
        memory_mib=1500,
        parallel="fsdp2",
        dropout=0.0,
        size="tiny",
        dim=256,
        layers=4,
        heads=4,
        vocab=8192,
    )
    of_real, of_two, of_64 = (
        peaks(probed_with)
        for probed_with in (real, simulated(real, 2), simulated(real, 64))
    )
    small, large = (ours - theirs for ours, theirs in zip(of_two, of_real, strict=True))
    # What gloo and its threads take is the same for all batches.
    assert abs(small - large) < 1
    assert -40 < small < 0
    # 7.3 million parameters, with their gradients and AdamW's two moments.
    assert 20 < of_two[0] - of_64[0] < 60
