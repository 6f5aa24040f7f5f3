"""`batchtune tune`."""

from __future__ import annotations

from typing import Annotated

import typer

from batchtune.cli.options import (
    ManifestOptions,
    MaxBatchSize,
    ProbeOptions,
    RunOptions,
    SweepOptions,
    expand,
    option,
)

EXAMPLE = """Examples:
batchtune tune train.csv --workload train.py:MyStep
batchtune tune train.csv --workload train.py:MyStep --set layers=12 --memory-fraction 0.95 --verify
batchtune tune train.tsv --length-scale 1/16000 --workload builtin:conformer-ctc --current train.yaml
batchtune tune examples/stdlib_lengths.csv --workload examples/custom_workload.py:TinyTagger --memory 1GiB
"""

_VERIFICATION = "Verification"


@expand
def tune(
    source: ManifestOptions,
    probe: ProbeOptions,
    sweep: SweepOptions,
    run: RunOptions,
    max_batch_size: MaxBatchSize = None,
    verify: Annotated[
        bool,
        option(
            "Run the recommended batches at the end, as `batchtune verify` does.",
            flag="--verify",
            name="VERIFY",
            panel=_VERIFICATION,
        ),
    ] = False,
    verify_steps: Annotated[
        int | None,
        option(
            "With --verify: shuffled steps to run; 200 unless given.",
            name="VERIFY_STEPS",
            metavar="N",
            panel=_VERIFICATION,
        ),
    ] = None,
    time_tolerance: Annotated[
        float,
        option(
            "With --verify: how far the measured time of an epoch may lie from the estimate, as a share of it.",
            name="TIME_TOLERANCE",
            metavar="X",
            panel=_VERIFICATION,
        ),
    ] = 0.1,
) -> None:
    """Probe, sweep and report, all in one.

    Goes from a manifest to a recommended sampler config: what `batchtune probe-oom`, `batchtune sweep-buckets` and
    `batchtune report` do one after the other.

    Reads the manifest. Writes run.json, trials.jsonl, probe.json, sweep.json and sampler.yaml into the run folder, and
    with --verify verify.json. Interrupted, the same command goes on from where it was.
    """
    from batchtune.cli import console
    from batchtune.cli.progress import probe_with_progress
    from batchtune.cli.sweeping import sweep_and_write
    from batchtune.cli.verifying import EXIT_DOES_NOT_HOLD, verify_with_progress
    from batchtune.reports import load_run, render
    from batchtune.reports.terminal import render_terminal
    from batchtune.tuning.verify_setup import Wanted
    from batchtune.tuning.verify_steps import DEFAULT_STEPS, VerifySettings

    steps = DEFAULT_STEPS if verify_steps is None else verify_steps
    verify_settings = VerifySettings(
        steps=steps, time_tolerance=time_tolerance, step_timeout_seconds=probe.trial_timeout
    )
    sweep_settings = sweep.settings(max_batch_size=max_batch_size, seed=run.seed)
    current = sweep.read_current()
    lengths = source.load(quiet=run.quiet)
    console.notes(console.describe(lengths), quiet=run.quiet)
    settings = probe.settings(lengths, max_batch_size=max_batch_size, seed=run.seed)
    probe_with_progress(lengths, settings, run, default_workload=probe.workload is None, sweep_settings=sweep_settings)
    found = sweep_and_write(lengths, sweep_settings, run, current=current)
    holds = True
    if verify and found.recommended is not None:
        wanted = Wanted(
            workload=settings.workload,
            options=settings.options,
            setup_timeout_seconds=probe.setup_timeout,
            wait_seconds=probe.wait,
        )
        holds = verify_with_progress(lengths, run.run, verify_settings, wanted, quiet=run.quiet).holds
    elif verify:
        console.note("Warning: there is nothing to verify, as no bucket table is recommended.")
    results = load_run(run.run)
    if run.json:
        console.write_result(render("json", results), None)
    else:
        render_terminal(results, console.result_console(), full=run.full)
    if not holds:
        raise typer.Exit(EXIT_DOES_NOT_HOLD)
