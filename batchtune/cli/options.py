"""Options that several commands share, each group a dataclass; `expand` makes them options of a command.

A field's annotation says how its option is parsed and what the help says; its default is the option's.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_type_hints

import typer

from batchtune.probe.devices import DEVICE_FORMS, device_names

if TYPE_CHECKING:
    from batchtune.lengths import Lengths
    from batchtune.manifests import ReadOptions
    from batchtune.probe.settings import ProbeSettings
    from batchtune.tuning.current import Current
    from batchtune.tuning.sweep import SweepSettings

DEFAULT_RUN_FOLDER = Path("batchtune-run")


def option(
    help: str,
    *,
    flag: str | None = None,
    metavar: str | None = None,
    name: str,
    values: Callable[[], Sequence[str]] | None = None,
    panel: str | None = None,
) -> Any:
    """An option that `BATCHTUNE_name` in the environment sets too.

    Args:
        help: What it does.
        flag: As it is written; by the parameter's name unless given.
        metavar: What stands for its value in the help.
        name: Of the environment variable, without `BATCHTUNE_`.
        values: What the shell's completion offers.
        panel: The section of the help it belongs to; that of its dataclass, or `Options`, unless given.
    """
    return typer.Option(
        *((flag,) if flag else ()),
        envvar=f"BATCHTUNE_{name}",
        show_envvar=False,
        help=help,
        metavar=metavar,
        autocompletion=complete_from(values) if values is not None else None,
        rich_help_panel=panel,
    )


def complete_from(values: Callable[[], Sequence[str]]) -> Callable[[str], list[str]]:
    """A completion that offers what `values` gives; nothing is imported before it is asked for."""

    def complete(incomplete: str) -> list[str]:
        return [value for value in values() if value.startswith(incomplete)]

    return complete


def manifest_formats() -> Sequence[str]:
    """What `--format` takes."""
    from batchtune.manifests import FORMATS

    return list(FORMATS)


def units() -> Sequence[str]:
    """What `--unit` takes."""
    from batchtune.lengths import UNITS

    return list(UNITS)


def strategies() -> Sequence[str]:
    """What `--strategy` takes."""
    from batchtune.batching.strategies import STRATEGIES

    return list(STRATEGIES)


def workloads() -> Sequence[str]:
    """The built-in workloads."""
    from batchtune.workloads.registry import BUILTINS

    return [f"builtin:{name}" for name in BUILTINS]


COMMON = "Common"
BUCKETS = "Bucket tables"
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Say nothing but the result and errors.", rich_help_panel=COMMON),
]
Json = Annotated[
    bool,
    typer.Option("--json", help="Print the result as JSON, alone on stdout.", rich_help_panel=COMMON),
]
Full = Annotated[
    bool,
    typer.Option("--full", help="Show all tables, not only what fits on a screen.", rich_help_panel=COMMON),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestOptions:
    """Where the lengths are and how to read them."""

    PANEL: ClassVar = "Reading the manifest"

    manifest: Annotated[
        list[str],
        typer.Argument(
            metavar="MANIFEST",
            help="What holds the lengths: a file, plain or compressed; a folder; 'a pattern-{00..31}.tar'; - for "
            "standard input; several of these, as one data set.",
            show_default=False,
        ),
    ]
    format: Annotated[
        str | None,
        option(
            "Format of the manifest; told from its content unless given.",
            name="FORMAT",
            metavar="FORMAT",
            values=manifest_formats,
        ),
    ] = None
    length_key: Annotated[
        str | None,
        option("Column or key of the length; found by its name unless given.", name="LENGTH_KEY", metavar="NAME"),
    ] = None
    target_key: Annotated[
        str | None,
        option("Column or key of a second length, that of the target.", name="TARGET_KEY", metavar="NAME"),
    ] = None
    unit: Annotated[
        str | None,
        option(
            "What the lengths count: s, ms, samples, frames, tokens, words, characters or bytes.",
            name="UNIT",
            metavar="UNIT",
            values=units,
        ),
    ] = None
    length_scale: Annotated[
        str | None,
        option("Multiply lengths by a number or a fraction, such as 1/16000.", name="LENGTH_SCALE", metavar="X"),
    ] = None
    min_length: Annotated[float | None, option("Leave shorter examples out.", name="MIN_LENGTH", metavar="X")] = None
    max_length: Annotated[float | None, option("Leave longer examples out.", name="MAX_LENGTH", metavar="X")] = None
    skip_invalid: Annotated[
        bool,
        option(
            "Leave rows with invalid lengths out, and what follows the damage in a broken shard or one of several "
            "files; what is left out is counted and told.",
            flag="--skip-invalid",
            name="SKIP_INVALID",
        ),
    ] = False

    measure: Annotated[
        str | None,
        option(
            "What of a text is its length: characters, words or bytes; characters unless given.",
            name="MEASURE",
            metavar="WHAT",
            values=lambda: ("characters", "words", "bytes"),
        ),
    ] = None
    tokenizer: Annotated[
        Path | None,
        option("A tokenizer.json: the length of a text is its number of tokens.", name="TOKENIZER", metavar="FILE"),
    ] = None
    reduce: Annotated[
        str | None,
        option(
            "What becomes of a list: max, sum, first, or the count of its items.",
            name="REDUCE",
            metavar="HOW",
            values=lambda: ("max", "sum", "first", "count"),
        ),
    ] = None
    target_file: Annotated[
        str | None,
        option(
            "File of the target lengths or texts: keyed by id as Kaldi's, or one line for each example (.ltr, .wrd).",
            name="TARGET_FILE",
            metavar="FILE",
        ),
    ] = None
    jobs: Annotated[
        int | None,
        option(
            "Processes that read where there are many files; as many as processors unless given.",
            name="JOBS",
            metavar="N",
        ),
    ] = None

    def load(self, *, quiet: bool) -> Lengths:
        """Reads the lengths, with progress on a terminal unless quiet.

        Raises:
            ManifestError, UsageError: They can't be read as asked.
        """
        return self._load(self.read_options(), quiet=quiet)

    def load_as_in(self, folder: Path, *, quiet: bool) -> Lengths:
        """Reads the lengths as those of a run were, but for what the user says; what is taken from it is told.

        Args:
            folder: The run folder; where it holds no run, nothing is taken from it.
            quiet: Say nothing.

        Raises:
            ManifestError, UsageError: They can't be read as asked.
            ResultError: The run can't be read.
        """
        from batchtune.cli import console
        from batchtune.tuning.run_folder import lengths_of

        given, theirs = self.read_options(), lengths_of(folder)
        if theirs is None or theirs.reading is None:
            return self._load(given, quiet=quiet)
        options = given.completed(theirs.reading)
        said = given.record().flags
        taken = [f"{name} {value}".strip() for name, value in options.record().flags.items() if name not in said]
        if taken:
            console.notes([f"Read as for the run in {folder}: {' '.join(taken)}."], quiet=quiet)
        return self._load(options, quiet=quiet)

    def _load(self, options: ReadOptions, *, quiet: bool) -> Lengths:
        from batchtune.cli.progress import reading_bar
        from batchtune.manifests import load_lengths

        with reading_bar(quiet=quiet) as on_progress:
            return load_lengths(self.manifest, options, jobs=self.processes(), on_progress=on_progress)

    def processes(self) -> int:
        """How many may read. Raises UsageError for a number that has no meaning."""
        from batchtune.errors import UsageError

        if self.jobs is not None and not 1 <= self.jobs <= 1024:
            raise UsageError(f"--jobs must be from 1 to 1024, got {self.jobs}")
        return self.jobs or len(os.sched_getaffinity(0))

    def read_options(self) -> ReadOptions:
        """What the user said. Raises UsageError where it has no meaning."""
        from batchtune.errors import UsageError, shortened
        from batchtune.lengths import UNITS
        from batchtune.manifests import ReadOptions, parse_scale

        if self.unit is not None and self.unit not in UNITS:
            raise UsageError(f"{shortened(self.unit)} is no unit", f"Known ones: {', '.join(UNITS)}.")
        return ReadOptions(
            format=self.format,
            length_key=self.length_key,
            target_key=self.target_key,
            unit=self.unit,
            length_scale=parse_scale(self.length_scale) if self.length_scale is not None else None,
            min_length=self.min_length,
            max_length=self.max_length,
            skip_invalid=self.skip_invalid,
            measure=self.measure,  # type: ignore[arg-type]  # checked there
            tokenizer=self.tokenizer,
            reduce=self.reduce,  # type: ignore[arg-type]  # checked there
            target_file=self.target_file,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Where results go, and how much is said."""

    PANEL: ClassVar = COMMON

    run: Annotated[Path, option("Folder for the files of this tuning.", flag="--run", name="RUN", metavar="DIR")] = (
        DEFAULT_RUN_FOLDER
    )
    seed: Annotated[
        int, option("Of the workload's random numbers and the sampler's shuffles.", name="SEED", metavar="N")
    ] = 0
    force: Annotated[
        bool, typer.Option("--force", help="Start over where the folder holds another run, and remove that.")
    ] = False
    quiet: Quiet = False
    json: Json = False
    full: Full = False


SetupTimeout = Annotated[
    float,
    option(
        "Seconds that importing and building the workload may take.",
        flag="--setup-timeout",
        name="SETUP_TIMEOUT",
        metavar="SECONDS",
    ),
]
Wait = Annotated[
    float,
    option(
        "Wait for another probe of the device to end: for so many seconds, or without a number as long as it takes.",
        flag="--wait",
        name="WAIT",
        metavar="[SECONDS]",
    ),
]
WorkloadSettings = Annotated[
    list[str] | None,
    option("Option for the workload; can be repeated.", flag="--set", name="SET", metavar="KEY=VALUE"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOptions:
    """What to measure, and on what."""

    PANEL: ClassVar = "Workload and device"

    workload: Annotated[
        str | None,
        option(
            "The training step: builtin:NAME, path/to/file.py:NAME or package.module:NAME. The last two run your own "
            "code. The built-in that fits the unit unless given.",
            name="WORKLOAD",
            metavar="W",
            values=workloads,
        ),
    ] = None
    set: WorkloadSettings = None
    device: Annotated[str, option(f"{DEVICE_FORMS}.", name="DEVICE", metavar="DEVICE", values=device_names)] = "auto"
    memory: Annotated[
        str | None,
        option(
            "Cap on the worker's memory, such as 2GiB; the whole device unless given.",
            name="MEMORY",
            metavar="SIZE",
        ),
    ] = None
    memory_fraction: Annotated[
        float, option("Part of that memory that may be used.", name="MEMORY_FRACTION", metavar="X")
    ] = 0.9
    reserve: Annotated[
        str | None,
        option(
            "Memory to keep free besides, such as 500MiB: for what training has and the workload has not (NCCL's "
            "buffers, a second model, evaluation).",
            name="RESERVE",
            metavar="SIZE",
        ),
    ] = None
    ddp: Annotated[
        bool,
        option(
            "Keep one copy of the gradients free besides: what the buckets of DistributedDataParallel take.",
            flag="--ddp",
            name="DDP",
        ),
    ] = False
    num_lengths: Annotated[
        int,
        option(
            "How many lengths to span the data with, the shortest and the longest included. More are added where the "
            "bucket tables need them.",
            name="NUM_LENGTHS",
            metavar="N",
        ),
    ] = 12
    max_lengths: Annotated[
        int | None,
        option("How many lengths to probe in all; 5 times --num-lengths.", name="MAX_LENGTHS", metavar="N"),
    ] = None
    tolerance: Annotated[
        float,
        option("How far below the limit a batch size may be found, as a share of it.", name="TOLERANCE", metavar="X"),
    ] = 0.01
    trial_timeout: Annotated[
        float, option("Seconds that one trial may take.", name="TRIAL_TIMEOUT", metavar="SECONDS")
    ] = 300.0
    setup_timeout: SetupTimeout = 600.0
    wait: Wait = 0.0

    def settings(self, lengths: Lengths, *, max_batch_size: int | None, seed: int) -> ProbeSettings:
        """The settings of the probe.

        Raises:
            UsageError: A value has no meaning, or the workload must be named because the unit is unknown.
        """
        from batchtune.errors import UsageError
        from batchtune.probe.settings import ProbeSettings
        from batchtune.units import parse_size
        from batchtune.workloads import default_workload, parse_options, with_unit

        workload = self.workload or default_workload(lengths.unit)
        if workload is None:
            raise UsageError(
                "which training step to measure is not known: the lengths have no unit",
                "Name it with --workload, or say with --unit what the lengths count.",
            )
        return ProbeSettings(
            workload=workload,
            options=with_unit(workload, parse_options(self.set or ()), lengths.unit),
            device=self.device,
            memory_bytes=parse_size(self.memory) if self.memory is not None else None,
            memory_fraction=self.memory_fraction,
            reserve_bytes=parse_size(self.reserve) if self.reserve is not None else 0,
            ddp=self.ddp,
            num_lengths=self.num_lengths,
            max_lengths=self.max_lengths,
            tolerance=self.tolerance,
            max_batch_size=max_batch_size,
            trial_timeout_seconds=self.trial_timeout,
            setup_timeout_seconds=self.setup_timeout,
            wait_seconds=self.wait,
            seed=seed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """Which bucket tables to compare."""

    PANEL: ClassVar = BUCKETS

    num_buckets: Annotated[
        str, option("Bucket counts: 15, 10:20 (both ends in) or 10,15,20.", name="NUM_BUCKETS", metavar="N")
    ] = "10:20"
    strategy: Annotated[
        list[str] | None,
        option(
            "speechbrain, linear, exponential, quantile or optimal; can be repeated. All unless given.",
            name="STRATEGY",
            metavar="S",
            values=strategies,
        ),
    ] = None

    current: Annotated[
        str | None,
        option(
            "Your config now, shown as a row: max_batch_length=600,num_buckets=200 or batch_size=16; or the file that "
            "holds it: a SpeechBrain YAML, a NeMo config, a sampler.yaml.",
            name="CURRENT",
            metavar="WHAT",
        ),
    ] = None
    multiple_of: Annotated[
        float | None,
        option(
            "Round boundaries up to multiples, as your batches are padded to them: for tensor cores, strides, or few "
            "shapes to compile.",
            name="MULTIPLE_OF",
            metavar="X",
        ),
    ] = None
    world_size: Annotated[
        int,
        option(
            "Ranks that train together; each step lasts as long as the slowest takes.", name="WORLD_SIZE", metavar="N"
        ),
    ] = 1
    same_bucket: Annotated[
        bool,
        option(
            "With --world-size: at each step all ranks take batches of the same bucket.",
            flag="--same-bucket",
            name="SAME_BUCKET",
        ),
    ] = False
    accumulate: Annotated[
        int,
        option(
            "Batches whose gradients are accumulated for a step of the optimizer; ranks wait for each other only then.",
            name="ACCUMULATE",
            metavar="N",
        ),
    ] = 1
    throughput_fraction: Annotated[
        float,
        option(
            "What part of the best throughput is enough: the smallest max_batch_length that reaches it is told.",
            name="THROUGHPUT_FRACTION",
            metavar="X",
        ),
    ] = 0.95
    min_randomness: Annotated[
        float | None,
        option(
            "Recommend only tables this random, from 0 to 1: the probability that two examples drawn at random are of "
            "one bucket.",
            name="MIN_RANDOMNESS",
            metavar="X",
        ),
    ] = None

    def settings(self, *, max_batch_size: int | None, seed: int) -> SweepSettings:
        """The settings of the sweep.

        Raises:
            UsageError: A value has no meaning.
        """
        from batchtune.tuning.pricing import Ranks
        from batchtune.tuning.sweep import ALL_STRATEGIES, SweepSettings, parse_num_buckets

        return SweepSettings(
            strategies=tuple(self.strategy or ALL_STRATEGIES),
            num_buckets=parse_num_buckets(self.num_buckets),
            max_batch_size=max_batch_size,
            seed=seed,
            multiple_of=self.multiple_of,
            ranks=Ranks(world_size=self.world_size, accumulate=self.accumulate, same_bucket=self.same_bucket),
            throughput_fraction=self.throughput_fraction,
            min_randomness=self.min_randomness,
        )

    def read_current(self) -> Current | None:
        """The user's settings now; None where they are not given.

        Raises:
            UsageError, ResultError: They can't be read.
        """
        from batchtune.tuning.current import read_current

        return None if self.current is None else read_current(self.current)


MaxBatchSize = Annotated[
    int | None,
    option(
        "Never more examples in a batch.", flag="--max-batch-size", name="MAX_BATCH_SIZE", metavar="N", panel=BUCKETS
    ),
]


def expand(command: Callable[..., None]) -> Callable[..., None]:
    """Makes a command of a function that takes option dataclasses: their fields become its options."""
    # Not get_type_hints: before Python 3.11 it hides an annotation behind Optional where the default is None.
    declared = inspect.signature(command, eval_str=True).parameters.values()
    groups: dict[str, type[Any]] = {
        parameter.name: parameter.annotation
        for parameter in declared
        if isinstance(parameter.annotation, type) and is_dataclass(parameter.annotation)
    }
    parameters: list[inspect.Parameter] = []
    for parameter in declared:
        if parameter.name in groups:
            group = groups[parameter.name]
            own = get_type_hints(group, include_extras=True)
            parameters += [_parameter(field, own[field.name], group.PANEL) for field in fields(group)]
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    def run(**values: Any) -> None:
        arguments: dict[str, Any] = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**arguments, **values)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what inspect reads
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _parameter(field: Field[Any], annotation: Any, panel: str) -> inspect.Parameter:
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    info = annotation.__metadata__[0]
    info.rich_help_panel = info.rich_help_panel or panel
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
