"""The records of `sweep.json` and `stream.json`, and of their `sampler.yaml` and `stream.yaml`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Annotated, Literal, TypeAlias

import msgspec

from batchtune.records import (
    ROUNDING,
    Amount,
    Cost,
    CostCount,
    CostRatio,
    CostShare,
    CostSize,
    Count,
    Gain,
    GainRatio,
    HistogramBin,
    Length,
    Part,
    Proof,
    Ranks,
    Record,
    Seed,
    SettingSize,
    Share,
    Size,
    TargetLength,
)
from batchtune.results.rows import (
    Baseline,
    EpochFigures,
    LowerBound,
    PackingSweep,
    Row,
    SweepSettings,
    Swept,
)
from batchtune.results.shared import (
    StepGradient,
    row_at,
    wrong_table,
)
from batchtune.units import counted, format_number


class BucketUse(Record):
    """One bucket of the recommended table.

    Attributes:
        boundary: Its inclusive upper edge.
        examples: Number of examples in it.
        batches: Batches of one epoch, over all ranks, including those that are not full.
        length: True length of its examples.
        padded_length: Cells of its batches, expected over shuffles.
        proven_by: Index of the trial in `trials.jsonl` that proves that its batches fit, if any.
    """

    boundary: Length
    batch_size: Size
    examples: Count
    batches: Count
    length: Amount
    padded_length: Amount
    proven_by: Count | None = None


class LearningRate(Record):
    """Factors for the learning rate when the batch size changes; a hint.

    Attributes:
        relative_to: The row whose batch size the factors start from: a baseline's name, or `current`.
        from_batch_size, to_batch_size: Mean batch sizes, before and with the recommended row.
        linear: to / from (Goyal et al. 2017, for SGD).
        square_root: √(to / from) (Krizhevsky 2014; Malladi et al. 2022 for Adam).
    """

    relative_to: str
    from_batch_size: Amount
    to_batch_size: Amount
    linear: Amount
    square_root: Amount


class TwoDimensionalRow(Record):
    """A bucket table over length and target length, and its gain over one dimension, on one rank.

    Attributes:
        num_buckets: The most buckets allowed.
        buckets: (length, target length) pairs, in ascending order, both inclusive upper edges: an example belongs to
            the first bucket with neither boundary below its own.
        batch_sizes: One for each bucket.
        batches, estimated_epoch_seconds: Of one epoch, from simulated shuffles.
        one_dimensional_batches, one_dimensional_epoch_seconds: The same for the optimal table over length alone, sized
            by the frontier, with the same number of buckets.
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

    @property
    def sizes_in_use(self) -> int:
        """As for a row."""
        return len(self.buckets)

    def problems(self) -> Iterator[str]:
        """Check the table."""
        if not self.buckets or len(self.buckets) != len(self.batch_sizes):
            yield f"it has {len(self.buckets)} buckets and {len(self.batch_sizes)} batch sizes"
        if any(before > after for before, after in itertools.pairwise(self.buckets)):
            yield "buckets do not ascend"


class Sweep(Swept[Row]):
    """`sweep.json`: the bucket tables compared.

    Attributes:
        current: The user's own settings, as a row; None if unknown.
        current_fits: Whether its batches stay within what was measured to fit, or within max_batch_length without a
            probe; None without such a row, or where an unfinished probe tried nothing of that size.
        current_settings: Those settings, and their `source`.
        recommended_table: Index of the best bucket table, for frameworks without pools; None if there is none.
        trade_off: Indices of the rows that no other beats in both speed and randomness, the fastest first.
        learning_rate: None if no row is recommended.
        two_dimensional: Empty without target lengths, or if memory does not depend on them.
        histogram: Ascending bins that cover all lengths.
        quantiles: 1001 lengths: quantile i / 1000 of the data set at position i.
        buckets: The buckets of the recommended table; empty without one, and for pools.
        packing: The packers, if the training packs (its probe does, or --max-tokens says so); the other rows then show
            training without packing.
        proof: The recommended row's batches as they ran in shuffled training; None if they did not run.
        gradient: How the gradient of a step of the probed script depends on its micro-batches; None if unknown.
        gradient_difference: How much a step's gradient changes with the recommended row, whose steps keep their
            examples; None if unknown.
    """

    FORMAT = "batchtune/sweep"

    settings: SweepSettings
    baselines: list[Baseline]
    lower_bound: LowerBound
    trade_off: list[Count] = []
    learning_rate: LearningRate | None = None
    two_dimensional: list[TwoDimensionalRow] = []
    histogram: list[HistogramBin] = []
    quantiles: Annotated[list[Length], msgspec.Meta(min_length=2)]
    buckets: list[BucketUse] = []
    recommended_table: Count | None = None
    packing: PackingSweep | msgspec.UnsetType = msgspec.UNSET
    proof: Proof | None = None
    gradient: StepGradient | None = None
    gradient_difference: CostRatio | None = None

    def problems(self) -> Iterator[str]:
        """Check the indices of rows, the quantiles, and the recommended row's figures."""
        missing = list(
            self.wrong_figures(
                recommended_table=self.recommended_table,
                trade_off=max(self.trade_off, default=None),
            )
        )
        yield from missing
        if any(low > high for low, high in itertools.pairwise(self.quantiles)):
            yield "quantiles do not ascend"
        if missing or self.recommended is None:
            return
        row = self.rows[self.recommended]
        examples = row.mean_batch_size * row.batches - row.repeated_examples
        if not math.isclose(examples, self.lengths.count, rel_tol=ROUNDING):
            yield f"row {self.recommended}: batches is {row.batches}, for {self.lengths.count:,} examples"
        true_length = (1 - row.padding_ratio) * row.padded_length
        if not math.isclose(true_length, self.lengths.total, rel_tol=ROUNDING):
            yield f"row {self.recommended}: padding_ratio is {row.padding_ratio}, for {self.lengths.total:,}"
        sizes = [bucket.batch_size for bucket in self.buckets]
        if sizes and sizes != row.batch_sizes:
            yield f"row {self.recommended}: batch_sizes are not those of its buckets"

    @property
    def recommends_nothing(self) -> bool:
        """Whether there is no row to write a config of, padded or packed."""
        return self.recommended is None and self.packed is None

    @property
    def unproven(self) -> int | None:
        """How many batch sizes of the recommended row are not proven, or packed micro-batches of an epoch.

        None without a row or a probe. No size is proven unless the table is, and no micro-batch where the proof failed.
        """
        proof = self.proof
        if self.packed is not None:
            packed = self.packed.row
            failed = proof is not None and not proof.holds
            return packed.batches if failed else packed.unproven
        row = self.recommended_row
        if row is None or row.unproven is None:
            return None
        if proof is not None and proof.holds:
            return row.unproven
        return row.sizes_in_use

    @property
    def packed(self) -> PackingSweep | None:
        """The packers; None if the training does not pack."""
        return None if self.packing is msgspec.UNSET else self.packing


def unproven_sizes(row: Row | TwoDimensionalRow) -> str | None:
    """Say how many batch sizes are not proven: `4 of 13 batch sizes are not proven to fit`; None if all are."""
    if not row.unproven:
        return None
    return f"{row.unproven} of {row.sizes_in_use} batch sizes {'is' if row.unproven == 1 else 'are'} not proven to fit"


Algorithm = Literal["speechbrain", "bucket", "pivot"]
"""How batches are made from a buffer: by SpeechBrain's `dynamic_bucketed_batch`, or by `BucketedStream`."""


class StreamRow(EpochFigures):
    """One way to batch a stream, and the cost of an epoch over all ranks and workers.

    Figures are those of simulated epochs, each worker's stream by itself: batches, cells, times and mates_again are
    means over them, the others those of the first.

    Attributes:
        buffer_size: The most examples that a worker holds.
        target_batch_numel, max_batch_numel: As in SpeechBrain's `dynamic_bucketed_batch`, in the unit of the lengths;
            None for other algorithms.
        max_batch_size: For `speechbrain`: the most examples of a batch; None: any.
        max_padding_ratio: For `speechbrain` and `pivot`: the largest fraction of a batch that may
            be padding; None: any.
        boundaries, batch_sizes: The table; a batch holds at most the size of its longest example's bucket. Empty for
            `speechbrain`.
        batches: Batches of one epoch that reads each example once.
        dropped_examples: How many an epoch leaves out, as SpeechBrain's `drop_end` does.
        padded_length: Cells of the epoch's batches.
        padding_ratio: Padded cells / all cells.
        fill: True length / (batches × max_batch_length).
        mean_batch_size: Examples in a batch; smallest_batch_size, largest_batch_size: of any batch.
        batch_size_variation: Their standard deviation / their mean.
        largest_padded_length: The largest of any batch of the epoch.
        under_half: The fraction of batches that are less than half full: of target_batch_numel, or of the batch size
            that fits with their longest example.
        wait_median, wait_p99: How many more examples a worker reads before it makes an example's batch.
        buffer_length: The most that a worker holds at once, as true length.
        buffer_bytes: The same in memory, by `bytes_per_length`.
        worker_imbalance, rank_imbalance: The most batches of a worker, or of a rank, / their mean.
        mate_distance: Mean distance of two examples of one batch, counted in examples as they are stored.
        mixing: The same / that of two examples drawn at random.
        mates_again: The probability that two examples of one batch share a batch again in the next epoch.
        length_correlation: Correlation of the lengths of two examples of one batch; None if all
            lengths are equal.
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


class ShardAdvice(Record):
    """How to write shards for some ranks and workers: the arguments of WebDataset's `ShardWriter`.

    Attributes:
        shards: How many: a multiple of ranks × workers.
        maxcount: Examples of a shard.
        maxsize_bytes: The size at which a shard is closed, however few it holds; None if sizes are unknown.
    """

    shards: Size
    maxcount: Size
    maxsize_bytes: Size | None = None


class Shards(Record):
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


class StreamedWith(Record):
    """How examples reach workers: the settings of a stream's sweep that later commands read.

    `workers` are those of each rank's DataLoader; 0: it reads in the process itself. WebDataset's `shardshuffle` holds
    `shuffle_shards` shards, its `.shuffle` `shuffle_buffer` examples; 0: they stay in order.
    """

    world_size: Ranks = 1
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


class StreamSettings(StreamedWith):
    """The settings of a stream's sweep, from the command line to `stream.json`.

    Attributes:
        buffer_sizes: The most examples that a worker holds to make batches of; no more than there are.
        bytes_per_length: The memory that a unit of length takes in the buffer; None: by the unit.
        min_steps: The fewest optimizer steps of an epoch, one for each batch of a rank.
    """

    buffer_sizes: tuple[SettingSize | Literal["all"], ...] = (256, 1024, 4096)
    num_buckets: tuple[SettingSize, ...] = (4, 8, 12, 16, 20)
    max_batch_size: SettingSize | None = None
    bytes_per_length: Annotated[float, msgspec.Meta(gt=0, le=1e12)] | None = None
    min_randomness: Part | None = None
    min_steps: SettingSize | None = None


class StreamSweep(Swept[StreamRow]):
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

    FORMAT = "batchtune/stream"

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
