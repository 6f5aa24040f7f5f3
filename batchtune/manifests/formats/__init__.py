"""The base class of every manifest format, with its columns, its rows, and the raw values in them."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from batchtune.lengths import FloatArray, IntArray, Unit
from batchtune.manifests.source import Head, Source

# Of a list, the number of its items.
COUNT = "count"

PEEKED_ROWS = 1000
_DEEPEST = 4

# The names under which data sets keep lengths, in order of preference, and the unit that each implies, or None.
# They are compared by `normalised`: `Duration[ms]`, `duration (ms)` and `duration_ms` are one name.
_NAMES: tuple[tuple[Unit | None, str], ...] = (
    (
        "s",
        "duration dur durations audio_duration speech_duration seconds duration_s duration_sec duration_secs",
    ),
    ("s", "duration_seconds dur_s length_s length_sec length_seconds len_s"),
    (
        "ms",
        "duration_ms duration_msec duration_millis duration_milliseconds dur_ms length_ms len_ms milliseconds",
    ),
    ("samples", "num_samples n_samples nsamples samples audio_samples"),
    ("frames", "num_frames n_frames nframes frames"),
    (
        "tokens",
        "num_tokens n_tokens ntokens tokens token_count token_length input_length input_tokens prompt_tokens",
    ),
    ("tokens", "total_tokens num_prefill_tokens num_decode_tokens num_total_tokens"),
    ("tokens", "output_tokens completion_tokens response_tokens generated_tokens"),
    ("words", "num_words n_words word_count"),
    (
        "characters",
        "num_chars n_chars chars char_count text_length num_characters n_characters characters",
    ),
    ("bytes", "bytes num_bytes n_bytes size_bytes size file_size filesize"),
    (None, "length len sequence_length seq_length seq_len seqlen"),
)
KNOWN_UNITS: dict[str, Unit | None] = {}
for _unit, _names in _NAMES:
    KNOWN_UNITS.update(dict.fromkeys(_names.split(), _unit))

# Lists whose items are tokens; of a tokenized data set, the first two are the model's input.
TOKEN_LISTS = ("input_ids", "token_ids", "tokens", "labels")
INPUTS = TOKEN_LISTS[:2]
_COUNTED_UNITS: dict[str, Unit] = {
    **dict.fromkeys((f"{name}_{COUNT}" for name in TOKEN_LISTS), "tokens"),
    f"input_values_{COUNT}": "samples",
}

# Where a row is likely to carry its id; messages show the first of these that exists.
ID_NAMES = tuple(
    "id utt_id uttid utt key audio_filepath audio_path path audio wav file clip name".split()
)


# What the messages of a chat hold.
MESSAGES = ({"role", "content"}, {"from", "value"})

Values = Sequence[object] | FloatArray

# The keys on the way from an object to a value in it.
KeyPath = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a manifest, or a key of its JSON objects.

    Attributes:
        values: Those in the first rows, without missing ones.
        is_text: Whether numbers are texts too.
        is_binary: Whether the values, which are not shown, are bytes.
    """

    name: str
    values: Sequence[object] = ()
    is_text: bool = False
    is_binary: bool = False

    @property
    def example(self) -> object:
        """A value that is not empty; None without one."""
        return next((value for value in self.values if value not in ("", [])), None)

    @property
    def numeric(self) -> bool:
        """Whether one of the values is a number, or a list with one."""
        return any(_holds_number(value) for value in self.values)

    @property
    def text(self) -> bool:
        """Whether more of the values are text than numbers: then their lengths are counted."""
        others = [value for value in self.values if not _holds_number(value)]
        num_texts = sum(map(_holds_text, others))
        return self.is_text or num_texts > len(self.values) - len(others)

    @property
    def chat(self) -> bool:
        """Whether the values are lists of messages, each with a role and a content, or as ShareGPT calls them."""
        example = self.example
        return (
            isinstance(example, list)
            and isinstance(example[0], dict)
            and any(names <= example[0].keys() for names in MESSAGES)
        )

    @property
    def holds_tokens(self) -> bool:
        """Whether the values are lists of tokens, by their name: then their number of items is the length."""
        return (
            isinstance(self.example, list)
            and normalised(last_part(self.name)) in TOKEN_LISTS
        )

    @property
    def known_unit(self) -> Unit | None:
        """The unit that the name implies."""
        return KNOWN_UNITS.get(normalised(self.name)) or KNOWN_UNITS.get(
            normalised(last_part(self.name))
        )


@dataclass(frozen=True, slots=True)
class Rows:
    """Some consecutive rows of a manifest, unchecked.

    Attributes:
        columns: The values of each column that is read, as in the file: text, or JSON values (lists too), None if
            missing; or an array of floats.
        ids: Returns the id of every row, None for a row without one.
        place: Maps the index of a row to a name of its place, such as `line 3`.
        left_out: Reason → number of examples that the reader itself left out.
        num_estimates: How many lengths are estimates.
        counts: How many examples each row stands for, in a histogram; None if each is one.
        order: Which row of the data set each is, from 0, if they stand in another order; else None.
    """

    columns: Sequence[Values]
    ids: Callable[[], Sequence[str | None]]
    place: Callable[[int], str] | None = None
    left_out: Mapping[str, int] = field(default_factory=dict)
    num_estimates: int = 0
    counts: IntArray | None = None
    order: IntArray | None = None


class Format(ABC):
    """One manifest format: an instance reads one source, and knows nothing but the layout of its files.

    Attributes:
        name: For `--format`.
        description: Its layout, in a few words, for the message that no format fits.
        units: Normalised column names that imply another unit in this format than elsewhere.
        names_columns: Whether the file itself names its columns, so that the user can choose.
        unique_ids: Whether two rows with one id are an error, and target files are joined by id.
        sharded: Whether a file is a shard of a stream, even if it is the only one. With --skip-invalid, a damaged
            shard is read up to the damage.
        of_folder: Whether it reads the files of a folder, rather than one file.
        endings: Of its files in a folder.
        length_column: The column of the lengths, if it is always the same.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    units: ClassVar[Mapping[str, Unit]] = {}
    names_columns: ClassVar[bool] = True
    unique_ids: ClassVar[bool] = False
    sharded: ClassVar[bool] = False
    of_folder: ClassVar[bool] = False
    endings: ClassVar[tuple[str, ...]] = ()
    length_column: ClassVar[str | None] = None

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
        """Return the column of the lengths if the format has one; None if the columns' names must tell."""
        return self.length_column

    def default_target(self) -> str | None:
        """Return the column of the target lengths if the file itself says that it has them, else None."""
        return None

    @property
    def noted_fingerprints(self) -> tuple[str, str] | None:
        """The digest of a histogram's runs and the fingerprint of its lengths, as the file notes them; else None."""
        return None

    @property
    def order_is_lost(self) -> bool:
        """Whether the rows stand in another order than the examples of the data set, and none tells which it is."""
        return False

    def unit_in(self, column: str) -> Unit | None:
        """Return the unit of a column by what the file says of it, else by its name; None if neither says one."""
        name = normalised(column)
        return (
            self.units.get(name)
            or _COUNTED_UNITS.get(name)
            or Column(column).known_unit
        )


class Unreadable(Exception):
    """A value that can't be read, such as the length of a damaged audio file; it stands among the values.

    The reason is the same for all of a kind, which are counted by it; the detail, for the message, may be empty.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class Estimate(float):
    """A length in seconds that is an estimate."""


def count_estimates(values: Values) -> int:
    """Return how many of the values are estimates."""
    return sum(type(value) is Estimate for value in values)


def number(value: object) -> float | None:
    """Return a value as a number, or None if it is not one; text is read, `nan` and `inf` count as numbers."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    # Python's digit grouping, no number in a manifest.
    if isinstance(value, str) and "_" in value:
        return None
    try:
        return float(value)
    except ValueError:
        return None
    except OverflowError:
        return math.inf


def walk(value: object, path: KeyPath) -> object:
    """Return the value at a path below another, or None.

    A list on the way is indexed by a whole number, `count` at the end is the number of its items, and any other name
    gives the list of what its items have there.
    """
    for position, part in enumerate(path):
        if isinstance(value, Mapping):
            value = value.get(part)
        elif not isinstance(value, list):
            return None
        elif part.isdecimal():
            value = (
                value[int(part)] if len(part) <= 9 and int(part) < len(value) else None
            )
        elif path[position:] == (COUNT,):
            return len(value)
        else:
            return [walk(item, path[position:]) for item in value]
    return value


def normalised(name: str) -> str:
    """Return a name in lower case, with runs of spaces, hyphens, dots and brackets as one underscore."""
    return re.sub(r"[\s\-_.()\[\]]+", "_", name.lower()).strip("_")


def last_part(name: str) -> str:
    """Return the end of a dotted path: `json.duration` → `duration`."""
    return name.rpartition(".")[2]


def id_name(columns: Iterable[str]) -> str | None:
    """Return the column that names a row, or None."""
    names = {normalised(name): name for name in columns}
    return next((names[known] for known in ID_NAMES if known in names), None)


def columns_of(rows: Iterable[Mapping[str, object]]) -> list[Column]:
    """Return the columns of some rows, those within mappings under dotted names, four levels deep."""
    values_by_name: dict[str, list[object]] = {}
    for row in rows:
        for name, value in _flattened(row, _DEEPEST):
            values = values_by_name.setdefault(name, [])
            if value is not None:
                values.append(value)
    return [Column(name, values) for name, values in values_by_name.items()]


def _flattened(row: Mapping[str, object], depth: int) -> Iterator[tuple[str, object]]:
    for name, value in row.items():
        if isinstance(value, Mapping) and depth > 1:
            for part, inner in _flattened(value, depth - 1):
                yield f"{name}.{part}", inner
        else:
            yield name, value


def _holds_number(value: object) -> bool:
    if isinstance(value, list):
        return any(number(item) is not None for item in value)
    return number(value) is not None


def _holds_text(value: object) -> bool:
    if isinstance(value, list):
        return any(_holds_text(item) for item in value)
    return isinstance(value, str) and bool(value.strip())
