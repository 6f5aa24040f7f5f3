"""`batchtune tune`."""

from __future__ import annotations

from batchtune.cli.options import (
    ManifestOptions,
    MaxBatchSize,
    ProbeOptions,
    RunOptions,
    SweepOptions,
    expand,
)

EXAMPLE = "Example:  batchtune tune train.csv --workload train.py:MyStep"


@expand
def tune(
    source: ManifestOptions,
    probe: ProbeOptions,
    sweep: SweepOptions,
    run: RunOptions,
    max_batch_size: MaxBatchSize = None,
) -> None:
    """Probe, sweep and report, all in one.

    From a manifest to a recommended sampler config.

    Writes probe.json, sweep.json and sampler.yaml into the run folder. Interrupted, it goes on from where it was.
    """
    from batchtune.cli import console
    from batchtune.cli.progress import probe_with_progress
    from batchtune.cli.sweeping import sweep_and_write
    from batchtune.reports import load_run, render
    from batchtune.reports.terminal import render_terminal
    from batchtune.results import SAMPLER_FILE

    sweep_settings = sweep.settings(max_batch_size=max_batch_size, seed=run.seed)
    lengths = source.load(quiet=run.quiet)
    console.notes(console.describe(lengths), quiet=run.quiet)
    settings = probe.settings(lengths, max_batch_size=max_batch_size, seed=run.seed)
    probe_with_progress(lengths, settings, run, default_workload=probe.workload is None)
    found = sweep_and_write(lengths, sweep_settings, run)
    results = load_run(run.run)
    if run.json:
        console.write_result(render("json", results), None)
    else:
        render_terminal(results, console.result_console())
    if found.recommended is not None and not run.quiet:
        console.note(f"The sampler config is in {run.run / SAMPLER_FILE}.")
