"""The base class of every manifest format, and what its readers hand on: columns, and rows as they stand there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from batchtune.errors import shortened
from batchtune.lengths import FloatArray, Unit
from batchtune.manifests.source import Head, Source


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a manifest, or a key of its JSON objects.

    Attributes:
        example: The first value that is not missing, or None.
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
        line = [] if self.line is None else [f"line {self.line}"]
        return ", ".join(line if self.id is None else [*line, f"id {shortened(self.id)}"]) or "one row"


@dataclass(frozen=True, slots=True)
class Rows:
    """Some consecutive rows of a manifest, unchecked.

    Attributes:
        lengths: Values as in the file: text, or what JSON makes of them (lists too), None if missing; or an array of
            floats.
        targets: The same rows' target lengths, or None if none were asked for.
        place: Index in `lengths` → where that row stands. Called for invalid rows, and for ids.
        left_out: Reason → number of examples that the reader itself left out.
        ids: Returns all rows' ids, if the format has a faster way to them than through `place`.
    """

    lengths: Sequence[object] | FloatArray
    targets: Sequence[object] | FloatArray | None
    place: Callable[[int], Place]
    left_out: Mapping[str, int] = field(default_factory=dict)
    ids: Callable[[], Sequence[str | None]] | None = None

    def names(self) -> Sequence[str | None]:
        """Return the id of every row, None for a row without one."""
        return self.ids() if self.ids is not None else [self.place(index).id for index in range(len(self.lengths))]


class Format(ABC):
    """One manifest format. Everything but the layout of its files is done elsewhere, once for all formats.

    Attributes:
        name: What `--format` calls it.
        description: Its layout, in a few words, for the message that no format fits.
        units: Normalised column names that imply another unit in this format than elsewhere.
        named_columns: Whether the file itself names its columns, so that the user can choose.
        unique_ids: Whether two rows with one id are an error.
        joined_by_id: Whether the rows of a target file are found by their ids, rather than line by line.
        breakable: Whether what precedes a damaged place is of use: with --skip-invalid it is read up to there.
        optional_columns: Whether a column may be missing from the first rows of one of several sources.
        missing_hint: What to do if most values are missing.
        of_folder: Whether it reads the files of a folder, rather than one file.
        folder_kind: What its files are called if a folder is searched for them, and by which endings they are found.
        folder_names: Files by which it finds its data in a folder, the first first.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    units: ClassVar[Mapping[str, Unit]] = {}
    named_columns: ClassVar[bool] = True
    unique_ids: ClassVar[bool] = False
    joined_by_id: ClassVar[bool] = False
    breakable: ClassVar[bool] = False
    optional_columns: ClassVar[bool] = False
    missing_hint: ClassVar[str | None] = None
    of_folder: ClassVar[bool] = False
    folder_kind: ClassVar[tuple[str, tuple[str, ...]] | None] = None
    folder_names: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def fits(self, head: Head) -> bool:
        """Whether a file that begins so is of this format. Takes any bytes, raises nothing."""

    @abstractmethod
    def columns(self, source: Source) -> Sequence[Column]:
        """The columns, by the first rows. Raises ManifestError for a file of another shape."""

    @abstractmethod
    def rows(self, source: Source, length_key: str, target_key: str | None) -> Iterator[Rows]:
        """All rows, with the values of these columns. Raises ManifestError for a file of another shape."""

    def default_column(self, columns: Sequence[Column]) -> str | None:
        """The column to read if the user names none; None if only the known names can tell."""
        return None

    def default_target(self, source: Source) -> str | None:
        """The column of the target lengths if the file itself says that it has them, else None."""
        return None

    def unit_in(self, source: Source, column: str) -> Unit | None:
        """What a column counts if the file says it, else None."""
        return None
