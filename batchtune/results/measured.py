"""The records of measurements: `run.json`, `trials.jsonl`, `probe.json`, `verify.json` and `training.jsonl`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from msgspec.structs import replace

from batchtune.allocators import Choice
from batchtune.errors import ResultError
from batchtune.files import reading
from batchtune.records import (
    PER_CENT,
    Amount,
    ByteChange,
    Bytes,
    Cost,
    CostBytes,
    CostCount,
    CostShare,
    Count,
    Length,
    Part,
    Ranks,
    Record,
    Seed,
    Share,
    Size,
    StepSeconds,
    StreamAlgorithm,
    TargetLength,
)
from batchtune.results.rows import PackedProbe
from batchtune.results.shared import (
    MALFORMED,
    BatchShape,
    ClosedBy,
    Measured,
    Result,
    check_meta,
    wrong_limit,
    wrong_settings,
    wrong_table,
)
from batchtune.units import format_size

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Outcome = Literal["ok", "oom", "timeout", "crash", "error"]
DeviceName = Annotated[
    str, msgspec.Meta(pattern=r"^([a-z]{1,16}(:[0-9]{1,4})?|law:[\w=.,+ -]{0,400})$")
]
# Each rank is a process, so a file of somebody else's is bounded.
_Processes = Annotated[int, msgspec.Meta(ge=1, le=1024)]
AnyLength = TypeVar("AnyLength", float, "npt.NDArray[np.float64]")
# Of a packed batch: a file of somebody else's must not fill the memory.
_MOST_SEQUENCES = 10**7
VerifyPhase = Literal["worst", "shuffled", "replayed", "pairs"]


def _fields_of(shape: BatchShape) -> dict[str, Any]:
    sequences = None
    if shape.sequences is not None:
        sequences = [
            (length, len(list(equal)))
            for length, equal in itertools.groupby(shape.sequences)
        ]
    return {
        "batch_size": shape.batch_size,
        "length": shape.length,
        "target_length": shape.target_length,
        "sequences": sequences,
    }


class Trial(Record):
    """One batch shape measured on the device.

    Attributes:
        index: Position in `trials.jsonl`, from 0.
        outcome: `ok`, or why not.
        steps: Training steps that completed.
        step_seconds: Median time of the timed steps (the first is a warm-up).
        peak_bytes: Most memory in use during the trial.
        reserved_bytes: Most memory held by the allocator, its cache included.
        alloc_retries: How often the allocator had to empty its cache to go on.
        elapsed_seconds: Wall time of the trial, including making the batch and starting a worker.
        step_seconds_spread: Interquartile range of the timed steps; None for fewer than two.
        mean_step_seconds: Mean time of the timed steps; None where the trial failed.
        worker: Number of the worker process in this run folder, from 1.
        confirmation: Whether the shape failed interleaved with the others, after it had passed
            alone; or in training.
        shuffled: Whether it failed after other batches, when a table ran in shuffled training, or interleaved where the
            allocator fragments. This says little about the shape itself.
        held_bytes: In use before the trial.
        rest_bytes: In use after the trial, once its batch was freed; libraries may keep buffers of its size.
        outside_bytes: Device memory that the worker holds outside torch's allocator (context, workspaces).
        sm_clock_mhz, throttle_reasons: While the steps were timed; None where the device can't tell.
        steady_peak_bytes: As `peak_bytes`, without the first step: the first step of a process may need more.
        peak_spread_bytes: Largest - smallest peak of the steps after the first; None for fewer than two.
        timing: Whether the shape, with a typical target, was run only to time it.
        failed_peak_bytes: Most memory in use before the error; None where the trial passed, or no error was seen.
        caught: Whether the workload caught the out-of-memory error itself, and its step returned normally.
        flushed: Whether all steps passed, but only after the allocator had emptied its cache to go on.
        other_processors: Processors used by other programs while steps were timed, on average; None on a GPU.
        parameters_changed: Whether any step of this worker so far has changed a parameter; None if unknown.
        compilations: How often torch.compile compiled a function meanwhile; those steps are not timed.
        at_recompile_limit: Whether a function had reached torch.compile's limit: other shapes run it uncompiled.
        recorded: Whether it was a batch of the recorded training in `training.jsonl`, not a trial.
        rank: Of several ranks, the one that failed first or took the most memory; None without ranks.
        oom_ranks: The ranks that ran out of memory; None without ranks.
        sequences: Of a packed batch, (length in tokens, how many sequences have it), the longest first; None: padded.
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
    held_bytes: ByteChange | None = None
    rest_bytes: ByteChange | None = None
    outside_bytes: ByteChange | None = None
    sm_clock_mhz: Count | None = None
    throttle_reasons: list[str] | None = None
    steady_peak_bytes: Bytes | None = None
    peak_spread_bytes: Bytes | None = None
    timing: bool = False
    failed_peak_bytes: Bytes | None = None
    caught: bool = False
    flushed: bool = False
    other_processors: Amount | None = None
    parameters_changed: bool | None = None
    compilations: Count = 0
    at_recompile_limit: bool = False
    recorded: bool = False
    shuffled: bool = False
    rank: Count | None = None
    oom_ranks: list[Count] | None = None
    sequences: list[tuple[Size, Size]] | None = None

    @classmethod
    def of(cls, shape: BatchShape, outcome: Outcome, **facts: Any) -> Trial:
        """Record an outcome; facts that are not given are unknown. The supervisor fills in its index and wall time."""
        made: dict[str, Any] = {
            "index": 0,
            "steps": 0,
            "step_seconds": None,
            "peak_bytes": None,
            "reserved_bytes": None,
            "alloc_retries": None,
            "error": None,
            "elapsed_seconds": 0.0,
            **facts,
        }
        return cls(outcome=outcome, **_fields_of(shape), **made)

    def with_shape(self, shape: BatchShape) -> Trial:
        """Return the same record of another shape."""
        return replace(self, **_fields_of(shape))

    def of_each(self, shapes: Sequence[BatchShape]) -> list[Trial]:
        """Return a record for each batch of a step; of several batches, times and peaks can't be told apart."""
        if len(shapes) == 1:
            return [self]
        shared = {
            "steps": self.steps,
            "reserved_bytes": self.reserved_bytes,
            "rest_bytes": self.rest_bytes,
            "worker": self.worker,
            "elapsed_seconds": self.elapsed_seconds / len(shapes),
        }
        first, *others = [Trial.of(shape, self.outcome, **shared) for shape in shapes]
        return [replace(first, alloc_retries=self.alloc_retries), *others]

    @property
    def shape(self) -> BatchShape:
        """The batch shape that was measured."""
        if self.sequences is not None:
            return BatchShape.packed(
                itertools.chain.from_iterable(
                    itertools.repeat(length, count) for length, count in self.sequences
                )
            )
        return BatchShape(self.batch_size, self.length, self.target_length)

    def problems(self, index: int | None = None) -> Iterator[str]:
        """Check the figures; `index` is its position in `trials.jsonl` or `probe.json`, if known."""
        if index not in (None, self.index):
            yield f"the index {self.index} can't be right here"
        if self.sequences is not None:
            count = sum(count for _, count in self.sequences)
            if count != self.batch_size or count > _MOST_SEQUENCES:
                yield f"sequences: {count:,} of them, but a batch_size of {self.batch_size:,}"
        for seconds in (self.step_seconds, self.mean_step_seconds):
            if seconds is not None and 0 < seconds < 1e-12:  # no clock can tell
                yield f"no step takes {seconds} s"


class FrontierPoint(Record):
    """The largest batch size that fits at one length.

    Attributes:
        closed_by: Why no larger size fits: `oom`, `timeout` or `crash` (the next size failed so), `memory` (the
            measured peak leaves too little room for it, by the fit), `data` (the data can't fill more), or `time` (the
            probe ended before; a larger size may fit).
        oom_batch_size: The smallest batch size that ran out of memory; None if none did.
        trial: Index of the trial that proves the batch size, no smaller in any respect; None if the probe was
            interrupted before its batches ran interleaved.
    """

    length: Length
    target_length: TargetLength | None
    batch_size: Size
    closed_by: ClosedBy
    oom_batch_size: Size | None
    step_seconds: StepSeconds | None
    peak_bytes: Bytes | None
    trial: Count | None = None

    @property
    def shape(self) -> BatchShape:
        """The batch."""
        return BatchShape(self.batch_size, self.length, self.target_length)


class Margin(Record):
    """The memory that a proven batch leaves free, because peaks of equal batches differ.

    A batch is proven if its lowest measured peak, plus `bytes`, is within the limit.

    Attributes:
        bytes: The larger of 1.1 × `spread_bytes` and `first_step_bytes`, + 0.1% of the limit.
        spread_bytes: The widest range of peaks of equal batches, or of what the process holds between trials.
        first_step_bytes: How far the first step of a process exceeds later ones with the same batch.
        repetitions: How many peaks were compared.
        fragments_bytes: Memory left free in addition, because the allocator can't use the gaps between its blocks: more
            with each table that failed in shuffled training.
    """

    bytes: Bytes
    spread_bytes: Bytes
    first_step_bytes: Bytes
    repetitions: Count
    fragments_bytes: Bytes = 0

    @property
    def free_bytes(self) -> int:
        """All that batches of a table leave free."""
        return self.bytes + self.fragments_bytes


class CostModel(Record):
    """cost = max(floor, constant + B·(example + linear·L + quadratic·L² + targets)).

    Targets add target_linear·T + target_quadratic·T² + cross·L·T. B is the batch size, L the longest length, T the
    longest target length of the batch.

    Attributes:
        example: The cost of each example, whatever its length.
        relative_error: Root mean square of (fit / measured - 1) over the fitted trials.
        largest_error: The largest |fit / measured - 1| among them; None if nothing was fitted.
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

    def per_example(
        self, length: AnyLength, target_length: AnyLength | float = 0.0
    ) -> AnyLength:
        """Return the cost of one more example, in the model's unit, element by element."""
        by_length = self.example + length * (
            self.linear + self.quadratic * length + self.cross * target_length
        )
        return by_length + target_length * (
            self.target_linear + self.target_quadratic * target_length
        )


class Confirmation(Record):
    """The batches at the limit, run again interleaved, with the allocator's cache kept, as training runs them.

    Attributes:
        shapes: How many batch shapes were confirmed.
        steps: Steps in all, each with a different shape from the one before.
        workers: How many worker processes ran them; the last was fresh.
        alloc_retries: How often the allocator emptied its cache to go on.
        reserved_growth_bytes: How far its cache grew after all shapes had run once; None if it has no cache.
        given_up: How many shapes failed and were replaced by smaller ones.
        time_ratio: Time of these steps / time of the same shapes' trials, which repeat one batch. Estimated times
            include it. None if too few are known.
    """

    shapes: Count
    steps: Count
    workers: Count
    alloc_retries: Count
    reserved_growth_bytes: ByteChange | None
    given_up: Count
    time_ratio: Amount | None = None


class Models(Record):
    """The fitted models; None if there were too few measurements."""

    peak_bytes: CostModel | None
    step_seconds: CostModel | None


class ProbedWith(Record):
    """The settings of a probe that its trials depend on: those that `run.json` and `probe.json` record.

    Attributes:
        num_lengths: How many lengths span the data, including the shortest and the longest.
        max_lengths: How many to probe in all, with those added where tables need them; None: as many as are worth
            their trials.
        tolerance: How far below the true limit a batch size may be, as a fraction of it; at least one example.
        nproc_per_node: Ranks of a machine; None: one process, without a process group.
        nnodes: Machines; None: one.
        simulate_world_size: The ranks that one process stands for.
        max_tokens: The largest token budget that is tried. None: all tokens of the data.
    """

    device: DeviceName = "auto"
    memory_bytes: Size | None = None
    memory_fraction: Part = 0.9
    num_lengths: Annotated[int, msgspec.Meta(ge=2)] = 12
    max_lengths: Size | None = None
    tolerance: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.01
    max_batch_size: Size | None = None
    seed: Seed = 0
    reserve_bytes: Bytes = 0
    ddp: bool = False
    allocator: Choice = "auto"
    nproc_per_node: _Processes | None = None
    nnodes: _Processes | None = None
    simulate_world_size: Ranks | None = None
    max_tokens: Size | None = None

    @property
    def world_size(self) -> int:
        """How many ranks there are on all nodes."""
        return (self.nproc_per_node or 1) * (self.nnodes or 1)


class Run(Measured):
    """The conditions of a run folder's trials. Trials are reused only if all of these are the same.

    Attributes:
        workload_sha256: Hash of the workload's file; None if it is not a file. batchtune warns of a change and keeps
            the trials: the change may be a comment, or the fix of what stopped the probe.
    """

    FORMAT = "batchtune/run"

    workload_sha256: str | None = None


class Probe(Measured):
    """`probe.json`: what fits, and what a batch costs.

    Attributes:
        frontier: In ascending order of length, each with the longest target at or below it. A size holds for all
            lengths up to its own.
        joint_frontier: The same for shorter targets than those; empty without targets.
        confirmation: None if the probe was interrupted before it.
        margin: None if peaks are unknown.
        warnings: Why figures may be wrong, each with its remedy.
        unfinished: Whether the probe was interrupted, or ended by its time limit; the same command continues it.
        packed: What fits for a workload that packs; then `frontier` is empty, and `max_batch_length` is the token
            budget. None for one that pads.
    """

    FORMAT = "batchtune/probe"

    trials: list[Trial]
    frontier: list[FrontierPoint]
    models: Models
    max_batch_length: Length
    confirmation: Confirmation | None = None
    margin: Margin | None = None
    joint_frontier: list[FrontierPoint] = []
    warnings: list[str] = []
    unfinished: bool = False
    packed: PackedProbe | None = None

    def problems(self) -> Iterator[str]:
        """Check the settings, the order of trials and points, and that either all points have targets or none."""
        yield from wrong_settings(self.settings, ProbedWith)
        yield from wrong_limit(self.max_batch_length, self.lengths)
        if not self.frontier and self.packed is None:
            yield "frontier: it is empty, and nothing is packed"
        if self.packed is not None:
            for index in self.packed.proofs:
                if index >= len(self.trials):
                    yield f"packed: trial {index} of {len(self.trials)} proves max_tokens"
        for index, trial in enumerate(self.trials):
            if trial.index != index:
                yield f"trials, entry {index}: the index {trial.index} can't be right here"
        for before, after in itertools.pairwise(self.frontier):
            if before.length >= after.length:
                yield f"frontier: the length {after.length} follows {before.length}"
        points = (*self.frontier, *self.joint_frontier)
        if len({point.target_length is None for point in points}) > 1:
            yield "frontier: only some points have a target_length"
        for point in points:
            if point.trial is None:
                continue
            if point.trial >= len(self.trials):
                yield f"frontier: trial {point.trial} of {len(self.trials)} proves {point.batch_size} × {point.length}"
            elif point.batch_size > self.trials[point.trial].batch_size:
                yield f"frontier: batch_size is {point.batch_size}, but trial {point.trial} ran a smaller batch"

    @property
    def why_unproven(self) -> str | None:
        """Why none of its sizes is proven although they ran; None if nothing speaks against them."""
        script = self.device.script
        return None if script is None else script.why_unproven

    @property
    def is_proven(self) -> bool:
        """Whether its sizes were run alone and interleaved, with a margin; not if the probe was interrupted before.

        Nor if a script's own batches take other memory than the measured ones.
        """
        if self.why_unproven is not None:
            return False
        if self.packed is not None:
            return bool(self.packed.proofs)
        return all(point.trial is not None for point in self.frontier)


class VerifyFailure(Record):
    """A batch of the verification that failed.

    Attributes:
        phase: Among the worst shapes, among the shuffled batches, where these were replayed, or in a pair of shapes on
            an emptied cache.
        step, bucket: Position in its phase, and index of its bucket in the table, both from 0.
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

    @property
    def shape(self) -> BatchShape:
        """The batch shape that failed."""
        return BatchShape(self.batch_size, self.length, self.target_length)


class Verification(Measured):
    """`verify.json`: the recommended batches, run for real.

    Attributes:
        bucket_boundaries, bucket_batch_sizes, max_batch_length: The table that was run, as in `sampler.yaml`.
        pool_size, batch_overhead: How batches were cut from pools, likewise; None: they were made in buckets.
        algorithm, buffer_size, max_padding_ratio: Those of a stream's batches, as in `stream.yaml`;
            None without a stream.
        worst_steps: Steps with the worst shape of each bucket, before the shuffled ones.
        steps, planned_steps: Shuffled steps that passed in the first process, and those that were planned.
        epoch_batches: Batches of one epoch.
        processes, restarted_steps: How many fresh processes ran shuffled batches, and the steps that passed in those
            after the first, each with another shuffle.
        pairs, planned_pairs: How often one shape followed another on an emptied cache without running out of memory,
            and how often that was planned; 0 where the allocator does not fragment.
        replayed_steps, replayed_processes: Steps whose memory requests were replayed in other orders, and how many
            processes so began anew; 0 without a GPU.
        unfinished: Whether time ended before all planned steps ran.
        alloc_retries: How often the allocator emptied its cache to go on, after each shape had run once.
        peak_bytes, reserved_bytes: The most in use, and the most held by the allocator; None where unknown.
        rest_growth_bytes: Growth of the memory in use between steps, from the second to the last quarter of the
            shuffled steps (of the worst shapes' steps if there are no others); None if too few passed.
        reserved_growth_bytes: The same for the memory that the allocator holds.
        estimated_epoch_seconds: Time of an epoch with this table, by the probe's step times; None
            without them.
        measured_epoch_seconds: From the shuffled steps, scaled to the epoch; None if none passed.
        time_ratio: Measured / estimated time of exactly the batches that were run.
        time_ratio_error: Standard error of that ratio; None for fewer than four steps.
        holds: Whether every check passed.
        reasons: Why it does not hold, each a sentence without a full stop; empty if it holds.
        warnings: Each a sentence without a full stop.
    """

    FORMAT = "batchtune/verify"

    bucket_boundaries: list[Length]
    bucket_batch_sizes: list[Size]
    max_batch_length: Length
    worst_steps: Count
    steps: Count
    planned_steps: Count
    epoch_batches: Count
    failures: list[VerifyFailure]
    alloc_retries: Count | None
    peak_bytes: Bytes | None
    reserved_bytes: Bytes | None
    rest_growth_bytes: ByteChange | None
    reserved_growth_bytes: ByteChange | None
    estimated_epoch_seconds: Amount | None
    measured_epoch_seconds: Amount | None
    time_ratio: Annotated[Amount, PER_CENT] | None
    time_ratio_error: Annotated[Amount, PER_CENT] | None
    holds: bool
    reasons: list[str]
    warnings: list[str]
    pool_size: Size | None = None
    batch_overhead: Amount | None = None
    algorithm: StreamAlgorithm | None = None
    buffer_size: Size | None = None
    max_padding_ratio: Share | None = None
    processes: Size = 1
    restarted_steps: Count = 0
    pairs: Count = 0
    planned_pairs: Count = 0
    replayed_steps: Count = 0
    replayed_processes: Count = 0
    unfinished: bool = False

    @property
    def of_stream(self) -> bool:
        """Whether the batches of a stream were run."""
        return self.algorithm is not None

    def problems(self) -> Iterator[str]:
        """Check the tables, and that the failures are in their buckets."""
        yield from wrong_table(self.bucket_boundaries, self.bucket_batch_sizes)
        for failure in self.failures:
            if failure.bucket >= len(self.bucket_boundaries):
                yield f"failures: bucket {failure.bucket} of {len(self.bucket_boundaries)}"


_START = b'{"meta":'
_MOST_BYTES = 1 << 34
# A packed step has the lengths of all its sequences.
_LONGEST_LINE_BYTES = 16 << 20
_HINT = "Move it away, and record the training again."


class TrainingStart(Result):
    """The line that begins a recording in `training.jsonl`, written by rank 0.

    Attributes:
        recording: Its name: the same in all lines of one training, and different in those of others.
        tuned: Whether batchtune made its batches (`batchtune run`).
    """

    FORMAT = "batchtune/training"

    device: str
    recording: str = ""
    tuned: bool = False


class TrainingStep(Record, omit_defaults=True):
    """A line of `training.jsonl`: one optimizer step, or the one that ran out of memory.

    Attributes:
        rank: Rank of the process, from 0.
        recording: As in the line that begins the recording.
        batches: What it trained on: several where gradients are accumulated. After an OOM the batches that were at
            hand, one of which was too large.
        seconds: Since the end of the step before, including the wait for data; None where something else came between,
            and for the first step of a process, which includes one-time work.
        peak_bytes: Most memory in use meanwhile; None where unknown, and for the first step.
        oom: The message of the out-of-memory error; None if the step passed.
        refused: `batchtune run` ended the training here: the steps of its recording do not count.
    """

    rank: Count
    batches: list[BatchShape]
    recording: str = ""
    seconds: StepSeconds | None = None
    peak_bytes: Bytes | None = None
    oom: str | None = None
    refused: bool = False


@dataclass(slots=True)
class Recording:
    """One training of `training.jsonl`, of all ranks; `damaged_lines` came between its start and the next one's."""

    start: TrainingStart
    steps: list[TrainingStep] = field(default_factory=list)
    damaged_lines: int = 0


def read_training(path: Path) -> list[Recording]:
    """Return the recordings of `training.jsonl`, oldest first, at least one.

    Damaged lines, and those without a start, are left out and counted. Raises ResultError if the file can't be read,
    or is too new.
    """
    if not path.exists():
        raise ResultError(
            f"{path} does not exist", "`batchtune record -- COMMAND` writes it."
        )
    recordings: list[Recording] = []
    current: dict[str, Recording] = {}
    # Of ranks that were faster than the one that writes the start.
    early: dict[str, list[TrainingStep]] = {}
    with reading(path, _MOST_BYTES, _HINT) as file:
        for number, line in enumerate(_lines(file, path), 1):
            try:
                if line.startswith(_START):
                    check_meta(line, TrainingStart, f"{path}, line {number}")
                    start = msgspec.json.decode(line, type=TrainingStart)
                    recording = Recording(start, early.pop(start.recording, []))
                    recordings.append(recording)
                    current[start.recording] = recording
                    continue
                step = msgspec.json.decode(line, type=TrainingStep)
            except MALFORMED:  # written when the power or the disk ended
                if recordings:
                    recordings[-1].damaged_lines += 1
                continue
            if step.recording in current:
                steps = current[step.recording].steps
                steps.append(step)
                if step.refused:
                    steps.clear()
            else:
                early.setdefault(step.recording, []).append(step)
    if not recordings:
        raise ResultError(f"{path} holds no start of a recording", _HINT)
    recordings[-1].damaged_lines += sum(map(len, early.values()))
    return recordings


def last_recording(path: Path) -> Recording:
    """Return the last recording of `training.jsonl` with steps, or the last of all. Raises as `read_training`."""
    recordings = read_training(path)
    with_steps = [recording for recording in recordings if recording.steps]
    return (with_steps or recordings)[-1]


def _lines(file: IO[bytes], path: Path) -> Iterator[bytes]:
    """Yield the lines of a file that are not empty. Raises ResultError for one that no recorder has written."""
    while line := file.readline(_LONGEST_LINE_BYTES):
        if len(line) == _LONGEST_LINE_BYTES:
            raise ResultError(
                f"{path} has a line of more than {format_size(_LONGEST_LINE_BYTES)}: batchtune writes no such line",
                _HINT,
            )
        line = line.strip()
        if line:
            yield line


class Training(Record):
    """The last recording of `training.jsonl`, and what the probe predicts of its batches.

    Steps are those of all ranks.

    Attributes:
        steps: Optimizer steps that passed.
        ooms: Steps that ran out of memory.
        first_oom: The message of the first of them; None without one.
        mean_step_seconds: Mean over the steps with a time.
        predicted_step_seconds: The mean of the same steps, by the probe's times; None without them.
        peak_bytes: The largest; None if unknown.
        predicted_peak_bytes: The largest of its batches, by the probe's model; None without one.
        epoch_batches: Its batches for as many examples as the data set has; None if that is not known.
        damaged_lines: How many damaged lines are left out.
        padding_ratio: Padded cells / all cells, assuming that its examples are on average as long as those of the data
            set.
    """

    device: str
    steps: Count
    ooms: CostCount
    first_oom: str | None
    damaged_lines: Count = 0
    mean_step_seconds: Cost | None = None
    peak_bytes: CostBytes | None = None
    predicted_step_seconds: Amount | None = None
    predicted_peak_bytes: Bytes | None = None
    epoch_batches: Cost | None = None
    padding_ratio: CostShare | None = None
