"""`batchtune probe-oom`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from batchtune.cli import console
from batchtune.cli.options import ManifestOptions, ProbeOptions, RunOptions, expand

if TYPE_CHECKING:
    from batchtune.buckets.sweep_settings import SweepSettings
    from batchtune.lengths import Lengths
    from batchtune.probe.settings import ProbeSettings
    from batchtune.results import Probe

EXAMPLES = """
batchtune probe-oom train.csv --workload train.py:MyStep --set layers=12
batchtune probe-oom train.csv --workload builtin:conformer-ctc --set size=base --set dtype=bf16
batchtune probe-oom train.csv --workload train.py:MyStep --device cuda:1 --memory 20GiB --reserve 1GiB
"""


@expand
def probe_oom(source: ManifestOptions, probe: ProbeOptions, run: RunOptions) -> None:
    """Find the largest batches that fit.

    Sorts the lengths in descending order, runs real training steps in a separate process, and bisects between batches
    that fit and batches that run out of memory, guided by a memory model.

    Reads the manifest. Writes run.json, trials.jsonl and probe.json into the run folder. If interrupted, the same
    command continues where it stopped.
    """
    from batchtune.reports import RunResults

    lengths = source.load(quiet=run.quiet)
    console.describe(lengths, quiet=run.quiet)
    found = probe_with_progress(lengths, probe.settings(lengths, run), run, default_workload=probe.workload is None)
    if run.json:
        console.write_json(found)
    else:
        results = RunResults(name=run.run.name, probe=found, sweep=None, folder=run.run)
        console.show(results, full=run.full)


def probe_with_progress(
    lengths: Lengths,
    settings: ProbeSettings,
    run: RunOptions,
    *,
    default_workload: bool,
    sweep_settings: SweepSettings | None = None,
) -> Probe:
    """Run the probe with a line for each trial and a bar below."""
    from batchtune.cli.progress import worker_bar
    from batchtune.probe.hooks import ProbeHooks
    from batchtune.probe.probing import run_probe
    from batchtune.run_folder import holds_other_lengths

    holds_other_lengths(lengths, run.run, force=run.force)
    if default_workload:
        chosen = f"Workload: {settings.workload}, the built-in for lengths in {lengths.unit}; --workload names yours."
        console.note(chosen, quiet=run.quiet)
    with worker_bar(lengths.unit, ddp=settings.ddp, quiet=run.quiet) as bar:
        hooks = ProbeHooks(on_progress=bar.probing, on_note=partial(console.note, quiet=run.quiet))
        return run_probe(lengths, settings, run.run, force=run.force, sweep_settings=sweep_settings, hooks=hooks)
