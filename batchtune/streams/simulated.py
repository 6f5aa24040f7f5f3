"""Simulates epochs of a stream: what each worker reads, and its batches, made by the very code that training runs."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import structs

from batchtune.buckets.advice import longer_than
from batchtune.buckets.current import (
    OPTION,
    YOURS,
    GivenSettings,
    Known,
    SettingLength,
    Settings,
    read_settings,
)
from batchtune.configs import STREAM_LIMITS, Recipe, RecipeBlock, entries
from batchtune.epochs import EpochBatches, EpochShapes, edges_of, floats, positions
from batchtune.epochs.measured_costs import StepTimeFunction
from batchtune.epochs.table import BucketTable, Limits
from batchtune.errors import ResultError
from batchtune.lengths import BoolArray, FloatArray, IntArray, Lengths, ceil_div
from batchtune.manifests import StreamLengths
from batchtune.results import (
    STREAM_FILE,
    SettingSize,
    Share,
    StreamConfig,
    StreamedWith,
    StreamSweep,
    read_result,
)
from batchtune.streams import (
    LengthReader,
    SortedBuffer,
    StreamBatches,
    StreamBatching,
    around_pivot,
    collected,
    stream_batches,
    stream_random,
)
from batchtune.units import (
    PER_SECOND,
    counted,
    counts_samples,
    format_length,
    format_number,
)

# SpeechBrain's `dynamic_bucketed_batch`: on lengths alone, batch for batch, and as a user has set it.

_SAMPLE_LENGTHS = ("min_sample_len", "max_sample_len")
_PIVOT = "indices_around_random_pivot"


@dataclass(frozen=True, slots=True)
class CurrentStream:
    """A user's current way to batch a stream, in the unit of the lengths.

    `settings` are the `current_settings` of `stream.json`; `notes` say what was assumed, and what may surprise, in
    sentences without a full stop.
    """

    batching: PivotSettings
    settings: dict[str, Any]
    notes: tuple[str, ...] = ()


class PivotSettings(Settings):
    """The parameters of SpeechBrain's `dynamic_bucketed_batch` with `indices_around_random_pivot`, as users set them.

    A batch begins as one random example of the sorted buffer, and grows to either side, by the neighbour that pads
    least, until its padded length reaches the target or neither neighbour may join. In a recipe, the parameters are
    those of the function with its `sampler_kwargs`, or these alone.

    Attributes:
        target_batch_numel: A batch grows until its padded length is as large. Required: SpeechBrain has no default.
        max_batch_numel: An example that would make the padded length larger does not join; a longer
            example is a batch of one. None: a batch overshoots its target, by one example and by
            how much that pads the others.
        max_batch_size: The most examples of a batch; None: any number. Below 1: one.
        max_padding_ratio: An example that would make padding a larger part does not join; None:
            any. Below 0: batches of one.
        buffersize: A batch is made whenever this many examples are held. Below 1: only when all of the stream is held.
        drop_end: Whether to leave out the examples that are held at the end of the stream.
        min_sample_len, max_sample_len: Shorter and longer examples are left out; None: any length.
        sample_rate: How many samples a second the limits count, as a user gives it; None: the unit of the lengths.
    """

    NAME = "speechbrain"
    SIGNS = STREAM_LIMITS
    AROUND = ("buffersize", "drop_end", *_SAMPLE_LENGTHS, "sample_rate")

    target_batch_numel: SettingLength
    max_batch_numel: SettingLength | None = None
    max_batch_size: SettingSize | None = None
    max_padding_ratio: Share | None = 0.2
    buffersize: SettingSize = 1024
    drop_end: bool = False
    min_sample_len: SettingLength | None = None
    max_sample_len: SettingLength | None = None
    sample_rate: SettingLength | None = None

    def keeps(self, lengths: FloatArray) -> BoolArray:
        """Return which examples the length limits keep."""
        return (lengths >= (self.min_sample_len or 0.0)) & (
            lengths <= _limit(self.max_sample_len)
        )

    @classmethod
    def find(cls, recipe: Recipe) -> RecipeBlock | None:
        """Return the training's settings: those passed to the function, if the file's top has them, too."""
        return recipe.training_block(STREAM_LIMITS, STREAM_LIMITS)

    @classmethod
    def check_block(cls, recipe: Recipe, block: RecipeBlock) -> None:
        """Refuse another `sampler_fn`."""
        recipe.check_block(block)
        for mapping in block.chain:
            function = entries(mapping).get("sampler_fn")
            if function is not None and _PIVOT not in f"{function.tag}{function.value}":
                raise recipe.wrong(
                    function,
                    f"sampler_fn is not {_PIVOT}, so its batches can't be reproduced",
                    "Leave --current out.",
                )

    def current(
        self, given: GivenSettings[PivotSettings], lengths: Lengths
    ) -> CurrentStream:
        """Return the settings in the unit of the lengths: numbers of samples become seconds."""
        rate = self._rate(given, lengths)
        batching = structs.replace(self, sample_rate=None)
        notes = []
        if rate is not None:
            for name in (*STREAM_LIMITS, *_SAMPLE_LENGTHS):
                samples = getattr(self, name)
                if samples is not None:
                    length = samples * PER_SECOND[lengths.unit] / rate
                    batching = structs.replace(batching, **{name: length})
            notes.append(
                f"{YOURS} counts samples, read as {format_number(rate)} a second (sample_rate)"
            )
        if batching.max_batch_numel is not None:
            consequence = "SpeechBrain makes each a batch of one, however long"
            notes += longer_than(
                lengths,
                batching.max_batch_numel,
                f"max_batch_numel of {YOURS},",
                consequence,
            )
        if given.from_file and "buffersize" not in given.names:
            default = batching.buffersize
            notes.append(
                f"buffersize is not in {given.source}: SpeechBrain's default, {default}, is assumed"
            )
        target = format_length(batching.target_batch_numel, lengths.unit)
        settings = f"target_batch_numel={target}, buffersize={batching.buffersize}"
        describe = f"SpeechBrain's dynamic_bucketed_batch, {settings}"
        values = structs.asdict(batching)
        del values["sample_rate"]
        if rate is not None:
            values["sample_rate"] = rate
        return CurrentStream(batching, given.record(describe, values), tuple(notes))

    def _rate(
        self, given: GivenSettings[PivotSettings], lengths: Lengths
    ) -> float | None:
        """Return how many samples a second the limits count; None if they count in the lengths' unit."""
        rate = self.sample_rate
        if lengths.unit not in PER_SECOND:
            if rate is not None and not given.from_file and lengths.unit != "samples":
                raise given.wrong(
                    f"sample_rate goes with lengths in seconds, but these are in {lengths.unit}",
                    f"Give the limits in {lengths.unit}, without sample_rate.",
                )
            return None
        # A batch holds about as many of them as of samples, so the size tells nothing.
        if lengths.unit == "ms":
            return rate
        # A recipe's sample_rate says how its audio is read, whatever its limits count.
        limit = (
            self.target_batch_numel
            if self.max_batch_numel is None
            else self.max_batch_numel
        )
        if not counts_samples(limit, lengths.longest):
            return None if given.from_file else rate
        if rate is None:
            raise given.wrong(
                f"a limit of {format_number(limit)} seems to be in samples, but the lengths are in {lengths.unit}",
                "Add sample_rate=16000 to the settings, or give the limits in the unit of the lengths.",
            )
        return rate


def _limit(limit: float | None) -> float:
    """Return a limit that may not be set, as a number."""
    return math.inf if limit is None else limit


def speechbrain_batches(
    lengths: npt.ArrayLike, settings: PivotSettings, random: random.Random
) -> StreamBatches:
    """Return the batches that SpeechBrain's `dynamic_bucketed_batch` makes of a stream with these lengths.

    They equal SpeechBrain's, example for example, and leave `random` in the same state, if its `random` has the same
    state before. SpeechBrain draws from the process-wide `random`, which a DataLoader reseeds in each worker from
    torch's seed; without workers its state is arbitrary unless the program seeds it.

    Examples that the length limits leave out count as read. The examples of a batch are the longest first, as
    SpeechBrain hands them to its collate_fn. Lengths that are not whole numbers are added up in SpeechBrain's order:
    rounding decides between neighbours that pad equally.

    `lengths`, shape (examples,), are in the order of the stream and in the unit of the settings.
    Source: `speechbrain.dataio.iterators`, SpeechBrain 1.1.

    Raises:
        ValueError: Two neighbours in the buffer are of length 0, where SpeechBrain raises a ZeroDivisionError.
    """
    values = floats(lengths)
    kept = np.flatnonzero(settings.keeps(values))
    reader = LengthReader(values[kept])

    def examples_read() -> int:
        # Anything after the last valid example is read only when the stream has ended.
        if reader.ended:
            return values.size
        return int(kept[reader.count - 1]) + 1

    batches = collected(_batches(reader, kept.size, settings, random), examples_read)
    return replace(batches, examples=kept[batches.examples])


def _batches(
    reader: LengthReader, total: int, settings: PivotSettings, random: random.Random
) -> Iterator[list[int]]:
    """Yield each batch of a stream of `total` examples, as places in it, the longest example first."""
    max_cells = _limit(settings.max_batch_numel)
    max_examples = _limit(settings.max_batch_size)
    max_padding = _limit(settings.max_padding_ratio)
    target = settings.target_batch_numel

    def admits(count: int, longest: float) -> bool:
        return count * longest <= max_cells

    def grows(count: int, longest: float) -> bool:
        return count < max_examples and count * longest < target

    held = SortedBuffer()
    buffer_size = settings.buffersize if settings.buffersize > 0 else total + 1
    for number in count(1):
        if not reader.ended:
            held.fill(reader, buffer_size)
        if reader.ended and (settings.drop_end or not held.places):
            return
        pivot = random.randint(0, len(held.places) - 1)
        try:
            ends = around_pivot(held.lengths, pivot, admits, max_padding, grows)
        except ZeroDivisionError:
            raise ValueError(
                f"batch {number}: SpeechBrain's padding_ratio divides by zero, as two examples are of length 0; leave "
                "them out with min_sample_len"
            ) from None
        batch = held.take(*ends)
        batch.reverse()
        yield batch


def speechbrain_limit(lengths: Lengths, limits: Limits) -> float:
    """Return the max_batch_numel with which every batch that can occur fits.

    A batch whose longest example is u holds at most min(S, ⌊M / u⌋) examples, S the largest batch size, and B(u) fit:
    so M < (B(u) + 1) u for all u with B(u) < S, unless there are no more than B(u) examples up to u. M is at most
    max_batch_length.
    """
    histogram = lengths.histogram
    fitting = limits.largest_sizes(histogram.lengths)
    largest = np.minimum(limits.max_batch_size or np.inf, histogram.cumulative)
    too_large = ((fitting + 1) * histogram.lengths)[fitting < largest]
    if too_large.size == 0:
        return limits.max_batch_length
    # Six digits, which round by at most 5e-6.
    below = float(f"{too_large.min() * (1 - 6e-6):.6g}")
    return min(limits.max_batch_length, below)


_STREAMS: Known[PivotSettings] = Known(
    kinds=(PivotSettings,),
    hint=(
        f"Write {OPTION} key=value,key=value or the path of a SpeechBrain YAML. Known are the arguments of "
        f"SpeechBrain's dynamic_bucketed_batch: {', '.join(PivotSettings.__struct_fields__)}."
    ),
    lacking="settings of dynamic_bucketed_batch (target_batch_numel)",
)


def stream_current(text: str, lengths: Lengths) -> CurrentStream:
    """Read and check a user's current way to batch a stream, and turn it into the unit of the lengths.

    The text is as in `read_settings`; in a recipe, `buffersize` and others may also stand in a mapping around the one
    with `target_batch_numel`. Numbers may be products.

    SpeechBrain counts what `len_fn` returns, as a rule samples of audio. Limits that no batch of lengths in seconds
    can have are divided by `sample_rate`, which may stand among the settings; on the command line it always divides.

    Raises as `read_settings` does, also for lengths in another unit.
    """
    given = read_settings(text, _STREAMS)
    return given.settings.current(given, lengths)


# WebDataset's default `initial` of both shuffles.
_INITIAL = 100
# This many examples stand for more: each worker's first shards that hold its part of them. Against all of a million
# examples, batches and cells of made-up speech and text came within 0.9% with one worker and 1.1% with eight, with
# buffers of 256 to 4,096 examples. Half as many: 0.8% with one worker, 1.1% with eight; a quarter: 0.8% and 3.2%.
_MOST_SIMULATED = 1 << 17
# The distance of mates is averaged over batches that hold about this many examples.
_MEASURED_APART = 1 << 20

AnyBatching: TypeAlias = PivotSettings | StreamBatching


def worker_streams(
    sharding: StreamedWith, sizes: Sequence[int], *, seed: int, epoch: int
) -> list[list[IntArray]]:
    """Return what each worker reads: [rank][worker], the indices of examples as stored, in its order.

    Shards are dealt and shuffled, to the shard, as by
    `WebDataset(urls, shardshuffle=shuffle_shards, detshuffle=True, seed=seed, nodesplitter=split_by_node)`. Three of
    its habits are easily missed:

    - It deals the shards before it shuffles them: a worker reads the same shards in every epoch.
    - A worker without a shard raises a ValueError (`empty_check`), or gives nothing if that is off.
    - Without `detshuffle`, shards come in the same order in every epoch. With it they do so too unless the DataLoader
      has `persistent_workers`, since each new worker counts epochs from 0.

    A worker's examples are shuffled as by `.shuffle(shuffle_buffer, rng=sample_random(seed, epoch, rank, worker))`.
    Without `rng` and `seed`, WebDataset shuffles by the time of day. `sizes` are the examples of each shard, by URL.
    """
    starts = edges_of(sizes)
    by_rank = []
    for rank in range(sharding.world_size):
        of_rank = np.arange(rank, len(sizes), sharding.world_size)
        streams = []
        for worker in range(sharding.readers_per_rank):
            dealt = of_rank[worker :: sharding.readers_per_rank]
            chance = random.Random(seed + epoch)
            shards = shuffled(dealt, sharding.shuffle_shards, chance)
            stored = positions(starts[shards], starts[shards + 1] - starts[shards])
            chance = sample_random(seed, epoch, rank, worker)
            streams.append(shuffled(stored, sharding.shuffle_buffer, chance))
        by_rank.append(streams)
    return by_rank


def sample_random(seed: int, epoch: int, rank: int, worker: int) -> random.Random:
    """Return the random numbers by which `worker_streams` shuffles one worker's examples."""
    # Not the numbers by which batches are made.
    return random.Random(f"samples {seed} {epoch} {rank} {worker}")


def shuffled(stream: IntArray, buffer_size: int, random: random.Random) -> IntArray:
    """Return a stream in the order in which WebDataset's `.shuffle(buffer_size, rng=random)` gives it.

    It fills a buffer by two examples for each that it gives, chosen from the buffer at random. `random` ends in the
    same state. Source: `webdataset.filters._shuffle`, WebDataset 1.0.
    """
    if buffer_size < 1:
        return stream
    initial = min(_INITIAL, buffer_size)
    source = iter(stream.tolist())
    result = []
    held = []
    for example in source:
        held.append(example)
        if len(held) < buffer_size:
            held.extend(islice(source, 1))
        if len(held) >= initial:
            result.append(_drawn(held, random))
    while held:
        result.append(_drawn(held, random))
    return np.array(result, dtype=np.int64)


def _drawn(held: list[int], random: random.Random) -> int:
    """Take a random example out of the buffer; the last one takes its place."""
    index = random.randint(0, len(held) - 1)
    drawn = held[index]
    held[index] = held[-1]
    held.pop()
    return drawn


def shard_sizes(stream: StreamLengths, shard_size: int) -> list[int]:
    """Return the examples of each shard; a source that is not a set of shards is cut into shards of `shard_size`."""
    if stream.shards:
        return [shard.count for shard in stream.shards]
    edges = [*range(0, stream.lengths.count, shard_size), stream.lengths.count]
    sizes: list[int] = np.diff(edges).tolist()
    return sizes


@dataclass(frozen=True, slots=True, eq=False)
class StoredStream:
    """The examples that are simulated, as they are stored, and how workers come to them.

    Attributes:
        lengths, targets: Shape (examples,).
        sizes: Examples of each shard.
        scale: Shape (workers of all ranks,), those of a rank together: all examples of a worker / those simulated.
    """

    lengths: FloatArray
    targets: FloatArray | None
    sizes: Sequence[int]
    sharding: StreamedWith
    scale: FloatArray
    seed: int
    _read: dict[int, list[list[IntArray]]] = field(default_factory=dict, init=False)

    @classmethod
    def of(
        cls,
        lengths: FloatArray,
        targets: FloatArray | None,
        sizes: Sequence[int],
        sharding: StreamedWith,
        seed: int,
    ) -> StoredStream:
        """Take all examples, or the first shards of every worker, equally many, that hold 131,072 examples or more."""
        readers = sharding.readers
        # Shard i goes to rank i % ranks, there to worker i // ranks % workers: whole rounds stay dealt as they are.
        rounds = np.zeros((ceil_div(len(sizes), readers), readers))
        rounds.flat[: len(sizes)] = sizes
        held = np.cumsum(rounds.sum(axis=1))
        enough = int(np.searchsorted(held, _MOST_SIMULATED)) + 1
        read = rounds[:enough].sum(axis=0)
        scale = np.divide(
            rounds.sum(axis=0), read, out=np.ones(readers), where=read > 0
        )
        by_rank = scale.reshape(
            sharding.readers_per_rank, sharding.world_size
        ).T.ravel()
        examples = int(read.sum())
        if targets is not None:
            targets = targets[:examples]
        sizes = sizes[: enough * readers]
        return cls(lengths[:examples], targets, sizes, sharding, by_rank, seed)

    def read_in(self, epoch: int) -> list[list[IntArray]]:
        """Return what each worker reads in an epoch, [rank][worker], as `worker_streams` does; worked out once."""
        if epoch not in self._read:
            self._read[epoch] = worker_streams(
                self.sharding, self.sizes, seed=self.seed, epoch=epoch
            )
        return self._read[epoch]


def stored_stream(stream: StreamLengths, folder: Path, seed: int) -> StoredStream:
    """Take all shards, dealt to workers as for the folder's `stream.json`; ResultError without one, or of others."""
    path = folder / STREAM_FILE
    if not path.exists():
        raise ResultError(
            f"{path}, which says how shards come to workers, does not exist",
            "`batchtune sweep-stream` writes it, with stream.yaml.",
        )
    swept = read_result(path, StreamSweep)
    sharding = msgspec.convert(swept.settings, StreamedWith, from_attributes=True)
    sizes = shard_sizes(stream, sharding.shard_size)
    if len(sizes) != swept.shards.count or max(sizes) != swept.shards.largest_count:
        raise ResultError(
            f"{path} is of {counted(swept.shards.count, 'other shard')}; these are {len(sizes):,}",
            "Give the same shards, or run `batchtune sweep-stream` again: batches depend on them.",
        )
    scale = np.ones(sharding.readers)
    return StoredStream(stream.values, stream.targets, sizes, sharding, scale, seed)


@dataclass(frozen=True, slots=True, eq=False)
class StreamEpoch:
    """The batches of one simulated epoch, worker after worker, those of a rank's workers together.

    Attributes:
        batches_by_worker: Shape (workers of all ranks,).
        weights: Shape (batches,): how many batches of an epoch of all examples each stands for.
        waits: Shape (examples in batches,): how many examples were read between each one's reading and its batch.
        most_held: The most that any worker held at once, as true length.
    """

    cut: EpochBatches
    shapes: EpochShapes
    batches_by_worker: IntArray
    weights: FloatArray
    waits: IntArray
    most_held: float

    def total(self, values: FloatArray) -> float:
        """Return the sum of a value of each batch for an epoch of all examples."""
        return float(np.sum(values * self.weights))


def simulate_stream(
    stored: StoredStream, batching: AnyBatching, epoch: int
) -> StreamEpoch:
    """Simulate the batches that all workers make of their streams in an epoch."""
    made = []
    examples = []
    largest_hold = 0.0
    for rank, streams in enumerate(stored.read_in(epoch)):
        for worker, stream in enumerate(streams):
            lengths = stored.lengths[stream]
            chance = stream_random(stored.seed, epoch, rank, worker)
            if isinstance(batching, PivotSettings):
                batches = speechbrain_batches(lengths, batching, chance)
                # What it leaves out is never held.
                lengths = np.where(batching.keeps(lengths), lengths, 0.0)
            else:
                batches = stream_batches(lengths, batching, chance)
            made.append(batches)
            examples.append(stream[batches.examples])
            largest_hold = max(largest_hold, most_held(batches, lengths))
    sizes = np.concatenate([np.diff(batches.ends, prepend=0) for batches in made])
    cut = EpochBatches.in_row(np.concatenate(examples), sizes, stored.lengths.size)
    batches_by_worker = np.array([batches.ends.size for batches in made])
    return StreamEpoch(
        cut=cut,
        shapes=cut.shapes(stored.lengths, stored.targets),
        batches_by_worker=batches_by_worker,
        weights=np.repeat(stored.scale, batches_by_worker),
        waits=np.concatenate([waits(batches) for batches in made]),
        most_held=largest_hold,
    )


def waits(batches: StreamBatches) -> IntArray:
    """Return how many examples are read after each one until its batch is made, in the order of `batches.examples`."""
    sizes = np.diff(batches.ends, prepend=0)
    return np.repeat(batches.read, sizes) - batches.examples - 1


def most_held(batches: StreamBatches, lengths: npt.ArrayLike) -> float:
    """Return the most that is held at once, as true length: just before a batch is made, or at the end of the stream.

    `lengths` are of shape (examples of the stream,), 0 for those that are never held.
    """
    values = floats(lengths)
    read = edges_of(values)
    batched = edges_of(values[batches.examples])
    before = np.append(0, batches.ends)
    return float(np.max(read[np.append(batches.read, values.size)] - batched[before]))


def distance_apart(epoch: StreamEpoch) -> float:
    """Return how far two examples of one batch are stored apart, relative to the (n + 1) / 3 of a random draw."""
    layout = epoch.cut.layout
    total = 0.0
    pairs = 0
    for batch in range(0, layout.starts.size, max(1, layout.count // _MEASURED_APART)):
        size = int(layout.batch_sizes[batch])
        start = layout.starts[batch]
        ascending = np.sort(epoch.cut.examples[start : start + size])
        # For ascending places p_0 … p_(n-1) the distances of all pairs add up to Σ p_k (2k - n + 1).
        total += float(ascending @ (2.0 * np.arange(size) - size + 1))
        pairs += size * (size - 1) // 2
    if pairs == 0:
        return 0.0
    return total / pairs / ((layout.count + 1) / 3)


def _batches_by_rank(epoch: StreamEpoch, sharding: StreamedWith) -> list[IntArray]:
    """Return each rank's batches in the order of its steps: those of its workers in turn."""
    shape = (sharding.world_size, sharding.readers_per_rank)
    ends = np.cumsum(epoch.batches_by_worker).reshape(shape)
    by_worker = epoch.batches_by_worker.reshape(shape)
    return [
        _in_turn(numbers) + end[-1] - numbers.sum()
        for numbers, end in zip(by_worker, ends, strict=True)
    ]


def _in_turn(numbers: Sequence[int] | IntArray) -> IntArray:
    """Return the order of rows that lie one after the other: the first of each, then the second of each, and so on."""
    places = np.concatenate([np.arange(number) for number in numbers])
    return np.argsort(places, kind="stable")


def stream_epoch(stored: StoredStream, config: StreamConfig, epoch: int) -> EpochShapes:
    """Return the shapes of the batches that `stream.yaml` makes, in the order of the ranks' steps.

    First come those of step 0, rank by rank.
    """
    batching = StreamBatching(
        algorithm=config.algorithm,
        table=BucketTable.of(config.bucket_boundaries, config.bucket_batch_sizes),
        buffer_size=config.buffer_size,
        max_padding_ratio=config.max_padding_ratio,
        shuffle=config.shuffle,
        drop_last=config.drop_last,
    )
    simulated = simulate_stream(stored, batching, epoch)
    by_rank = _batches_by_rank(simulated, stored.sharding)
    order = np.concatenate(by_rank)[_in_turn([batches.size for batches in by_rank])]
    return simulated.shapes.chosen(order)


def epoch_seconds(
    stored: StoredStream, epoch: StreamEpoch, step_seconds: StepTimeFunction
) -> float:
    """Return the time of an epoch: a rank takes its workers' batches in turn, and each step waits for the slowest.

    Ranks whose streams end earlier go on with their first batches, as in a nominal epoch of the mean length.
    """
    seconds = epoch.shapes.seconds(step_seconds)
    steps = round(seconds.size / stored.sharding.world_size)
    if steps == 0:
        return 0.0
    ranks = [
        np.resize(seconds[batches], steps)
        for batches in _batches_by_rank(epoch, stored.sharding)
        if batches.size
    ]
    return float(np.max(ranks, axis=0).sum() * epoch.weights.mean())
