"""The result files: typed records and their versioned JSON.

A run folder holds `run.json` (what the trials were measured for), `trials.jsonl`, `probe.json`, `sweep.json`,
`sampler.yaml` and `verify.json`. Units are in the names; what is unknown is None (`null`), never 0.

Files may come from anywhere. The types below say what a number may be; `read_result` holds a file to them, and to what
`batchtune.consistency` says of numbers that follow from each other.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, overload

import msgspec

from batchtune import consistency
from batchtune.errors import ResultError, shortened
from batchtune.files import read_regular, write_whole
from batchtune.shapes import BatchShape

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    FloatArray = npt.NDArray[np.float64]

RUN_FILE = "run.json"
TRIALS_FILE = "trials.jsonl"
PROBE_FILE = "probe.json"
SWEEP_FILE = "sweep.json"
SAMPLER_FILE = "sampler.yaml"
VERIFY_FILE = "verify.json"

# No sane number is larger: sums and products of these stay far from what a float or a 64-bit integer can hold.
Count = Annotated[int, msgspec.Meta(ge=0, le=10**15)]
Size = Annotated[int, msgspec.Meta(ge=1, le=10**18)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**60)]
# A difference of two measurements.
ByteChange = Annotated[int, msgspec.Meta(ge=-(2**60), le=2**60)]
Length = Annotated[float, msgspec.Meta(gt=0, le=1e18)]
TargetLength = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e40)]
Seed = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
# Of a step: at most 30,000 years.
StepSeconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]

Outcome = Literal["ok", "oom", "timeout", "crash", "error"]
ClosedBy = Literal["oom", "memory", "data", "timeout", "crash"]
Sizing = Literal["length", "frontier"]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the records: frozen, named fields."""


class Meta(Record, frozen=True, kw_only=True):
    """What a result file is."""

    format: str
    version: int
    batchtune: str


class ReadingRecord(Record, frozen=True, kw_only=True, omit_defaults=True):
    """How the manifest was read: the options as they were given, None for those that were not.

    Attributes:
        length_scale: As a number or a fraction, `1/16000`.
        tokenizer, target_file: Paths, as they were given.
    """

    format: str | None = None
    length_key: str | None = None
    target_key: str | None = None
    target_file: str | None = None
    unit: str | None = None
    length_scale: str | None = None
    min_length: float | None = None
    max_length: float | None = None
    skip_invalid: bool = False
    measure: str | None = None
    tokenizer: str | None = None
    reduce: str | None = None

    @property
    def flags(self) -> dict[str, str]:
        """Option → value, as on the command line, of those that were given; the value of --skip-invalid is empty."""
        found = {}
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and value is not False:
                text = "" if value is True else f"{value:.15g}" if isinstance(value, float) else shlex.quote(value)
                found[f"--{name.replace('_', '-')}"] = text
        return found

    @property
    def filters(self) -> str | None:
        """The limits as on the command line, `--min-length 1 --max-length 30`; None without any."""
        flags = self.flags
        return " ".join(f"{name} {flags[name]}" for name in ("--min-length", "--max-length") if name in flags) or None


class LengthsSummary(Record, frozen=True, kw_only=True):
    """The data set that a result is about.

    Attributes:
        reading: How its manifest was read; None where it was none, or in files of older versions.
        left_out: Reason → number of examples that were left out: `longer than --max-length 30` → 1000.
    """

    count: Size
    total: Amount
    min: Length
    max: Length
    unit: str | None
    fingerprint: str
    reading: ReadingRecord | None = None
    left_out: dict[str, Count] = {}


class Trial(Record, frozen=True, kw_only=True):
    """One batch shape measured on the device.

    Attributes:
        index: Position in `trials.jsonl`, from 0.
        outcome: `ok`, or why not.
        steps: Training steps that were run to their end.
        step_seconds: Median time of the measured steps (the first is a warm-up).
        peak_bytes: Most memory in use during the trial.
        reserved_bytes: Most memory held by the allocator, its cache included.
        alloc_retries: How often the allocator had to empty its cache to go on.
        error: The error's message where the outcome is not `ok`.
        elapsed_seconds: Wall time of the trial, batch making and worker start included.
        step_seconds_spread: Interquartile range of the measured steps; None for fewer than two.
        mean_step_seconds: Mean time of the measured steps; None in older files.
        worker: Number of the worker process in this run folder, from 1; trials of one number shared a process.
        confirmation: Whether the shape failed in alternation with the others, after it had passed by itself.
        rest_bytes: In use after the trial, when its batch was freed.
        outside_bytes: Memory of the device that the worker holds outside torch's allocator (context, workspaces).
        sm_clock_mhz, throttle_reasons: While the steps were timed; None where the device can't tell.
        steady_peak_bytes: As `peak_bytes`, the first step left out: the first step of a process may need more.
        peak_spread_bytes: Largest - smallest peak of the steps after the first; None for fewer than two.
        timing: Whether the shape was run for its time alone, with a typical target: no size is searched there.
        failed_peak_bytes: Most memory in use before the error; None where the trial passed, or no error was seen.
        caught: Whether the workload caught the lack of memory itself, and its step returned as if it had passed.
        other_processors: How many processors other programs took while steps were timed, on average; None on a GPU.
    """

    index: Count
    batch_size: Size
    length: Length
    target_length: TargetLength | None
    outcome: Outcome
    steps: Count
    step_seconds: StepSeconds | None
    peak_bytes: Bytes | None
    reserved_bytes: Bytes | None
    alloc_retries: Count | None
    error: str | None
    elapsed_seconds: Amount
    step_seconds_spread: StepSeconds | None = None
    mean_step_seconds: StepSeconds | None = None
    worker: Count | None = None
    confirmation: bool = False
    rest_bytes: ByteChange | None = None
    outside_bytes: ByteChange | None = None
    sm_clock_mhz: Count | None = None
    throttle_reasons: list[str] | None = None
    steady_peak_bytes: Bytes | None = None
    peak_spread_bytes: Bytes | None = None
    timing: bool = False
    failed_peak_bytes: Bytes | None = None
    caught: bool = False
    other_processors: Amount | None = None

    @property
    def shape(self) -> BatchShape:
        """What was measured."""
        return BatchShape(self.batch_size, self.length, self.target_length)


class WorkloadRecord(Record, frozen=True, kw_only=True):
    """The training step that was measured."""

    spec: str
    options: dict[str, Any]


class DeviceProcess(Record, frozen=True, kw_only=True):
    """A process that uses a device; None for what the driver does not tell."""

    pid: Count
    used_bytes: Bytes | None


class Device(Record, frozen=True, kw_only=True):
    """The device that was measured, and the limit that was enforced on it. None: the system can't tell.

    Attributes:
        limit_bytes: What the workload may take, after all that is kept free.
        other_processes: How many other processes used the device at the start.
        processes: Those, each with its memory.
        uuid: Of the GPU or the MIG instance.
        free_bytes: Of the device, before this process used it.
        mig: Whether it is a part of a GPU (Multi-Instance GPU).
        ecc: Whether its memory corrects errors, which takes some of it.
        outside_bytes: Held by this process outside torch's allocator: the context, the libraries' workspaces.
        reserve_bytes: Kept free because the user said so.
        ddp_bytes: Kept free for the gradient buckets of DistributedDataParallel.
        settings: What else decides memory and time: the allocator's environment variables, TF32, cudnn.benchmark,
            deterministic algorithms; name → value, as they are after the workload's setup.
        processors: That the worker may use; None on a GPU, as for the next two.
        load_average: Of the last minute, before the workload was built.
        other_processors: How many processors other programs took while the workload was built, on average.
    """

    kind: str
    name: str
    total_bytes: Bytes
    limit_bytes: Bytes
    driver: str | None
    torch: str
    allocator: str
    other_processes: Count | None
    processes: list[DeviceProcess] | None = None
    uuid: str | None = None
    free_bytes: Bytes | None = None
    mig: bool | None = None
    ecc: bool | None = None
    outside_bytes: ByteChange | None = None
    reserve_bytes: Bytes = 0
    ddp_bytes: Bytes = 0
    settings: dict[str, Any] = {}
    processors: Count | None = None
    load_average: Amount | None = None
    other_processors: Amount | None = None


class FrontierPoint(Record, frozen=True, kw_only=True):
    """The largest batch size that fits at one length.

    Attributes:
        closed_by: What ends it: `oom` (one step more was seen to run out), `memory` (the measured peak leaves
            less room than one step more needs, by the fit), `data` (the data can't fill more), or `timeout` and
            `crash` (one step more failed so, twice).
        oom_batch_size: The smallest batch size that was seen to run out; None unless one was.
        trial: Index of the trial that proves the batch size: it ran with at least as many examples, as long a length
            and as long a target. None where an older batchtune wrote the file.
    """

    length: Length
    target_length: TargetLength | None
    batch_size: Size
    closed_by: ClosedBy
    oom_batch_size: Size | None
    step_seconds: StepSeconds | None
    peak_bytes: Bytes | None
    trial: Count | None = None


class Margin(Record, frozen=True, kw_only=True):
    """The memory that a proven batch leaves free, because peaks of equal batches differ.

    A batch counts as proven where the lowest peak that was seen of it, plus `bytes`, is within the limit.

    Attributes:
        bytes: 1.1 × `spread_bytes`, or `first_step_bytes` where that is more, + 0.1% of the limit.
        spread_bytes: The widest range of peaks of equal batches, or of what the process holds between trials.
        first_step_bytes: By how much the first step of a process exceeds later ones with the same batch.
        repetitions: How many peaks were compared.
    """

    bytes: Bytes
    spread_bytes: Bytes
    first_step_bytes: Bytes
    repetitions: Count


class CostModel(Record, frozen=True, kw_only=True):
    """cost = max(floor, constant + B·(example + linear·L + quadratic·L² + targets)).

    Targets add target_linear·T + target_quadratic·T² + cross·L·T. B is the batch size, L the longest length, T the
    longest target length of the batch.

    Attributes:
        example: What each example costs whatever its length.
        relative_error: Root mean square of (fit / measured - 1) over all trials it was fitted to.
        largest_error: The largest |fit / measured - 1| among them; None in files of older versions.
    """

    floor: Amount
    constant: Amount
    linear: Amount
    quadratic: Amount
    relative_error: Amount
    target_linear: Amount = 0.0
    target_quadratic: Amount = 0.0
    cross: Amount = 0.0
    example: Amount = 0.0
    largest_error: Amount | None = None

    @overload
    def per_example(self, length: float, target_length: float = 0.0) -> float: ...
    @overload
    def per_example(self, length: FloatArray, target_length: FloatArray | float = 0.0) -> FloatArray: ...
    def per_example(self, length: Any, target_length: Any = 0.0) -> Any:
        """What one more example costs, in the model's unit, element by element: the slope over the batch size."""
        own = self.example + length * (self.linear + self.quadratic * length + self.cross * target_length)
        return own + target_length * (self.target_linear + self.target_quadratic * target_length)


class Confirmation(Record, frozen=True, kw_only=True):
    """The batches at the limit, run once more one after the other, the allocator's cache kept, as training runs them.

    Attributes:
        shapes: How many batch shapes were confirmed.
        steps: Steps in all, each with another shape than the one before (where there is more than one).
        workers: In how many worker processes one after the other; the last was fresh.
        alloc_retries: How often the allocator emptied its cache to go on.
        reserved_growth_bytes: By how much its cache grew after all shapes had been seen once; None where it has none.
        given_up: How many shapes failed on the way and were replaced by smaller ones.
        time_ratio: What the steps took, each with another shape than the one before as in training, over what trials,
            which repeat a batch, took for the same shapes; None where too few are known. Estimated times include it.
    """

    shapes: Count
    steps: Count
    workers: Count
    alloc_retries: Count
    reserved_growth_bytes: ByteChange | None
    given_up: Count
    time_ratio: Amount | None = None


class Models(Record, frozen=True, kw_only=True):
    """The fitted models; None where there were too few measurements."""

    peak_bytes: CostModel | None
    step_seconds: CostModel | None


class Result(Record, frozen=True, kw_only=True):
    """Base of the files: `meta` comes first; FORMAT and VERSION say what it must hold."""

    FORMAT: ClassVar[str]
    VERSION: ClassVar[int] = 1

    meta: Meta

    def problems(self) -> Iterator[str]:
        """Yield what numbers that follow from each other show to be edited or damaged; nothing where all is well."""
        return iter(())


class ProbedWith(Record, frozen=True, kw_only=True):
    """The settings of a probe, where something later reads them; those of older files are as they were then."""

    device: Annotated[str, msgspec.Meta(pattern=r"^[a-z]{1,16}(:[0-9]{1,4})?$")] = "auto"
    memory_bytes: Size | None = None
    memory_fraction: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.9
    max_batch_size: Size | None = None
    seed: Seed = 0
    reserve_bytes: Bytes = 0
    ddp: bool = False


class SweptWith(Record, frozen=True, kw_only=True):
    """The settings of a sweep, where something later reads them; missing in files of older versions."""

    max_batch_size: Size | None = None
    seed: Seed = 0
    multiple_of: Annotated[float, msgspec.Meta(gt=0, le=1e15)] | None = None
    world_size: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1
    same_bucket: bool = False
    accumulate: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1


class Run(Result, frozen=True, kw_only=True):
    """What a run folder's trials were measured for: they count only where all of this is the same.

    Attributes:
        workload_sha256: Of the workload's file; None where it is no file. A change is told, but does not undo the
            trials: it may have been a comment, or the mending of what stopped the probe.
    """

    FORMAT: ClassVar[str] = "batchtune/run"

    lengths: LengthsSummary
    workload: WorkloadRecord
    device: Device
    settings: dict[str, Any]
    workload_sha256: str | None = None

    def problems(self) -> Iterator[str]:
        """As for every result."""
        return consistency.of_run(self)


class Probe(Result, frozen=True, kw_only=True):
    """`probe.json`: what fits, and what a batch costs.

    Attributes:
        frontier: In ascending order of length, each with the longest target at or below it. A size holds for all
            lengths up to its own.
        joint_frontier: The same for shorter targets than those; empty without targets.
        confirmation: None where the run was written by an older batchtune.
        margin: None where peaks are not known, or where an older batchtune wrote the file.
        warnings: Why figures may not be trusted, each with its remedy.
    """

    FORMAT: ClassVar[str] = "batchtune/probe"

    lengths: LengthsSummary
    workload: WorkloadRecord
    device: Device
    settings: dict[str, Any]
    trials: list[Trial]
    frontier: list[FrontierPoint]
    models: Models
    max_batch_length: Length
    confirmation: Confirmation | None = None
    margin: Margin | None = None
    joint_frontier: list[FrontierPoint] = []
    warnings: list[str] = []

    def problems(self) -> Iterator[str]:
        """As for every result."""
        yield from _wrong_settings(self.settings, ProbedWith)
        yield from consistency.of_probe(self)

    @property
    def is_proven(self) -> bool:
        """Whether its sizes were run alone and in turns, with a margin: not by an older batchtune."""
        return all(point.trial is not None for point in self.frontier)


class RankTimes(Record, frozen=True, kw_only=True):
    """The time of one epoch on several ranks that wait for each other at every step.

    Attributes:
        without_waiting_epoch_seconds: If no rank ever waited: all batches' time / the number of ranks.
        independent_epoch_seconds: Each rank takes whatever batch comes.
        same_bucket_epoch_seconds: At each step all ranks take batches of the same bucket.
    """

    without_waiting_epoch_seconds: Amount
    independent_epoch_seconds: Amount
    same_bucket_epoch_seconds: Amount


class Row(Record, frozen=True, kw_only=True):
    """One bucket table of a sweep and what one epoch with it costs.

    On several ranks the batches are those of all ranks together, as `batchtune.BucketBatchSampler` deals them: every
    rank has as many, so some are split, or (in the same bucket) what fills no batch on each rank is dealt in smaller
    ones.

    Attributes:
        num_buckets: What was asked for; used_buckets: how many hold an example.
        boundaries, batch_sizes: The table, one entry a bucket; the boundary is an inclusive upper edge.
        batches: Batches of one epoch, `drop_last` off; a multiple of the ranks.
        padded_length: Cells of the epoch's batches, expected over shuffles.
        padding_ratio: Padded cells / all cells; those of an example that is dealt a second time count as padded.
        fill: True length, of each example once, / (batches × max_batch_length).
        mean_batch_size: Examples in a batch, one that is dealt twice counted twice.
        largest_padded_length: Of any batch that this table can form on these data.
        effective_buckets: 1 / Σ p², p the share of the examples in each bucket.
        estimated_epoch_seconds: On all ranks, each step as long as its slowest rank takes; None without step times.
        estimated_epoch_error_seconds: Its standard error; None likewise.
        equal_to_best: Whether it differs from the lowest estimated time by no more than the error of the difference.
        smallest_batch_size, largest_batch_size: Of the epoch's batches, those that are not full included.
        batch_size_variation: Their standard deviation / their mean.
        steps: Optimizer steps of one epoch, on `world_size` ranks with gradients accumulated.
        ranks: What the ranks' waiting for each other costs; None for one rank, or without step times.
        unproven: How many buckets have a batch size that is not proven: no batch that ran, alone and in turns, was at
            least as large in every respect. None without a probe.
        repeated_examples: How many examples are dealt a second time, so that every rank has as many batches.
    """

    strategy: str
    sizing: Sizing
    num_buckets: Size
    used_buckets: Count
    boundaries: list[Length]
    batch_sizes: list[Size]
    batches: Size
    padded_length: Amount
    padding_ratio: Share
    fill: Amount
    mean_batch_size: Amount
    largest_padded_length: Amount
    effective_buckets: Amount
    estimated_epoch_seconds: Amount | None
    estimated_epoch_error_seconds: Amount | None = None
    equal_to_best: bool | None = None
    smallest_batch_size: Size | None = None
    largest_batch_size: Size | None = None
    batch_size_variation: Amount | None = None
    steps: Count | None = None
    ranks: RankTimes | None = None
    unproven: Count | None = None
    repeated_examples: Count | None = None


class Baseline(Record, frozen=True, kw_only=True):
    """A fixed batch size, the largest that fits the longest examples.

    On several ranks batches and padded_length are those of all ranks together, each with as many batches: where the
    number of batches is no multiple of the ranks, some are split in two.
    """

    name: str
    batch_size: Size
    batches: Size
    padded_length: Amount
    padding_ratio: Share
    estimated_epoch_seconds: Amount | None


class LowerBound(Record, frozen=True, kw_only=True):
    """What no bucket table can beat; on several ranks over all of them, each with as many batches."""

    batches: Size
    padded_length: Amount
    estimated_epoch_seconds: Amount | None


class HistogramBin(Record, frozen=True, kw_only=True):
    """The examples with lengths in (from, to]: `from` is an exclusive lower edge, `to` an inclusive upper one."""

    from_: TargetLength = msgspec.field(name="from")
    to: Length
    count: Count


class BucketUse(Record, frozen=True, kw_only=True):
    """What one bucket of the recommended table holds.

    Attributes:
        boundary: Its inclusive upper edge.
        examples: Number of examples in it.
        batches: Batches of one epoch, over all ranks, those that are not full included.
        length: True length of its examples.
        padded_length: Cells of its batches, expected over shuffles.
        proven_by: The trial, as `trials.jsonl` counts them, that shows that its batches fit; None where none does.
    """

    boundary: Length
    batch_size: Size
    examples: Count
    batches: Count
    length: Amount
    padded_length: Amount
    proven_by: Count | None = None


class Drift(Record, frozen=True, kw_only=True):
    """How far other lengths are from those that a run was tuned for.

    Attributes:
        lengths: The others.
        changed: Whether the fingerprint differs.
        distance: Kolmogorov-Smirnov: the largest difference between the two distribution functions, 0 to 1.
        beyond: How many of the others are longer than the last boundary of the recommended table.
        batches: What the tuned table needs for the others; those beyond it are batches of one.
        retuned_batches: What a table tuned for the others, with the same strategy, sizing and number of buckets, needs.
        epoch_seconds, retuned_epoch_seconds: The same in estimated time; None without step times.
        stale: How much the tuned table costs above one tuned anew, in time where it is known, else in batches: 0.02 is
            2% more; 0 where it costs no more.
    """

    lengths: LengthsSummary
    changed: bool
    distance: float
    beyond: int
    batches: int
    retuned_batches: int
    epoch_seconds: float | None
    retuned_epoch_seconds: float | None
    stale: float


class SaturationPoint(Record, frozen=True, kw_only=True):
    """What one max_batch_length brings.

    Attributes:
        batches, mean_batch_size: As for a row, over all ranks.
        throughput: True length that is trained on, per second.
    """

    max_batch_length: Length
    batches: Size
    mean_batch_size: Amount
    estimated_epoch_seconds: Amount
    throughput: Amount


class Saturation(Record, frozen=True, kw_only=True):
    """How throughput grows with max_batch_length.

    Attributes:
        num_buckets: Of the optimal table at each point.
        points: In ascending order of max_batch_length.
        fraction: Of the best throughput.
        max_batch_length: The smallest among the points that reaches this fraction.
    """

    num_buckets: Size
    points: list[SaturationPoint]
    fraction: Share
    max_batch_length: Length


class LearningRate(Record, frozen=True, kw_only=True):
    """By what to multiply the learning rate, a hint, when the batch size changes.

    Attributes:
        relative_to: Whose batch size the factors start from: a baseline's name, or `current`.
        from_batch_size, to_batch_size: Mean batch sizes, before and with the recommended row.
        linear: to / from (Goyal et al. 2017, for SGD).
        square_root: √(to / from) (Krizhevsky 2014; Malladi et al. 2022 for Adam).
    """

    relative_to: str
    from_batch_size: Amount
    to_batch_size: Amount
    linear: Amount
    square_root: Amount


class TwoDimensionalRow(Record, frozen=True, kw_only=True):
    """A bucket table over length and target length, and what it gains over one dimension, on one rank.

    Attributes:
        num_buckets: The most buckets allowed.
        buckets: (length, target length) pairs, in ascending order, both inclusive upper edges: an example belongs
            to the first bucket whose length boundary and whose target boundary are both not below its own.
        batch_sizes: One for each bucket.
        batches, estimated_epoch_seconds: Of one epoch, from simulated shuffles.
        one_dimensional_batches, one_dimensional_epoch_seconds: Of the optimal table over length alone, sized by the
            frontier, with as many buckets, from the same shuffles.
        unproven: As for a row.
    """

    num_buckets: Size
    buckets: list[tuple[Length, TargetLength]]
    batch_sizes: list[Size]
    batches: Size
    estimated_epoch_seconds: Amount | None
    one_dimensional_batches: Size
    one_dimensional_epoch_seconds: Amount | None
    unproven: Count | None = None


class Sweep(Result, frozen=True, kw_only=True):
    """`sweep.json`: the bucket tables compared.

    Attributes:
        current: The user's own settings, as a row; None where they are not known.
        current_fits: Whether its batches stay within what was measured to fit, or within max_batch_length where there
            is no probe; None without one.
        current_settings: Those settings, and `source`, where they were read.
        trade_off: Indices of the rows that no other beats in both speed and randomness, the fastest first.
        knee: Index of the row on that curve after which more speed costs most randomness; None where it has no bend.
        saturation: None without step times.
        learning_rate: None where no row is recommended.
        two_dimensional: Empty without target lengths, or where memory does not depend on them.
        histogram: Of the lengths, ascending bins that cover them all; empty in files of older versions.
        quantiles: 1001 lengths: quantile i / 1000 of the data set at position i; empty likewise.
        buckets: Of the recommended table; empty without one.
    """

    FORMAT: ClassVar[str] = "batchtune/sweep"

    lengths: LengthsSummary
    max_batch_length: Length
    settings: dict[str, Any]
    device_name: str | None
    rows: list[Row]
    baselines: list[Baseline]
    lower_bound: LowerBound
    recommended: Count | None
    reason: str
    warnings: list[str]
    current: Row | None = None
    current_fits: bool | None = None
    current_settings: dict[str, Any] | None = None
    trade_off: list[Count] = []
    knee: Count | None = None
    saturation: Saturation | None = None
    learning_rate: LearningRate | None = None
    two_dimensional: list[TwoDimensionalRow] = []
    histogram: list[HistogramBin] = []
    quantiles: list[Length] = []
    buckets: list[BucketUse] = []

    def problems(self) -> Iterator[str]:
        """As for every result."""
        yield from _wrong_settings(self.settings, SweptWith)
        yield from consistency.of_sweep(self)

    @property
    def recommended_row(self) -> Row | None:
        """The recommended row, or None where no row beats the baseline."""
        return None if self.recommended is None else self.rows[self.recommended]

    @property
    def world_size(self) -> int:
        """Number of ranks whose batches are counted; 1 where the settings do not say."""
        found = self.settings.get("world_size")
        return found if isinstance(found, int) and found > 1 else 1


VerifyPhase = Literal["worst", "shuffled"]


class VerifyFailure(Record, frozen=True, kw_only=True):
    """A batch of the verification that did not pass.

    Attributes:
        phase: Among the worst shapes, or among the shuffled batches.
        step: Position in its phase, from 0.
        bucket: Index of its bucket in the table.
        outcome: `oom`, `crash` or `timeout`.
    """

    phase: VerifyPhase
    step: Count
    bucket: Count
    batch_size: Size
    length: Length
    target_length: TargetLength | None
    outcome: Outcome
    error: str | None


class Proposal(Record, frozen=True, kw_only=True):
    """The next smaller sizes, where a table did not hold.

    Attributes:
        bucket_batch_sizes: Instead of the table's, with its boundaries.
        max_batch_length: Instead of the table's, for samplers that work batch sizes out of it.
        verified: Whether these batch sizes were run like the table's, in a fresh worker process, and passed.
        steps: How many steps that took.
    """

    bucket_batch_sizes: list[Size]
    max_batch_length: Length
    verified: bool
    steps: Count


class Verification(Result, frozen=True, kw_only=True):
    """`verify.json`: the recommended batches, run for real.

    Attributes:
        bucket_boundaries, bucket_batch_sizes, max_batch_length: The table that was run, as `sampler.yaml` had it.
        worst_steps: Steps with the worst shape of each bucket, before the shuffled ones.
        steps: Shuffled steps that passed.
        planned_steps: Shuffled steps that were to be run; None where time decided.
        epoch_batches: Batches of one epoch.
        alloc_retries: How often the allocator emptied its cache to go on, after each shape had been run once.
        peak_bytes, reserved_bytes: The most in use, and the most held by the allocator; None where unknown.
        rest_growth_bytes: By how much memory in use between steps grew, from the second to the last quarter of the
            shuffled steps (of the worst shapes', where it did not come to those); None where too few steps passed.
        reserved_growth_bytes: The same of what the allocator holds.
        estimated_epoch_seconds: Of this table, by the probe's step times; None without them.
        measured_epoch_seconds: From the shuffled steps, scaled to the epoch; None where none passed.
        time_ratio: Measured / estimated time of exactly the batches that were run.
        time_ratio_spread: Interquartile range of that ratio over the steps.
        holds: Whether all that was checked is as it should be.
        reasons: Why it does not hold; sentences without a full stop. Empty where it does.
        warnings: What to know besides, each a sentence without a full stop.
        proposal: Smaller sizes; None where it holds, or where smaller sizes don't help.
    """

    FORMAT: ClassVar[str] = "batchtune/verify"

    lengths: LengthsSummary
    workload: WorkloadRecord
    device: Device
    settings: dict[str, Any]
    bucket_boundaries: list[Length]
    bucket_batch_sizes: list[Size]
    max_batch_length: Length
    worst_steps: Count
    steps: Count
    planned_steps: Count | None
    epoch_batches: Count
    failures: list[VerifyFailure]
    alloc_retries: Count | None
    peak_bytes: Bytes | None
    reserved_bytes: Bytes | None
    rest_growth_bytes: ByteChange | None
    reserved_growth_bytes: ByteChange | None
    estimated_epoch_seconds: Amount | None
    measured_epoch_seconds: Amount | None
    time_ratio: Amount | None
    time_ratio_spread: Amount | None
    holds: bool
    reasons: list[str]
    warnings: list[str]
    proposal: Proposal | None

    def problems(self) -> Iterator[str]:
        """As for every result."""
        return consistency.of_verification(self)


class Percentiles(Record, frozen=True, kw_only=True):
    """How long examples are: percentiles 0, 50, 95, 99, 99.9 and 100 by nearest rank: each one occurs."""

    min: float
    median: float
    p95: float
    p99: float
    p999: float
    max: float


class Scan(Result, frozen=True, kw_only=True):
    """What `batchtune scan` found out about a data set's lengths.

    Attributes:
        sources: Where the lengths come from, as the user named it.
        distinct: Number of different lengths.
        targets: Of the target lengths; None where there are none.
        histogram: Bins that cover all lengths, the longest first; even or log-spaced.
        left_out: Reason → number of examples that were left out.
        notes: What the reader found out.
        warnings: What looks wrong or wasteful, each with its remedy.
    """

    FORMAT: ClassVar[str] = "batchtune/scan"

    sources: list[str]
    lengths: LengthsSummary
    distinct: int
    percentiles: Percentiles
    targets: Percentiles | None
    histogram: list[HistogramBin]
    left_out: dict[str, int]
    notes: list[str]
    warnings: list[str]


class DoctorGpu(Record, frozen=True, kw_only=True):
    """A GPU, or an instance of one (MIG), as it is now; None: can't be told.

    Attributes:
        device: What PyTorch calls it, such as `cuda:0`; None where PyTorch does not see it.
        processes: Who uses it, each with its memory.
        mig: Whether it is an instance, or divided into instances.
        throttle_reasons: Why its clock is lower now than it could be.
        probe_process: The process of batchtune that is probing it; None where there is none.
    """

    name: str
    device: str | None
    uuid: str | None
    capability: str | None
    total_bytes: int | None
    free_bytes: int | None
    processes: list[DeviceProcess] | None
    mig: bool | None
    ecc: bool | None
    sm_clock_mhz: int | None
    max_sm_clock_mhz: int | None
    throttle_reasons: list[str] | None
    probe_process: int | None


class DoctorTorch(Record, frozen=True, kw_only=True):
    """PyTorch, as a process of its own found it.

    Attributes:
        version: None where it can't be imported.
        cuda, hip, cudnn: What it was built with; None: without.
        problem: Why it can't be used, or sees no GPU though it was built for one.
    """

    version: str | None
    cuda: str | None
    hip: str | None
    cudnn: str | None
    problem: str | None


class DoctorCpu(Record, frozen=True, kw_only=True):
    """The CPU and its memory.

    Attributes:
        processors: That this process may use.
        load_average: Of the last minute: how many processes ran or waited to run; None where the system can't tell.
        limit_problem: Why memory can't be limited and measured here; None where it can.
        probe_process: The process of batchtune that is probing it; None where there is none.
    """

    name: str
    processors: int
    total_bytes: int
    available_bytes: int | None
    limit_problem: str | None
    probe_process: int | None
    load_average: float | None = None


class Doctor(Result, frozen=True, kw_only=True):
    """What `batchtune doctor` found out about a machine.

    Attributes:
        driver: The NVIDIA driver's version; None where there is none.
        nvml_problem: Why the driver can't be asked; None where it can.
        environment: The variables that change what a training step takes, those that are set.
        packages: Optional package → version; None where it is not installed.
        warnings: What stands in the way of a probe, each with its remedy.
    """

    FORMAT: ClassVar[str] = "batchtune/doctor"

    python: str
    system: str
    torch: DoctorTorch
    driver: str | None
    nvml_problem: str | None
    gpus: list[DoctorGpu]
    cpu: DoctorCpu
    environment: dict[str, str]
    packages: dict[str, str | None]
    warnings: list[str]


class Exported(Result, frozen=True, kw_only=True):
    """What `batchtune export --json` prints: a recommendation in another framework's words.

    Attributes:
        framework: As `--to` names it.
        title: The framework's own name.
        file: Where it was written, or what to call it.
        content: The config or the snippet.
    """

    FORMAT: ClassVar[str] = "batchtune/export"

    framework: str
    title: str
    file: str
    content: str


R = TypeVar("R", bound=Result)

# What JSON may hold as it is and a terminal acts on: control characters, changes of writing direction; and what GitHub
# takes for a command.
_ACTIVE = re.compile("[\x7f-\x9f\u2028-\u202e\u2066-\u2069]|(?<=##)\\[")


def meta_of(kind: type[Result]) -> Meta:
    """The `meta` that a newly written file of this kind carries."""
    from batchtune import __version__

    return Meta(format=kind.FORMAT, version=kind.VERSION, batchtune=__version__)


def encode(result: Result) -> bytes:
    """Return a result as the bytes of its file, which do nothing to a terminal or a log that shows them."""
    text = msgspec.json.format(msgspec.json.encode(result), indent=2)
    return _ACTIVE.sub(lambda match: f"\\u{ord(match[0]):04x}", text.decode()).encode() + b"\n"


def write_result(path: Path, result: Result) -> None:
    """Write a result file into a run folder, whole or not at all; a link in its place is not followed.

    Raises:
        ResultError: The file can't be written.
    """
    write_whole(path, encode(result), follow=False)


class _Envelope(msgspec.Struct):
    meta: Meta


# Of a result file: a sweep of all bucket counts up to 1000 has less.
LARGEST_BYTES = 256 << 20


def read_result(path: Path, kind: type[R]) -> R:
    """Read a result file, and check that it is of this kind, no newer than known, and that its numbers can be.

    Raises:
        ResultError: Missing, unreadable, not of this kind, newer, edited or damaged; the message names the field.
    """
    again = "Make it anew with the command that wrote it."
    data = read_regular(path, LARGEST_BYTES, again)
    try:
        meta = msgspec.json.decode(data, type=_Envelope).meta
        if meta.format != kind.FORMAT:
            raise ResultError(f"{path} is a {shortened(meta.format)} file; a {kind.FORMAT!r} file is needed here")
        if meta.version > kind.VERSION:
            raise ResultError(
                f"{path} has version {meta.version} of {shortened(meta.format)}, written by batchtune "
                f"{shortened(meta.batchtune)}; this batchtune knows versions up to {kind.VERSION}",
                "Install a newer batchtune.",
            )
        found = msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise ResultError(f"{path} is edited or damaged: {error}", again) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ResultError(f"{path} is damaged: {error}", again) from error
    for problem in found.problems():
        raise ResultError(f"{path} is edited or damaged: {problem}", again)
    return found


def _wrong_settings(settings: dict[str, Any], kind: type[Record]) -> Iterator[str]:
    try:
        msgspec.convert(settings, kind)
    except msgspec.ValidationError as error:
        yield f"settings: {error}"
