"""`batchtune verify`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from batchtune.cli import console
from batchtune.cli.options import (
    DEFAULT_RUN_FOLDER,
    Full,
    Json,
    ManifestOptions,
    Quiet,
    WorkloadOptions,
    expand,
    option,
)
from batchtune.errors import ResultError, UsageError
from batchtune.units import counted

if TYPE_CHECKING:
    from batchtune.lengths import Lengths
    from batchtune.results import Verification
    from batchtune.tuning.verify_plan import VerifySettings
    from batchtune.tuning.verifying import VerifyProgress

EXAMPLES = """
batchtune verify train.csv --workload train.py:MyStep
batchtune verify my-run train.csv --workload train.py:MyStep --set layers=12 --steps 500
batchtune verify train.csv --workload train.py:MyStep --epoch --json > verified.json
"""
EXIT_DOES_NOT_HOLD = 3
_RUN_FILES = ("run.json", "probe.json", "sweep.json", "sampler.yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAndManifest(ManifestOptions):
    """Where the lengths are, after the run folder if that is named."""

    manifest: Annotated[
        list[str],
        typer.Argument(
            metavar="[RUN] MANIFEST",
            help="The run folder, if it is not batchtune-run, then the source of the lengths as for other commands. A "
            "folder that holds run.json, probe.json, sweep.json or sampler.yaml is taken as the run folder; --run "
            "names it too.",
            show_default=False,
        ),
    ]

    def split(self, run: Path | None) -> tuple[Path, ManifestOptions]:
        """Return the run folder, and where the lengths are. Raises UsageError if two or no manifest are named."""
        first, *rest = self.manifest
        if not any((Path(first) / name).is_file() for name in _RUN_FILES):
            return run or DEFAULT_RUN_FOLDER, self
        if run is not None and run.resolve() != Path(first).resolve():
            raise UsageError(f"two run folders are named: {first}, and {run} with --run", "Name one of them.")
        if not rest:
            raise UsageError(
                f"the manifest is missing: {first} is a run folder",
                f"Run `batchtune verify {first} MANIFEST`, with the manifest that the run was made from.",
            )
        return Path(first), replace(self, manifest=rest)


@expand
def verify(
    source: RunAndManifest,
    subject: WorkloadOptions,
    run: Annotated[Path | None, option("The run folder (default: batchtune-run).", "DIR")] = None,
    steps: Annotated[int | None, option("Number of shuffled steps (default: 200).", "N")] = None,
    minutes: Annotated[float | None, option("Run shuffled steps for this long instead.", "X")] = None,
    epoch: Annotated[bool, option("Run one whole epoch instead.")] = False,
    time_tolerance: Annotated[
        float, option("Largest relative difference between the measured and the estimated time of an epoch.", "X")
    ] = 0.1,
    step_timeout: Annotated[float, option("Time limit of one step.", "SECONDS")] = 300.0,
    seed: Annotated[int | None, option("Seed for the shuffles (default: that of sampler.yaml).", "N")] = None,
    quiet: Quiet = False,
    json: Json = False,
    full: Full = False,
) -> None:
    """Run the recommended batches for real.

    Runs the batches of the run folder's sampler.yaml, one training step after the other in one process: first the
    largest batch of each bucket (in pools: of each batch size), twice, then shuffled batches with real lengths. It
    holds if nothing runs out of memory, memory does not creep, and an epoch takes the estimated time. If not, smaller
    sizes are tried and proposed.

    Reads the manifest and the run folder's sampler.yaml, and takes the device, the limit, a built-in workload and the
    options for reading the manifest from its probe.json or run.json. Writes verify.json there. Without --steps,
    --minutes or --epoch, it runs 200 shuffled steps.
    """
    from batchtune.reports import load_run
    from batchtune.tuning.verify_plan import DEFAULT_STEPS, VerifySettings

    folder, manifest = source.split(run)
    settings = VerifySettings(
        steps=DEFAULT_STEPS if steps is None and minutes is None and not epoch else steps,
        minutes=minutes,
        epoch=epoch,
        seed=seed or 0,
        time_tolerance=time_tolerance,
        step_timeout_seconds=step_timeout,
    )
    asked = subject.asked()
    lengths = manifest.load(quiet=quiet, as_in=folder)
    found = verify_with_progress(lengths, folder, settings, asked, seed=seed, quiet=quiet)
    if json:
        console.write_json(found)
    else:
        console.show(load_run(folder), full=full, verification=True)
    if not found.holds:
        raise typer.Exit(EXIT_DOES_NOT_HOLD)


def verify_with_progress(
    lengths: Lengths,
    folder: Path,
    settings: VerifySettings,
    asked: Mapping[str, Any],
    *,
    seed: int | None = None,
    quiet: bool,
) -> Verification:
    """Run what the folder's `sampler.yaml` says with a progress bar, and write `verify.json`.

    `asked` has the fields of `ProbeSettings` that the user gave. Without `seed`, the seed is that of `sampler.yaml`.
    """
    from batchtune.cli.progress import worker_bar
    from batchtune.exports.sampler import read_sampler_yaml
    from batchtune.results import PROBE_FILE, SAMPLER_FILE, SWEEP_FILE, Probe, Sweep, read_result
    from batchtune.tuning.run_folder import check_lengths, lengths_of
    from batchtune.tuning.verify_plan import VerifyPlan, subject_of
    from batchtune.tuning.verifying import run_verify

    if not (folder / SAMPLER_FILE).exists():
        sweep = read_result(folder / SWEEP_FILE, Sweep) if (folder / SWEEP_FILE).exists() else None
        if sweep is not None and sweep.recommended is None:
            raise ResultError(
                f"nothing to verify in {folder}: its sweep recommends nothing ({sweep.reason})",
                "Sweep other numbers of buckets with --num-buckets, or keep the fixed batch size.",
            )
        raise ResultError(
            f"{folder / SAMPLER_FILE} does not exist",
            "`batchtune sweep-buckets` writes it. Another run folder is named with --run, or before the manifest.",
        )
    config = read_sampler_yaml(folder / SAMPLER_FILE)
    check_lengths(lengths, config.evidence.fingerprint, folder / SAMPLER_FILE, lengths_of(folder))
    probe = read_result(folder / PROBE_FILE, Probe) if (folder / PROBE_FILE).exists() else None
    if probe is not None:
        check_lengths(lengths, probe.lengths.fingerprint, folder / PROBE_FILE, probe.lengths)
    subject = subject_of(lengths, probe, asked, folder)
    console.notes(subject.notes, quiet=quiet)
    if not config.shuffle:
        console.note(
            "sampler.yaml has shuffle: false, but the order of the manifest is unknown here: batches are formed of "
            "shuffled examples, as with shuffle: true.",
            quiet=quiet,
        )
    settings = replace(settings, seed=config.seed if seed is None else seed)
    plan = VerifyPlan(lengths=lengths, config=config, settings=settings, probe=probe)
    shown: list[VerifyProgress] = []
    try:
        with worker_bar(lengths.unit, ddp=subject.settings.ddp, quiet=quiet) as bar:

            def on_progress(progress: VerifyProgress) -> None:
                shown[:] = [progress]
                bar.verifying(progress)

            on_note = partial(console.note, quiet=quiet)
            return run_verify(plan, subject, folder, on_note=on_note, on_progress=on_progress)
    except KeyboardInterrupt:
        batches = {"worst": "of the worst batches", "shuffled": "with shuffled batches"}
        last = next((one for one in shown if one.doing in batches), None)
        passed = f"{counted(last.done, 'step')} {batches[last.doing]} had passed. " if last else ""
        console.note(
            f"{passed}No verify.json was written: that takes a whole verification. "
            f"`batchtune report {shlex.quote(str(folder))}` shows what was to be verified."
        )
        raise
