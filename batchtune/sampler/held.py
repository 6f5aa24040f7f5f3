"""The examples of a stream that are held until their batches are made."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from batchtune.batching.table import OverlongError

_END = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How the examples of a stream are measured, and what limits them; as `BucketedStream` says."""

    length_of: Callable[[Any], float]
    last_boundary: float
    overlong: Literal["error", "single", "drop"]
    buffer_bytes: int | None
    bytes_of: Callable[[Any], int] | None

    def __post_init__(self) -> None:
        if not callable(self.length_of):
            raise ValueError(f"length_of must be a function of an example, got {self.length_of!r}")
        if self.overlong not in ("error", "single", "drop"):
            raise ValueError(f"overlong must be error, single or drop, got {self.overlong!r}")
        if (self.buffer_bytes is None) != (self.bytes_of is None):
            raise ValueError("buffer_bytes and bytes_of go together: give both")


class Held:
    """The examples that were read and are in no batch yet; the `Reader` of their lengths.

    Attributes:
        examples: Those of the source, still to be read in this pass over it.
        batches: How many batches have left.
        seen: How many examples the source has given.
        dropped: How many of them were overlong, and left out.
    """

    def __init__(self, limits: Limits) -> None:
        self.count, self.ended = 0, False
        self.seen = self.dropped = self.batches = 0
        self.examples: Iterator[Any] = iter(())
        self._limits = limits
        self._held: dict[int, Any] = {}
        self._bytes: dict[int, int] = {}
        self._total_bytes = 0
        self._digest = hashlib.blake2b(digest_size=8)

    @property
    def read_digest(self) -> str:
        """A digest of the lengths that were read, in their order."""
        return self._digest.hexdigest()

    def read(self, room: int) -> list[float]:
        """As for every reader."""
        read = self._read(room)
        while len(read) < room and not self.ended and not self._heavy:  # some were dropped
            read += self._read(room - len(read))
        return read

    @property
    def _heavy(self) -> bool:
        return self._limits.buffer_bytes is not None and self._total_bytes > self._limits.buffer_bytes

    def _read(self, room: int) -> list[float]:
        examples, sizes = self._next(room)
        lengths = list(map(float, map(self._limits.length_of, examples)))
        total = sum(lengths)
        # A sum is finite if no summand is infinite or none.
        if lengths and not (0 < min(lengths) and max(lengths) <= self._limits.last_boundary and total - total == 0):
            kept = self._kept(lengths)
            examples, lengths = [examples[index] for index in kept], [lengths[index] for index in kept]
            sizes = [sizes[index] for index in kept] if sizes else []
        else:
            self.seen += len(examples)
        places = range(self.count, self.count + len(examples))
        self._held.update(zip(places, examples, strict=True))
        self.count += len(examples)
        self._digest.update(array("d", lengths))
        if sizes:
            self._bytes.update(zip(places, sizes, strict=True))
            self._total_bytes += sum(sizes)
        return lengths

    def _next(self, room: int) -> tuple[list[Any], list[int]]:
        """Read the next examples, with their sizes in memory if these are limited."""
        bytes_of, most = self._limits.bytes_of, self._limits.buffer_bytes
        if bytes_of is None or most is None:
            examples = list(islice(self.examples, room))
            self.ended = len(examples) < room
            return examples, []
        examples, sizes, total = [], [], self._total_bytes
        while len(examples) < room and total <= most:
            example = next(self.examples, _END)
            if example is _END:
                self.ended = True
                break
            examples.append(example)
            sizes.append(bytes_of(example))
            total += sizes[-1]
        return examples, sizes

    def _kept(self, lengths: list[float]) -> list[int]:
        """Return which of the examples are not dropped as overlong; raise ValueError for one that is not allowed."""
        kept, last = [], self._limits.last_boundary
        for index, length in enumerate(lengths):
            if not 0 < length < math.inf:
                raise ValueError(
                    f"lengths must be positive and finite, but example {self.seen} of the stream has {length}: leave "
                    "it out of the source, or fix length_of"
                )
            if length > last and self._limits.overlong == "error":
                raise OverlongError(
                    f"example {self.seen} of the stream has the length {length}, beyond the last of bucket_boundaries, "
                    f'{last}: leave it out of the source, add a boundary, or say overlong="single" for batches of one '
                    'or overlong="drop"'
                )
            self.seen += 1
            if length > last and self._limits.overlong == "drop":
                self.dropped += 1
            else:
                kept.append(index)
        return kept

    def begin(self, examples: Iterator[Any]) -> None:
        """Begin a pass over the source."""
        self.examples, self.ended = examples, False

    def taken(self, places: list[int]) -> list[Any]:
        """Return the examples at these places, which leave as a batch."""
        self.batches += 1
        if self._bytes:
            self._total_bytes -= sum(map(self._bytes.pop, places))
        return list(map(self._held.pop, places))
