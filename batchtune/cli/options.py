"""The options that several commands share, in groups: dataclasses whose fields `expand` makes options of a command."""

from __future__ import annotations

import inspect
import os
import shlex
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import partial
from json import loads
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeVar,
    get_type_hints,
)

import typer

from batchtune.allocators import Choice
from batchtune.cli import console
from batchtune.cli.app import PREFIX, WrongNumber
from batchtune.errors import UsageError, shortened
from batchtune.probe.devices import DEVICE_FORMS
from batchtune.units import parse_size

if TYPE_CHECKING:
    from batchtune.buckets.current import Current
    from batchtune.lengths import Lengths
    from batchtune.loaders.runner import LoaderSettings
    from batchtune.manifests import ReadOptions, StreamLengths
    from batchtune.probe.settings import ProbeSettings
    from batchtune.results import StreamSettings, SweepSettings

AnyLengths = TypeVar("AnyLengths")
AnyValue = TypeVar("AnyValue")

Kept = Literal["same", "steps", "nothing"]
ModelTask = Literal["causal-lm", "sequence-classification", "ctc", "speech-seq2seq"]
DEFAULT_RUN_FOLDER = Path("batchtune-run")
BUCKETS = "Bucket tables"
_NUMBERS: dict[Any, str] = {int: "a whole number", float: "a number"}


def option(
    help: str,
    metavar: str | None = None,
    *flags: str,
    default: Any = None,
    variable: str | None = "",
    **further: Any,
) -> Any:
    """Declare an option, as a field of a group or a parameter of a command; `expand` derives the rest from its name.

    `variable` is its environment variable without `BATCHTUNE_`; None: it has none.
    """
    envvar = None if variable is None else PREFIX + variable
    info = typer.Option(
        *flags, help=help, metavar=metavar, envvar=envvar, show_envvar=False, **further
    )
    return field(default=default, metadata={"info": info})


def argument(help: str, metavar: str, default: Any = MISSING, **further: Any) -> Any:
    """Declare an argument, where `option` declares an option."""
    info = typer.Argument(help=help, metavar=metavar, show_envvar=False, **further)
    return field(default=default, metadata={"info": info})


def _size(text: str) -> str:
    """Check a memory size before anything else is done; it stays as the user wrote it."""
    parse_size(text)
    return text


QUIET = option(
    "Print only the result and errors.",
    None,
    "--quiet",
    "-q",
    variable=None,
    default=False,
)
JSON = option("Print the result as JSON on stdout.", variable=None, default=False)
FULL = option(
    "Show all tables, not only what fits on a screen.", variable=None, default=False
)
OUTPUT = option(
    "File to write (- for stdout).", "FILE", "--output", "-o", variable=None
)
RUN_FOLDER = argument(
    metavar="RUN",
    envvar="BATCHTUNE_RUN",
    help="The run folder; --run names it too.",
    default=DEFAULT_RUN_FOLDER,
)
SETUP_TIMEOUT = option(
    "Time limit for importing and building your code, and for a script's first batches.",
    "SECONDS",
    default=600.0,
)
MAX_BATCH_LENGTH = option(
    "Largest padded length of a batch, in the unit of the lengths (default: the one that the probe found).",
    "X",
    min=0,
    max=1e15,
    rich_help_panel=BUCKETS,
)
MIN_RANDOMNESS = option(
    "Recommend only rows at least this random, from 0 to 1: the probability that two examples of a batch do not "
    "share one again in the next epoch.",
    "X",
)
MIN_STEPS = option(
    "Keep at least N optimizer steps in an epoch, such as the number that your training has now: batches get "
    "smaller if necessary (default: as --keep says).",
    "N",
    min=1,
)
TIME_TOLERANCE = option(
    "Largest relative difference between the measured and the estimated time of a verified epoch.",
    "X",
    default=0.1,
)
SCRIPT_COMMAND = option("The words after --.", variable=None, hidden=True)
"""The words after `--` on the command line, as a JSON list: see `script_words`."""
WORLD_SIZE = option(
    "Number of ranks that train together (default: as probed, or 1).", "N"
)


def script_words(command: str) -> list[str]:
    """Return the words of a script's command from the value of `ScriptCommand`."""
    words: list[str] = loads(command)
    return words


def given(names: Iterable[str], *groups: Any, **values: Any) -> dict[str, Any]:
    """Return arguments for the fields with these names: `values`, and the options of the same names, if given.

    The field of `--setup-timeout` is `setup_timeout_seconds`.
    """
    arguments = {}
    for name in names:
        option_name = name.removesuffix("_seconds")
        for group in groups:
            if hasattr(group, option_name):
                arguments[name] = getattr(group, option_name)
    arguments.update(values)
    return {name: value for name, value in arguments.items() if value is not None}


def _if_given(parse: Callable[[Any], AnyValue], value: Any) -> AnyValue | None:
    """Return what is read from an option's value; None without one."""
    return None if value is None else parse(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestOptions:
    """The source of the lengths and how to read it."""

    PANEL = "Reading the manifest"

    manifest: list[str] = argument(
        metavar="MANIFEST",
        help="Where to read the lengths from: a file (compressed or not), a folder, 'a pattern-{00..31}.tar', "
        "a URL (s3://, gs://, https://), or - for standard input. Several form one data set.",
        show_default=False,
    )
    format: str | None = option(
        "Format of the manifest (default: detected from its content).", "FORMAT"
    )
    length_key: str | None = option(
        "Column or key of the lengths (default: found by name); a+b: the sum of two or more.",
        "NAME",
    )
    target_key: str | None = option(
        "Column or key of a second length, such as the transcript's.", "NAME"
    )
    unit: str | None = option(
        "Unit of the lengths: s, ms, samples, frames, tokens, words, characters or bytes. It names the unit of your "
        "data. Values are converted only if the column's name says s and you say ms, or the reverse: add "
        "--length-scale 1 if they are in your unit already.",
        "UNIT",
    )
    length_scale: str | None = option(
        "Multiply lengths by a number or a fraction, such as 1/16000.", "X"
    )
    min_length: float | None = option("Leave out shorter examples.", "X")
    max_length: float | None = option("Leave out longer examples.", "X")
    truncate: float | None = option(
        "Count longer examples as this long: your training cuts them off there.", "X"
    )
    skip_invalid: bool = option(
        "Leave out rows with invalid lengths and, if there are several shards or files, the rest of a damaged one. "
        "Everything left out is counted and reported.",
        default=False,
    )
    measure: str | None = option(
        "How to measure the length of a text: in characters, words or bytes (default: characters).",
        "WHAT",
    )
    tokenizer: Path | None = option(
        "A tokenizer.json or its folder, to measure texts in tokens, and chats by its chat template.",
        "PATH",
    )
    reduce: str | None = option(
        "How to reduce a list to one length: max, sum, first, or count (the number of items).",
        "HOW",
    )
    target_file: str | None = option(
        "File with target lengths or texts: keyed by id like Kaldi's, or one line per example (.ltr, .wrd).",
        "FILE",
    )
    jobs: int | None = option(
        "Number of processes that read many files (default: one per processor).",
        "N",
        min=1,
        max=1024,
    )

    def load(
        self, *, quiet: bool, as_in: Path | None = None, described: bool = True
    ) -> Lengths:
        """Read and describe the lengths; options that were not given are taken from the run folder `as_in`."""
        from batchtune.manifests import load_lengths

        lengths = self._read(load_lengths, quiet=quiet, as_in=as_in)
        console.describe(lengths, quiet=quiet or not described)
        return lengths

    def load_stream(self, *, quiet: bool, as_in: Path | None = None) -> StreamLengths:
        """Read the lengths in the order in which they are stored, as `load` does."""
        from batchtune.manifests import load_stream

        stream = self._read(load_stream, quiet=quiet, as_in=as_in)
        console.describe(stream.lengths, quiet=quiet)
        return stream

    def _read(
        self, reader: Callable[..., AnyLengths], *, quiet: bool, as_in: Path | None
    ) -> AnyLengths:
        from batchtune.manifests.inputs import expand
        from batchtune.run_folder import lengths_of

        options = self.read_options()
        run_lengths = _if_given(lengths_of, as_in)
        if run_lengths is not None and run_lengths.reading is not None:
            given = options
            options = options.completed(run_lengths.reading)
            if given.target_file != options.target_file:
                # Named by a file that may come from anywhere.
                for source in expand(str(options.target_file), None):
                    source.check_ordinary()
            known = given.record().flags
            taken = [flag for flag in options.record().flags if flag not in known]
            if taken:
                console.note(
                    f"Options taken from the run in {as_in}: {' '.join(taken)}.",
                    quiet=quiet,
                )
        with console.progress("Reading", quiet=quiet) as bar:
            return reader(
                self.manifest, options, jobs=self.processes, on_progress=bar.reading
            )

    def or_own_lengths(self, folder: Path) -> ManifestOptions:
        """Return the source, by default the lengths that `tune` took from a script and kept in the run folder.

        Raises UsageError if the run was tuned with a manifest instead.
        """
        from batchtune.results import OWN_LENGTHS_FILE

        if self.manifest:
            return self
        path = folder / OWN_LENGTHS_FILE
        if folder.is_dir() and not path.exists():
            raise UsageError(
                f"the manifest is missing: {folder} was tuned with one, and not with a script's own lengths",
                "Give the manifest that was tuned. It stands before --, if you give a command.",
            )
        return replace(self, manifest=[str(path)])

    @property
    def in_words(self) -> str:
        """The manifest and how to read it, as a part of a command line; a word for it if it was read from a pipe."""
        manifest = self.manifest or []  # a script's own lengths
        if "-" in manifest:
            return "MANIFEST"
        words = [shlex.join(manifest), *self.read_options().record().flags]
        return " ".join(words)

    @property
    def processes(self) -> int:
        """The number of processes that may read."""
        return self.jobs or len(os.sched_getaffinity(0))

    def read_options(self) -> ReadOptions:
        """Return the options for reading that the user gave. Raises UsageError if one is invalid."""
        from batchtune.manifests import ReadOptions

        tokenizer = _if_given(str, self.tokenizer)
        return ReadOptions(
            **given(ReadOptions.__struct_fields__, self, tokenizer=tokenizer)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Where results go, and how much is printed."""

    PANEL = None

    max_batch_size: int | None = option(
        "Largest number of examples in a batch (default: no limit; of a sweep, as probed).",
        "N",
        rich_help_panel=BUCKETS,
    )
    run: Path = option(
        "Run folder: the files of this run are read and written there.",
        "DIR",
        default=DEFAULT_RUN_FOLDER,
    )
    seed: int = option(
        "Seed for the workload's random numbers and the sampler's shuffles.",
        "N",
        default=0,
    )
    force: bool = option(
        "If the folder holds another run, remove it and start over.",
        variable=None,
        default=False,
    )
    quiet: bool = QUIET
    json: bool = JSON
    full: bool = FULL

    @property
    def continued(self) -> Path | None:
        """The run folder, unless its run starts over."""
        return None if self.force else self.run


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """The training step, its device and memory; whatever is not given is taken from the run, if it has a probe."""

    PANEL = "Workload and device"

    workload: str | None = option(
        "The training step: builtin:NAME, path/to/file.py:NAME or package.module:NAME. The last two run your own "
        "code, which batchtune never does just because a file names it (default: the built-in that was probed, or "
        "the one for the lengths' unit). Or a model, trained by a framework: torch:FILE.py:NAME, "
        "lightning:FILE.py:NAME, transformers:FOLDER (with a config.json; nothing is downloaded), or "
        "speechbrain:FILE.py.",
        "W",
    )
    task: ModelTask | None = option(
        "For transformers: causal-lm, sequence-classification, ctc or speech-seq2seq. Examples are random. "
        "--set takes TrainingArguments, such as bf16=true, and lora=RANK.",
        "TASK",
    )
    loss: str | None = option(
        "For torch: cross_entropy of outputs [B, ..., classes], mse, or a function of the file, loss(outputs, inputs). "
        "The model's inputs are random tokens [B, L] below --set vocab=100, or frames with --set features=80.",
        "LOSS",
    )
    hparams: str | None = option(
        "For speechbrain: the YAML file of the script; --set changes its values.",
        "FILE",
    )
    set: list[str] | None = option(
        "An option for the workload; can be repeated.", "KEY=VALUE"
    )
    command: str | None = SCRIPT_COMMAND
    per_unit: float | None = option(
        "After -- COMMAND: size of a batch's length axis for one unit of the manifest, such as 16000 samples per "
        "second (default: found by comparing the script's examples with the manifest).",
        "X",
    )
    target_per_unit: float | None = option(
        "Like --per-unit, for the target's axis.",
        "X",
    )
    batch_size_key: str | None = option(
        "After -- COMMAND, for a data set that makes whole batches: the part of a batch whose first axis is the batch "
        "size.",
        "NAME",
    )
    loader: int | None = option(
        "After -- COMMAND: which data loader to tune, if several train at once; an error lists them.",
        "N",
    )
    scratch: str | None = option(
        "After -- COMMAND: folder for what the script writes while it is measured, removed at the end (default: a "
        "temporary one); none: the script runs in the working folder itself, and may overwrite or delete your files.",
        "DIR|none",
    )
    device: str | None = option(
        f"{DEVICE_FORMS} (default: as probed, or auto).", "DEVICE"
    )
    nproc_per_node: str | None = option(
        "Train on several ranks: the number that torchrun starts here, or auto for one on each GPU (default: as "
        "probed, or a single process without a process group). A training script's own command sets it: -- torchrun "
        "--nproc-per-node 8 train.py.",
        "N|auto",
    )
    simulate_world_size: int | None = option(
        "Measure one rank of an FSDP2 training on N ranks, without the others: one process takes the first rank's "
        "shard, under torch's fake process group. Step times exclude communication. On a GPU, 1GiB is kept free for "
        "NCCL; --reserve gives another size (default: as probed).",
        "N",
        min=1,
        max=16_384,
    )
    nnodes: int | None = option(
        "Number of machines with ranks. Start the same command once on each, such as with srun --ntasks-per-node=1; "
        "node 0 alone reads the manifest and writes the run folder.",
        "N",
        min=1,
        max=1024,
    )
    node_rank: int | None = option(
        "Number of this machine, from 0 on (default: SLURM_NODEID).", "N"
    )
    rdzv_endpoint: str | None = option(
        "Address at which the others reach node 0, and the first of its three TCP ports: one for torchrun's "
        "rendezvous, then two for batchtune.",
        "HOST:PORT",
    )
    memory: str | None = option(
        "Memory limit of the training process, or of each rank, such as 2GiB (default: as probed, or the whole "
        "device; on the CPU, ranks share the machine's memory).",
        "SIZE",
        parser=_size,
    )
    memory_fraction: float | None = option(
        "Fraction of --memory, or of the whole device, to use (default: as probed, or 0.9).",
        "X",
    )
    allocator: Choice | None = option(
        "How torch takes GPU memory: expandable (segments), native, or auto, which is expandable where that "
        "works, unless PYTORCH_ALLOC_CONF says otherwise. Train with the same allocator: every result says how "
        "(default: as probed, or auto).",
        "auto|expandable|native",
    )
    reserve: str | None = option(
        "Memory to keep free in addition, such as 500MiB: for what training needs but the workload lacks (NCCL's "
        "buffers, a second model, evaluation).",
        "SIZE",
        parser=_size,
    )
    setup_timeout: float = SETUP_TIMEOUT
    wait: float = option(
        "How long to wait for another probe that uses the device; without a number, until it ends.",
        "[SECONDS]",
        default=0.0,
    )

    def asked(
        self, source: ManifestOptions, lengths: Lengths | None = None
    ) -> dict[str, Any]:
        """Return the fields of `ProbeSettings` that the user gave. Raises UsageError if one is invalid.

        A command after `--` needs no lengths.

        The keys of the manifest also name the parts of a script's batches, where these have such parts.
        """
        from batchtune.cli.ranks import parse_nproc
        from batchtune.probe.settings import ProbeSettings
        from batchtune.workloads import parse_options

        values = {
            "workload": self.workload or None,
            "options": _if_given(parse_options, self.set),
            **self._script(source, lengths),
            "nproc_per_node": _if_given(
                partial(parse_nproc, device=self.device), self.nproc_per_node
            ),
            "nnodes": None if self.nnodes == 1 else self.nnodes,
            "memory_bytes": _if_given(parse_size, self.memory),
            "reserve_bytes": _if_given(parse_size, self.reserve),
        }
        return given(ProbeSettings.__struct_fields__, self, **values)

    def _script(
        self, source: ManifestOptions, lengths: Lengths | None
    ) -> dict[str, Any]:
        """Return the fields of `ProbeSettings` for the script after `--`, or one that --workload names, if any."""
        options = given(
            ("per_unit", "target_per_unit", "batch_size_key", "loader"), self
        )
        if self.command is not None and (self.workload or self.set):
            raise UsageError(
                "--workload and --set are for a workload, but a command is given as well",
                "Give one of --workload W and -- COMMAND.",
            )
        named = self._named()
        if self.command is None and named is None:
            for name in options:
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(
                    f"{flag} is for a training script",
                    "Put the script's command at the end of the line: -- python train.py",
                )
            return {}
        options |= given(("length_key", "target_key"), source)
        if named is not None:
            from batchtune.scripts.named import script_options

            assert self.workload is not None and lengths is not None
            options = script_options(self.workload, options, lengths.unit)
            return {"command": named, "options": options}
        assert self.command is not None
        from batchtune.files import command_text

        words = script_words(self.command)
        return {
            "workload": command_text(words),
            "command": words,
            "options": options,
        }

    @property
    def in_words(self) -> str | None:
        """The training step as a part of a command line, after a space; None if only some commands take it."""
        if self.command is not None:
            from batchtune.files import command_text

            return f" -- {command_text(script_words(self.command))}"
        if self.workload is None or self._named() is not None:
            return None
        words = ["--workload", self.workload]
        for text in self.set or []:
            words += ["--set", text]
        return f" {shlex.join(words)}"

    def _named(self) -> list[str] | None:
        """Return the command of a workload that is named by its framework; None for another workload."""
        from batchtune.scripts.named import FLAGS, named_command

        workload = self.workload or ""
        kind = workload.partition(":")[0]
        for framework, flag in FLAGS.items():
            if flag is None:
                continue
            is_given = getattr(self, flag) is not None
            if framework == kind and not is_given:
                raise UsageError(f"--workload {framework}:… needs --{flag}")
            if framework != kind and is_given:
                raise UsageError(f"--{flag} is only for --workload {framework}:…")
        if kind not in FLAGS:
            return None
        value = getattr(self, FLAGS[kind] or "", None)
        return named_command(workload, value, self.set or [])


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOptions(WorkloadOptions):
    """The options of a probe."""

    ddp: bool = option(
        "Keep room for a copy of the gradients: the gradient buckets of DistributedDataParallel.",
        default=False,
    )
    num_lengths: int = option(
        "Number of lengths to start with, from the shortest to the longest; more are added where the bucket "
        "tables need them.",
        "N",
        default=12,
    )
    max_lengths: int | None = option(
        "Largest number of lengths to probe (default: after 2.5 × --num-lengths trials, lengths are added only where "
        "they may save more than 1.5%).",
        "N",
    )
    minutes: float | None = option(
        "End the probe after this time, with the sizes proven by then; the same command continues it. A running "
        "trial is not cut short, so the probe may take one trial longer.",
        "N",
        min=0.01,
    )
    max_tokens: int | None = option(
        "For a workload that packs: try no larger batch than this many tokens (default: all tokens of the data).",
        "N",
    )
    tolerance: float = option(
        "How far a batch size, or a token budget, may be below the largest that fits, as a fraction of it.",
        "X",
        default=0.01,
    )
    trial_timeout: float = option(
        "Time limit of one trial.", "SECONDS", default=300.0, min=0.1
    )

    def settings(
        self, lengths: Lengths, run: RunOptions, source: ManifestOptions
    ) -> ProbeSettings:
        """Return the settings of the probe. Raises UsageError if one is invalid, or the workload must be named."""
        from batchtune.probe.devices import law
        from batchtune.probe.settings import ProbeSettings
        from batchtune.results import checked
        from batchtune.workloads import default_workload, with_unit

        default = default_workload(lengths.unit)
        if law.is_law(self.device or ""):
            default = law.WORKLOAD
        asked = {
            "options": {},
            "workload": default,
            **self.asked(source, lengths),
        }
        if asked["workload"] is None:
            raise UsageError(
                "no training step to measure, and no built-in for lengths without a unit",
                "Name one with --workload, or give the unit of the lengths with --unit.",
            )
        asked["options"] = with_unit(asked["workload"], asked["options"], lengths.unit)
        return checked(
            ProbeSettings, given(ProbeSettings.__struct_fields__, run, **asked)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """The bucket tables to compare."""

    PANEL = BUCKETS

    num_buckets: str = option(
        "Bucket counts: 15, 10:20 (both included) or 10,15,20.", "N", default="10:20"
    )
    strategy: list[str] | None = option(
        "A strategy to compare: speechbrain, linear, exponential, quantile, optimal, pooled or, with a token "
        "budget, packed; can be repeated (default: all).",
        "S",
    )
    current: str | None = option(
        "Your current settings, to compare with: max_batch_length=600,num_buckets=200, batch_size=16 or "
        "bucket_boundaries=4:8,bucket_batch_sizes=32:16, a SpeechBrain YAML, or the training.jsonl of `batchtune "
        "record`. By default, a script's own batch size if its DataLoader shuffles, or else the batches of its own "
        "sampler.",
        "WHAT",
    )
    pool_size: str | None = option(
        "Pool sizes: 20000, 1000,20000 or 1000,all (default: nine from 1000 to all). A pool is sorted by length and "
        "cut into batches.",
        "N",
    )
    multiple_of: float | None = option(
        "Round boundaries up to multiples of this, if you pad batches to them: for tensor cores, strides, or "
        "fewer shapes to compile.",
        "X",
    )
    world_size: int | None = WORLD_SIZE
    same_bucket: bool = option(
        "With --world-size: all ranks take batches of the same bucket at each step.",
        default=False,
    )
    keep: Kept | None = option(
        "What to keep: same (the examples of each optimizer step, cut into other micro-batches), steps (at "
        "least their number), or nothing (batches as large as fit). The default follows your own batches (a "
        "script's, or --current): same if a step has several, else steps; nothing if they are not known. With "
        "same, tune tries no batch with more examples than a step.",
        "WHAT",
    )
    micro_batches: int | None = option(
        "With --keep same: cut each rank's share of a step into N micro-batches; train with a gradient accumulation "
        "of N (default: as many as now).",
        "N",
    )
    equal_counts: bool = option(
        "With --keep same: give all micro-batches of a step the same number of examples, for a loss that is a mean "
        "over the examples of each micro-batch.",
        default=False,
    )
    throughput_fraction: float | None = option(
        "With --keep nothing: take the smallest batches that reach this share of the best throughput, such as 0.95, "
        "instead of the largest that fit. Needs step times.",
        "F",
    )
    accumulate: int | None = option(
        "Gradient accumulation steps; ranks only wait for each other at the last one (default: as in the probed "
        "script, or 1).",
        "N",
    )
    min_randomness: float | None = MIN_RANDOMNESS
    min_steps: int | None = MIN_STEPS

    def settings(self, run: RunOptions) -> SweepSettings:
        """Return the settings of the sweep. Raises UsageError if a value is invalid."""
        from batchtune.buckets import (
            STRATEGIES,
            checked_settings,
            parse_num_buckets,
            parse_sizes,
        )
        from batchtune.results import SweepSettings

        return checked_settings(
            **given(
                SweepSettings.__struct_fields__,
                self,
                run,
                strategies=tuple(self.strategy or STRATEGIES),
                num_buckets=parse_num_buckets(self.num_buckets),
                pool_sizes=_if_given(
                    partial(parse_sizes, flag="--pool-size"), self.pool_size
                ),
            )
        )

    def current_settings(self) -> Current | None:
        """Return the user's current settings, if given. Raises UsageError or ResultError if they are invalid."""
        from batchtune.buckets.current import read_current

        return _if_given(read_current, self.current)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """How workers read the stream, and the ways to batch it that are compared."""

    PANEL = "Stream"

    workers: int = option(
        "DataLoader workers of each rank; each reads its own shards.", "N", default=1
    )
    world_size: int | None = WORLD_SIZE
    shuffle_shards: int = option(
        "WebDataset's shardshuffle; 0 keeps the order of the source.", "N", default=100
    )
    shuffle_buffer: int = option(
        "The N of WebDataset's .shuffle(N) before batching; 0: no shuffle.",
        "N",
        default=1000,
    )
    buffer_size: str = option(
        "Number of examples that a worker holds to form batches; several are compared.",
        "N",
        default="256,1024,4096",
    )
    num_buckets: str = option(
        "Bucket counts: 15, 10:20 (both included) or 10,15,20.",
        "N",
        default="4,8,12,16,20",
    )
    shard_size: int = option(
        "Examples per shard, if the source has no shards.", "N", default=1000
    )
    bytes_per_length: float | None = option(
        "Memory in the buffer per unit of length, in bytes (default: by the unit: 64000 a second, which is "
        "float32 at 16 kHz, 320 a frame, 8 a token).",
        "X",
    )
    current: str | None = option(
        "Your current settings of dynamic_bucketed_batch, to compare with: "
        "target_batch_numel=450,max_batch_numel=600,buffersize=1024, or a SpeechBrain YAML.",
        "WHAT",
    )
    min_randomness: float | None = MIN_RANDOMNESS
    min_steps: int | None = MIN_STEPS

    def settings(self, run: RunOptions) -> StreamSettings:
        """Return the settings of the sweep. Raises UsageError or ResultError if a value is invalid."""
        from batchtune.buckets import parse_num_buckets, parse_sizes
        from batchtune.buckets.sweep import probed_ranks
        from batchtune.results import StreamSettings, checked

        values = given(
            StreamSettings.__struct_fields__,
            self,
            run,
            world_size=self.world_size or probed_ranks(run.run),
            buffer_sizes=parse_sizes(self.buffer_size, "--buffer-size"),
            num_buckets=parse_num_buckets(self.num_buckets),
        )
        return checked(StreamSettings, values)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """How a loader is measured."""

    PANEL = "Loader"

    target: str = argument(
        "Your code that makes the loader, path/to/file.py:NAME or package.module:NAME: a class or function "
        "that returns a data set, DataLoader arguments as a dict, a DataLoader, or any iterable of batches; or a "
        "generator function of DALI's dynamic mode. It is imported and run.",
        "TARGET",
        show_default=False,
    )
    set: list[str] | None = option(
        "An argument for your function; can be repeated.", "KEY=VALUE"
    )
    kind: str | None = option(
        "Kind of loader: torch, dali or iterable (default: detected).", "KIND"
    )
    sweep: list[str] | None = option(
        "Values to compare: num_workers=0:8, prefetch_factor=2,4 or pin_memory=true, or of any parameter of your "
        "function. Can be repeated (default: by the kind and the number of processors).",
        "NAME=VALUES",
    )
    step_ms: float | None = option(
        "Time of a training step in ms (default: from the run's probe).", "X"
    )
    device: str = option(f"{DEVICE_FORMS}.", "DEVICE", default="auto")
    ranks_per_node: int = option(
        "Ranks that share the processors of this machine.", "N", default=1
    )
    seconds: float = option("Seconds to measure each setting.", "X", default=2.0)
    trials: int = option(
        "How often to measure the best settings; the median counts.", "N", default=3
    )
    timeout: float = option("Time limit of one batch.", "SECONDS", default=60.0)
    setup_timeout: float = SETUP_TIMEOUT
    check_reproducible: bool = option(
        "Check that two epochs from the same seed give the same batches, bit for bit; it takes two epochs, of at most "
        "a minute each.",
        default=False,
    )
    seed: int = option("Seed for all random numbers of the loader.", "N", default=0)

    def settings(self, run: Path) -> LoaderSettings:
        """Return the settings of the tuning. Raises UsageError if a value is invalid."""
        from batchtune.loaders.runner import LoaderSettings, parse_sweep
        from batchtune.results import SAMPLER_FILE, checked
        from batchtune.workloads import parse_options

        values = given(
            [each.name for each in fields(LoaderSettings)],
            self,
            options=parse_options(self.set or []),
            sweep=parse_sweep(self.sweep or []),
        )
        if (run / SAMPLER_FILE).exists():
            values["config"] = str(run / SAMPLER_FILE)
        return checked(LoaderSettings, values)


def expand(command: Callable[..., None]) -> Callable[..., None]:
    """Make a command of a function that takes options and groups of options, whose fields become options too."""
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        group: Any = parameter.annotation
        if hasattr(group, "PANEL"):
            groups[parameter.name] = group
            hints = get_type_hints(group)
            parameters += [
                _parameter(each.name, hints[each.name], each, group.PANEL)
                for each in fields(group)
            ]
        elif isinstance(parameter.default, Field):
            parameters.append(
                _parameter(parameter.name, group, parameter.default, None)
            )
        else:  # typer's context
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(
                **{option.name: values.pop(option.name) for option in fields(group)}
            )
        command(**values)

    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what inspect reads
    run.__annotations__ = {
        parameter.name: parameter.annotation for parameter in parameters
    }
    return run


def _parameter(
    name: str, kind: Any, declared: Field[Any], panel: str | None
) -> inspect.Parameter:
    """Return a parameter whose option has its flag, environment variable and section of the help."""
    info = copy(declared.metadata["info"])
    info.rich_help_panel = info.rich_help_panel or panel
    if info.envvar == PREFIX:
        info.envvar = PREFIX + name.upper()
    default = declared.default
    # Typer would add a --no-... to it.
    if isinstance(default, bool) and info.default is ...:
        info.default = f"--{name.replace('_', '-')}"
    for number in _NUMBERS:
        if kind in (number, number | None):
            info.parser = _number_reader(number, info)
    if kind in (Path, Path | None):
        info.parser = _path
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if default is MISSING else default,
        annotation=Annotated[kind, info],
    )


def _path(value: Any) -> Path:
    """Return an option's path. Raises BadParameter for an empty one, which would be the working folder."""
    if value == "":
        raise typer.BadParameter("the path is empty. Is a shell variable unset?")
    return Path(value)


def _number_reader(kind: Any, info: Any) -> Callable[[Any], Any]:
    """Return a function that reads an option's number and raises WrongNumber if it is none, or beyond the limits."""

    def read(value: Any) -> Any:
        try:
            number = kind(value)
        except ValueError:
            raise WrongNumber(f"{shortened(value)} is not {_NUMBERS[kind]}") from None
        if info.min is not None and not number >= info.min:
            raise WrongNumber(f"{value} is not at least {info.min:g}")
        if info.max is not None and not number <= info.max:
            raise WrongNumber(f"{value} is not at most {info.max:g}")
        return number

    return read
