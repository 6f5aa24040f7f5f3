"""Turn values of a file into numbers: text is counted, lists are reduced, and invalid values say what is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from batchtune.errors import ManifestError, UsageError, shortened
from batchtune.lengths import FloatArray, Unit

if TYPE_CHECKING:
    pass

# Beyond these no data set goes, whatever its unit; sums and squares of lengths must stay exact and finite.
SMALLEST = 1e-9
LARGEST = 1e15

Counting = Literal["characters", "words", "bytes"]
COUNTINGS: tuple[Counting, ...] = get_args(Counting)
Reduction = Literal["max", "sum", "first", "count"]
REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)

# Of a list, the number of its items.
COUNT = "count"

Values = Sequence[object] | FloatArray
Count = Callable[[Sequence[str]], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Measure:
    """How the values of a column become numbers.

    Attributes:
        texts: The unit in which texts are counted; None if the values are numbers.
        lists: How a list becomes one number; None if a list is invalid.
        chats: Whether the values are lists of messages, each list one text.
    """

    texts: Unit | None = None
    lists: Reduction | None = None
    chats: bool = False


class Unreadable(Exception):
    """A value that can't be read, such as the length of a damaged audio file; it stands among the values.

    The reason is the same for all of a kind, which are counted by it; the detail, for the message, may be empty.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class Estimate(float):
    """A length in seconds that is an estimate."""


def number(value: object) -> float | None:
    """Return a value as a number, or None if it is not one; text is read, `nan` and `inf` count as numbers."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    if (
        isinstance(value, str) and "_" in value
    ):  # Python's digit grouping, no number in a manifest
        return None
    try:
        return float(value)
    except ValueError:
        return None
    except OverflowError:
        return math.inf


def numbers(values: Values) -> FloatArray:
    """Return values as float64, shape (len(values),), NaN where one is not a number."""
    if isinstance(values, np.ndarray):
        return values
    types = set(map(type, values))
    try:
        if types <= {int, float}:
            return np.array(values, dtype=np.float64)
        if types == {str} and "_" not in "".join(values):  # type: ignore[arg-type]  # all are str
            return np.fromiter(map(float, values), dtype=np.float64, count=len(values))  # type: ignore[arg-type]
    except (ValueError, OverflowError):
        pass  # one of them is not a number: take them one by one
    return np.array(list(map(number, values)), dtype=np.float64)  # None becomes NaN


def fault(value: object, scaled: float) -> str:
    """Say in a word or two why a value, and what `numbers` and the scale made of it, is not a valid length."""
    if isinstance(value, Unreadable):
        return value.reason
    if isinstance(value, str) and not value.strip():
        return "empty"
    if number(value) is None:
        names = {
            type(None): "missing",
            bool: "a boolean",
            list: "a list",
            dict: "an object",
            str: "text",
        }
        return names.get(type(value), "not a number")
    if math.isnan(scaled):
        return "NaN"
    if math.isinf(scaled):
        return "infinite"
    if scaled > LARGEST:
        return "absurdly long"
    if 0 < scaled < SMALLEST:
        return "absurdly short"
    if scaled == 0:
        return "zero"
    return "negative"


def walk(value: object, path: tuple[str, ...]) -> object:
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


def measured(values: Values, count: Count) -> Sequence[object]:
    """Replace texts, also those in lists, by their lengths; any other value is Unreadable, but for None."""
    if set(map(type, values)) == {str}:
        return count(values)  # type: ignore[arg-type]  # all are str
    return [_measured_one(value, count) for value in values]


def _measured_one(value: object, count: Count) -> object:
    if isinstance(value, str):
        return count([value])[0]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return list(count(value))
    if value is None or isinstance(value, Unreadable):
        return value
    return Unreadable("not text", shortened(value))


def reduced(values: Values, reduction: Reduction) -> Values:
    """Replace lists by one number each; any other value stays."""
    if isinstance(values, np.ndarray):
        return values
    return [
        _reduced(value, reduction) if isinstance(value, list) else value
        for value in values
    ]


def _reduced(items: list[object], reduction: Reduction) -> object:
    if reduction == "count":
        return len(items)
    sizes = numbers(items)
    if not sizes.size or np.isnan(sizes).any():
        return Unreadable("an empty list, or not of numbers", shortened(items))
    if reduction == "first":
        return float(sizes[0])
    if reduction == "max":
        return float(sizes.max())
    return float(sizes.sum())


_COUNTS: dict[str, Count] = {
    "characters": lambda texts: list(map(len, texts)),
    "words": lambda texts: [len(text.split()) for text in texts],
    "bytes": lambda texts: [
        len(text.encode("utf-8", errors="surrogatepass")) for text in texts
    ],
}


@lru_cache
def counter(
    unit: str, tokenizer: Path | None, *, adds_special_tokens: bool = True
) -> Count:
    """Return a function that counts characters, words, bytes, or tokens of texts.

    The tokenizer is a `tokenizer.json` of Hugging Face's tokenizers, or its folder; the special tokens that it adds to
    a single sequence count. Raises UsageError without the package tokenizers, ManifestError for a damaged tokenizer.
    """
    if tokenizer is None:
        return _COUNTS[unit]
    try:
        import tokenizers
    except ImportError:
        hint = "Install it: pip install 'batchtune[text]'."
        raise UsageError("--tokenizer needs the package tokenizers", hint) from None
    path = tokenizer_file(tokenizer)
    if not path.is_file():
        raise ManifestError(
            f"{path}, the tokenizer, does not exist",
            "Name a tokenizer.json on this machine.",
        )
    try:
        loaded = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing more particular
        hint = "Name a tokenizer.json of tokenizers."
        raise ManifestError(f"{tokenizer} is not a tokenizer: {error}", hint) from None
    loaded.no_truncation()
    loaded.no_padding()

    def count(texts: Sequence[str]) -> list[int]:
        return list(
            map(
                len,
                loaded.encode_batch(
                    list(texts), add_special_tokens=adds_special_tokens
                ),
            )
        )

    return count


def tokenizer_file(tokenizer: Path) -> Path:
    """Return the tokenizer's file: a folder's is `tokenizer.json`."""
    if tokenizer.is_dir():
        return tokenizer / "tokenizer.json"
    return tokenizer
