"""The micro-batches of exactly so many tokens that are the worst for memory, and a typical one.

Of all with as many tokens, that of the longest sequences has the most Σ L², that of the shortest the most sequences.
Between them stand those with a share of their tokens in the longest, the rest in the shortest: one of them contains
nearly every micro-batch that training packs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np

from batchtune.lengths import FloatArray, IntArray, Lengths
from batchtune.results import BatchShape

Composition = Literal["longest", "99%", "95%", "80%", "halves", "typical", "shortest"]
COMPOSITIONS: tuple[Composition, ...] = get_args(Composition)
# With these, at most 1.8% of the micro-batches of long public data are contained in none, mostly none; with halves
# alone, up to all are.
_IN_LONGEST: dict[Composition, float] = {
    "longest": 1.0,
    "99%": 0.99,
    "95%": 0.95,
    "80%": 0.8,
    "halves": 0.5,
    "shortest": 0.0,
}

# So many stand for all sequences where a typical batch is drawn.
_MOST_DRAWN = 1 << 20
# What a trial may record; no training packs as many.
_MOST_SEQUENCES = 10**7


@dataclass(frozen=True, eq=False)
class _Line:
    """Sequences in a line: lengths, each so many times, shape (runs,)."""

    lengths: IntArray
    counts: IntArray

    @cached_property
    def _sums(self) -> FloatArray:
        """The tokens, their squares and the sequences of the first runs, none to all of them, shape (runs + 1, 3)."""
        lengths = self.lengths.astype(np.float64)
        of_runs = self.counts * np.stack((lengths, lengths**2, np.ones_like(lengths)))
        return np.vstack((np.zeros(3), of_runs.cumsum(axis=1).T))

    def _cut(self, tokens: int) -> tuple[int, int, int]:
        """Return how many runs fit in so many tokens, how many whole sequences of the next one, and what is left."""
        totals = self._sums[:, 0]
        whole = int(np.searchsorted(totals, tokens, side="right")) - 1
        left = tokens - int(totals[whole])
        if not left:
            return whole, 0, 0
        length = int(self.lengths[whole])
        return whole, left // length, left % length

    def first(self, tokens: int) -> list[int]:
        """Return the lengths of the first ones that come to so many tokens, the last of them cut."""
        whole, more, cut = self._cut(tokens)
        lengths: list[int] = np.repeat(
            self.lengths[:whole], self.counts[:whole]
        ).tolist()
        if more:
            lengths += [int(self.lengths[whole])] * more
        if cut:
            lengths.append(cut)
        return lengths

    def features(self, tokens: int) -> FloatArray:
        """Return the Σ L, Σ L² and number of the first ones that come to so many tokens."""
        whole, more, cut = self._cut(tokens)
        features: FloatArray = self._sums[whole].copy()
        if more:
            length = float(self.lengths[whole])
            features += more * np.array([length, length**2, 1.0])
        if cut:
            features += np.array([cut, float(cut) ** 2, 1.0])
        return features


class Compositions:
    """Those of a data set, of which all lengths are whole tokens."""

    def __init__(self, lengths: Lengths, seed: int) -> None:
        histogram = lengths.histogram
        distinct = histogram.lengths.astype(np.int64)
        self.longest = int(distinct[-1])
        """The tokens of the longest sequence, the least budget."""
        self.all_tokens = int(
            histogram.total_of(np.array(min(lengths.count, _MOST_SEQUENCES)))
        )
        """The tokens of the whole data set, or of as many sequences as a trial can have."""
        self._shortest_first = _Line(distinct, histogram.counts)
        self._longest_first = _Line(distinct[::-1], histogram.counts[::-1])
        drawn = lengths.evenly(_MOST_DRAWN).values.astype(np.int64)
        np.random.default_rng(seed).shuffle(drawn)
        drawn = np.tile(drawn, -(-self.all_tokens // int(drawn.sum())))
        self._drawn = _Line(drawn, np.ones(drawn.size, np.int64))
        self._shapes: dict[tuple[Composition, int], BatchShape] = {}

    def shape(self, composition: Composition, tokens: int) -> BatchShape:
        """Return the batch of so many tokens."""
        key = (composition, tokens)
        if key not in self._shapes:
            lengths: list[int] = []
            for line, share in self._parts(composition, tokens):
                lengths += line.first(share)
            self._shapes[key] = BatchShape.packed(lengths)
        return self._shapes[key]

    def features(self, composition: Composition, tokens: int) -> FloatArray:
        """Return that batch's Σ L, Σ L² and number of sequences, without making it."""
        features = np.zeros(3)
        for line, share in self._parts(composition, tokens):
            features += line.features(share)
        return features

    def _parts(self, composition: Composition, tokens: int) -> list[tuple[_Line, int]]:
        """Return the lines that a batch begins, and how many of its tokens are from each."""
        if composition == "typical":
            return [(self._drawn, tokens)]
        in_longest = round(_IN_LONGEST[composition] * tokens)
        return [
            (self._longest_first, in_longest),
            (self._shortest_first, tokens - in_longest),
        ]

    def padded_alike(self, sequences: int) -> BatchShape:
        """Return one longest sequence and short ones: padded, the shape of `sequences` longest ones."""
        shortest = int(self._shortest_first.lengths[0])
        return BatchShape.packed([self.longest, *[shortest] * (sequences - 1)])
