"""Which column holds the lengths: the names that data sets use, and dotted paths into nested values."""

from __future__ import annotations

import difflib
import operator
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from batchtune.errors import QUOTED_CHARACTERS, ManifestError, shortened
from batchtune.lengths import Unit
from batchtune.manifests.base import Column
from batchtune.manifests.values import number

# The names under which data sets keep lengths, and the unit that each implies; None if it implies none.
# They are compared by `normalised`: `Duration[ms]`, `duration (ms)` and `duration_ms` are one name.
KNOWN_UNITS: dict[str, Unit | None] = {
    **dict.fromkeys(("duration", "dur", "durations", "audio_duration", "speech_duration", "seconds"), "s"),
    **dict.fromkeys(("duration_s", "duration_sec", "duration_secs", "duration_seconds"), "s"),
    **dict.fromkeys(("dur_s", "length_s", "length_sec", "length_seconds", "len_s"), "s"),
    **dict.fromkeys(("duration_ms", "duration_msec", "duration_millis", "duration_milliseconds"), "ms"),
    **dict.fromkeys(("dur_ms", "length_ms", "len_ms", "milliseconds"), "ms"),
    **dict.fromkeys(("num_samples", "n_samples", "nsamples", "samples", "audio_samples"), "samples"),
    **dict.fromkeys(("num_frames", "n_frames", "nframes", "frames"), "frames"),
    **dict.fromkeys(("num_tokens", "n_tokens", "ntokens", "tokens", "token_count", "token_length"), "tokens"),
    **dict.fromkeys(("input_length", "input_tokens", "prompt_tokens", "total_tokens"), "tokens"),
    **dict.fromkeys(("num_prefill_tokens", "num_decode_tokens", "num_total_tokens"), "tokens"),
    **dict.fromkeys(("num_words", "n_words", "word_count"), "words"),
    **dict.fromkeys(("num_chars", "n_chars", "chars", "char_count", "text_length"), "characters"),
    **dict.fromkeys(("num_characters", "n_characters", "characters"), "characters"),
    **dict.fromkeys(("bytes", "num_bytes", "n_bytes", "size_bytes", "size", "file_size", "filesize"), "bytes"),
    **dict.fromkeys(("length", "len", "sequence_length", "seq_length", "seq_len", "seqlen"), None),
}

# Where a row is likely to carry its id; the first of these that is there is shown in messages.
ID_NAMES = tuple("id utt_id uttid utt key audio_filepath audio_path path audio wav file clip name".split())

PEEKED_ROWS = 1000
_LISTED = 20
_DEPTH = 4
_INDEX = re.compile(r"\[(\d{1,6})\]")


def normalised(name: str) -> str:
    """Return a name in lower case, with runs of spaces, hyphens, dots and brackets as one underscore."""
    return re.sub(r"[\s\-_.()\[\]]+", "_", name.lower()).strip("_")


def last_part(name: str) -> str:
    """Return the end of a dotted path: `json.duration` → `duration`."""
    return name.rpartition(".")[2]


def summarise(entries: Iterable[Mapping[str, object]]) -> list[Column]:
    """Return the columns of some rows, in the order in which they are first seen; all keys of all rows count.

    Nested values have dotted names there, and a list counts as its items.
    """
    examples: dict[str, object] = {}
    numbers: Counter[str] = Counter()
    texts: Counter[str] = Counter()
    for entry in entries:
        for name, value in flattened(entry).items():
            if examples.get(name) in (None, "", []):
                examples[name] = value
            items = value if isinstance(value, list) else (value,)
            if any(number(item) is not None for item in items):
                numbers[name] += 1
            elif any(isinstance(item, str) and item.strip() for item in items):
                texts[name] += 1
    return [Column(name, one, numbers[name] > 0, texts[name] > numbers[name]) for name, one in examples.items()]


def id_name(columns: Iterable[str]) -> str | None:
    """Return the column that names a row, or None."""
    names = {normalised(name): name for name in columns}
    return next((names[known] for known in ID_NAMES if known in names), None)


def find_column(path: Path, columns: Sequence[Column], key: str, option: str) -> Column:
    """Return the column that the user named: exactly so or, where only one is, in other upper and lower case.

    Raises:
        ManifestError: No column has that name; the message names the nearest, or all.
    """
    exact = [column for column in columns if column.name == key]
    found = exact or [column for column in columns if column.name.casefold() == key.casefold()]
    if len(found) == 1:
        return found[0]
    # An item of a list: prompt.0.content, where prompt.content is the column.
    for column in columns:
        if isinstance(column.example, list) and column.name == without_indices(dotted(key)):
            return replace(column, name=dotted(key))
    # Within a value that the first rows did not show: JSON that is null there, too large or malformed.
    if any(column.example is None and key.startswith(f"{column.name}.") for column in columns):
        return Column(key, None, numeric=False)
    folded = {column.name.casefold(): column.name for column in columns}
    near = [folded[name] for name in difflib.get_close_matches(key.casefold(), list(folded), n=3, cutoff=0.5)]
    meant = f"Did you mean {' or '.join(map(shortened, near))}?" if near else f"Name one of them with {option} NAME."
    raise ManifestError(f"{path} has no column {shortened(key)} ({option}). Its columns: {_listed(columns)}", meant)


def choose_column(path: Path, columns: Sequence[Column], taken: str | None) -> Column:
    """Return the one column that is known to hold lengths.

    Args:
        path: For messages.
        columns: Of the manifest.
        taken: A column that already has another use, or None.

    Raises:
        ManifestError: None is, or several are: the message lists them with an example of each.
    """
    free = [column for column in columns if column.name != taken]
    order = {name: index for index, name in enumerate(KNOWN_UNITS)}
    for part in (str, last_part):
        known = [(order[normalised(part(one.name))], one) for one in free if normalised(part(one.name)) in order]
        candidates = [one for one in known if one[1].numeric] or known
        if len(candidates) == 1:
            return candidates[0][1]
        if candidates:
            named = [column for _, column in sorted(candidates, key=operator.itemgetter(0))]
            examples = [f"{shortened(one.name)} (such as {shortened(one.example, 40)})" for one in named]
            raise ManifestError(
                f"{path} has {len(named)} columns that may hold the lengths: {_first(examples)}",
                f"Choose with --length-key NAME, for example --length-key {shortened(named[0].name)}.",
            )
    hint = "Name the column that holds the lengths with --length-key NAME."
    if any(number(column.name) is not None for column in columns):
        hint = "One of these names is a number: a table needs a first line that names its columns."
    raise ManifestError(f"{path} has no column that is known to hold lengths. Its columns: {_listed(columns)}", hint)


def _listed(columns: Sequence[Column]) -> str:
    names = (one.name if len(one.name) <= QUOTED_CHARACTERS else shortened(one.name) for one in columns)
    return _first([name + (" (numeric)" if one.numeric else "") for name, one in zip(names, columns, strict=True)])


def _first(texts: Sequence[str]) -> str:
    more = [f"and {len(texts) - _LISTED:,} more"] if len(texts) > _LISTED else []
    return ", ".join([*texts[:_LISTED], *more])


def dotted(key: str) -> str:
    """Return a path as it is written here: `prompt[0].content` becomes `prompt.0.content`."""
    return _INDEX.sub(r".\1", key)


def without_indices(key: str) -> str:
    """Return a path as columns are listed: `prompt.0.content` becomes `prompt.content`."""
    return ".".join(part for part in key.split(".") if not part.isdecimal())


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


def flattened(entry: Mapping[str, object]) -> dict[str, object]:
    """Return an entry with its nested values under dotted names, four levels deep, after those that are not nested."""
    found = {name: value for name, value in entry.items() if not _nested(value)}
    for name, value in entry.items():
        if _nested(value):
            for path in _paths(value, _DEPTH - 1):
                found.setdefault(".".join((name, *path)), walk(value, path))
    return found


def _nested(value: object) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list) and any(isinstance(item, Mapping) for item in value))


def _paths(value: object, depth: int) -> Iterator[tuple[str, ...]]:
    """Yield the paths of the leaves below a mapping, or below the first mapping of a list."""
    if isinstance(value, list):
        value = next((item for item in value if isinstance(item, Mapping)), None)
    if not isinstance(value, Mapping):
        return
    for name, one in value.items():
        if _nested(one) and depth > 1:
            for path in _paths(one, depth - 1):
                yield (name, *path)
        else:
            yield (name,)
