"""The records of `sweep.json` and `sampler.yaml`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Annotated, ClassVar

import msgspec

from batchtune.records import (
    ROUNDING,
    Amount,
    CostRatio,
    Count,
    HistogramBin,
    Length,
    Proof,
    Record,
    Size,
    TargetLength,
)
from batchtune.results.devices import StepGradient
from batchtune.results.rows import (
    Baseline,
    LowerBound,
    PackingSweep,
    Row,
    SweepSettings,
    Swept,
)


class BucketUse(Record, frozen=True, kw_only=True):
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


class LearningRate(Record, frozen=True, kw_only=True):
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


class TwoDimensionalRow(Record, frozen=True, kw_only=True):
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


class Sweep(Swept[Row], frozen=True, kw_only=True):
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
        histogram: Of the lengths, ascending bins that cover them all.
        quantiles: 1001 lengths: quantile i / 1000 of the data set at position i.
        buckets: Of the recommended table; empty without one, and for pools.
        packing: The packers, if the training packs (its probe does, or --max-tokens says so); the other rows then show
            training without packing.
        proof: The recommended row's batches as they ran in shuffled training; None if they did not run.
        gradient: How the gradient of a step of the probed script depends on its micro-batches; None if unknown.
        gradient_difference: How much a step's gradient changes with the recommended row, whose steps keep their
            examples; None if unknown.
    """

    FORMAT: ClassVar[str] = "batchtune/sweep"

    settings: SweepSettings
    baselines: list[Baseline]
    lower_bound: LowerBound
    trade_off: list[Count] = msgspec.field(default_factory=list)
    learning_rate: LearningRate | None = None
    two_dimensional: list[TwoDimensionalRow] = msgspec.field(default_factory=list)
    histogram: list[HistogramBin] = msgspec.field(default_factory=list)
    quantiles: Annotated[list[Length], msgspec.Meta(min_length=2)]
    buckets: list[BucketUse] = msgspec.field(default_factory=list)
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
