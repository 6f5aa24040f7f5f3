"""What every format of a report must do; a new one in the registry is held to it too."""

from dataclasses import replace

import msgspec
import pytest
from loader_records import (
    hostile_loader,
    loaded,
    made_iterable,
    made_loader,
)
from packed_records import with_packing
from report_records import (
    hostile_results,
    made_probe,
    made_sweep,
    made_trial,
)
from reports.test_terminal import RUNS as SHOWN
from streamed_records import empty_stream, hostile_stream, made_stream

from batchtune.reports import FORMATS, RunResults, render
from batchtune.reports.page import build_page
from batchtune.results import LowerBound

UNTIMED_PROBE = msgspec.structs.replace(
    made_probe(unit=None),
    trials=[],
    frontier=[
        msgspec.structs.replace(
            point,
            step_seconds=None,
            peak_bytes=None,
            target_length=80.0,
        )
        for point in made_probe().frontier
    ],
)
CRASHED = msgspec.structs.replace(
    made_probe(),
    trials=[
        *made_probe().trials,
        made_trial(12, "crash", error="worker died: SIGSEGV"),
    ],
)
EXPANDABLE = msgspec.structs.replace(
    made_probe(),
    device=msgspec.structs.replace(made_probe().device, allocator="expandable"),
)
TRAIN_WITH = (
    "Train with PYTORCH_ALLOC_CONF=expandable_segments:True, as it was measured:"
)
ZEROS = {"estimated_epoch_seconds": 0.0, "mean_batch_size": 0.0}
HOSTILE = "\x1b[31m<script>|`\n"
RUNS = {
    **SHOWN,
    "crashed": RunResults(name="run", probe=CRASHED),
    "expandable": RunResults(name="run", probe=EXPANDABLE),
    "expandable, swept": RunResults(name="run", probe=EXPANDABLE, sweep=made_sweep()),
    "expandable, packed": RunResults(
        name="run", probe=EXPANDABLE, sweep=with_packing(made_sweep())
    ),
    "expandable stream": RunResults(name="run", probe=EXPANDABLE, stream=made_stream()),
    "untimed": RunResults(
        name="run", probe=UNTIMED_PROBE, sweep=made_sweep(timed=False, unit=None)
    ),
    "no rows": RunResults(
        name="run",
        sweep=msgspec.structs.replace(made_sweep(), rows=[], recommended=None),
    ),
    "no frontier": RunResults(
        name="run",
        probe=msgspec.structs.replace(made_probe(), frontier=[]),
    ),
    "zeros": RunResults(
        name="run",
        sweep=msgspec.structs.replace(
            made_sweep(),
            rows=[msgspec.structs.replace(made_sweep().rows[0], **ZEROS, batches=1)],
            recommended=0,
            baselines=[
                msgspec.structs.replace(
                    made_sweep().baselines[0],
                    batches=1,
                    padding_ratio=0.0,
                    estimated_epoch_seconds=0.0,
                )
            ],
            lower_bound=LowerBound(
                batches=1, padded_length=0.0, estimated_epoch_seconds=0.0
            ),
        ),
    ),
    "bare stream": RunResults(name="run", stream=made_stream(timed=False, unit=None)),
    "no stream recommended": RunResults(
        name="run",
        stream=made_stream(recommended=None),
    ),
    "one loader": loaded(made_iterable()),
    "no settings of a loader": loaded(made_loader(rows=[], recommended=None)),
    "no rows of a stream": RunResults(
        name="run",
        stream=empty_stream(),
    ),
    "hostile packing": RunResults(
        name="run", sweep=with_packing(made_sweep(), HOSTILE)
    ),
    "hostile": replace(
        hostile_results(HOSTILE),
        stream=hostile_stream(HOSTILE),
        loader=hostile_loader(HOSTILE),
    ),
}


# What every format says of a run; quotation marks are written in different ways, and a terminal breaks lines.
SAID = {
    "both": ["Set 13 buckets (optimal)"],
    "verified": ["Verified: 500 shuffled batches"],
    "does-not-hold": ["The verification does not hold."],
    "crashed": ["worker died: SIGSEGV"],
    "expandable": [TRAIN_WITH],
    "expandable, swept": [TRAIN_WITH],
    "expandable, packed": [TRAIN_WITH],
    "expandable stream": [TRAIN_WITH],
    "bare stream": [
        "buffer_size=4096, max_padding_ratio=0.2) with max_batch_length = 600"
    ],
    "stream-and-sweep": [
        "buffer_size=4096, max_padding_ratio=0.2) with max_batch_length = 600"
    ],
    "loader-bottleneck": ["the step waits for data 34.0% of the time"],
    "loader-and-sweep": ["the step waits for data 0.6% of the time"],
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_run_is_shown_with_what_matters_most(name):
    for run, results in RUNS.items():
        text = render(name, results)
        assert text.endswith("\n") and not text.endswith("\n\n"), run
        assert "\x1b" not in text, run
        assert name in ("terminal", "json") or "<script>|" not in text, run
        assert all(words in " ".join(text.split()) for words in SAID.get(run, [])), run


@pytest.mark.parametrize("name", [name for name in RUNS if "expandable" in name])
def test_what_training_needs_is_among_the_first_lines(name):
    assert sum(line.startswith(TRAIN_WITH) for line in build_page(RUNS[name]).lead) == 1
