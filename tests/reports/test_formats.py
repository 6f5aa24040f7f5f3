"""What every format of a report must do; a new one in the registry is held to it too."""

import dataclasses

import pytest
from loader_records import hostile_loader, loaded, made_iterable, made_loader
from msgspec.structs import replace
from packed_records import with_packing
from report_records import hostile_results, made_probe, made_sweep, made_trial
from reports.changed import run_of, with_row
from reports.test_terminal import RUNS as SHOWN
from streamed_records import empty_stream, hostile_stream, made_stream

from batchtune.reports import FORMATS, render
from batchtune.reports.page import build_page
from batchtune.results import LowerBound

PROBE = made_probe()
UNTIMED_POINTS = [
    replace(point, step_seconds=None, peak_bytes=None, target_length=80.0)
    for point in PROBE.frontier
]
CRASH = made_trial(12, "crash", error="worker died: SIGSEGV")
DEVICE = replace(PROBE.device, allocator="expandable")
EXPANDABLE = {"probe": replace(PROBE, device=DEVICE)}
TRAIN_WITH = (
    "Train with PYTORCH_ALLOC_CONF=expandable_segments:True, as it was measured:"
)
FIRST_ROW = replace(made_sweep(), rows=made_sweep().rows[:1], recommended=0)
NO_TIME = {"batches": 1, "estimated_epoch_seconds": 0.0}
HOSTILE = "\x1b[31m<script>|`\n"
RUNS = {
    **SHOWN,
    "crashed": run_of(probe=replace(PROBE, trials=[*PROBE.trials, CRASH])),
    "expandable": run_of(**EXPANDABLE),
    "expandable, swept": run_of(**EXPANDABLE, sweep=made_sweep()),
    "expandable, packed": run_of(**EXPANDABLE, sweep=with_packing(made_sweep())),
    "expandable stream": run_of(**EXPANDABLE, stream=made_stream()),
    "untimed": run_of(
        probe=replace(made_probe(unit=None), trials=[], frontier=UNTIMED_POINTS),
        sweep=made_sweep(timed=False, unit=None),
    ),
    "no rows": run_of(sweep=replace(made_sweep(), rows=[], recommended=None)),
    "no frontier": run_of(probe=replace(PROBE, frontier=[])),
    "zeros": run_of(
        sweep=replace(
            with_row(FIRST_ROW, mean_batch_size=0.0, **NO_TIME),
            baselines=[
                replace(made_sweep().baselines[0], padding_ratio=0.0, **NO_TIME)
            ],
            lower_bound=LowerBound(padded_length=0.0, **NO_TIME),
        ),
    ),
    "bare stream": run_of(stream=made_stream(timed=False, unit=None)),
    "no stream recommended": run_of(stream=made_stream(recommended=None)),
    "one loader": loaded(made_iterable()),
    "no settings of a loader": loaded(made_loader(rows=[], recommended=None)),
    "no rows of a stream": run_of(stream=empty_stream()),
    "hostile packing": run_of(sweep=with_packing(made_sweep(), HOSTILE)),
    "hostile": dataclasses.replace(
        hostile_results(HOSTILE),
        stream=hostile_stream(HOSTILE),
        loader=hostile_loader(HOSTILE),
    ),
}


# What every format says of a run; quotation marks are written in different ways, and a terminal breaks lines.
SAID = {
    "both": "Set 13 buckets (optimal)",
    "verified": "Verified: 500 shuffled batches",
    "does-not-hold": "The verification does not hold.",
    "crashed": "worker died: SIGSEGV",
    "expandable": TRAIN_WITH,
    "stream-and-sweep": "buffer_size=4096, max_padding_ratio=0.2) with max_batch_length = 600",
    "loader-bottleneck": "the step waits for data 34.0% of the time",
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_run_is_shown_with_what_matters_most(name):
    for run, results in RUNS.items():
        text = render(name, results)
        assert text.endswith("\n") and not text.endswith("\n\n"), run
        assert "\x1b" not in text, run
        assert name in ("terminal", "json") or "<script>|" not in text, run
        assert SAID.get(run, "") in " ".join(text.split()), run


@pytest.mark.parametrize("name", [name for name in RUNS if "expandable" in name])
def test_what_training_needs_is_among_the_first_lines(name):
    assert sum(line.startswith(TRAIN_WITH) for line in build_page(RUNS[name]).lead) == 1
