"""`batchtune tune` and `batchtune probe-oom`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from batchtune.cli import console
from batchtune.cli.options import (
    ManifestOptions,
    ProbeOptions,
    RunOptions,
    SweepOptions,
    TimeTolerance,
    expand,
    option,
)
from batchtune.cli.sweep import sweep_and_write
from batchtune.cli.verify import EXIT_DOES_NOT_HOLD, sampler_plan, verify_with_progress

if TYPE_CHECKING:
    from batchtune.lengths import Lengths
    from batchtune.results import Probe, SweepSettings

EXAMPLES = {
    "tune": """
batchtune tune train.csv --workload train.py:MyStep
batchtune tune train.csv --workload train.py:MyStep --set layers=12 --memory-fraction 0.95 --verify
batchtune tune train.tsv --length-scale 1/16000 --workload builtin:conformer-ctc --current train.yaml
batchtune tune examples/stdlib_lengths.csv --workload examples/custom_workload.py:TinyTagger --memory 1GiB
""",
    "probe-oom": """
batchtune probe-oom train.csv --workload train.py:MyStep --set layers=12
batchtune probe-oom train.csv --workload builtin:conformer-ctc --set size=base --set dtype=bf16
batchtune probe-oom train.csv --workload train.py:MyStep --device cuda:1 --memory 20GiB --reserve 1GiB
""",
}


@expand
def tune(
    source: ManifestOptions,
    probe: ProbeOptions,
    sweep: SweepOptions,
    run: RunOptions,
    verify: Annotated[
        bool, option("Run the recommended batches at the end, like `batchtune verify`.")
    ] = False,
    verify_steps: Annotated[
        int | None,
        option(
            "With --verify: number of shuffled steps (default: an epoch, at most 200 or a minute).",
            "N",
        ),
    ] = None,
    time_tolerance: TimeTolerance = 0.1,
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
        steps=verify_steps,
        time_tolerance=time_tolerance,
        step_timeout_seconds=probe.trial_timeout,
    )
    sweep_settings = sweep.settings(run)
    current = sweep.current_settings()
    lengths = source.load(quiet=run.quiet)
    found = _probe(lengths, probe, run, sweep_settings)
    swept = sweep_and_write(lengths, sweep_settings, current, run)
    holds = True
    if verify and swept.recommended is not None:
        asked = {
            "workload": found.workload.spec,
            "options": found.workload.options,
            **probe.asked(),
        }
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


@expand
def probe_oom(source: ManifestOptions, probe: ProbeOptions, run: RunOptions) -> None:
    """Find the largest batches that fit.

    Sorts the lengths in descending order, runs real training steps in a separate process, and bisects between batches
    that fit and batches that run out of memory, guided by a memory model.

    Reads the manifest. Writes run.json, trials.jsonl and probe.json into the run folder. If interrupted, the same
    command continues where it stopped.
    """
    from batchtune.reports import RunResults

    found = _probe(source.load(quiet=run.quiet), probe, run)
    if run.json:
        console.write_json(found)
    else:
        results = RunResults(name=run.run.name, probe=found, sweep=None, folder=run.run)
        console.show(results, full=run.full)


def _probe(
    lengths: Lengths,
    probe: ProbeOptions,
    run: RunOptions,
    sweep_settings: SweepSettings | None = None,
) -> Probe:
    """Run the probe with a line for each trial and a bar below."""
    from batchtune.cli.progress import worker_bar
    from batchtune.probe.probing import run_probe
    from batchtune.probe.progress import ProbeHooks
    from batchtune.run_folder import holds_other_lengths

    settings = probe.settings(lengths, run)
    holds_other_lengths(lengths, run.run, force=run.force)
    if probe.workload is None:
        chosen = f"Workload: {settings.workload}, the built-in for lengths in {lengths.unit}; --workload names yours."
        console.note(chosen, quiet=run.quiet)
    with worker_bar(lengths.unit, ddp=settings.ddp, quiet=run.quiet) as bar:
        hooks = ProbeHooks(
            on_progress=bar.probing, on_note=partial(console.note, quiet=run.quiet)
        )
        return run_probe(
            lengths,
            settings,
            run.run,
            force=run.force,
            sweep_settings=sweep_settings,
            hooks=hooks,
        )
