"""`batchtune verify`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from batchtune.cli.options import (
    DEFAULT_RUN_FOLDER,
    Full,
    Json,
    ManifestOptions,
    Quiet,
    SetupTimeout,
    Wait,
    WorkloadSettings,
    expand,
    option,
    workloads,
)
from batchtune.probe.devices import DEVICE_FORMS, device_names

if TYPE_CHECKING:
    from batchtune.tuning.verify_setup import Wanted

EXAMPLE = """Examples:
batchtune verify train.csv --workload train.py:MyStep
batchtune verify my-run train.csv --workload train.py:MyStep --set layers=12 --steps 500
batchtune verify train.csv --workload train.py:MyStep --epoch --json > verified.json
"""

_RUN_FILES = ("run.json", "probe.json", "sweep.json", "sampler.yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunAndManifest(ManifestOptions):
    """Where the lengths are, with the run folder before them if it is named."""

    manifest: Annotated[
        list[str],
        typer.Argument(
            metavar="[RUN] MANIFEST",
            help="The run folder, if it is not batchtune-run: a folder that holds run.json, probe.json, sweep.json or "
            "sampler.yaml is taken for it (--run names it too). Then what holds the lengths, as for other commands.",
            show_default=False,
        ),
    ]

    def split(self, run: Path | None) -> tuple[Path, ManifestOptions]:
        """The run folder, and where the lengths are.

        Raises:
            UsageError: No manifest is left, or two run folders are named.
        """
        from batchtune.errors import UsageError

        first, *rest = self.manifest
        if not any((Path(first) / name).is_file() for name in _RUN_FILES):
            return run or DEFAULT_RUN_FOLDER, self
        if run is not None and run.resolve() != Path(first).resolve():
            raise UsageError(f"two run folders are named: {first}, and {run} with --run", "Name one of them.")
        if not rest:
            raise UsageError(
                f"the manifest is missing: {first} is a run folder",
                f"Say `batchtune verify {first} MANIFEST`, with the manifest that the run was made from.",
            )
        return Path(first), replace(self, manifest=rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedOptions:
    """What to run, where it is not what was probed."""

    PANEL: ClassVar = "Workload and device"

    workload: Annotated[
        str | None,
        option(
            "The training step that was probed: builtin:NAME, path/to/file.py:NAME or package.module:NAME. The last "
            "two run your own code, so you must name them here, with their --set options: batchtune runs no code that "
            "only a file names. A built-in, and all that follows here, is as it was probed unless given.",
            name="WORKLOAD",
            metavar="W",
            values=workloads,
        ),
    ] = None
    set: WorkloadSettings = None
    device: Annotated[str | None, option(f"{DEVICE_FORMS}.", name="DEVICE", metavar="DEVICE", values=device_names)] = (
        None
    )
    memory: Annotated[
        str | None, option("Cap on the worker's memory, such as 2GiB.", name="MEMORY", metavar="SIZE")
    ] = None
    memory_fraction: Annotated[
        float | None, option("Part of that memory that may be used.", name="MEMORY_FRACTION", metavar="X")
    ] = None
    reserve: Annotated[
        str | None, option("Memory to keep free besides, such as 500MiB.", name="RESERVE", metavar="SIZE")
    ] = None
    setup_timeout: SetupTimeout = 600.0
    wait: Wait = 0.0

    def wanted(self) -> Wanted:
        """What the user says. Raises UsageError where it has no meaning."""
        from batchtune.tuning.verify_setup import Wanted
        from batchtune.units import parse_size
        from batchtune.workloads import parse_options

        return Wanted(
            workload=self.workload,
            options=parse_options(self.set) if self.set else None,
            device=self.device,
            memory_bytes=parse_size(self.memory) if self.memory is not None else None,
            memory_fraction=self.memory_fraction,
            reserve_bytes=parse_size(self.reserve) if self.reserve is not None else None,
            setup_timeout_seconds=self.setup_timeout,
            wait_seconds=self.wait,
        )


@expand
def verify(
    source: RunAndManifest,
    wanted: WantedOptions,
    run: Annotated[
        Path | None,
        option("The run folder; batchtune-run unless given.", flag="--run", name="RUN", metavar="DIR"),
    ] = None,
    steps: Annotated[int | None, option("Shuffled steps to run; 200 unless given.", name="STEPS", metavar="N")] = None,
    minutes: Annotated[
        float | None, option("Run shuffled steps for so long instead.", name="MINUTES", metavar="X")
    ] = None,
    epoch: Annotated[bool, option("Run one whole epoch instead.", flag="--epoch", name="EPOCH")] = False,
    time_tolerance: Annotated[
        float,
        option(
            "How far the measured time of an epoch may lie from the estimate, as a share of it.",
            name="TIME_TOLERANCE",
            metavar="X",
        ),
    ] = 0.1,
    step_timeout: Annotated[
        float, option("Seconds that one step may take.", name="STEP_TIMEOUT", metavar="SECONDS")
    ] = 300.0,
    seed: Annotated[
        int | None, option("Of the shuffles; that of sampler.yaml unless given.", name="SEED", metavar="N")
    ] = None,
    quiet: Quiet = False,
    json: Json = False,
    full: Full = False,
) -> None:
    """Run the recommended batches for real.

    Runs what the run folder's sampler.yaml says, one training step after the other in one process: first the largest
    batch of each bucket, twice, then shuffled batches with real lengths. It holds when nothing runs out of memory,
    memory does not creep, and the time of an epoch is as estimated. Where it does not hold, smaller sizes are tried
    and proposed.

    Reads the manifest and the run folder's sampler.yaml, and from its probe.json or run.json the device, the limit, a
    built-in workload, and how the manifest was read. Writes verify.json there. Without --steps, --minutes or --epoch,
    200 shuffled steps are run.
    """
    from batchtune.cli import console
    from batchtune.cli.verifying import EXIT_DOES_NOT_HOLD, verify_with_progress
    from batchtune.reports import load_run
    from batchtune.reports.terminal import render_verification
    from batchtune.results import encode
    from batchtune.tuning.verify_steps import DEFAULT_STEPS, VerifySettings

    folder, manifest = source.split(run)
    by_default = DEFAULT_STEPS if steps is None and minutes is None and not epoch else None
    settings = VerifySettings(
        steps=by_default if steps is None else steps,
        minutes=minutes,
        epoch=epoch,
        seed=seed or 0,
        time_tolerance=time_tolerance,
        step_timeout_seconds=step_timeout,
    )
    wishes = wanted.wanted()
    lengths = manifest.load_as_in(folder, quiet=quiet)
    found = verify_with_progress(lengths, folder, settings, wishes, seed=seed, quiet=quiet)
    if json:
        console.write_result(encode(found).decode(), None)
    else:
        render_verification(load_run(folder), console.result_console(), full=full)
    if not found.holds:
        raise typer.Exit(EXIT_DOES_NOT_HOLD)
