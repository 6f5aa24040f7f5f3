"""Which setting a loader's tuning chooses, with measurements that are made: on a machine whose speed varies."""

import random

import pytest
from loader_records import loaded, made_dali
from msgspec.structs import replace
from reports.changed import with_row

from batchtune.loaders import read_tuning
from batchtune.loaders import tuner as loader_tuner
from batchtune.loaders.runner import LoaderSettings, Measurement
from batchtune.loaders.tuner import reason_for, run_loader_tuning, warnings_for
from batchtune.loaders.worker import BatchFacts, Opened, Taken
from batchtune.reports.page import build_page
from batchtune.results import BUSY_IDLE, Demand, Reproduced

BATCHES = 40


class MadeRunner:
    """Stands for LoaderRunner: each measurement is faster or slower by chance."""

    def __init__(self, noise, seed, seconds_of):
        self.noise = noise
        self.random = random.Random(seed)
        self.seconds_of = seconds_of

    def __call__(self, settings):
        return self

    def close(self):
        return None

    def inspect(self):
        return Opened(
            pid=1,
            kind="torch",
            takes=[],
            device="cpu",
            device_name="CPU",
            batches=BATCHES,
            dealt=True,
        )

    def measure(self, arguments, request):
        batch = self.seconds_of(arguments) * self.random.uniform(1, 1 + self.noise)
        given = request.steps or [0.0]
        steps = [given[number % len(given)] for number in range(BATCHES)]
        waits = [
            max(0.0, batch - (step if arguments["num_workers"] else 0.0))
            for step in steps
        ]
        taken = Taken(
            complete=True,
            waits=[0.1, *waits[1:]],
            steps=steps,
            batches=[BatchFacts(examples=8, total_length=80.0, size_bytes=1)] * BATCHES,
            cpu_seconds=0.1,
        )
        return Measurement(arguments=arguments, epochs=[taken])

    def reproduced(self, arguments):
        return Reproduced(batches=1)


def by_workers(arguments):
    """Seconds of a batch: two workers are the fastest, more do not help."""
    return {0: 0.010, 1: 0.009}.get(int(arguments["num_workers"] or 0), 0.006)


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    def tune(
        noise=0.0,
        seed=0,
        seconds_of=by_workers,
        on_progress=lambda progress: None,
        **given,
    ):
        runner = MadeRunner(noise, seed, seconds_of)
        monkeypatch.setattr(loader_tuner, "LoaderRunner", runner)
        settings = LoaderSettings(target="train.py:make", **given)
        return run_loader_tuning(
            settings, tmp_path, force=True, on_progress=on_progress
        )

    return tune


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.5])
def test_no_row_is_faster_than_the_recommended_one(tuned, noise, seed):
    sweep = {
        "num_workers": [0, 1, 2, 3, 4, 6],
        "prefetch_factor": [2, 4],
        "in_order": [True, False],
    }
    found = tuned(noise, seed, sweep=sweep)
    chosen = found.recommended_row
    assert chosen.equal_to_best and chosen.examples_per_second
    for row in found.rows:
        faster = (
            row.examples_per_second is not None
            and row.examples_per_second > chosen.examples_per_second
        )
        assert not faster or row.equal_to_best
        assert (row.examples_per_second or 0.0) <= chosen.examples_per_second / 0.9
    assert (
        "Within the error of it" in found.reason
        or sum(row.equal_to_best is True for row in found.rows) == 1
    )


@pytest.mark.parametrize(("step", "bottleneck"), [(0.02, False), (0.005, True)])
def test_a_setting_that_delivers_enough_is_no_bottleneck(tuned, step, bottleneck):
    found = tuned(sweep={"num_workers": [0]}, step_ms=1000 * step)
    assert found.recommended_row.gpu_idle > BUSY_IDLE
    assert (
        found.is_bottleneck
        == bottleneck
        == found.reason.startswith("The loader is the bottleneck")
    )
    headline = build_page(loaded(found)).lead[0]
    assert headline.startswith("The loader is the bottleneck") == bottleneck
    assert "the step waits for data" in headline
    said = "".join(warnings_for(with_row(found, processors=4.0), 4))
    assert ("Make each example cheaper" in said) == bottleneck


def test_what_reproducing_takes_is_said_before(tuned):
    said = []
    sweep = {"num_workers": [0]}
    tuned(sweep=sweep, check_reproducible=True, on_progress=said.append)
    (progress,) = [one for one in said if one.doing == "Comparing two epochs of"]
    assert progress.seconds == 120


def test_of_dali_reader_threads_are_too_few():
    made = made_dali()
    rows = [replace(row, gpu_idle=0.2, batches_per_second=1.0) for row in made.rows]
    demand = Demand(source="step-ms", per="batch", step_seconds=0.1)
    waits = replace(made, rows=rows, demand=demand)
    said = " ".join([reason_for(waits), *warnings_for(waits, 2)])
    assert "reader threads" in said and "worker" not in said


def test_interrupted_it_keeps_what_it_has_measured(tuned, tmp_path):
    def interrupted(arguments):
        if arguments["num_workers"] == 2:
            raise KeyboardInterrupt
        return 0.01

    with pytest.raises(KeyboardInterrupt):
        tuned(seconds_of=interrupted, sweep={"num_workers": [0, 1, 2]})
    found = read_tuning(tmp_path / "loader.json")
    assert found.interrupted and found.reason.startswith("Interrupted after")
    assert {row.workers for row in found.rows} == {0, 1}
