"""Real ranks over gloo: one result each, whatever goes wrong on one of them, and nothing left behind."""

import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from worker_processes import gone, ours, processes_of, wait_for

from batchtune.errors import ProbeError, WorkloadError
from batchtune.lengths import Lengths
from batchtune.probe.probing import run_probe
from batchtune.probe.settings import ProbeSettings
from batchtune.probe.supervisor import Supervisor
from batchtune.results import BatchShape, Trial

GANG = Path(__file__).parent / "gang_workload.py"
LENGTHS = Lengths.of([24.0, 100.0, 256.0] * 40, unit="tokens")
TINY = {"size": "tiny", "dim": 64, "layers": 2, "heads": 2, "vocab": 1024}
MIB = 1 << 20
SMALL, FAULT = (BatchShape(size, 100.0) for size in (2, 3))


@pytest.fixture(autouse=True)
def no_process_stays() -> Iterator[None]:
    yield
    assert not ours()


def settings(
    workload: str = "Shared",
    *,
    memory_mib: int = 460,
    timeout_seconds: float = 60.0,
    **options: object,
) -> ProbeSettings:
    return ProbeSettings(
        workload=workload if ":" in workload else f"{GANG}:{workload}",
        options=options,
        device="cpu",
        memory_bytes=memory_mib * MIB,
        memory_fraction=1.0,
        num_lengths=2,
        trial_timeout_seconds=timeout_seconds,
        nproc_per_node=2,
    )


def supervise(workload: str = "Shared", **options: object) -> Supervisor:
    return Supervisor(settings(workload, **options), lengths=LENGTHS)  # type: ignore[arg-type]


def test_two_ranks_are_one_worker() -> None:
    with supervise(ballast_rank=1, ballast_mib=60) as supervisor:
        device = supervisor.start()
        fits, too_large = (
            supervisor.measure(BatchShape(size, 100.0), 0).trial for size in (2, 26)
        )
    assert (device.world_size, device.nnodes, device.backend) == (2, 1, "gloo")
    assert device.limit_bytes == 460 * MIB
    assert [rank.rank for rank in device.ranks] == [0, 1]
    held = device.ranks[1].base_bytes - device.ranks[0].base_bytes
    assert abs(held - 60 * MIB) < 8 * MIB
    assert (fits.outcome, fits.rank, fits.oom_ranks) == ("ok", 1, [])
    assert fits.steps >= 3
    assert fits.parameters_changed
    assert 0 < (fits.peak_bytes or 0) - device.ranks[1].base_bytes < 30 * MIB
    # Rank 0 has room for it, and waits for the gradients of rank 1.
    assert (too_large.outcome, too_large.rank, too_large.oom_ranks) == ("oom", 1, [1])
    assert (too_large.error or "").startswith("rank 1: RuntimeError: ")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
@pytest.mark.parametrize(
    ("fault", "outcome", "oom_ranks", "error"),
    [
        ("run_out", "oom", [1], r"rank 1: RuntimeError: .*can't allocate memory.*"),
        ("kill", "crash", [], "rank 1: its process was killed by SIGKILL"),
        ("leave", "crash", [], "rank 1: its process ended with exit code 3"),
        (
            *("hang", "timeout", []),
            r"rank 1: no answer within 5 s; it hangs at gang_workload\.py, line \d+, in hang",
        ),
        (
            *("hang_for_good", "timeout", []),
            r"rank 1: no answer within 5 s; it hangs at gang_workload\.py, line \d+, in hang_for_good",
        ),
        ("fail", "error", [], "rank 1: ValueError: tokens and labels differ"),
    ],
)
def test_each_fault_is_one_result(
    parallel: str, fault: str, outcome: str, oom_ranks: list[int], error: str
) -> None:
    with supervise(fault=fault, parallel=parallel, timeout_seconds=5.0) as supervisor:
        supervisor.start()
        before, failed, after = (
            supervisor.measure(shape, 0) for shape in (SMALL, FAULT, SMALL)
        )
    assert failed.trial.outcome == outcome
    assert (failed.trial.rank, failed.trial.oom_ranks) == (1, oom_ranks)
    assert re.fullmatch(error, failed.trial.error or "")
    assert (before.trial.outcome, after.trial.outcome) == ("ok", "ok")
    assert (before.trial.worker, after.trial.worker) == (1, 2)
    if outcome in ("oom", "error"):
        assert failed.stage == "step"
        assert "gang_workload.py" in (failed.traceback or "")


@pytest.mark.slow
def test_all_ranks_out_of_memory_are_one_result() -> None:
    with supervise(parallel="fsdp2") as supervisor:
        trials = [
            supervisor.measure(BatchShape(size, 100.0), 0).trial for size in (90, 2)
        ]
    assert [trial.outcome for trial in trials] == ["oom", "ok"]
    assert trials[0].oom_ranks == [0, 1]


@pytest.mark.slow
def test_an_oom_that_one_rank_catches_ends_the_trial() -> None:
    with supervise("CatchesOnOneRank", ballast_rank=1, ballast_mib=60) as supervisor:
        trials = [
            supervisor.measure(BatchShape(size, 100.0), 0).trial for size in (2, 26, 2)
        ]
    assert [trial.outcome for trial in trials] == ["ok", "oom", "ok"]
    assert trials[1].oom_ranks == [1]
    assert "caught by the workload" in (trials[1].error or "")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fifty_trials_run_without_a_deadlock() -> None:
    trials: list[Trial] = []
    with supervise("UnevenSteps") as supervisor:
        supervisor.start()
        for index in range(50):
            shape = BatchShape(1 + index % 5, 100.0)
            if index % 7 == 6:
                trials.append(supervisor.step(shape, release=index % 2 == 0).trial)
            else:
                trials.append(supervisor.measure(shape, index).trial)
    assert {trial.outcome for trial in trials} == {"ok"}
    assert {trial.worker for trial in trials} == {1}


@pytest.mark.slow
def test_a_rank_that_fails_in_the_setup_is_named() -> None:
    with (
        supervise(ballast_rank=1, ballast_mib=1 << 20) as supervisor,
        pytest.raises(ProbeError, match=r"limit is too small: .*rank 1: RuntimeError"),
    ):
        supervisor.start()


@pytest.mark.slow
def test_an_error_in_the_first_step_is_the_workloads_own() -> None:
    with (
        supervise(fault="fail", fault_size=1) as supervisor,
        pytest.raises(WorkloadError, match="first step failed: rank 1: ValueError"),
    ):
        supervisor.start()


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["supervisor", "nursery", "both"])
def test_nothing_stays_if_something_above_is_killed(
    tmp_path: Path, victim: str
) -> None:
    folders = [str(folder) for folder in Path(__file__).parents[:2]]
    code = (
        f"import sys; sys.path[:0] = {folders}\n"
        "from pathlib import Path\n"
        "from test_gang import SMALL, FAULT, supervise\n"
        "with supervise(fault='hang') as supervisor:\n"
        "    supervisor.measure(SMALL, 0)\n"
        "    Path('ready').touch()\n"
        "    print(supervisor.measure(FAULT, 0).trial.outcome, flush=True)\n"
    )
    supervisor = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    wait_for(tmp_path / "ready")
    # Nursery, leader, torchrun and its two ranks.
    assert len(processes_of(supervisor.pid)) == 5
    (nursery,) = psutil.Process(supervisor.pid).children()
    if victim == "both":
        supervisor.send_signal(signal.SIGSTOP)
    if victim != "supervisor":
        nursery.kill()
    if victim != "nursery":
        supervisor.kill()
    printed, _ = supervisor.communicate()
    assert gone(supervisor.pid)
    assert printed.split() == (["crash"] if victim == "nursery" else [])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_answers_are_those_of_fresh_gangs(tmp_path: Path, parallel: str) -> None:
    lengths = Lengths.of([100.0, 256.0] * 200, unit="tokens")
    probed_with = settings(
        "builtin:transformer-lm", memory_mib=400, parallel=parallel, **TINY
    )
    probe = run_probe(lengths, probed_with, tmp_path)
    assert probe.settings["nproc_per_node"] == 2
    assert probe.device.world_size == 2
    assert probe.margin is not None
    point = probe.frontier[-1]
    assert point.closed_by in ("oom", "memory")
    example_bytes = (
        (point.peak_bytes or 0) - probe.device.ranks[0].base_bytes
    ) / point.batch_size
    # One example, and the margin, which the probe leaves free on purpose.
    most = point.batch_size + 1 + math.ceil(probe.margin.bytes / example_bytes)
    largest = _largest_in_fresh_gangs(probed_with, point.length, point.batch_size)
    assert point.batch_size <= largest <= most


def _largest_in_fresh_gangs(
    probed_with: ProbeSettings, length: float, guess: int
) -> int:
    """The largest batch size that fits, by bisection, each in a gang that has run nothing before."""
    low, high = 1, 2 * guess
    while high - low > 1:
        middle = (low + high) // 2
        with Supervisor(probed_with, lengths=LENGTHS) as supervisor:
            trial = supervisor.measure(BatchShape(middle, length), 0).trial
        if trial.outcome == "ok":
            low = middle
        else:
            high = middle
    return low


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_what_one_rank_holds_is_all_that_it_costs(tmp_path: Path) -> None:
    lengths = Lengths.of([100.0, 200.0] * 60, unit="tokens")
    sizes = []
    for mib in (0, 60):
        probed = run_probe(
            lengths,
            settings(ballast_rank=1, ballast_mib=mib),
            tmp_path / str(mib),
        )
        sizes.append(probed.frontier[-1].batch_size)
    # A batch that is much too large, rank 0 can't hold either.
    assert all(
        1 in (trial.oom_ranks or ())
        for trial in probed.trials
        if trial.outcome == "oom"
    )
    passed = [trial for trial in probed.trials if trial.length == 200.0]
    small, large = (
        pick(
            (trial.batch_size, trial.peak_bytes) for trial in passed if trial.peak_bytes
        )
        for pick in (min, max)
    )
    example_mib = (large[1] - small[1]) / (large[0] - small[0]) / MIB
    assert abs((sizes[0] - sizes[1]) * example_mib - 60) < 2 * example_mib + 2


@pytest.mark.slow
def test_a_rank_sees_no_variables_of_another_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("SLURM_PROCID", "SLURM_NTASKS", "MASTER_ADDR", "RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "7")
    with supervise("TellsItsVariables") as supervisor:
        supervisor.start()
        trial = supervisor.measure(FAULT, 0).trial
    told = dict(pair.split("=") for pair in re.findall(r"\w+=\S+", trial.error or ""))
    assert told.pop("LOCAL_RANK") in ("0", "1")  # whichever fails first
    assert told == {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    assert os.environ["SLURM_PROCID"] == "7"


@pytest.mark.slow
def test_ranks_find_a_token_budget_together(tmp_path: Path) -> None:
    asked = settings("builtin:transformer-lm", packed=True, **TINY)
    probe = run_probe(LENGTHS, asked, tmp_path)
    assert probe.device.world_size == 2
    assert probe.packed is not None
    assert probe.packed.max_tokens > 256
    assert probe.is_proven
