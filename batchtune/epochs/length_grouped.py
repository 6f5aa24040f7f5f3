"""The order of examples in Transformers' length-grouped batches (`group_by_length`)."""

from __future__ import annotations

import numpy as np

from batchtune.lengths import FloatArray, IntArray

_MEGABATCHES = 50


def megabatch_size(count: int, batch_size: int) -> int:
    """Return how many examples are sorted together: 50 batches, or a quarter of the data if that is less."""
    return batch_size * max(1, min(count // (batch_size * 4), _MEGABATCHES))


def length_grouped(lengths: FloatArray, batch_size: int, shuffled: IntArray) -> IntArray:
    """Return the examples of an epoch in their order, from a random order of all; consecutive ones form batches.

    As `get_length_grouped_indices` of Transformers (5.23): each megabatch is sorted, the longest example first, and the
    longest of all comes first in the epoch. Both arrays have the shape (count,).
    """
    size = megabatch_size(lengths.size, batch_size)
    grouped: IntArray = shuffled.copy()
    for start in range(0, grouped.size, size):
        megabatch = shuffled[start : start + size]
        grouped[start : start + size] = megabatch[np.argsort(-lengths[megabatch], kind="stable")]
    longest = size * int(np.argmax(lengths[grouped[::size]]))
    grouped[[0, longest]] = grouped[[longest, 0]]
    return grouped
