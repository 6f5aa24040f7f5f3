"""Reads `--current`: settings written out, or the path of a file that holds them."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from batchtune.errors import ResultError, UsageError
from batchtune.lengths import Lengths
from batchtune.plain_yaml import parse_yaml, read_text
from batchtune.tuning.current.finding import find_settings
from batchtune.tuning.current.kinds import KINDS, KNOWN, kind_of
from batchtune.tuning.current.records import Current, CurrentTable
from batchtune.tuning.current.values import Settings

OPTION = "--current"
_HOW = "Write --current max_batch_length=600,num_buckets=200, --current batch_size=16, or the path of a YAML file."
_FILES = "Give a SpeechBrain training YAML, a NeMo config or a sampler.yaml."
_PAIRS = re.compile(r"\s*[A-Za-z_]\w*\s*=", re.ASCII)
_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?(inf|nan)")
_LONGEST_TEXT = 1_000_000
# Sorted greedy batches are no buckets: equal lengths fall into different batches.
_GREEDY = {"max_tokens": "fairseq", "batch_bins": "ESPnet"}


def read_current(text: str) -> Current:
    """Reads a user's current batching settings.

    Args:
        text: `key=value,key=value` (a list is written with colons, `bucket_boundaries=2:4:8.5`), the path of a
            SpeechBrain training YAML, a NeMo config or a sampler.yaml, or `PATH:KEY.PATH` for a block within one.

    Returns:
        The settings, checked.

    Raises:
        UsageError: The text is neither, names an unknown key, or has a wrong value.
        ResultError: The file can't be read, or holds no settings that can be reproduced.
    """
    found = _file(text)
    if found is not None:
        path, key_path = found
        return find_settings(parse_yaml(read_text(path, path.name, _FILES), path.name), path.name, key_path)
    if not _PAIRS.match(text):
        raise UsageError(f"{OPTION}: {text[:200]!r} is neither a file nor key=value settings", _HOW)
    return _pairs(text)


def current_table(current: Current, lengths: Lengths) -> CurrentTable:
    """The batches that current settings make of these lengths, as a bucket table.

    Raises:
        ResultError: The settings are for other lengths: other units, or none is left.
    """
    try:
        return KINDS[current.kind].table(current, lengths)
    except ValueError as error:
        raise ResultError(f"{current.source}: the settings make no bucket table: {error}", _HOW) from error


def _file(text: str) -> tuple[Path, str | None] | None:
    """The file and the key path that a text names; None where no such file exists."""
    if _is_file(text):
        return Path(text), None
    end = len(text)
    for _ in range(text.count(":")):
        end = text.rindex(":", 0, end)
        if _is_file(text[:end]):
            return Path(text[:end]), text[end + 1 :]
        if len(text) - end > 10_000:  # no key path is that long
            break
    return None


def _is_file(text: str) -> bool:
    try:
        # A folder too: reading it tells what is wrong.
        return bool(text) and Path(text).exists()
    except (OSError, ValueError):  # a name too long, or with a NUL
        return False


def _pairs(text: str) -> Current:
    if len(text) > _LONGEST_TEXT:
        raise UsageError(f"{OPTION}: the settings are longer than {_LONGEST_TEXT:,} characters", _HOW)
    values: dict[str, Any] = {}
    for pair in text.split(","):
        name, separator, value = (part.strip() for part in pair.partition("="))
        if not separator or not name:
            raise UsageError(f"{OPTION}: {pair.strip()[:60]!r} is no key=value", _HOW)
        if name in values:
            raise UsageError(f"{OPTION}: {name} is given twice", "Give each setting once.")
        values[name] = _value(name, value)
    kind = kind_of(values)
    if kind is None:
        raise _unknown(values, ("max_batch_length", "bucket_boundaries", "batch_size", "num_buckets"))
    if not values.keys() <= set(KINDS[kind].keys):
        raise _unknown(values, KINDS[kind].keys)
    return KINDS[kind].read(Settings(values=values, source=OPTION, error=UsageError))


def _value(name: str, text: str) -> Any:
    """A number, a list of numbers (written with colons), true, false, or the word itself."""
    if not text:
        raise UsageError(f"{OPTION}: {name} has no value", _HOW)
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return [_number(part) for part in text.split(":")] if ":" in text else _number(text)


def _number(text: str) -> float | int | str:
    text = text.strip()
    if not _NUMBER.fullmatch(text):
        return text
    number = float(text)
    return int(number) if math.isfinite(number) and number == int(number) and abs(number) < 2**53 else number


def _unknown(values: dict[str, Any], known: tuple[str, ...]) -> UsageError:
    """The error for names that are not known, or that alone say nothing."""
    unknown = [name for name in values if not any(name in one.keys for one in KINDS.values())]
    greedy = next((name for name in unknown if name in _GREEDY), None)
    if greedy is not None:
        return UsageError(
            f"{OPTION}: {greedy} is {_GREEDY[greedy]}'s, which sorts all examples and cuts them greedily: "
            "such batches are no bucket table, and are not reproduced",
            KNOWN,
        )
    if not unknown and not any(name in known for name in values):
        unknown = list(values)
    others = unknown or [name for name in values if name not in known]
    if others:
        return UsageError(f"{OPTION}: {others[0][:60]!r} is no setting that goes here", f"Known: {', '.join(known)}.")
    return UsageError(f"{OPTION}: {', '.join(values)} alone says nothing of the batches", KNOWN)
