"""What a format's reader hands on: the columns of a manifest, and its rows as they stand there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from batchtune.lengths import Unit
from batchtune.manifests.source import Head, Source, shortened


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a manifest, or a key of its JSON objects.

    Attributes:
        name: As it stands in the file.
        example: The first value that is there, or None.
        numeric: Whether one of the first values is a number.
    """

    name: str
    example: object
    numeric: bool


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row stands."""

    line: int | None
    id: str | None

    def __str__(self) -> str:
        parts = [] if self.line is None else [f"line {self.line}"]
        if self.id is not None:
            parts.append(f"id {shortened(self.id, 80)}")
        return ", ".join(parts) or "one row"


@dataclass(frozen=True, slots=True)
class Rows:
    """Some consecutive rows of a manifest, unchecked.

    Attributes:
        lengths: Values as they stand in the file: text, or what JSON makes of them; None where missing.
        targets: The same rows' target lengths, or None where none were asked for.
        place: Index in `lengths` → where that row stands. Called for invalid rows only.
        left_out: Reason → number of examples that the reader itself left out.
    """

    lengths: Sequence[object]
    targets: Sequence[object] | None
    place: Callable[[int], Place]
    left_out: Mapping[str, int] = field(default_factory=dict)


class Format(Protocol):
    """One manifest format. Everything but the layout of its files is done elsewhere, once for all formats."""

    @property
    def name(self) -> str:
        """What `--format` calls it."""

    @property
    def description(self) -> str:
        """Its layout, in a few words, for the message that no format fits."""

    @property
    def units(self) -> Mapping[str, Unit]:
        """Normalised column names that imply another unit in this format than elsewhere."""

    @property
    def named_columns(self) -> bool:
        """Whether the file itself names its columns, so that there is something to choose."""

    def fits(self, head: Head) -> bool:
        """Whether a file that begins so is of this format. Takes any bytes, raises nothing."""

    def columns(self, source: Source) -> Sequence[Column]:
        """The columns, by the first rows. Raises ManifestError for a file of another shape."""

    def rows(self, source: Source, length_key: str, target_key: str | None) -> Iterator[Rows]:
        """All rows, with the values of these columns. Raises ManifestError for a file of another shape."""
