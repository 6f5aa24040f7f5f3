"""`batchtune verify`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from batchtune.cli import console
from batchtune.cli.options import (
    DEFAULT_RUN_FOLDER,
    FULL,
    JSON,
    QUIET,
    TIME_TOLERANCE,
    ManifestOptions,
    WorkloadOptions,
    argument,
    expand,
    option,
)
from batchtune.cli.ranks import other_nodes, refuse_to_be_a_rank
from batchtune.errors import ResultError, UsageError

if TYPE_CHECKING:
    from batchtune.lengths import Lengths
    from batchtune.manifests import StreamLengths
    from batchtune.probe.nodes import Nodes
    from batchtune.results import (
        SamplerConfig,
        StreamConfig,
        Verification,
    )
    from batchtune.verify.plan import Plan, Subject, VerifyPlan, VerifySettings

EXAMPLES = {
    "verify": """
batchtune verify train.csv --workload train.py:MyStep
batchtune verify train.csv -- python train.py
batchtune verify my-run train.csv --workload train.py:MyStep --set layers=12 --steps 500
batchtune verify train.csv --workload train.py:MyStep --epoch --json > verified.json
batchtune verify --stream 'shards/train-{000..127}.tar' --workload train.py:MyStep
"""
}
EXIT_DOES_NOT_HOLD = 3
_RUN_FILES = (
    "run.json",
    "probe.json",
    "sweep.json",
    "sampler.yaml",
    "stream.json",
    "stream.yaml",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAndManifest(ManifestOptions):
    """The source of the lengths, after the run folder if it is named."""

    manifest: list[str] = argument(
        metavar="[RUN] MANIFEST",
        help="The run folder, unless it is batchtune-run, then the source of the lengths as for other commands. A "
        "folder with run.json, probe.json, sweep.json, sampler.yaml, stream.json or stream.yaml is taken for the "
        "run folder; --run names it too.",
        show_default=False,
    )

    def split(self, run: Path | None) -> tuple[Path, ManifestOptions]:
        """Return the run folder and the source; without --run, the first argument may be the run folder.

        Without a source, the lengths are those that `tune` took from a script's data set.
        """
        folder = run or DEFAULT_RUN_FOLDER
        source = self
        if self.manifest and run is None:
            first = Path(self.manifest[0])
            if any((first / name).is_file() for name in _RUN_FILES):
                folder = first
                source = replace(self, manifest=self.manifest[1:])
        return folder, source.or_own_lengths(folder)


@expand
def verify(
    source: RunAndManifest,
    subject: WorkloadOptions,
    run: Path | None = option("The run folder (default: batchtune-run).", "DIR"),
    stream: bool = option(
        "Run the batches of stream.yaml (default: only if the run folder has no sampler.yaml).",
        default=False,
    ),
    steps: int | None = option(
        "Number of shuffled batches (default: an epoch, at most 200 or a minute).",
        "N",
    ),
    epoch: bool = option("Run one whole epoch instead of --steps.", default=False),
    time_tolerance: float = TIME_TOLERANCE,
    step_timeout: float = option("Time limit of one step.", "SECONDS", default=300.0),
    seed: int | None = option(
        "Seed for the shuffles (default: that of the YAML file).", "N"
    ),
    quiet: bool = QUIET,
    json: bool = JSON,
    full: bool = FULL,
) -> None:
    """Run the recommended batches for real.

    Runs the batches of the run folder's sampler.yaml, one training step after the other in one
    process: first the largest batch of each bucket (in pools: of each batch size), twice, then
    shuffled batches with real lengths. On a GPU, their memory requests are replayed in other
    orders; on CUDA's native allocator pairs of shapes follow, each on an emptied cache. Other
    shuffles run in further processes if a start costs little. The recommendation holds if no batch
    runs out of memory, memory does not grow, and an epoch takes the estimated time; otherwise the
    exit code is 3.

    After --, give the command of your training script, if it was probed: it runs unchanged.

    With --stream, runs the batches of stream.yaml: the largest ones, then those that BucketedStream makes of the
    shards, in its order, with the workers, ranks and shuffles of stream.json.

    Reads the manifest and the run folder's sampler.yaml, and takes the device, the limit, a
    built-in workload and the options for reading the manifest from its probe.json or run.json.
    Writes verify.json into the run folder, and marks in sweep.json and sampler.yaml whether the
    recommended batches are proven.
    """
    from batchtune.files import check_writable
    from batchtune.reports import load_run
    from batchtune.reports.page import build_verification_page
    from batchtune.results import SAMPLER_FILE, STREAM_CONFIG_FILE, checked
    from batchtune.verify import mark_proven
    from batchtune.verify.plan import VerifySettings, subject_of

    refuse_to_be_a_rank()
    folder, manifest = source.split(run)
    check_writable(folder)
    if (
        not stream
        and (folder / STREAM_CONFIG_FILE).exists()
        and not (folder / SAMPLER_FILE).exists()
    ):
        stream = True
        console.note(
            f"Verifying {folder / STREAM_CONFIG_FILE}, as the folder holds no {SAMPLER_FILE}.",
            quiet=quiet,
        )
    if steps is not None and epoch:
        raise UsageError(
            "how long to verify is not clear", "Give one of --steps and --epoch."
        )
    settings = checked(
        VerifySettings,
        {
            "steps": steps,
            "epoch": epoch,
            "seed": seed,
            "time_tolerance": time_tolerance,
            "step_timeout_seconds": step_timeout,
        },
    )
    with other_nodes(subject, quiet=quiet) as nodes:
        stored = None
        if stream:
            stored = manifest.load_stream(quiet=quiet, as_in=folder)
            lengths = stored.lengths
        else:
            lengths = manifest.load(quiet=quiet, as_in=folder)
        asked = subject.asked(manifest, lengths)
        plan = _plan(lengths, stored, folder, settings, quiet=quiet)
        verification = run_with_progress(
            plan,
            subject_of(plan.lengths, plan.probe, asked, folder),
            folder=folder,
            nodes=nodes,
            quiet=quiet,
            on_note=partial(console.note, quiet=quiet),
        )
        if not stream:
            mark_proven(folder, verification)
    if json:
        console.write_json(verification)
    else:
        console.show_page(build_verification_page(load_run(folder)), full=full)
    if not verification.holds:
        raise typer.Exit(EXIT_DOES_NOT_HOLD)


def _plan(
    lengths: Lengths,
    stored: StreamLengths | None,
    folder: Path,
    settings: VerifySettings,
    *,
    quiet: bool,
) -> VerifyPlan:
    """Return the plan to run the batches of the folder's `sampler.yaml`, or those that `stream.yaml` makes of a stream.

    Raises ResultError if one of them, or the probe next to it, is of other lengths, or if packed batches were probed.
    """
    from batchtune.configs import read_sampler_yaml, read_stream_yaml
    from batchtune.results import (
        PROBE_FILE,
        SAMPLER_FILE,
        STREAM_CONFIG_FILE,
        Probe,
        read_if_written,
    )
    from batchtune.run_folder import check_lengths, lengths_of
    from batchtune.streams.simulated import stored_stream
    from batchtune.verify.plan import VerifyPlan

    probe_path = folder / PROBE_FILE
    probe = read_if_written(probe_path, Probe)
    if probe is not None and probe.packed is not None:
        raise ResultError(
            f"{probe_path} is of packed batches, and verify runs padded ones only",
            "`batchtune tune` proves packed batches in shuffled training: `batchtune report` shows what ran.",
        )
    config: SamplerConfig | StreamConfig
    if stored is None:
        path = folder / SAMPLER_FILE
        config = read_sampler_yaml(path)
        if not config.shuffle:
            console.note(
                "sampler.yaml has shuffle: false, but the order of the manifest is unknown here: batches are made of "
                "shuffled examples, as with shuffle: true.",
                quiet=quiet,
            )
    else:
        path = folder / STREAM_CONFIG_FILE
        config = read_stream_yaml(path)
    check_lengths(
        lengths, config.evidence.fingerprint, config.unit, path, lengths_of(folder)
    )
    if probe is not None:
        check_lengths(
            lengths,
            probe.lengths.fingerprint,
            probe.lengths.unit,
            probe_path,
            probe.lengths,
        )
    stream = None
    if stored is not None:
        stream = stored_stream(stored, folder, settings.seed_of(config))
    return VerifyPlan(
        lengths=lengths, config=config, settings=settings, probe=probe, stream=stream
    )


def run_with_progress(
    plan: Plan,
    subject: Subject,
    deadline: float = math.inf,
    *,
    folder: Path,
    nodes: Nodes | None,
    quiet: bool,
    on_note: Callable[[str], None],
) -> Verification:
    """Run a plan with a progress bar, as `run_verify` does."""
    from batchtune.verify import run_verify

    doing = "Running"
    if plan.settings.brief:
        doing = "Proving the recommended batches with up to"
    console.note(
        f"{doing} {plan.planned_steps:,} shuffled batches, then others in fresh processes if time allows; an epoch has "
        f"{plan.epoch_batches:,}.",
        quiet=quiet,
    )
    with console.worker_bar(plan.lengths.unit, subject.settings, quiet=quiet) as bar:
        bar.introduced = plan.settings.brief  # by the probe before
        return run_verify(
            plan,
            subject,
            deadline,
            folder=folder,
            on_note=on_note,
            on_progress=bar.verifying,
            nodes=nodes,
        )
