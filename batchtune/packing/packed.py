"""Sequences in micro-batches, and what these come to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchtune.epochs.layout import positions
from batchtune.lengths import AnyArray, FloatArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Micro-batches, none of them empty.

    Attributes:
        sequences: Shape (sequences,): their indices, micro-batch after micro-batch.
        sizes: Shape (micro-batches,): how many sequences each holds.
    """

    sequences: IntArray
    sizes: IntArray

    @classmethod
    def of_owners(cls, sequences: IntArray, owners: IntArray) -> Packed:
        """Return the micro-batches of sequences, in this order within each, from the micro-batch of each of them."""
        sizes = np.bincount(owners)
        return cls(sequences[np.argsort(owners, kind="stable")], sizes[sizes > 0])

    @property
    def count(self) -> int:
        """The number of micro-batches."""
        return int(self.sizes.size)

    @property
    def starts(self) -> IntArray:
        """Where each micro-batch begins in `sequences`, shape (micro-batches,)."""
        return np.cumsum(self.sizes) - self.sizes

    def lists(self) -> Iterator[list[int]]:
        """Yield the sequences of each micro-batch."""
        sequences = self.sequences.tolist()
        starts = self.starts.tolist()
        for start, size in zip(starts, self.sizes.tolist(), strict=True):
            yield sequences[start : start + size]

    def sums(self, values: AnyArray) -> AnyArray:
        """Return the sum for each micro-batch of one value for each sequence."""
        return np.add.reduceat(values[self.sequences], self.starts)

    def extents(self, tokens: IntArray) -> FloatArray:
        """Return what memory depends on: tokens, Σ of their squares, sequences and the longest, shape (batches, 4)."""
        held = tokens[self.sequences].astype(np.float64)
        return np.column_stack(
            (
                np.add.reduceat(held, self.starts),
                np.add.reduceat(held**2, self.starts),
                self.sizes,
                np.maximum.reduceat(held, self.starts),
            )
        )

    def ordered(self, order: npt.NDArray[np.intp]) -> Packed:
        """Return the micro-batches in another order."""
        sizes = self.sizes[order]
        places = positions(self.starts[order], sizes)
        return Packed(self.sequences[places], sizes)

    def split_to(self, wanted: int, seconds: FloatArray) -> Packed:
        """Return at least as many micro-batches, or as many as there are sequences, of which the slowest are halved.

        `seconds`, shape (sequences,), descend within each micro-batch: every second sequence goes to the other half.
        """
        packed = self
        while packed.count < min(wanted, packed.sequences.size):
            sums = np.where(packed.sizes > 1, packed.sums(seconds), -1.0)
            # Those with more than half of the slowest one's seconds are halved before its halves are.
            halvable = int(np.count_nonzero(sums > sums.max() / 2))
            slowest = np.argsort(-sums, kind="stable")
            halved = np.zeros(packed.count, dtype=np.int64)
            halved[slowest[: min(halvable, wanted - packed.count)]] = 1
            nth = np.arange(packed.sequences.size) - np.repeat(
                packed.starts, packed.sizes
            )
            owners = np.repeat(2 * np.arange(packed.count), packed.sizes)
            owners += nth % 2 * np.repeat(halved, packed.sizes)
            packed = Packed.of_owners(packed.sequences, owners)
        return packed
