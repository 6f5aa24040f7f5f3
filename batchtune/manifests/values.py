"""Values as they stand in a file → numbers, what is wrong with the others, and how texts and lists are measured."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from batchtune.errors import ManifestError, UsageError, shortened
from batchtune.lengths import FloatArray, Unit

# Beyond these no data set goes, whatever its unit; sums and squares of lengths must stay exact and finite.
SMALLEST = 1e-9
LARGEST = 1e15


class Unreadable:
    """Stands for a value that could not be read, such as the length of a damaged audio file.

    Not a dataclass: msgspec would send one to another process as a mapping.

    Args:
        reason: In a few words, the same for all of a kind: by it they are counted.
        detail: What was seen, for the message; may be empty.
    """

    __slots__ = ("detail", "reason")

    def __init__(self, reason: str, detail: str = "") -> None:
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


def numbers(values: Sequence[object] | FloatArray) -> FloatArray:
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
    """Say in a word or two why a value is not a valid length.

    Args:
        value: As it stands in the file.
        scaled: What `numbers` and the scale made of it.
    """
    if isinstance(value, Unreadable):
        return value.reason
    named = {type(None): "missing", bool: "a boolean", list: "a list", dict: "an object"}
    if type(value) in named:
        return named[type(value)]
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


Counting = Literal["characters", "words", "bytes"]
COUNTINGS: tuple[Counting, ...] = get_args(Counting)
Reduction = Literal["max", "sum", "first", "count"]
REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)

Count = Callable[[Sequence[str]], Sequence[int]]
Values = Sequence[object] | FloatArray


def counter(counting: Counting, tokenizer: Path | None) -> tuple[Count, Unit]:
    """Return how texts are counted, and the unit of what comes out.

    Args:
        counting: What is counted without a tokenizer.
        tokenizer: A `tokenizer.json` of Hugging Face's tokenizers: its tokens are counted, with the special ones that
            it adds to a single sequence.

    Raises:
        UsageError: The package is not installed.
        ManifestError: The tokenizer can't be read.
    """
    if tokenizer is not None:
        return _tokens(tokenizer), "tokens"
    return _COUNTS[counting], counting


def measured(values: Values, count: Count) -> Sequence[object]:
    """Replace texts, also those in lists, by their lengths; any other value is Unreadable, but for None."""
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if set(map(type, values)) == {str}:
        return count(values)  # type: ignore[arg-type]  # all are str
    return [_measured(value, count) for value in values]


def _measured(value: object, count: Count) -> object:
    if isinstance(value, str):
        return count([value])[0]
    if isinstance(value, list):
        return [count([item])[0] if isinstance(item, str) else item for item in value]
    return value if value is None or isinstance(value, Unreadable) else Unreadable("not text", shortened(value))


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
    for item in items:
        if number(item) is None:
            return Unreadable("a list that does not only hold numbers", shortened(item))
    return _REDUCE[reduction]([found for item in items if (found := number(item)) is not None])


_COUNTS: dict[Counting, Count] = {
    "characters": lambda texts: list(map(len, texts)),
    "words": lambda texts: [len(text.split()) for text in texts],
    "bytes": lambda texts: [len(text.encode("utf-8", errors="surrogatepass")) for text in texts],
}
_REDUCE: dict[Reduction, Callable[[list[float]], float]] = {"max": max, "sum": sum, "first": operator.itemgetter(0)}


def _tokens(path: Path) -> Count:
    try:
        import tokenizers
    except ImportError:
        hint = "Install it: pip install 'batchtune[text]'."
        raise UsageError("--tokenizer needs the package tokenizers", hint) from None
    if not path.is_file():
        raise ManifestError(f"{path}, the tokenizer, does not exist", "Name a tokenizer.json on this machine.")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing more particular
        raise ManifestError(f"{path} is not a tokenizer: {error}", "Name a tokenizer.json of tokenizers.") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda texts: [len(encoding) for encoding in tokenizer.encode_batch(list(texts))]
