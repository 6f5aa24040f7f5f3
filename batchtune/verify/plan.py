"""Plans a verification (workload, limit, sampler, batches), and judges its steps."""

from __future__ import annotations

import itertools
import math
import random
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np

from batchtune.allocators import NATIVE
from batchtune.buckets.micro_batches import batcher_of, in_order
from batchtune.epochs import EpochShapes, RankSplit, ShuffleKey, shapes_of
from batchtune.epochs.batchers import Batcher, Batching
from batchtune.epochs.measured_costs import Costs, costs_of
from batchtune.epochs.table import BucketTable
from batchtune.errors import ResultError, UsageError
from batchtune.lengths import FloatArray, IntArray, Lengths
from batchtune.packing import Budget, Packed, budget_in
from batchtune.probe.devices import law
from batchtune.probe.packed_search import COMPOSITIONS, Compositions
from batchtune.probe.settings import ProbeSettings
from batchtune.results import (
    PROBE_FILE,
    SAMPLER_FILE,
    STREAM_CONFIG_FILE,
    BatchShape,
    Device,
    PackedConfig,
    Positive,
    Probe,
    ProbedWith,
    Record,
    SamplerConfig,
    Seed,
    Size,
    StreamConfig,
    Trial,
    Verification,
    VerifyFailure,
    WorkloadRecord,
    checked,
    meta_of,
)
from batchtune.streams.simulated import StoredStream, stream_epoch
from batchtune.trust import recompile_warnings
from batchtune.units import counted, format_length, format_seconds, format_size
from batchtune.workloads import is_builtin, with_unit

FEWEST_STEPS = 12
"""With fewer steps growth can't be distinguished from noise."""
# Unless the user says how many.
MOST_STEPS = 200
# Where not all pairs can be run, each shape runs first, then this many others. That found 97% of the tables that run
# out of memory in a shuffled epoch; all ordered pairs found 7 of 7 (base and large transformer-lm, 24 and 80 GiB).
_AFTER_EACH = 3
# Batches shorter than their bucket are looked for among this many of the first epoch.
_LOOKED_THROUGH = 20_000
# Of more examples, so many that are evenly spaced in order of length stand for all.
MOST_SHUFFLED = 1 << 24
_OF_THE_LIMIT = (
    "memory_bytes",
    "memory_fraction",
    "reserve_bytes",
    "ddp",
    "simulate_world_size",
)
_RANKS = ("nproc_per_node", "simulate_world_size")


class Subject(NamedTuple):
    """The training step to verify; without a limit the settings give it."""

    settings: ProbeSettings
    limit_bytes: int | None


def subject_of(
    lengths: Lengths, probe: Probe | None, asked: Mapping[str, Any], folder: Path
) -> Subject:
    """Return what was probed, with the `ProbeSettings` fields that the user `asked` for in place of the probe's.

    Without a workload among them, the probe's is taken if it is built in. Raises UsageError if the user has to name the
    workload or its options, or if a value is out of range.
    """
    workload = _workload(probe, asked, folder)
    options = with_unit(workload.spec, workload.options, lengths.unit)
    recorded = ProbedWith()
    if probe is not None:
        recorded = msgspec.convert(probe.settings, ProbedWith)
    probed_with = msgspec.structs.asdict(recorded)
    if not asked.keys().isdisjoint(_RANKS):
        # Real ranks take the place of simulated ones, and the other way round.
        probed_with |= dict.fromkeys(_RANKS)
    values = {
        # The probe has said what is wrong with a script's own batches.
        "force": probe is not None,
        **probed_with,
        **asked,
        "workload": workload.spec,
        "options": options,
    }
    settings = checked(ProbeSettings, values)
    limit = None
    if probe is not None and all(
        getattr(settings, name) == getattr(recorded, name) for name in _OF_THE_LIMIT
    ):
        limit = probe.device.limit_bytes
    return Subject(settings=settings, limit_bytes=limit)


def _workload(
    probe: Probe | None, asked: Mapping[str, Any], folder: Path
) -> WorkloadRecord:
    """Return the workload to run, named by the user; only a built-in and its options may come from the record.

    Anything else in the record could be made to run any code, and so could options, such as a file to load.
    """
    spec = asked.get("workload")
    options = asked.get("options")
    if probe is None:
        if spec is None:
            raise UsageError(
                f"no training step to verify: {folder} holds no {PROBE_FILE}",
                "Name the one that you will train with --workload, such as --workload train.py:MyStep.",
            )
    elif spec in (None, probe.workload.spec):
        probed = probe.workload
        runs_code = not is_builtin(probed.spec) and probed.spec != law.WORKLOAD
        if runs_code and (spec is None or (options is None and probed.options)):
            name = f"--workload {shlex.quote(probed.spec)}, and its options with --set"
            if probed.command is not None:
                name = f"-- {probed.spec}"
            raise UsageError(
                f"{folder / PROBE_FILE} says that {shlex.quote(probed.spec)} was probed, and batchtune runs no code "
                "that only a file names, and passes it no such options",
                f"If that is your training step, name it yourself: {name}.",
            )
        spec = probed.spec
        options = probed.options if options is None else options
    return WorkloadRecord(spec=str(spec), options=options or {})


class VerifySettings(Record):
    """How much to run, and how closely to look; `results.checked` checks the types and ranges.

    Attributes:
        steps: Number of shuffled steps, which may be more than an epoch has; None: as many as fit
            into the time.
        epoch: Whether to run one epoch.
        seed: Of the shuffles; None: that of the YAML file.
        time_tolerance: The largest deviation of the measured time from the estimate, as a fraction of it.
        seconds: How long the shuffled steps may take by the probe's times, and as long again the pairs.
        brief: Whether only to prove that batches fit: without the steps that show times and leaks.
    """

    steps: Size | None = None
    epoch: bool = False
    seed: Seed | None = None
    time_tolerance: Positive = 0.10
    step_timeout_seconds: Positive = 300.0
    seconds: Positive = 60.0
    brief: bool = False

    def seed_of(self, config: SamplerConfig | StreamConfig | PackedConfig) -> int:
        """Return the seed of the shuffles: the user's, or else the config's."""
        return config.seed if self.seed is None else self.seed


class PlannedBatch(NamedTuple):
    """A batch to run, and its bucket."""

    shape: BatchShape
    bucket: int


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What both plans are made of."""

    lengths: Lengths
    config: SamplerConfig | StreamConfig | PackedConfig
    settings: VerifySettings
    probe: Probe | None = None

    @property
    def seed(self) -> int:
        """Of the shuffles: the user's, or else the config's."""
        return self.settings.seed_of(self.config)

    @cached_property
    def costs(self) -> Costs:
        """What the probe measured; nothing without one."""
        if self.probe is None:
            return Costs()
        return costs_of(self.probe)

    def _with_others_after(
        self, firsts: Sequence[PlannedBatch], among: Sequence[PlannedBatch]
    ) -> Iterator[list[PlannedBatch]]:
        """Yield each of the batches with three random others after it."""
        chosen = random.Random(self.seed)
        for first in firsts:
            others = [batch for batch in among if batch != first]
            after = chosen.sample(others, min(_AFTER_EACH, len(others)))
            yield [first, *after]


@dataclass(frozen=True, kw_only=True)
class VerifyPlan(_Plan):
    """The padded batches of `sampler.yaml` to verify; or, with a `stream`, of its `stream.yaml`.

    Raises ResultError if the last boundary is below the longest length, or `drop_last` leaves out every batch.
    """

    config: SamplerConfig | StreamConfig
    stream: StoredStream | None = None

    def __post_init__(self) -> None:
        lengths = self.padded
        last = self.config.bucket_boundaries[-1]
        if beyond := lengths.count_beyond(last):
            name = SAMPLER_FILE if self.stream is None else STREAM_CONFIG_FILE
            raise ResultError(
                f"{name}: the last of the bucket_boundaries is {format_length(last, lengths.unit)}, but {beyond:,} of "
                f"{lengths.count:,} examples are longer, up to {format_length(lengths.longest, lengths.unit)}",
                "Add a boundary that is at least as large, or leave out the longer ones with --max-length.",
            )
        if not self.epoch_batches:
            raise ResultError(
                "drop_last leaves out every batch: no bucket, pool or worker holds enough examples to fill one",
                "Set drop_last: false in the config, or make the batch sizes smaller.",
            )

    @property
    def epoch_batches(self) -> int:
        """The number of batches of an epoch."""
        return len(self.first_epoch)

    @property
    def recorded(self) -> dict[str, Any]:
        """The fields of the record on the sampler."""
        settings = {}
        if self.stream is not None:
            settings = msgspec.structs.asdict(self.stream.sharding)
        settings |= msgspec.structs.asdict(self.settings)
        settings["seed"] = self.seed
        settings["multiple_of"] = self.config.evidence.multiple_of
        shared = {*self.config.__struct_fields__} & {*Verification.__struct_fields__}
        fields = {name: getattr(self.config, name) for name in shared}
        return {"settings": settings, **fields}

    @cached_property
    def planned_steps(self) -> int:
        """How many shuffled steps to run.

        By default, those of an epoch, but at most 200, and no more than fit into the settings'
        seconds by the probe's times; at least as many as show whether memory creeps.
        """
        epoch = self.epoch_batches
        if self.settings.epoch:
            return epoch
        if self.settings.steps is not None:
            return self.settings.steps
        steps = min(epoch, MOST_STEPS)
        if self.costs.step_seconds is not None:
            step_seconds = float(
                self.first_epoch.seconds(self.costs.step_seconds).mean()
            )
            if not self.settings.brief:  # then a step has equal batches
                step_seconds *= self.costs.accumulate
            steps = min(steps, int(self.settings.seconds / step_seconds))
        steps = max(FEWEST_STEPS, steps)
        if self.settings.brief:  # all batches of the last optimizer step run
            steps += -steps % self.costs.accumulate
        return steps

    @cached_property
    def sequences(self) -> list[list[PlannedBatch]]:
        """Batches to run one after the other, each sequence on an emptied cache.

        What runs out of memory in a fragmented cache depends on which shape follows which. If the
        time allows it, these are all ordered pairs of worst batches, else each worst batch with
        three random others after it. Real batches that are shorter than the worst of their bucket
        follow, also with three others each.
        """
        worst = self.worst_batches
        shorter = self._shorter_batches
        sequences = [list(pair) for pair in itertools.permutations(worst, 2)]
        firsts = shorter
        if not self._fits_the_time(sequences):
            sequences = []
            firsts = [*worst, *shorter]
        return [*sequences, *self._with_others_after(firsts, [*worst, *shorter])]

    @property
    def slightly_shorter(self) -> list[PlannedBatch]:
        """The worst batches with another length: one of the data in the longer half of their bucket, at random."""
        chosen = random.Random(self.seed)
        lengths = self.padded.histogram.lengths
        shorter = []
        for batch in self.worst_batches:
            longest = batch.shape.length
            (lower,) = self.table.lower_edges(np.array([longest])).tolist()
            is_near = (lengths > (lower + longest) / 2) & (lengths < longest)
            length = chosen.choice(lengths[is_near].tolist() or [longest])
            shorter.append(batch._replace(shape=replace(batch.shape, length=length)))
        return shorter

    @property
    def _shorter_batches(self) -> list[PlannedBatch]:
        """The shortest batch of the first epoch with each worst batch's size, if it is shorter than that one."""
        longest = {batch.shape.batch_size: batch for batch in self.worst_batches}
        shortest = dict(longest)
        batches = min(self.epoch_batches, _LOOKED_THROUGH)
        for batch in itertools.islice(self.shuffled_batches(), batches):
            size = batch.shape.batch_size
            if size in shortest and batch.shape.length < shortest[size].shape.length:
                shortest[size] = batch
        return [batch for size, batch in shortest.items() if batch != longest[size]]

    def seconds_of(self, shapes: Sequence[BatchShape]) -> FloatArray:
        """Return the time of each batch by the probe's step times, which must be known; shape (shapes,)."""
        assert self.costs.step_seconds is not None
        return EpochShapes.of(shapes, with_targets=self.lengths.has_targets).seconds(
            self.costs.step_seconds
        )

    def _fits_the_time(self, sequences: Sequence[Sequence[PlannedBatch]]) -> bool:
        """Return whether they take no longer than the settings' seconds; False if step times are not known."""
        if self.costs.step_seconds is None or not sequences:
            return False
        shapes = [batch.shape for sequence in sequences for batch in sequence]
        of_each = self.costs.accumulate
        if self.settings.brief:  # a step has both batches of a pair, in turns
            of_each = max(1, of_each // 2)
        return float(self.seconds_of(shapes).sum()) * of_each <= self.settings.seconds

    @cached_property
    def table(self) -> BucketTable:
        """The sampler's table."""
        return BucketTable.of(
            self.config.bucket_boundaries, self.config.bucket_batch_sizes
        )

    @property
    def batching(self) -> Batching:
        """How the sampler makes batches; as in pools, those of a stream may hold examples of shorter buckets."""
        if isinstance(self.config, StreamConfig):
            return Batching(self.table, self.config.buffer_size)
        batching = Batching.of(self.config)
        if batching.accumulate is None or batching.pool_size is None:
            return batching
        # One rank runs its share of each step.
        share = max(1, batching.pool_size // self.costs.world_size)
        return replace(batching, pool_size=share)

    @cached_property
    def padded(self) -> Lengths:
        """The lengths as batches are padded to them."""
        multiple = self.config.evidence.multiple_of
        if multiple is None:
            return self.lengths
        return self.lengths.padded_to(multiple)

    @cached_property
    def first_epoch(self) -> EpochShapes:
        """The shapes of the first epoch's batches."""
        return self._epoch_shapes(0)

    def _epoch_shapes(self, epoch: int) -> EpochShapes:
        if isinstance(self.config, StreamConfig):
            assert self.stream is not None
            return stream_epoch(self.stream, self.config, epoch)
        drawing = ShuffleKey(
            ordering=self.config.batch_ordering, seed=self.seed + epoch
        )
        cut = self._batcher.cut(drawing, RankSplit(drop_last=self.config.drop_last))
        return shapes_of(cut, drawing, self._sample)

    @cached_property
    def _sample(self) -> Lengths:
        """The examples that are shuffled: of very many some, which form the same batches but for chance."""
        return self.padded.evenly(MOST_SHUFFLED)

    @cached_property
    def _batcher(self) -> Batcher:
        return self.batching.batcher(self._sample.values)

    @cached_property
    def worst_batches(self) -> list[PlannedBatch]:
        """The largest batch of each bucket that these data can form, the largest padded length first.

        It has the longest length and the longest target in the bucket, which may belong to two examples: if batches
        hold a single one, both are tried.
        """
        runs = self.padded.runs
        lengths = runs.values
        targets = runs.targets
        sizes, longest = self.batching.largest_batches(self.padded.histogram)
        worst = []
        for size, length, bucket, lower in zip(
            sizes.tolist(),
            longest.tolist(),
            self.table.assign(longest).tolist(),
            self.table.lower_edges(longest).tolist(),
            strict=True,
        ):
            if targets is None:
                worst.append(PlannedBatch(BatchShape(size, length), bucket))
                continue
            # The values descend.
            shorter = np.searchsorted(lengths[::-1], [length, lower], side="right")
            start, end = (lengths.size - shorter).tolist()
            if self.batching.uses_pools and size > 1:
                end = lengths.size  # its others may be shorter than those of the bucket
            longest_target = start + int(targets[start:end].argmax())
            pairs = {(start, longest_target)}
            if size == 1:
                pairs = {(start, start), (longest_target, longest_target)}
            for example, other in pairs:
                shape = BatchShape(size, float(lengths[example]), float(targets[other]))
                worst.append(PlannedBatch(shape, bucket))
        return sorted(worst, key=lambda batch: -batch.shape.padded_length)

    def shuffled_batches(self, first: int = 0) -> Iterator[PlannedBatch]:
        """Yield epoch after epoch of batches from the `first` on, as the sampler draws them with seed + epoch.

        Of a stream, all ranks' batches come in turn, as each rank's workers deliver theirs.
        """
        for epoch in itertools.count(first):
            shapes = self._epoch_shapes(epoch) if epoch else self.first_epoch
            buckets = self.table.assign(shapes.lengths).tolist()
            yield from map(PlannedBatch, shapes.one_by_one(), buckets)


# Judges the steps of a verification: failures, memory that creeps, times.

# As for the trials of the probe: what would take less than 5% of the limit in 10,000 more steps does no harm.
_FORESEEN_STEPS = 10_000
_HARMLESS_SHARE = 0.05
# Growth counts if it is this many times as large as its standard error, and more than a few pages: so much the
# interpreter itself takes now and then.
_ABOVE_NOISE = 4.0
_FEW_PAGES_BYTES = 64 << 10
_MOST_CORRELATED = 0.9
# At the end (the last tenth of the steps, but at least so many) a cache that fills up grows by less than this fraction
# of the pace before.
_FEWEST_AT_THE_END = 8
_SAME_PACE = 2 / 3
_FEWEST_FOR_ERROR = 4
_TIMES = (
    "estimated_epoch_seconds",
    "measured_epoch_seconds",
    "time_ratio",
    "time_ratio_error",
)
TIME_ENDED = "The time ended before all planned batches had run"
WENT = {
    "oom": "ran out of memory",
    "crash": "ended its process",
    "timeout": "took too long",
}
WHERE = {
    "worst": "among the largest batches",
    "shuffled": "among shuffled batches",
    "replayed": "as shuffled batches were replayed",
    "pairs": "after another shape",
}


def growth_of(figures: Sequence[int | None]) -> int | None:
    """Return by how much figures, one per step, grew from the second to the last quarter, by their medians.

    None if any is unknown, or for fewer than 12.
    """
    if None in figures or len(figures) < FEWEST_STEPS:
        return None
    _, second, _, last = np.array_split(np.array(figures, dtype=np.float64), 4)
    return round(np.median(last) - np.median(second))


def leaks(in_use: Sequence[int | None], limit_bytes: int) -> bool:
    """Return whether memory in use between 12 or more steps grew by more than is harmless, at one pace to the end.

    The first quarter, in which it may still settle, does not count; a cache that fills up grows more slowly at the end.
    """
    known = np.array(in_use, dtype=np.float64)
    _, *medians = [float(np.median(part)) for part in np.array_split(known, 4)]
    if (
        not medians[0] < medians[1] < medians[2]
        or medians[2] - medians[0] < _FEW_PAGES_BYTES
    ):
        return False
    quarter = known.size // 4
    before = known[quarter:-quarter] - known[quarter:-quarter].mean()
    steps = np.arange(before.size) - (before.size - 1) / 2
    slope = float(steps @ before) / float(steps @ steps)
    residuals = before - slope * steps
    variance = float(residuals @ residuals) / (before.size - 2)
    error = math.sqrt(variance / float(steps @ steps))
    smallest_slope = max(
        _HARMLESS_SHARE * limit_bytes / _FORESEEN_STEPS,
        _ABOVE_NOISE * error * _wandering(residuals),
        _FEW_PAGES_BYTES / (known.size / 2),
    )
    end = known[-max(_FEWEST_AT_THE_END, known.size // 10) :]
    first, second = np.array_split(end, 2)
    pace = (np.median(second) - np.median(first)) / (end.size / 2)
    return bool(slope > smallest_slope and pace >= _SAME_PACE * slope)


def _wandering(residuals: FloatArray) -> float:
    """Return by how much a slope's standard error is larger than if its residuals were independent; 1 if they are.

    A heap wanders: what one step left, the next finds. With a correlation r of neighbours, n steps tell as much as
    n (1 - r) / (1 + r) independent ones (Bartlett 1935).
    """
    square = float(residuals @ residuals)
    if square == 0:
        return 1.0
    correlation = float(residuals[1:] @ residuals[:-1]) / square
    correlation = min(max(correlation, 0.0), _MOST_CORRELATED)
    return float(np.sqrt((1 + correlation) / (1 - correlation)))


@dataclass(slots=True)
class DoneSteps:
    """All steps of a verification, in their order; `restarted` are shuffled ones, in further processes."""

    worst: list[Trial] = field(default_factory=list)
    shuffled: list[Trial] = field(default_factory=list)
    pairs: list[Trial] = field(default_factory=list)
    restarted: list[Trial] = field(default_factory=list)
    failures: list[VerifyFailure] = field(default_factory=list)
    processes: int = 1
    passed_pairs: int = 0
    planned_pairs: int = 0
    replayed: int = 0
    replayed_processes: int = 0
    unfinished: bool = False

    @property
    def ran(self) -> list[Trial]:
        """All of them."""
        return [*self.worst, *self.shuffled, *self.pairs, *self.restarted]

    @property
    def seconds(self) -> float:
        """How long they took."""
        return sum(
            trial.elapsed_seconds or trial.step_seconds or 0.0 for trial in self.ran
        )

    @property
    def passed(self) -> list[Trial]:
        """The shuffled steps, or the worst without any, before the first that failed: that changes what is in use."""
        return list(
            itertools.takewhile(
                lambda trial: trial.outcome == "ok", self.shuffled or self.worst
            )
        )


def judge(
    steps: DoneSteps, plan: Plan, workload: WorkloadRecord, device: Device
) -> Verification:
    """Judge all steps that were run."""
    in_use = [trial.rest_bytes for trial in steps.passed]
    growth = growth_of(in_use)
    times: dict[str, Any] = dict.fromkeys(_TIMES)
    if isinstance(plan, VerifyPlan):
        times |= _times(steps.shuffled, plan, device)
    retries = [
        trial.alloc_retries
        # Each worst shape had run once.
        for trial in (*steps.worst[len(plan.worst_batches) :], *steps.shuffled)
        if trial.alloc_retries is not None
    ]
    reserved = [trial.reserved_bytes for trial in steps.passed]
    reserved_growth = growth_of(reserved)
    reasons = list(_failures(steps, plan))
    if growth is not None and leaks(in_use, device.limit_bytes):
        leak = (
            f"Memory in use between steps grew by {format_size(growth)} in {len(in_use) // 2} steps, at the end as "
            "fast as before: the workload leaks, or fills a cache for which these steps are too few (run more with "
            "--steps). Look for code that keeps tensors, such as a loss that is accumulated without .item()"
        )
        reasons.insert(0, leak)
    unused = [
        (size or 0) - (used or 0) for size, used in zip(reserved, in_use, strict=True)
    ]
    if reserved_growth is not None and leaks(unused, device.limit_bytes):
        remedy = "Keep more memory free with --memory-fraction, and probe again"
        if device.allocator == NATIVE:
            remedy += ", or probe again with --allocator expandable"
        reasons.append(
            f"The allocator's cache grew by {format_size(reserved_growth)} and was still growing: batches of different "
            f"shapes fragment the memory. {remedy}"
        )
    if steps.unfinished and not steps.failures:
        reasons.append(TIME_ENDED)
    if not steps.failures:
        reasons += _time_reasons(times, plan.settings.time_tolerance)
    return Verification(
        meta=meta_of(Verification),
        lengths=plan.lengths.summary(),
        workload=workload,
        device=device,
        worst_steps=len(steps.worst),
        steps=sum(trial.outcome == "ok" for trial in steps.shuffled),
        planned_steps=plan.planned_steps,
        epoch_batches=plan.epoch_batches,
        failures=steps.failures,
        alloc_retries=sum(retries) if retries else None,
        peak_bytes=_largest(trial.peak_bytes for trial in steps.ran),
        reserved_bytes=_largest(trial.reserved_bytes for trial in steps.ran),
        rest_growth_bytes=growth,
        reserved_growth_bytes=reserved_growth,
        processes=steps.processes,
        restarted_steps=sum(trial.outcome == "ok" for trial in steps.restarted),
        pairs=steps.passed_pairs,
        planned_pairs=steps.planned_pairs,
        replayed_steps=steps.replayed,
        replayed_processes=steps.replayed_processes,
        unfinished=steps.unfinished,
        holds=not reasons,
        reasons=reasons,
        warnings=list(_warnings(steps, sum(retries), growth, plan, device)),
        **plan.recorded,
        **times,
    )


def _largest(figures: Iterable[int | None]) -> int | None:
    return max(filter(None, figures), default=None)


def _failures(steps: DoneSteps, plan: Plan) -> Iterator[str]:
    """Yield the first failure of each bucket."""
    buckets = len(plan.recorded["bucket_boundaries"])
    for failure in {
        failure.bucket: failure for failure in reversed(steps.failures)
    }.values():
        shape = f"{failure.batch_size:,} × {format_length(failure.length, plan.lengths.unit)}"
        yield (
            f"A batch of {shape} {WENT[failure.outcome]} {WHERE[failure.phase]} (bucket {failure.bucket + 1} of "
            f"{buckets}): {failure.error}"
        )


def _time_reasons(times: Mapping[str, Any], tolerance: float) -> Iterator[str]:
    """Yield that steps take another time than estimated."""
    ratio = times["time_ratio"]
    if ratio is not None and abs(ratio - 1) > tolerance:
        yield (
            f"An epoch takes {format_seconds(times['measured_epoch_seconds'])} measured against "
            f"{format_seconds(times['estimated_epoch_seconds'])} estimated: {ratio:.2f} times, where "
            f"{max(0.0, 1 - tolerance):.2f} to {1 + tolerance:.2f} is allowed. Probe again with --force while the "
            "machine does nothing else, or allow more with --time-tolerance"
        )


def _times(
    shuffled: Sequence[Trial], plan: VerifyPlan, device: Device
) -> dict[str, Any]:
    """Return the fields of the record on an epoch's measured and estimated time; None where unknown.

    The same batches are compared: the ratio of the sums over the steps that were run, which weighs each step by its
    time, scales the epoch's estimate. Without an estimate the mean batch is multiplied by their number. A step of a
    script trains on all batches of an optimizer step, which are equal.
    """
    times: dict[str, Any] = {}
    timed = [trial for trial in shuffled if trial.step_seconds]
    steps = np.array([trial.step_seconds for trial in timed], dtype=np.float64)
    seconds = steps / device.accumulation
    if timed:
        times["measured_epoch_seconds"] = float(seconds.mean()) * plan.epoch_batches
    step_seconds = plan.costs.step_seconds
    if step_seconds is None:
        return times
    epoch = float(plan.first_epoch.seconds(step_seconds).sum())
    times["estimated_epoch_seconds"] = epoch
    if timed:
        estimated = plan.seconds_of([trial.shape for trial in timed])
        ratio = float(seconds.sum() / estimated.sum())
        times["time_ratio"] = ratio
        times["measured_epoch_seconds"] = ratio * epoch
        if len(timed) >= _FEWEST_FOR_ERROR:
            deviation = np.std(seconds - ratio * estimated, ddof=1)
            times["time_ratio_error"] = float(
                deviation * math.sqrt(len(timed)) / estimated.sum()
            )
    return times


def _warnings(
    steps: DoneSteps,
    retries: int,
    growth: int | None,
    plan: Plan,
    device: Device,
) -> Iterator[str]:
    """Yield why figures may be wrong, and what is not known."""
    if device.simulated:
        yield (
            f"Verified on one rank's shard of {counted(device.world_size, 'rank')} (simulated): the time and memory of "
            "communication are left out. Verify on real ranks with --nproc-per-node"
        )
    if retries:
        yield (
            f"The allocator emptied its cache {counted(retries, 'time')} to go on, which costs time and is "
            "the last step before running out of memory. Keep more free with --memory-fraction or --reserve, and probe "
            "again"
        )
    yield from recompile_warnings([*steps.worst, *steps.shuffled])
    if steps.failures:
        return
    if growth is None:
        yield f"It is unknown whether memory creeps: at least {FEWEST_STEPS} steps must report the memory in use"
    if plan.costs.step_seconds is None:
        yield (
            "The time of an epoch was not compared with an estimate, because no step times are known: "
            "`batchtune probe-oom` measures them"
        )


@dataclass(frozen=True, kw_only=True)
class PackedPlan(_Plan):
    """The packed micro-batches of `sampler.yaml` to prove. A `PlannedBatch` of them has no bucket: it is 0."""

    config: PackedConfig

    @cached_property
    def epoch_batches(self) -> int:
        """The number of micro-batches of an epoch."""
        return self._epoch(0).count

    @property
    def planned_steps(self) -> int:
        """How many shuffled steps to run, unless they take too long: those of an epoch, but 12 to 200."""
        steps = max(FEWEST_STEPS, min(self.epoch_batches, MOST_STEPS))
        return steps + -steps % self.costs.accumulate  # whole optimizer steps

    @cached_property
    def worst_batches(self) -> list[PlannedBatch]:
        """The micro-batches that prove the budget, those of the longest sequences first."""
        compositions = Compositions(self.lengths, self.seed)
        tokens = min(self.config.max_tokens, compositions.all_tokens)
        shapes = [compositions.shape(name, tokens) for name in COMPOSITIONS]
        return [PlannedBatch(shape, 0) for shape in dict.fromkeys(shapes)]

    @property
    def slightly_shorter(self) -> list[PlannedBatch]:
        """The worst batches again: a packed one is as long as its budget."""
        return self.worst_batches

    @property
    def sequences(self) -> list[list[PlannedBatch]]:
        """Each of those with three others after it, each sequence on an emptied cache."""
        return list(self._with_others_after(self.worst_batches, self.worst_batches))

    def shuffled_batches(self, first: int = 0) -> Iterator[PlannedBatch]:
        """Yield epoch after epoch of micro-batches from the `first` on, as the sampler draws them with seed + epoch."""
        for epoch in itertools.count(first):
            for sequences in self._epoch(epoch).lists():
                shape = BatchShape.packed(self._tokens[sequences].tolist())
                yield PlannedBatch(shape, 0)

    @property
    def recorded(self) -> dict[str, Any]:
        """The fields of the record on the sampler; there are no buckets."""
        return {
            "settings": {**msgspec.structs.asdict(self.settings), "seed": self.seed},
            "bucket_boundaries": [],
            "bucket_batch_sizes": [],
            "max_batch_length": float(self.config.max_tokens),
            "pool_size": self.config.pool_size,
        }

    @cached_property
    def _budget(self) -> Budget:
        return budget_in(self.config)

    @cached_property
    def _tokens(self) -> IntArray:
        return self._budget.checked(self.lengths.evenly(MOST_SHUFFLED).values)

    @cached_property
    def _batcher(self) -> Batcher:
        config = self.config
        accumulate = None
        pool_size = config.pool_size
        if config.keeps_examples:
            accumulate = config.accumulate
            # One rank runs its share of each step.
            pool_size = max(1, pool_size // self.costs.world_size)
        return batcher_of(self._tokens, self._budget, pool_size, accumulate)

    def _epoch(self, epoch: int) -> Packed:
        drawing = ShuffleKey(seed=self.seed + epoch)
        return in_order(self._batcher.cut(drawing, RankSplit()), drawing)


Plan: TypeAlias = VerifyPlan | PackedPlan
"""Either has the batches of a sampler to run, how many of them, and the probe to compare with."""
