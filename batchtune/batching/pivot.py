"""SpeechBrain's `dynamic_bucketed_batch` on lengths alone, batch for batch."""

from __future__ import annotations

import math
import random
import sys
from dataclasses import dataclass
from numbers import Integral, Real

import numpy as np
import numpy.typing as npt

from batchtune.batching.streams import StreamBatches
from batchtune.errors import shortened
from batchtune.lengths import FloatArray

# Whole numbers up to here, and their sums, are exact as floats.
_EXACT = 2**53


@dataclass(frozen=True, slots=True, kw_only=True)
class PivotSettings:
    """The parameters of SpeechBrain's `dynamic_bucketed_batch` with `indices_around_random_pivot`.

    A batch begins as one random example of the sorted buffer, and grows to either side, by the neighbour that pads
    least, until its padded length reaches the target or neither neighbour may join.

    Attributes:
        target_batch_numel: A batch grows until its padded length is as large. Required: SpeechBrain has no default.
        max_batch_numel: No example joins that would make the padded length larger; a longer example is a batch of
            one. None: a batch overshoots its target, by one example and by how much that pads the others.
        max_batch_size: The most examples of a batch; None: any number. Below 1: one.
        max_padding_ratio: No example joins that would make padding a larger part; None: any. Below 0: batches of one.
        buffersize: A batch is made whenever this many examples are held. Below 1: only when all of the stream is held.
        drop_end: Whether to leave out the examples that are held at the end of the stream.
        min_sample_len, max_sample_len: Shorter and longer examples are left out; None: any length.

    Raises ValueError if one of them is not a number; SpeechBrain raises a TypeError later, or reads on for ever.
    """

    target_batch_numel: float
    max_batch_numel: float | None = None
    max_batch_size: int | None = None
    max_padding_ratio: float | None = 0.2
    buffersize: int = 1024
    drop_end: bool = False
    min_sample_len: float | None = None
    max_sample_len: float | None = None

    def __post_init__(self) -> None:
        optional = ("max_batch_numel", "max_batch_size", "max_padding_ratio", "min_sample_len", "max_sample_len")
        for name in ("target_batch_numel", "buffersize", *optional):
            value, whole = getattr(self, name), name in ("buffersize", "max_batch_size")
            if value is None and name in optional:
                continue
            if not isinstance(value, Integral if whole else Real) or math.isnan(value):
                rule = f"a {'whole ' if whole else ''}number{' or None' if name in optional else ''}"
                raise ValueError(f"{name} must be {rule}, got {shortened(value)}")

    def keeps(self, lengths: FloatArray) -> npt.NDArray[np.bool_]:
        """Return which examples the length limits keep."""
        least = -math.inf if self.min_sample_len is None else self.min_sample_len
        most = math.inf if self.max_sample_len is None else self.max_sample_len
        return (lengths >= least) & (lengths <= most)


def speechbrain_batches(lengths: npt.ArrayLike, settings: PivotSettings, random: random.Random) -> StreamBatches:
    """Return the batches that SpeechBrain's `dynamic_bucketed_batch` makes of a stream with these lengths.

    They equal SpeechBrain's, example for example, and leave `random` in the same state, if its `random` has the same
    state before. SpeechBrain draws from the process-wide `random`, which a DataLoader reseeds in each worker from
    torch's seed; without workers its state is arbitrary unless the program seeds it.

    Examples that the length limits leave out count as read. The examples of a batch are the longest first, as
    SpeechBrain hands them to its collate_fn. Lengths that are not whole numbers are added up as this version of Python
    does (from 3.12 on, `sum` compensates rounding): that decides between neighbours that pad equally.

    `lengths`, shape (examples,), are in the order of the stream and in the unit of the settings.
    Source: `speechbrain.dataio.iterators`, SpeechBrain 1.1.

    Raises:
        ValueError: A length is negative or not finite; whole lengths are so large that floats can't hold their sums; or
            two neighbours in the buffer are of length 0, where SpeechBrain raises a ZeroDivisionError.
        BatchtuneError: Numba is not installed.
    """
    from batchtune.batching.compiled import Rules, advance, buffer_of, pivot_batches, words_of

    given = np.asarray(lengths)
    if given.ndim != 1:
        raise ValueError(f"lengths must be one-dimensional, got shape {given.shape}")
    values = given.astype(np.float64)
    if not (np.isfinite(values).all() and (values >= 0).all()):
        raise ValueError("lengths must be finite and not negative")
    kept = np.flatnonzero(settings.keeps(values))
    stream = values[kept]
    room = min(settings.buffersize, stream.size) if settings.buffersize > 0 else stream.size
    whole = bool((stream == np.floor(stream)).all()) and float(stream.max(initial=0)) * room < _EXACT
    if not whole and given.dtype.kind in "iu":
        raise ValueError(f"lengths are up to {int(given.max())}: the sum of {room} is not exact; use a larger unit")
    rules = Rules(
        target=float(settings.target_batch_numel),
        size=_EXACT if settings.max_batch_size is None else min(int(settings.max_batch_size), _EXACT),
        numel=math.inf if settings.max_batch_numel is None else float(settings.max_batch_numel),
        ratio=math.inf if settings.max_padding_ratio is None else float(settings.max_padding_ratio),
        exact=whole,
        compensated=sys.version_info >= (3, 12),
    )
    # With drop_end, a buffer that never fills gives no batch.
    last = max(1, settings.buffersize if settings.buffersize > 0 else room + 1) if settings.drop_end else 1
    examples, ends, read = (np.empty(stream.size, np.int64) for _ in range(3))
    words = words_of(random)
    batches = pivot_batches(stream, words, buffer_of(stream, room), rules, last, (examples, ends, read))
    advance(random, words)
    if batches < 0:
        raise ValueError(
            f"batch {-batches}: SpeechBrain's padding_ratio divides by zero, as two examples are of length 0; leave "
            "them out with min_sample_len"
        )
    ends, read = ends[:batches].copy(), read[:batches]
    held = read - np.concatenate(([0], ends[:-1]))[:batches]
    # Anything after the last valid example is read only when the stream has ended.
    ended = held != settings.buffersize
    examples = kept[examples[: int(ends[-1]) if batches else 0]]
    return StreamBatches(examples, ends, np.where(ended, values.size, kept[read - 1] + 1))
