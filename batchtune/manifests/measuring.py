"""Text → how long it is, and lists → one length."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar, get_args

import numpy as np

from batchtune.errors import ManifestError, UsageError, shortened
from batchtune.lengths import FloatArray, Unit
from batchtune.manifests.values import Unreadable, number

Counting = Literal["characters", "words", "bytes"]
COUNTINGS: tuple[Counting, ...] = get_args(Counting)
Reduction = Literal["max", "sum", "first", "count"]
REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)

Count = Callable[[Sequence[str]], Sequence[int]]
Values = Sequence[object] | FloatArray
N = TypeVar("N", int, float)


def counter(counting: Counting, tokenizer: Path | None) -> tuple[Count, Unit]:
    """How texts are counted, and the unit of what comes out.

    Args:
        counting: What is counted where there is no tokenizer.
        tokenizer: A `tokenizer.json` of Hugging Face's tokenizers: its tokens are counted, the special ones that
            it adds to a single sequence included.

    Raises:
        UsageError: The package is not installed.
        ManifestError: The tokenizer can't be read.
    """
    if tokenizer is not None:
        return _tokens(tokenizer), "tokens"
    return _COUNTS[counting], counting


def measured(values: Values, count: Count) -> Sequence[object]:
    """Texts, also those in lists, replaced by their lengths; what is no text is Unreadable, None stays."""
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if set(map(type, values)) == {str}:
        return count(values)  # type: ignore[arg-type]  # all are str
    found: list[object] = []
    for value in values:
        if isinstance(value, str):
            found.append(count([value])[0])
        elif isinstance(value, list):
            found.append([count([item])[0] if isinstance(item, str) else item for item in value])
        elif value is None or isinstance(value, Unreadable):
            found.append(value)
        else:
            found.append(Unreadable("no text", shortened(value)))
    return found


def reduced(values: Values, reduction: Reduction) -> Values:
    """Lists replaced by one number each; what is no list stays."""
    if isinstance(values, np.ndarray):
        return values
    return [_reduced(value, reduction) if isinstance(value, list) else value for value in values]


def _reduced(items: list[object], reduction: Reduction) -> object:
    if reduction == "count":
        return len(items)
    if not items:
        return Unreadable("an empty list", "[]")
    numbers = [found for item in items if (found := number(item)) is not None]
    if len(numbers) < len(items):
        odd = next(item for item in items if number(item) is None)
        return Unreadable("a list that holds no numbers alone", shortened(odd))
    return _REDUCE[reduction](numbers)


def _words(texts: Sequence[str]) -> list[int]:
    return [len(text.split()) for text in texts]


def _bytes(texts: Sequence[str]) -> list[int]:
    return [len(text.encode("utf-8", errors="surrogatepass")) for text in texts]


_COUNTS: dict[Counting, Count] = {"characters": lambda texts: list(map(len, texts)), "words": _words, "bytes": _bytes}
_REDUCE: dict[Reduction, Callable[[list[float]], float]] = {"max": max, "sum": sum, "first": operator.itemgetter(0)}


def _tokens(path: Path) -> Count:
    try:
        import tokenizers
    except ImportError:
        raise UsageError(
            "--tokenizer needs the package tokenizers", "Install it: pip install 'batchtune[text]'."
        ) from None
    if not path.is_file():
        raise ManifestError(f"{path}, the tokenizer, does not exist", "Name a tokenizer.json on this machine.")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing more particular
        raise ManifestError(f"{path} is no tokenizer: {error}", "Name a tokenizer.json of tokenizers.") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def count(texts: Sequence[str]) -> list[int]:
        return [len(encoding) for encoding in tokenizer.encode_batch(list(texts))]

    return count
