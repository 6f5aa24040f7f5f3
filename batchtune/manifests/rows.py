"""What a format's reader hands on: the columns of a manifest, and its rows as they stand there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from batchtune.errors import shortened
from batchtune.lengths import FloatArray, Unit
from batchtune.manifests.source import Head, Source


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a manifest, or a key of its JSON objects.

    Attributes:
        name: As it stands in the file.
        example: The first value that is there, or None.
        numeric: Whether one of the first values is a number (in a list: one of its items).
        text: Whether more of the first values are text than numbers: what is measured rather than read.
    """

    name: str
    example: object
    numeric: bool
    text: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row stands."""

    line: int | None
    id: str | None

    def __str__(self) -> str:
        parts = [] if self.line is None else [f"line {self.line}"]
        if self.id is not None:
            parts.append(f"id {shortened(self.id)}")
        return ", ".join(parts) or "one row"


@dataclass(frozen=True, slots=True)
class Rows:
    """Some consecutive rows of a manifest, unchecked.

    Attributes:
        lengths: Values as they stand in the file: text, or what JSON makes of them (lists too); None where
            missing. An array of floats where the file has nothing else.
        targets: The same rows' target lengths, or None where none were asked for.
        place: Index in `lengths` → where that row stands. Called for invalid rows, and where ids are asked for.
        left_out: Reason → number of examples that the reader itself left out.
        ids: All rows' ids, where the format has a faster way to them than through `place`.
    """

    lengths: Sequence[object] | FloatArray
    targets: Sequence[object] | FloatArray | None
    place: Callable[[int], Place]
    left_out: Mapping[str, int] = field(default_factory=dict)
    ids: Callable[[], Sequence[str | None]] | None = None

    def names(self) -> Sequence[str | None]:
        """The id of every row, None where it has none."""
        if self.ids is not None:
            return self.ids()
        return [self.place(index).id for index in range(len(self.lengths))]


class Format(Protocol):
    """One manifest format. Everything but the layout of its files is done elsewhere, once for all formats.

    A format may also be a `TellsDefault`, `TellsTarget` and `TellsUnit`, and have flags that are False where they are
    not there: `unique_ids`, that two rows with one id are an error; `breakable`, that what stands before a damaged
    place is of use, so that with --skip-invalid it is read up to there; `optional_columns`, that a column may be
    missing from the first rows of one of several sources. `missing_hint` is what to do where most values are missing.
    """

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


@runtime_checkable
class TellsDefault(Protocol):
    """A format that knows which column is meant where the user names none."""

    def default_column(self, columns: Sequence[Column]) -> str | None:
        """Its name, or None where it can't be told."""


@runtime_checkable
class TellsUnit(Protocol):
    """A format whose files say what a column counts."""

    def unit_in(self, source: Source, column: str) -> Unit | None:
        """The unit, or None where nothing says it."""


@runtime_checkable
class TellsTarget(Protocol):
    """A format whose files can say which column holds the target lengths."""

    def default_target(self, source: Source) -> str | None:
        """Its name, or None where there are no targets."""
