"""The records of `stream.json` and `stream.yaml`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, TypeAlias

import msgspec

from batchtune.records import (
    Amount,
    Cost,
    CostCount,
    CostRatio,
    CostShare,
    CostSize,
    Count,
    Gain,
    GainRatio,
    Length,
    Record,
    Seed,
    Share,
    Size,
)
from batchtune.results.rows import EpochFigures, Row, Swept
from batchtune.results.shared import (
    row_at,
    wrong_table,
)
from batchtune.results.sweep import Sweep
from batchtune.units import counted, format_number

_Setting = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
Algorithm = Literal["speechbrain", "bucket", "pivot"]
"""How batches are made from a buffer: by SpeechBrain's `dynamic_bucketed_batch`, or by `BucketedStream`."""


class StreamRow(EpochFigures, frozen=True, kw_only=True):
    """One way to batch a stream, and the cost of an epoch over all ranks and workers.

    Figures are those of simulated epochs, each worker's stream by itself: batches, cells, times and mates_again are
    means over them, the others those of the first.

    Attributes:
        buffer_size: The most examples that a worker holds.
        target_batch_numel, max_batch_numel: As in SpeechBrain's `dynamic_bucketed_batch`, in the unit of the lengths;
            None for other algorithms.
        max_batch_size: Of `speechbrain`; None: any.
        max_padding_ratio: Of `speechbrain` and `pivot`; None: any.
        boundaries, batch_sizes: The table; a batch holds at most the size of its longest example's bucket. Empty for
            `speechbrain`.
        batches: Of one epoch that reads each example once.
        dropped_examples: How many an epoch leaves out, as SpeechBrain's `drop_end` does.
        padded_length: Cells of the epoch's batches.
        padding_ratio: Padded cells / all cells.
        fill: True length / (batches × max_batch_length).
        mean_batch_size: Examples in a batch; smallest_batch_size, largest_batch_size: of any batch.
        batch_size_variation: Their standard deviation / their mean.
        largest_padded_length: Of any batch of the epoch.
        under_half: The fraction of batches that are less than half full: of target_batch_numel, or of the batch size
            that fits with their longest example.
        wait_median, wait_p99: How many more examples a worker reads before it makes an example's batch.
        buffer_length: The most that a worker holds at once, as true length.
        buffer_bytes: The same in memory, by `bytes_per_length`.
        worker_imbalance, rank_imbalance: The most batches of a worker, or of a rank, / their mean.
        mate_distance: Mean distance of two examples of one batch, counted in examples as they are stored.
        mixing: The same / that of two examples drawn at random.
        mates_again: The probability that two examples of one batch share a batch again in the next epoch.
        length_correlation: Of the lengths of two examples of one batch; None if all lengths are equal.
        effective_buckets: mates_again / the same for batches of the same sizes drawn from all examples.
        estimated_epoch_seconds: On all ranks, each step as long as its slowest rank takes; None without step times.
        estimated_epoch_error_seconds: Its standard error; None without step times.
        equal_to_best: Whether it differs from the lowest estimated time by no more than the error of the difference.
        simulated_epochs: How many epochs were simulated.
        batches_deviation, epoch_seconds_deviation: Standard deviation of an epoch's batches, and of its time.
        unproven: How many of the epoch's batches are larger than what is proven to fit; None without a probe.
    """

    algorithm: Algorithm
    buffer_size: CostSize
    target_batch_numel: Length | None = None
    max_batch_numel: Length | None = None
    max_batch_size: Size | None = None
    max_padding_ratio: Share | None = None
    dropped_examples: CostCount
    under_half: CostShare
    wait_median: Cost
    wait_p99: Cost
    buffer_length: Cost
    buffer_bytes: Cost
    worker_imbalance: CostRatio
    rank_imbalance: CostRatio
    mate_distance: Gain
    mixing: GainRatio
    simulated_epochs: Count

    @property
    def name(self) -> str:
        """The row's name in sentences: `bucket with 12 buckets and a buffer of 1024`."""
        buffer = f"a buffer of {format_number(self.buffer_size)}"
        if self.by_speechbrain:
            return f"SpeechBrain's dynamic_bucketed_batch with {buffer}"
        buckets = (
            ""
            if self.num_buckets is None
            else f"{counted(self.num_buckets, 'bucket')} and "
        )
        return f"{self.algorithm} with {buckets}{buffer}"

    @property
    def by_speechbrain(self) -> bool:
        """Whether SpeechBrain's own function makes the batches, not `BucketedStream`."""
        return self.algorithm == "speechbrain"

    @property
    def num_buckets(self) -> int | None:
        """How many buckets there are; None if batches are not made in buckets."""
        return len(self.boundaries) if self.algorithm == "bucket" else None

    def problems(self) -> Iterator[str]:
        """Check the table, which only SpeechBrain's algorithm lacks."""
        if self.by_speechbrain and self.target_batch_numel is None:
            yield "algorithm is speechbrain, but target_batch_numel is missing"
        if not self.by_speechbrain or self.boundaries or self.batch_sizes:
            yield from wrong_table(self.boundaries, self.batch_sizes)


class ShardAdvice(Record, frozen=True, kw_only=True):
    """How to write shards for some ranks and workers: the arguments of WebDataset's `ShardWriter`.

    Attributes:
        shards: How many: a multiple of ranks × workers.
        maxcount: Examples of a shard.
        maxsize_bytes: The size at which a shard is closed, however few it holds; None if sizes are unknown.
    """

    shards: Size
    maxcount: Size
    maxsize_bytes: Size | None = None


class Shards(Record, frozen=True, kw_only=True):
    """The shards of a stream.

    Attributes:
        count: How many there are; for a manifest without shards, how many of `shard_size` examples there would be.
        assumed: Whether they are made up, because the source has no shards.
        broken: How many are truncated or can't be read; examples before the damage count.
        empty: How many hold no example that counts.
        smallest_count, median_count, largest_count: Examples of a shard.
        smallest_length, largest_length: True length of a shard.
        sorted: Whether the examples come in order of length, so that a buffer can't mix them.
        repeated_ids: How many keys occur more than once; None if the source has no keys.
        idle_workers: How many workers, of all ranks, get no shard.
        advice: None if the shards are fine.
    """

    count: Count
    assumed: bool
    broken: Count = 0
    empty: Count = 0
    smallest_count: Count
    median_count: Amount
    largest_count: Count
    smallest_length: Amount
    largest_length: Amount
    sorted: bool
    repeated_ids: Count | None = None
    idle_workers: Count = 0
    advice: ShardAdvice | None = None


class StreamedWith(Record, frozen=True, kw_only=True):
    """How examples reach workers: the settings of a stream's sweep that later commands read.

    `workers` are those of each rank's DataLoader; 0: it reads in the process itself. WebDataset's `shardshuffle` holds
    `shuffle_shards` shards, its `.shuffle` `shuffle_buffer` examples; 0: they stay in order.
    """

    world_size: Annotated[int, msgspec.Meta(ge=1, le=16_384)] = 1
    workers: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 1
    shuffle_shards: Annotated[int, msgspec.Meta(ge=0, le=10**9)] = 100
    shuffle_buffer: Annotated[int, msgspec.Meta(ge=0, le=10**9)] = 1000
    shard_size: Annotated[int, msgspec.Meta(ge=1, le=10**12)] = 1000
    seed: Seed = 0

    @property
    def readers_per_rank(self) -> int:
        """Number of processes that read for one rank."""
        return max(1, self.workers)

    @property
    def readers(self) -> int:
        """Number of processes that read for all ranks."""
        return self.world_size * self.readers_per_rank


class StreamSettings(StreamedWith, frozen=True, kw_only=True):
    """The settings of a stream's sweep, from the command line to `stream.json`.

    Attributes:
        buffer_sizes: The most examples that a worker holds to make batches of; no more than there are.
        bytes_per_length: The memory that a unit of length takes in the buffer; None: by the unit.
        min_steps: The fewest optimizer steps of an epoch, one for each batch of a rank.
    """

    buffer_sizes: tuple[_Setting | Literal["all"], ...] = (256, 1024, 4096)
    num_buckets: tuple[_Setting, ...] = (4, 8, 12, 16, 20)
    max_batch_size: _Setting | None = None
    bytes_per_length: Annotated[float, msgspec.Meta(gt=0, le=1e12)] | None = None
    min_randomness: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    min_steps: _Setting | None = None


class StreamSweep(Swept[StreamRow], frozen=True, kw_only=True):
    """`stream.json`: ways to batch a stream, compared.

    Attributes:
        settings: `world_size`, `workers` (of a rank), `shuffle_shards`, `shuffle_buffer`, `buffer_sizes`, `seed`,
            `bytes_per_length`, and the other options given.
        simulated_examples: How many examples were simulated: all, or the first shards of each worker. In the second
            case `mates_again` is too high, because fewer examples can meet, and ends of streams count too much.
        map_style: A bucket table over all examples, as a sampler with random access runs it, to show what streaming
            costs. None if no table beats the baseline.
        current: The user's own settings, as a row; None if unknown.
        current_fits: Whether its batches stay within what was measured to fit, or within max_batch_length.
        current_settings: Those settings, and their `source`.
        recommended: Index of the recommended row.
        recommended_speechbrain: Index of the best row of SpeechBrain's own algorithm.
        batches_per_rank: Batches of a nominal epoch on each rank: the mean over ranks with the recommended row.
    """

    FORMAT: ClassVar[str] = "batchtune/stream"

    settings: StreamSettings
    simulated_examples: Size
    shards: Shards
    map_style: Row | None
    recommended_speechbrain: Count | None
    batches_per_rank: Size | None

    def problems(self) -> Iterator[str]:
        """Check the indices of rows."""
        speechbrain = self.recommended_speechbrain
        wrong = list(self.wrong_figures(recommended_speechbrain=speechbrain))
        yield from wrong
        row = None if wrong else self.speechbrain_row
        if row is not None and not row.by_speechbrain:
            yield f"recommended_speechbrain is {speechbrain}, whose algorithm is {row.algorithm}"

    @property
    def speechbrain_row(self) -> StreamRow | None:
        """The best row of SpeechBrain's own algorithm, if any."""
        return row_at(self.rows, self.recommended_speechbrain)


AnyRow: TypeAlias = Row | StreamRow
AnySweep: TypeAlias = Sweep | StreamSweep
