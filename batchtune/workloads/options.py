"""Workload options as they stand on the command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from batchtune.errors import UsageError

_INTEGER = re.compile(r"[+-]?\d+")
_DECIMAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_WORDS: dict[str, Any] = {"true": True, "false": False, "none": None}


def parse_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Reads the `--set key=value` options of a workload.

    Args:
        pairs: Such as `["layers=12", "dtype=bf16", "checkpoint=true"]`. The first `=` of each
            parts key and value, so that a value may hold one.

    Returns:
        Key → value, in the order given. A value is an int or a float where it reads as one, True, False or
        None for `true`, `false` and `none` in any case, and else the text itself.

    Raises:
        UsageError: A pair without `=` or without a key, or a key twice.
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        key, separator, text = pair.partition("=")
        key = key.strip()
        if not separator or not key:
            raise UsageError(f"{pair!r} is no workload option", "Write key=value, such as layers=12.")
        if key in options:
            raise UsageError(f"the workload option {key!r} is set twice", f"Keep one --set {key}=...")
        options[key] = _typed(text.strip())
    return options


def _typed(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _DECIMAL.fullmatch(text) else text
