"""The supervisor against real worker processes, each going wrong in its own way."""

import re
from collections.abc import Iterator

import pytest
from worker_processes import ours, supervise

from batchtune.errors import ProbeError, WorkloadError
from batchtune.results import BatchShape

SHAPE = BatchShape(2, 3.0)


@pytest.fixture(autouse=True)
def no_process_stays() -> Iterator[None]:
    yield
    assert not ours()


def test_a_good_workload_is_measured() -> None:
    with supervise("Good") as supervisor:
        device = supervisor.start()
        trial = supervisor.measure(SHAPE, 7).trial
    assert (device.kind, device.limit_bytes) == ("cpu", 1 << 30)
    assert (trial.index, trial.outcome, trial.error) == (7, "ok", None)
    assert trial.steps >= 2
    assert trial.step_seconds is not None and trial.step_seconds > 0
    assert trial.peak_bytes is not None and 0 < trial.peak_bytes < 1 << 30
    assert device.processors is not None
    assert device.load_average is not None
    for others in (device.other_processors, trial.other_processors):
        assert others is not None
        # Clocks tick every hundredth of a second.
        assert 0 <= others <= device.processors * 1.2


def test_the_limit_is_real_and_the_worker_lives_on() -> None:
    with supervise("HungryInStep") as supervisor:
        supervisor.start()
        outcomes = [
            supervisor.measure(BatchShape(size, 1.0), 0).trial.outcome
            for size in (1, 4, 1)
        ]
    assert outcomes == ["ok", "oom", "ok"]


@pytest.mark.parametrize("workload", ["TwoLosses", "KeepsItsFeatures"])
def test_a_failure_leaves_no_memory_to_later_trials(workload: str) -> None:
    with supervise(workload) as supervisor:
        supervisor.start()
        before, failed, after = (
            supervisor.measure(BatchShape(size, 10.0), 0).trial for size in (1, 20, 1)
        )
    assert failed.outcome == "oom"
    assert abs((after.peak_bytes or 0) - (before.peak_bytes or 0)) < 8 << 20


@pytest.mark.slow
def test_half_made_optimizer_state_does_not_spoil_the_next_trial() -> None:
    # Beside the batch, about 910 MiB are needed before the state's second half, and 200 MiB for it.
    with supervise("HungryInOptimizer", memory_bytes=2 << 30) as supervisor:
        supervisor.start()
        outcomes = [
            supervisor.measure(BatchShape(mib, 1.0), 0).trial.outcome
            for mib in (1040, 10)
        ]
    assert outcomes == ["oom", "ok"]


def test_an_error_in_the_setup_is_the_workloads_own() -> None:
    with (
        supervise("RaisesInSetup") as supervisor,
        pytest.raises(WorkloadError, match="epoch-3") as caught,
    ):
        supervisor.start()
    assert caught.value.traceback is not None
    assert "raise ValueError" in caught.value.traceback


def test_a_worker_that_dies_in_the_setup_shows_its_last_words() -> None:
    with (
        supervise("DiesInSetup") as supervisor,
        pytest.raises(WorkloadError, match="SIGABRT") as caught,
    ):
        supervisor.start()
    assert "a library's last words" in (caught.value.traceback or "")


def test_a_setup_beyond_the_limit_says_that_it_is_too_small() -> None:
    with (
        supervise("HungryInSetup") as supervisor,
        pytest.raises(ProbeError, match="limit is too small"),
    ):
        supervisor.start()


@pytest.mark.slow
def test_a_limit_below_pytorchs_need_is_reported_first() -> None:
    with (
        supervise("Good", memory_bytes=50 << 20) as supervisor,
        pytest.raises(ProbeError, match="Python, PyTorch and your code hold"),
    ):
        supervisor.start()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stage", "message"),
    [
        ("RaisesInMakeBatch", "make_batch", "vocabulary"),
        ("RaisesInStep", "step", "shapes cannot be multiplied"),
        ("RaisesSystemExit", "step", "SystemExit: 3"),
        ("RaisesWhatCantBePrinted", "step", r"a lone surrogate: \udcff x"),
        ("RaisesWhatHasNoWords", "step", "Wordless"),
    ],
)
def test_an_error_in_a_trial_is_the_workloads_own(
    name: str, stage: str, message: str
) -> None:
    with supervise(name) as supervisor:
        supervisor.start()
        measured = supervisor.measure(SHAPE, 0)
        trial = measured.trial
    assert trial.outcome == "error"
    assert message in (trial.error or "")
    assert len(trial.error or "") < 2000
    assert measured is not None
    assert measured.stage == stage
    assert "faulty_workload.py" in (measured.traceback or "")


@pytest.mark.parametrize(
    ("name", "outcome", "error"),
    [
        ("Segfaults", "crash", "SIGSEGV"),
        pytest.param("ExitsInStep", "crash", "exit code 0", marks=pytest.mark.slow),
        pytest.param("Forks", "crash", "exit code 3", marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_dies_is_replaced(name: str, outcome: str, error: str) -> None:
    with supervise(name) as supervisor:
        supervisor.start()
        first = supervisor.measure(SHAPE, 0).trial
        second = supervisor.measure(SHAPE, 1).trial
    assert (first.outcome, second.outcome) == (outcome, outcome)
    assert error in (first.error or "")


def test_a_worker_that_hangs_is_stopped() -> None:
    with supervise("Hangs", timeout_seconds=1.0) as supervisor:
        supervisor.start()
        trial = supervisor.measure(SHAPE, 0).trial
    assert trial.outcome == "timeout"
    assert re.fullmatch(
        r"no answer within 1 s; it hangs at faulty_workload\.py, line \d+, in step",
        trial.error or "",
    )


def test_an_oom_caught_by_the_workload_still_counts() -> None:
    with supervise("CatchesItself") as supervisor:
        supervisor.start()
        fits, too_large = (
            supervisor.measure(BatchShape(size, 1.0), 0).trial for size in (1, 4)
        )
    assert (fits.outcome, fits.caught) == ("ok", False)
    assert (too_large.outcome, too_large.caught) == ("oom", True)
    assert "caught by the workload, whose step still returned: RuntimeError" in (
        too_large.error or ""
    )
    assert "faulty_workload.py, line" in (too_large.error or "")


def test_the_peak_before_an_error_is_known() -> None:
    with supervise("PretendsToBeOut") as supervisor:
        trial = supervisor.measure(SHAPE, 0).trial
    assert (trial.outcome, trial.peak_bytes) == ("oom", None)
    assert 0 < (trial.failed_peak_bytes or 0) < 600 << 20
