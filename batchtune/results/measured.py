"""The records of what is measured: `run.json`, `trials.jsonl`, `probe.json` and `verify.json`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, overload

import msgspec

from batchtune.results.shared import (
    Amount,
    ByteChange,
    Bytes,
    Count,
    Length,
    Measured,
    Record,
    Seed,
    Share,
    Size,
    StepSeconds,
    StreamAlgorithm,
    TargetLength,
    wrong_boundaries,
    wrong_limit,
    wrong_settings,
)
from batchtune.shapes import BatchShape

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    FloatArray = npt.NDArray[np.float64]

Outcome = Literal["ok", "oom", "timeout", "crash", "error"]
ClosedBy = Literal["oom", "memory", "data", "timeout", "crash"]

# In seconds; less than a clock can tell.
_SHORTEST_STEP = 1e-12


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

    def problems(self, index: int | None = None) -> Iterator[str]:
        """As for every record; `index` is its place in `trials.jsonl` or `probe.json`, where that is known."""
        if index not in (None, self.index):
            yield f"the index {self.index} can't be right here"
        for seconds in (self.step_seconds, self.mean_step_seconds):
            if seconds is not None and 0 < seconds < _SHORTEST_STEP:
                yield f"no step takes {seconds} s"


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
        """Return what one more example costs, in the model's unit, element by element."""
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


class ProbedWith(Record, frozen=True, kw_only=True):
    """The settings of a probe, where something later reads them; those of older files are as they were then."""

    device: Annotated[str, msgspec.Meta(pattern=r"^[a-z]{1,16}(:[0-9]{1,4})?$")] = "auto"
    memory_bytes: Size | None = None
    memory_fraction: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.9
    max_batch_size: Size | None = None
    seed: Seed = 0
    reserve_bytes: Bytes = 0
    ddp: bool = False


class Run(Measured, frozen=True, kw_only=True):
    """What a run folder's trials were measured for: they count only where all of this is the same.

    Attributes:
        workload_sha256: Hash of the workload's file; None if it is not a file. batchtune warns of a change, and keeps
            the trials: it may have been a comment, or the fix of what stopped the probe.
    """

    FORMAT: ClassVar[str] = "batchtune/run"

    workload_sha256: str | None = None


class Probe(Measured, frozen=True, kw_only=True):
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

    trials: list[Trial]
    frontier: list[FrontierPoint]
    models: Models
    max_batch_length: Length
    confirmation: Confirmation | None = None
    margin: Margin | None = None
    joint_frontier: list[FrontierPoint] = msgspec.field(default_factory=list)
    warnings: list[str] = msgspec.field(default_factory=list)

    def problems(self) -> Iterator[str]:
        """As for every record."""
        yield from wrong_settings(self.settings, ProbedWith)
        yield from wrong_limit(self.max_batch_length, self.lengths)
        for index, trial in enumerate(self.trials):
            if trial.index != index:
                yield f"trials, entry {index}: the index {trial.index} can't be right here"
        if not self.frontier:
            yield "frontier is empty"
        for before, after in itertools.pairwise(self.frontier):
            if before.length >= after.length:
                yield f"frontier: the length {after.length} follows {before.length}"
        points = (*self.frontier, *self.joint_frontier)
        with_targets = {point.target_length is not None for point in points}
        if len(with_targets) > 1:
            yield "frontier: only some points have a target_length"
        if self.joint_frontier and with_targets == {False}:
            yield "joint_frontier has no target_length"
        for point in points:
            if point.trial is not None and point.trial >= len(self.trials):
                yield f"frontier: trial {point.trial} of {len(self.trials)} proves {point.batch_size} × {point.length}"

    @property
    def is_proven(self) -> bool:
        """Whether its sizes were run alone and in turns, with a margin: not by an older batchtune."""
        return all(point.trial is not None for point in self.frontier)


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


class Verification(Measured, frozen=True, kw_only=True):
    """`verify.json`: the recommended batches, run for real.

    Attributes:
        bucket_boundaries, bucket_batch_sizes, max_batch_length: The table that was run, as `sampler.yaml` had it.
        pool_size, batch_overhead: How batches were cut from pools, likewise; None: they were made in buckets.
        algorithm, buffer_size, max_padding_ratio: Of a stream's batches, as `stream.yaml` had them; None for a table
            or pools over all examples.
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
    pool_size: Size | None = None
    batch_overhead: Amount | None = None
    algorithm: StreamAlgorithm | None = None
    buffer_size: Size | None = None
    max_padding_ratio: Share | None = None

    @property
    def of_stream(self) -> bool:
        """Whether the batches of a stream were run."""
        return self.algorithm is not None

    def problems(self) -> Iterator[str]:
        """As for every record."""
        yield from wrong_boundaries(self.bucket_boundaries)
        buckets = len(self.bucket_boundaries)
        proposed = self.proposal.bucket_batch_sizes if self.proposal is not None else self.bucket_batch_sizes
        for what, sizes in (("batch sizes", self.bucket_batch_sizes), ("proposed batch sizes", proposed)):
            if len(sizes) != buckets:
                yield f"it has {buckets} boundaries and {len(sizes)} {what}"
        for failure in self.failures:
            if failure.bucket >= buckets:
                yield f"failures: bucket {failure.bucket} of {buckets}"
