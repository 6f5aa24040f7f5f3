"""`batchtune tune`."""

from __future__ import annotations

from typing import Annotated

import typer

from batchtune.cli import console
from batchtune.cli.options import ManifestOptions, ProbeOptions, RunOptions, SweepOptions, expand, option
from batchtune.cli.probe_oom import probe_with_progress
from batchtune.cli.sweep_buckets import sweep_and_write
from batchtune.cli.verify import EXIT_DOES_NOT_HOLD, sampler_plan, verify_with_progress

EXAMPLES = """
batchtune tune train.csv --workload train.py:MyStep
batchtune tune train.csv --workload train.py:MyStep --set layers=12 --memory-fraction 0.95 --verify
batchtune tune train.tsv --length-scale 1/16000 --workload builtin:conformer-ctc --current train.yaml
batchtune tune examples/stdlib_lengths.csv --workload examples/custom_workload.py:TinyTagger --memory 1GiB
"""
_PANEL = "Verification"


@expand
def tune(
    source: ManifestOptions,
    probe: ProbeOptions,
    sweep: SweepOptions,
    run: RunOptions,
    verify: Annotated[
        bool, option("Run the recommended batches at the end, like `batchtune verify`.", rich_help_panel=_PANEL)
    ] = False,
    verify_steps: Annotated[int, option("With --verify: number of shuffled steps.", "N", rich_help_panel=_PANEL)] = 200,
    time_tolerance: Annotated[
        float,
        option(
            "With --verify: largest relative difference between the measured and the estimated time of an epoch.",
            "X",
            rich_help_panel=_PANEL,
        ),
    ] = 0.1,
) -> None:
    """Probe, sweep and report, all in one.

    Runs `batchtune probe-oom`, `batchtune sweep-buckets` and `batchtune report`: from a manifest to a recommended
    sampler config.

    Reads the manifest. Writes run.json, trials.jsonl, probe.json, sweep.json, sampler.yaml and, with --verify,
    verify.json into the run folder. If interrupted, the same command continues where it stopped.
    """
    from batchtune.reports import load_run, render
    from batchtune.verify.plan import VerifySettings

    verify_settings = VerifySettings(
        steps=verify_steps, time_tolerance=time_tolerance, step_timeout_seconds=probe.trial_timeout
    )
    sweep_settings = sweep.settings(run)
    current = sweep.current_settings()
    lengths = source.load(quiet=run.quiet)
    console.describe(lengths, quiet=run.quiet)
    settings = probe.settings(lengths, run)
    probe_with_progress(lengths, settings, run, default_workload=probe.workload is None, sweep_settings=sweep_settings)
    found = sweep_and_write(lengths, sweep_settings, current, run)
    holds = True
    if verify and found.recommended is not None:
        names = ("workload", "options", "setup_timeout_seconds", "wait_seconds")
        asked = {name: getattr(settings, name) for name in names}
        plan = sampler_plan(lengths, run.run, verify_settings, quiet=run.quiet)
        holds = verify_with_progress(plan, run.run, asked, quiet=run.quiet).holds
    elif verify:
        console.note("Warning: nothing to verify, because nothing is recommended.")
    results = load_run(run.run)
    if run.json:
        console.write_result(render("json", results), None)
    else:
        console.show(results, full=run.full)
    if not holds:
        raise typer.Exit(EXIT_DOES_NOT_HOLD)
