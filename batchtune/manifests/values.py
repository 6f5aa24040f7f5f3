"""Turn values of a file into numbers: text is counted, lists are reduced, and invalid values say what is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from batchtune.errors import ManifestError, UsageError, shortened
from batchtune.lengths import FloatArray, Unit

# Beyond these no data set goes, whatever its unit; sums and squares of lengths must stay exact and finite.
SMALLEST = 1e-9
LARGEST = 1e15

Counting = Literal["characters", "words", "bytes"]
COUNTINGS: tuple[Counting, ...] = get_args(Counting)
Reduction = Literal["max", "sum", "first", "count"]
REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)

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
        self.detail = detail

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unreadable) and (self.reason, self.detail) == (other.reason, other.detail)

    def __hash__(self) -> int:
        return hash((self.reason, self.detail))

    def __repr__(self) -> str:
        return self.detail or "unreadable"


def number(value: object) -> float | None:
    """Return a value as a number, or None if it is not one; text is read, `nan` and `inf` count as numbers."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    if isinstance(value, str) and "_" in value:  # Python's digit grouping, no number in a manifest
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
    return np.array([math.nan if value is None else value for value in map(number, values)], dtype=np.float64)


def fault(value: object, scaled: float) -> str:
    """Say in a word or two why a value, and what `numbers` and the scale made of it, is not a valid length."""
    if isinstance(value, Unreadable):
        return value.reason
    names = {type(None): "missing", bool: "a boolean", list: "a list", dict: "an object"}
    if type(value) in names:
        return names[type(value)]
    if isinstance(value, str) and not value.strip():
        return "empty"
    if number(value) is None:
        return "text"
    if math.isnan(scaled):
        return "NaN"
    if math.isinf(scaled):
        return "infinite"
    if scaled > LARGEST:
        return "absurdly long"
    if 0 < scaled < SMALLEST:
        return "absurdly short"
    return "zero" if scaled == 0 else "negative"


def measured(values: Values, count: Count) -> Sequence[object]:
    """Replace texts, also those in lists, by their lengths; any other value is Unreadable, but for None."""
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if set(map(type, values)) == {str}:
        return count(values)  # type: ignore[arg-type]  # all are str
    lengths: list[object] = []
    for value in values:
        if isinstance(value, str):
            lengths += count([value])
        elif isinstance(value, list):
            lengths.append([count([item])[0] if isinstance(item, str) else item for item in value])
        elif value is None or isinstance(value, Unreadable):
            lengths.append(value)
        else:
            lengths.append(Unreadable("not text", shortened(value)))
    return lengths


def reduced(values: Values, reduction: Reduction) -> Values:
    """Replace lists by one number each; any other value stays."""
    if isinstance(values, np.ndarray):
        return values
    return [_reduced(value, reduction) if isinstance(value, list) else value for value in values]


def _reduced(items: list[object], reduction: Reduction) -> object:
    if reduction == "count":
        return len(items)
    if not items:
        return Unreadable("an empty list", "[]")
    sizes = []
    for item in items:
        size = number(item)
        if size is None:
            return Unreadable("a list that does not only hold numbers", shortened(item))
        sizes.append(size)
    if reduction == "first":
        return sizes[0]
    return max(sizes) if reduction == "max" else sum(sizes)


_COUNTS: dict[str, Count] = {
    "characters": lambda texts: list(map(len, texts)),
    "words": lambda texts: [len(text.split()) for text in texts],
    "bytes": lambda texts: [len(text.encode("utf-8", errors="surrogatepass")) for text in texts],
}


@lru_cache
def counter(unit: str, tokenizer: Path | None, *, adds_special_tokens: bool = True) -> Count:
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
        raise ManifestError(f"{path}, the tokenizer, does not exist", "Name a tokenizer.json on this machine.")
    try:
        loaded = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing more particular
        hint = "Name a tokenizer.json of tokenizers."
        raise ManifestError(f"{tokenizer} is not a tokenizer: {error}", hint) from None
    loaded.no_truncation()
    loaded.no_padding()

    def count(texts: Sequence[str]) -> list[int]:
        return list(map(len, loaded.encode_batch(list(texts), add_special_tokens=adds_special_tokens)))

    return count


def tokenizer_file(tokenizer: Path) -> Path:
    """Return the tokenizer's file: a folder's is `tokenizer.json`."""
    return tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
