"""A training script on two ranks under the probe: one trial, one result, whatever happens on one of them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

import psutil
import pyarrow.parquet
import pytest
from cli.conftest import run_in
from scripts.test_feeding import check_growth, supervise
from shared_nursery import OF_SCRIPTS

from batchtune.errors import WorkloadError
from batchtune.lengths import Lengths
from batchtune.processes.worker import tail
from batchtune.results import (
    BatchShape,
    Device,
    Sweep,
    Trial,
    read_result,
)

SCRIPT = Path(__file__).with_name("ranked_script.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
ROWS = [20 + 37 * index % 80 for index in range(400)]
LENGTHS = Lengths.of(ROWS, unit="frames")
SMALL = BatchShape(4, 60.0)
LARGE = BatchShape(150, 60.0)
TOO_LARGE = BatchShape(201, 20.0)  # for rank 1, by its own fault


def supervise_ranks(*command, ranks=2, timeout_seconds=60.0):
    """The supervisor of a command that torchrun starts on these ranks."""
    return supervise(
        *(*TORCHRUN, f"--nproc-per-node={ranks}", *command),
        lengths=LENGTHS,
        memory_bytes=700 << 20,
        trial_timeout_seconds=timeout_seconds,
    )


@pytest.fixture(scope="module", autouse=True)
def working_folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("ranks"))
        patch.delenv("OMP_NUM_THREADS", raising=False)  # torchrun warns of that
        patch.setattr("batchtune.probe.supervisor.Nursery", lambda *_: OF_SCRIPTS)
        yield


@pytest.fixture(autouse=True)
def no_process_outlives_its_test():
    def started():
        children = psutil.Process().children(recursive=True)
        return {child.pid for child in children} - OF_SCRIPTS.pids()

    before = started()
    yield
    assert started() <= before


class Together(NamedTuple):
    """What became of one script on two ranks."""

    device: Device
    small: Trial
    large: Trial
    others: list[str]  # outcomes of 12 trials of many shapes, then of two single steps
    failed: Trial


@pytest.fixture(scope="module")
def together(working_folder):
    """A script with accelerate, which accumulates; rank 1 catches its OOM in too large a batch."""
    pytest.importorskip("accelerate")
    with supervise_ranks(str(SCRIPT), "caught") as supervisor:
        device = supervisor.start()
        small = supervisor.measure(SMALL, 0).trial
        large = supervisor.measure(LARGE, 1).trial
        others = []
        for index in range(12):
            shape = BatchShape(1 + 7 * index % 19, 20.0 + 6 * index)
            others.append(supervisor.measure(shape, index).trial.outcome)
        others += [supervisor.step(shape).trial.outcome for shape in (LARGE, SMALL)]
        failed = supervisor.measure(TOO_LARGE, 14).trial
    return Together(device, small, large, others, failed)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_ranks_train_on_the_shapes_that_are_asked_for(together):
    small = together.small
    large = together.large
    assert (small.outcome, large.outcome) == ("ok", "ok")
    assert together.others == ["ok"] * 14  # without a deadlock
    assert together.failed.worker == 1
    check_growth(small, large, (150 - 4) * 60)  # as on one rank
    device = together.device
    assert (device.world_size, device.backend) == (2, "gloo")
    assert [rank.rank for rank in device.ranks] == [0, 1]
    script = device.script
    assert (script.loader, script.per_unit) == ("Lengths, 400 examples", 1.0)
    assert (script.accumulation, script.look_ahead) == (2, 1)
    assert script.optimizers == ["SGD"]
    assert len(script.twins) == 6
    assert all(abs(twin.difference) <= 0.02 for twin in script.twins)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_oom_that_one_rank_catches_is_that_of_all(together):
    failed = together.failed
    assert (failed.outcome, failed.rank, failed.oom_ranks) == ("oom", 1, [1])
    caught = "rank 1: caught by the workload, and other ranks waited for that step: RuntimeError"
    assert (failed.error or "").startswith(caught)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_rank_takes_what_each_of_two_does(together):
    """DDP's buckets are the same on one rank; only what gloo holds differs."""
    with supervise_ranks(str(SCRIPT), ranks=1) as supervisor:
        device = supervisor.start()
        alone = supervisor.measure(LARGE, 0).trial
    assert (device.world_size, device.backend) == (1, "gloo")
    assert (alone.outcome, alone.rank, alone.oom_ranks) == ("ok", None, None)
    base_bytes = [each.ranks[0].base_bytes for each in (device, together.device)]
    alone_bytes = (alone.peak_bytes or 0) - base_bytes[0]
    assert (together.large.peak_bytes or 0) - base_bytes[1] == pytest.approx(
        alone_bytes, rel=0.1
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_that_hangs_says_where():
    pytest.importorskip("accelerate")
    with supervise_ranks(str(SCRIPT), "hangs", timeout_seconds=8.0) as supervisor:
        supervisor.start()
        small = supervisor.measure(SMALL, 0).trial
        failed = supervisor.measure(TOO_LARGE, 1).trial
    assert small.outcome == "ok"
    assert (failed.outcome, failed.rank, failed.oom_ranks) == ("timeout", 1, [])
    line = r"rank 1: no answer within 8 s; it hangs at ranked_script\.py, line \d+, in fail"
    assert re.fullmatch(line, failed.error or "")


@pytest.mark.slow
def test_torchrun_tells_how_a_silent_rank_has_ended():
    program = "test $RANK = 0 && exec sleep 100; exit 5"
    ended = "rank 1 ended first: its process ended with exit code 5"
    with (
        supervise_ranks("--no-python", "sh", "-c", program) as supervisor,
        pytest.raises(WorkloadError, match=ended),
    ):
        supervisor.start()


def test_torchruns_banner_is_none_of_a_script_s_words():
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
def test_ranks_are_tuned_and_proven(together, tmp_path):
    # By what this machine's processes take: a limit that half of the data fits into leaves nothing to tune.
    base_bytes = max(rank.base_bytes for rank in together.device.ranks)
    words = [f"--memory={base_bytes + (20 << 20)}B", "--memory-fraction=1"]
    words += ["--num-lengths=3", "--max-lengths=3", "--tolerance=0.1"]
    script = ["--", *TORCHRUN, "--nproc-per-node=2", str(SCRIPT)]
    ran = run_in(tmp_path, "tune", *words, *script)
    assert ran.returncode == 0, ran.stderr
    folder = tmp_path / "batchtune-run"
    # They are written once, not by each rank.
    written = pyarrow.parquet.read_table(folder / "lengths.parquet")
    assert written.column("length").to_pylist() == ROWS
    assert (folder / "sampler.yaml").exists(), ran.stdout + ran.stderr
    assert read_result(folder / "sweep.json", Sweep).proof.holds
