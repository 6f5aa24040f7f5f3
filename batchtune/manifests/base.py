"""The base class of every manifest format; its columns, and which of them holds the lengths."""

from __future__ import annotations

import difflib
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, NamedTuple

from batchtune.errors import QUOTED_CHARACTERS, ManifestError, shortened
from batchtune.lengths import Unit
from batchtune.manifests.source import Head, Source
from batchtune.manifests.values import Values, number


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a manifest, or a key of its JSON objects.

    Attributes:
        example: The first value that is not missing, or None.
        numeric: Whether one of the first values is a number (in a list: one of its items).
        text: Whether more of the first values are text than numbers: then their lengths are counted.
        chat: Whether the values are lists of messages, each with a role and a content.
    """

    name: str
    example: object
    numeric: bool
    text: bool = False
    chat: bool = False

    @property
    def holds_tokens(self) -> bool:
        """Whether the values are lists of tokens, by their name: then their number of items is the length."""
        return isinstance(self.example, list) and normalised(last_part(self.name)) in _TOKEN_LISTS


class Place(NamedTuple):
    """The place of a row in its file."""

    line: int | None
    id: str | None

    def __str__(self) -> str:
        parts = []
        if self.line is not None:
            parts.append(f"line {self.line}")
        if self.id is not None:
            parts.append(f"id {shortened(self.id)}")
        return ", ".join(parts) or "one row"


@dataclass(frozen=True, slots=True)
class Rows:
    """Some consecutive rows of a manifest, unchecked.

    Attributes:
        columns: The values of each column that is read, as in the file: text, or JSON values (lists too), None if
            missing; or an array of floats.
        place: Maps the index of a row to its place. Only called for rows that a message names.
        ids: Returns the id of every row, None for a row without one.
        left_out: Reason → number of examples that the reader itself left out.
        num_estimates: How many lengths are estimates.
    """

    columns: Sequence[Values]
    place: Callable[[int], Place]
    ids: Callable[[], Sequence[str | None]]
    left_out: Mapping[str, int] = field(default_factory=dict)
    num_estimates: int = 0


class Format(ABC):
    """One manifest format: an instance reads one source, and knows nothing but the layout of its files.

    Attributes:
        name: For `--format`.
        description: Its layout, in a few words, for the message that no format fits.
        units: Normalised column names that imply another unit in this format than elsewhere.
        length_column: The column of the lengths if that is always the same.
        named_columns: Whether the file itself names its columns, so that the user can choose.
        unique_ids: Whether two rows with one id are an error.
        joined_by_id: Whether the rows of a target file are found by their ids, rather than line by line.
        sharded: Whether a file is a shard of a stream, even if it is the only one. With --skip-invalid, a damaged
            shard is read up to the damage.
        optional_columns: Whether a column may be missing from the first rows of one of several sources.
        missing_hint: What to do if most values are missing.
        of_folder: Whether it reads the files of a folder, rather than one file.
        folder_kind: A name for its files in a folder, and their endings.
        folder_names: Names of its files in a folder, the most useful first.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    units: ClassVar[Mapping[str, Unit]] = {}
    length_column: ClassVar[str | None] = None
    named_columns: ClassVar[bool] = True
    unique_ids: ClassVar[bool] = False
    joined_by_id: ClassVar[bool] = False
    sharded: ClassVar[bool] = False
    optional_columns: ClassVar[bool] = False
    missing_hint: ClassVar[str | None] = None
    of_folder: ClassVar[bool] = False
    folder_kind: ClassVar[tuple[str, tuple[str, ...]] | None] = None
    folder_names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, source: Source) -> None:
        self.source = source

    @staticmethod
    @abstractmethod
    def fits(head: Head) -> bool:
        """Return whether a file with this head is of this format. Takes any bytes, raises nothing."""

    @abstractmethod
    def columns(self) -> Sequence[Column]:
        """Return the columns of the first rows. Raises ManifestError for a file of another shape."""

    @abstractmethod
    def rows(self, keys: Sequence[str]) -> Iterator[Rows]:
        """Yield all rows, with the values of these columns. Raises ManifestError for a file of another shape."""

    def default_column(self, columns: Sequence[Column]) -> str | None:
        """Return the column to read if the user names none; None if only the known names can tell."""
        return self.length_column

    def default_target(self) -> str | None:
        """Return the column of the target lengths if the file itself says that it has them, else None."""
        return None

    def unit_in(self, column: str) -> Unit | None:
        """Return the unit of a column by what the file says of it, else by its name; None if neither says one."""
        return unit_of_name(column, self.units)


# The names under which data sets keep lengths, in order of preference, and the unit that each implies, or None.
# They are compared by `normalised`: `Duration[ms]`, `duration (ms)` and `duration_ms` are one name.
_NAMES: tuple[tuple[Unit | None, str], ...] = (
    ("s", "duration dur durations audio_duration speech_duration seconds duration_s duration_sec duration_secs"),
    ("s", "duration_seconds dur_s length_s length_sec length_seconds len_s"),
    ("ms", "duration_ms duration_msec duration_millis duration_milliseconds dur_ms length_ms len_ms milliseconds"),
    ("samples", "num_samples n_samples nsamples samples audio_samples"),
    ("frames", "num_frames n_frames nframes frames"),
    ("tokens", "num_tokens n_tokens ntokens tokens token_count token_length input_length input_tokens prompt_tokens"),
    ("tokens", "total_tokens num_prefill_tokens num_decode_tokens num_total_tokens"),
    ("words", "num_words n_words word_count"),
    ("characters", "num_chars n_chars chars char_count text_length num_characters n_characters characters"),
    ("bytes", "bytes num_bytes n_bytes size_bytes size file_size filesize"),
    (None, "length len sequence_length seq_length seq_len seqlen"),
)
KNOWN_UNITS: dict[str, Unit | None] = {}
for _unit, _names in _NAMES:
    KNOWN_UNITS.update(dict.fromkeys(_names.split(), _unit))

# Lists whose items are tokens; of a tokenized data set, the first two are the model's input.
_TOKEN_LISTS = ("input_ids", "token_ids", "tokens", "labels")
INPUTS = _TOKEN_LISTS[:2]
# Lists of messages.
_CHATS = ("messages", "conversations", "conversation")

# Where a row is likely to carry its id; messages show the first of these that exists.
_ID_NAMES = tuple("id utt_id uttid utt key audio_filepath audio_path path audio wav file clip name".split())

PEEKED_ROWS = 1000


def normalised(name: str) -> str:
    """Return a name in lower case, with runs of spaces, hyphens, dots and brackets as one underscore."""
    return re.sub(r"[\s\-_.()\[\]]+", "_", name.lower()).strip("_")


def unit_of_name(name: str, units: Mapping[str, Unit]) -> Unit | None:
    """Return the unit that a column's name, or its last part, implies: one of `units`, or one known everywhere."""
    whole = normalised(name)
    return units.get(whole) or KNOWN_UNITS.get(whole) or KNOWN_UNITS.get(normalised(last_part(name)))


def last_part(name: str) -> str:
    """Return the end of a dotted path: `json.duration` → `duration`."""
    return name.rpartition(".")[2]


def summarise(entries: Iterable[Mapping[str, object]]) -> list[Column]:
    """Return the columns of some rows, in the order in which they are first seen; all keys of all rows count.

    Nested values have dotted names, four levels deep, and come after the others; a list counts as its items.
    """
    examples: dict[str, object] = {}
    numbers: Counter[str] = Counter()
    texts: Counter[str] = Counter()
    for entry in entries:
        values: dict[str, object] = {}
        for path in sorted(_paths(entry, 4), key=lambda path: len(path) > 1):
            values.setdefault(".".join(path), walk(entry, path))
        for name, value in values.items():
            if examples.get(name) in (None, "", []):
                examples[name] = value
            items = value if isinstance(value, list) else (value,)
            if any(number(item) is not None for item in items):
                numbers[name] += 1
            elif any(isinstance(item, str) and item.strip() for item in items):
                texts[name] += 1
    columns = []
    for name, example in examples.items():
        columns.append(Column(name, example, numeric=numbers[name] > 0, text=texts[name] > numbers[name]))
    return columns


def chats_among(columns: Sequence[Column]) -> list[Column]:
    """Return a column for each list of messages: what `messages.role` and `messages.content` are parts of."""
    names = [f"{column.name}." for column in columns]
    chats = []
    for column in columns:
        whole, _, part = column.name.rpartition(".")
        if part == "role" and isinstance(column.example, list):
            if any(name.startswith(f"{whole}.content.") for name in names):
                chats.append(Column(whole, column.example, numeric=False, text=True, chat=True))
    return chats


def id_name(columns: Iterable[str]) -> str | None:
    """Return the column that names a row, or None."""
    names = {normalised(name): name for name in columns}
    return next((names[known] for known in _ID_NAMES if known in names), None)


def find_column(path: Path, columns: Sequence[Column], key: str, option: str) -> Column:
    """Return the column that the user named, if need be in other upper and lower case. Raises ManifestError."""
    exact = [column for column in columns if column.name == key]
    folded = [column for column in columns if column.name.casefold() == key.casefold()]
    for matches in (exact, folded):
        if len(matches) == 1:
            return matches[0]
    # An item of a list: prompt.0.content, where prompt.content is the column.
    whole = ".".join(part for part in dotted(key).split(".") if not part.isdecimal())
    for column in columns:
        if isinstance(column.example, list) and column.name == whole:
            return replace(column, name=dotted(key))
    # Within a value that the first rows did not show: JSON that is null there, too large or malformed.
    if any(column.example is None and key.startswith(f"{column.name}.") for column in columns):
        return Column(key, None, numeric=False)
    names = {column.name.casefold(): shortened(column.name) for column in columns}
    near = [names[name] for name in difflib.get_close_matches(key.casefold(), list(names), n=3, cutoff=0.5)]
    hint = f"Name one of them with {option} NAME."
    if near:
        hint = f"Did you mean {' or '.join(near)}?"
    raise ManifestError(f"{path} has no column {shortened(key)} ({option}). Its columns: {_listed(columns)}", hint)


def choose_column(path: Path, columns: Sequence[Column], taken: str | None, *, counts_texts: bool = False) -> Column:
    """Return the one column, other than the one taken, that holds lengths, or whose values have one.

    Columns with a known name come first, then tokens, chats, and nested columns with a known name; chats before all
    others if the user wants texts to be counted. Raises ManifestError for none or several: the message lists them with
    an example of each.
    """
    free = [column for column in columns if column.name != taken]
    chats = [column for column in free if column.chat and column.name in _CHATS]
    if counts_texts and len(chats) == 1:
        return chats[0]
    tokens = [column for column in free if column.holds_tokens and normalised(column.name) in INPUTS]
    for candidates in (_known(free, str), tokens, chats, _known(free, last_part)):
        if len(candidates) == 1:
            return candidates[0]
        if candidates:
            examples = [f"{shortened(column.name)} (such as {shortened(column.example, 40)})" for column in candidates]
            hint = f"Choose with --length-key NAME, for example --length-key {shortened(candidates[0].name)}."
            message = f"{path} has {len(candidates)} columns that may hold the lengths: {_first(examples)}"
            raise ManifestError(message, hint)
    hint = "Name the column that holds the lengths with --length-key NAME."
    if any(number(column.name) is not None for column in columns):
        hint = "One of these names is a number: a table needs a first line that names its columns."
    raise ManifestError(f"{path} has no column that is known to hold lengths. Its columns: {_listed(columns)}", hint)


def _known(columns: Sequence[Column], part: Callable[[str], str]) -> list[Column]:
    """Return the columns whose name, or this part of it, is known for lengths; the preferred name first."""
    ranks = {name: rank for rank, name in enumerate(KNOWN_UNITS)}
    known = [column for column in columns if normalised(part(column.name)) in ranks]
    numeric = [column for column in known if column.numeric]
    return sorted(numeric or known, key=lambda column: ranks[normalised(part(column.name))])


def _listed(columns: Sequence[Column]) -> str:
    names = []
    for column in columns:
        name = column.name
        if len(name) > QUOTED_CHARACTERS:
            name = shortened(name)
        if column.numeric:
            name += " (numeric)"
        names.append(name)
    return _first(names)


def _first(texts: Sequence[str]) -> str:
    shown = list(texts[:20])
    if len(texts) > 20:
        shown.append(f"and {len(texts) - 20:,} more")
    return ", ".join(shown)


def dotted(key: str) -> str:
    """Rewrite the indices of a path: `prompt[0].content` becomes `prompt.0.content`."""
    return re.sub(r"\[(\d{1,6})\]", r".\1", key)


def walk(value: object, path: Sequence[str]) -> object:
    """Return the value at a path below another, or None.

    A list on the way is indexed by a whole number; any other name gives the list of what its items have there.
    """
    for position, part in enumerate(path):
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, list) and part.isdecimal():
            value = value[int(part)] if len(part) <= 9 and int(part) < len(value) else None
        elif isinstance(value, list):
            rest = path[position:]
            return [walk(item, rest) for item in value]
        else:
            return None
    return value


def _paths(value: object, depth: int) -> Iterator[tuple[str, ...]]:
    """Yield the paths of the leaves below a mapping, or below the first mapping of a list; () for a leaf itself."""
    if isinstance(value, list):
        value = next((item for item in value if isinstance(item, Mapping)), None)
    if depth == 0 or not isinstance(value, Mapping):
        yield ()
        return
    for name, child in value.items():
        for path in _paths(child, depth - 1):
            yield (name, *path)
