"""A training script on two ranks under the probe: one trial, one result, whatever happens on one of them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet
import pytest
from cli.conftest import run_in
from msgspec.structs import replace

from batchtune.errors import BatchtuneError, OptionError, WorkloadError
from batchtune.lengths import Lengths
from batchtune.probe.probing import run_probe
from batchtune.probe.settings import ProbeSettings
from batchtune.probe.supervisor import Supervisor
from batchtune.processes.worker import tail
from batchtune.results import BatchShape, Probe, Trial, Verification, read_result
from batchtune.scripts.own_lengths import write_own_lengths

SCRIPT = Path(__file__).with_name("ranked_script.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
ROWS = [20 + 37 * index % 80 for index in range(400)]
LENGTHS = Lengths.of(ROWS, unit="frames")
SMALL = BatchShape(4, 60.0)
LARGE = BatchShape(30, 60.0)


def supervise(
    *words: str,
    ranks: int = 2,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> Supervisor:
    command = [*TORCHRUN, f"--nproc-per-node={ranks}", str(SCRIPT), *words]
    if "--lightning" in words:
        command = [sys.executable, str(SCRIPT), *words]
    return Supervisor(
        ProbeSettings(
            workload="a script",
            options=options or {},
            command=command,
            memory_bytes=700 << 20,
            memory_fraction=1.0,
            trial_timeout_seconds=settings.pop("timeout_seconds", 60.0),
            **settings,
        ),
        lengths=LENGTHS,
    )


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # torchrun warns of that
    before = set(psutil.Process().children(recursive=True))
    yield tmp_path
    assert set(psutil.Process().children(recursive=True)) <= before


def trials(supervisor: Supervisor) -> list[Trial]:
    """The outcomes of a small batch, a large one, and the small one again."""
    with supervisor:
        supervisor.start()
        return [
            supervisor.measure(shape, index).trial
            for index, shape in enumerate((SMALL, LARGE, SMALL))
        ]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "words",
    [
        ["--accumulate=2", "--workers=1"],
        ["--accelerate", "--accumulate=2"],
        ["--lightning", "--accumulate=2"],
    ],
    ids=["ddp", "accelerate", "lightning"],
)
def test_all_ranks_train_on_the_shapes_that_are_asked_for(words: list[str]) -> None:
    library = words[0].removeprefix("--")
    if library in ("accelerate", "lightning"):
        pytest.importorskip(library)
    with supervise(*words) as supervisor:
        device = supervisor.start()
        small, large = (
            supervisor.measure(shape, index).trial
            for index, shape in enumerate((SMALL, LARGE))
        )
        again = [supervisor.step(shape).trial.outcome for shape in (LARGE, SMALL)]
        worker = supervisor.worker
    assert (small.outcome, large.outcome, worker) == ("ok", "ok", 1)
    assert again == ["ok", "ok"]
    # The features and 256 activations of each frame, forward and backward, as on one rank.
    growth = (large.peak_bytes or 0) - (small.peak_bytes or 0)
    assert 4 * 256 < growth / ((30 - 4) * 60) < 4 * (5 * 256 + 16)
    assert (device.world_size, device.backend) == (2, "gloo")
    assert [rank.rank for rank in device.ranks] == [0, 1]
    script = device.script
    assert script is not None
    assert (script.loader, script.per_unit) == ("Lengths, 400 examples", 1.0)
    assert (script.accumulation, script.look_ahead) == (2, int(library == "accelerate"))
    assert all(abs(twin.difference) <= 0.02 for twin in script.twins)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("fault", "outcome", "oom_ranks", "error"),
    [
        ("oom", "oom", [1], "rank 1: RuntimeError: .*can't allocate memory.*"),
        ("swallowed", "oom", [1], "rank 1: caught by the workload, and other ranks .*"),
        ("killed", "crash", [], "rank 1: its process was killed by SIGKILL"),
        ("bug", "error", [], "rank 1: KeyError: 'no such speaker'"),
        ("ends", "error", [], "rank 1: WorkloadError: the script ended by itself.*"),
        (
            *("hang", "timeout", []),
            r"rank 1: no answer within 8 s; it hangs at ranked_script\.py, line \d+, in fail",
        ),
    ],
)
def test_a_fault_of_one_rank_is_one_result(
    fault: str, outcome: str, oom_ranks: list[int], error: str
) -> None:
    limit = 8.0 if fault == "hang" else 60.0
    before, failed, after = trials(supervise(fault, timeout_seconds=limit))
    assert failed.outcome == outcome
    assert (failed.rank, failed.oom_ranks) == (1, oom_ranks)
    assert re.fullmatch(error, failed.error or "", re.DOTALL)
    assert (before.outcome, after.outcome) == ("ok", "ok")
    assert (before.worker, after.worker) == (1, 2)


@pytest.mark.slow
def test_a_bug_on_one_rank_is_shown_with_its_line() -> None:
    with supervise("bug") as supervisor:
        supervisor.start()
        ran = supervisor.measure(LARGE, 0)
    assert ran.stage == "step"
    assert 'raise KeyError("no such speaker")' in (ran.traceback or "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "options", "expected"),
    [
        (["early"], {}, "rank 1 ended first\nTraceback .*\nValueError: no such folder"),
        (["data"], {}, "rank 1 ended first\n.*\nIndexError: broken example"),
        (
            ["early exit"],
            {},
            "rank 1 ended first\nbatchtune: ranked_script.py iterated",
        ),
        (["early death"], {}, "rank 1 ended first: its process ended with exit code 5"),
        (["not finite"], {}, "rank 1: parameters are not finite"),
        (["no step"], {}, "no optimizer stepped after any of its 200 batches of Len"),
        ([], {"ddp": True}, "the script trains on 2 ranks, where they are really"),
        (["learns"], {}, "rank 1 has learned something else of the script's batches"),
    ],
)
def test_ranks_that_can_not_be_measured_say_why(
    words: list[str], options: dict[str, Any], expected: str
) -> None:
    with (
        supervise(*words, **options) as supervisor,
        pytest.raises((WorkloadError, OptionError)) as raised,
    ):
        supervisor.start()
    error: BatchtuneError = raised.value
    traceback = getattr(error, "traceback", None)
    assert re.search(expected, f"{error.message}\n{traceback}", re.DOTALL)


@pytest.mark.slow
def test_one_rank_under_torchrun_is_as_one_without() -> None:
    with supervise(ranks=1) as supervisor:
        device = supervisor.start()
        trial = supervisor.measure(SMALL, 0).trial
    assert (device.world_size, device.backend) == (1, "gloo")
    assert (trial.outcome, trial.rank, trial.oom_ranks) == ("ok", None, None)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_twenty_trials_run_without_a_deadlock() -> None:
    outcomes = []
    with supervise("--accumulate=2") as supervisor:
        supervisor.start()
        for index in range(20):
            shape = BatchShape(1 + 7 * index % 19, 20.0 + 4 * index)
            outcomes.append(supervisor.measure(shape, index).trial.outcome)
        worker = supervisor.worker
    assert (outcomes, worker) == (["ok"] * 20, 1)


def test_torchruns_report_does_not_hide_a_script_s_last_words() -> None:
    report = (
        "W1124 14:07:10.451000 26245 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 26319 "
        "closing signal SIGTERM\n"
        "Traceback (most recent call last):\n"
    )
    words = "[rank1]: ValueError: no such folder\n"
    assert tail(words + report, lines=3) == words.strip()
    assert tail(report, lines=1) == "Traceback (most recent call last):"


def test_torchruns_banner_is_none_of_a_script_s_words() -> None:
    lines = ["*" * 41, "Setting OMP_NUM_THREADS environment variable", "*" * 41]
    logged = [
        f"W1124 14:07:08.451000 2624 torch/distributed/run.py:874] {line}\n"
        for line in lines
    ]
    printed = "\n".join(lines)
    for banner in ("".join(logged), f"\n{printed}\n"):
        assert tail(f"{banner}ValueError: no such folder\n", lines=3).strip() == (
            "ValueError: no such folder"
        )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_fit_what_one_does(tmp_path: Path) -> None:
    """DDP's buckets are the same on one rank; only what gloo holds differs."""
    free_bytes = 60 << 20
    sizes = []
    for ranks in (1, 2):
        with supervise(ranks=ranks) as supervisor:
            base_bytes = supervisor.start().ranks[0].base_bytes
        settings = replace(
            supervisor._settings,
            memory_bytes=base_bytes + free_bytes,
            num_lengths=2,
            max_lengths=2,
            tolerance=0.05,
        )
        probed = run_probe(LENGTHS, settings, tmp_path / str(ranks))
        sizes.append(probed.frontier[-1].batch_size)
    ooms = [trial for trial in probed.trials if trial.outcome == "oom"]
    assert ooms and all(trial.oom_ranks for trial in ooms)
    alone, together = sizes
    assert 100 < alone < 300
    assert abs(together - alone) <= 0.1 * alone


@pytest.mark.slow
def test_the_lengths_are_written_once(tmp_path: Path) -> None:
    path = tmp_path / "lengths.parquet"
    command = [*TORCHRUN, "--nproc-per-node=2", str(SCRIPT)]
    assert write_own_lengths(command, {}, path, 120.0) == "Lengths, 400 examples"
    written = pyarrow.parquet.read_table(path).column("length").to_pylist()
    assert written == ROWS


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_accelerates_ranks_are_tuned_and_verified(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    accelerated = ["--accelerate", "--accumulate=2"]
    # By what this machine's processes take: a limit that half of the data fits into leaves nothing to tune.
    with supervise(*accelerated) as supervisor:
        base_bytes = max(rank.base_bytes for rank in supervisor.start().ranks)
    words = ["tune", f"--memory={base_bytes + (30 << 20)}B", "--memory-fraction=1"]
    # With more buckets, 400 examples need more batches.
    words += ["--num-lengths=3", "--max-lengths=3", "--num-buckets=2:4"]
    words += ["--tolerance=0.1", "--verify", "--verify-steps=20", "--time-tolerance=10"]
    script = [str(SCRIPT), *accelerated]
    ran = run_in(tmp_path, *words, "--", *TORCHRUN, "--nproc-per-node=2", *script)
    assert ran.returncode == 0, ran.stderr
    assert "the script's own data set (Lengths, 400 examples)" in ran.stderr
    folder = tmp_path / "batchtune-run"
    probe = read_result(folder / "probe.json", Probe)
    assert (probe.device.world_size, len(probe.device.ranks)) == (2, 2)
    assert read_result(folder / "verify.json", Verification).failures == []
