"""Reads `--current`: settings written out, or the path of a file that holds them."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from batchtune.configs.recipes import LIMITS, Block, block_at
from batchtune.configs.references import References, evaluated
from batchtune.configs.tree import Node, parse_yaml, read_text
from batchtune.errors import ResultError, UsageError, shortened
from batchtune.tuning.current.base import HOW, OPTION, Current, Settings, SettingsKind, TableKind
from batchtune.tuning.current.nemo import NemoSettings
from batchtune.tuning.current.speechbrain import SpeechBrainSettings
from batchtune.tuning.current.tables import FixedSize, OwnTable

_PAIRS = re.compile(r"\s*[A-Za-z_]\w*\s*=", re.ASCII)
_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?(inf|nan)")
_LONGEST_TEXT = 1_000_000
_LONGEST_KEY_PATH = 10_000

AnyKind = TypeVar("AnyKind", bound=SettingsKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known(Generic[AnyKind]):
    """The kinds of settings that a command takes, in the order in which they are asked, and its hints.

    Attributes:
        how, settings, files: How to write settings, and which settings and files are known; a sentence each.
        examples: Names to suggest if settings are of no kind.
        refused: Name of a setting that can't be reproduced → why, a phrase after that name.
        incomplete: Name of a setting at a file's top → the file's problem if no kind claims it.
    """

    kinds: Sequence[AnyKind]
    how: str
    settings: str
    files: str
    examples: Sequence[str]
    refused: Mapping[str, str] = field(default_factory=dict)
    incomplete: Mapping[str, str] = field(default_factory=dict)


# Equal lengths fall into different batches.
_GREEDY = (
    "{}'s, which sorts all examples and cuts them greedily: such batches form no bucket table, and are not reproduced"
)
_INCOMPLETE = "neither num_buckets nor bucket_boundaries"
TABLES: Known[TableKind] = Known(
    # In this order: a NeMo data set may have a batch_size, and a recipe a loader with one.
    kinds=(OwnTable(), NemoSettings(), SpeechBrainSettings(), FixedSize()),
    how=HOW,
    settings=(
        "Known are SpeechBrain's max_batch_length with num_buckets or bucket_boundaries (and max_batch_ex), NeMo's "
        "bucket_duration_bins with bucket_batch_size or batch_duration, bucket_boundaries with bucket_batch_sizes, "
        "and batch_size."
    ),
    files="Give a SpeechBrain training YAML, a NeMo config or a sampler.yaml.",
    examples=("max_batch_length", "bucket_boundaries", "batch_size", "num_buckets"),
    refused={"max_tokens": _GREEDY.format("fairseq"), "batch_bins": _GREEDY.format("ESPnet")},
    incomplete={name: f"has {name}, but {_INCOMPLETE}" for name in LIMITS},
)


def read_current(text: str) -> Current:
    """Read and check a user's current batching settings.

    The text is as in `read_settings`; the file is a SpeechBrain training YAML, a NeMo config or a sampler.yaml. Raises
    as `read_settings` does, also for wrong values and for settings that can't be reproduced.
    """
    kind, settings = read_settings(text, TABLES)
    return Current(kind=kind, given=settings, settings=kind.read(settings))


def read_settings(text: str, known: Known[AnyKind]) -> tuple[AnyKind, Settings]:
    """Read settings, without checking them yet, and find their kind.

    The text is `key=value,key=value` (a list is written with colons, `bucket_boundaries=2:4:8.5`), the path of a
    file, or `PATH:KEY.PATH` for a block within one. Raises UsageError if it is neither, or names an unknown key, and
    ResultError if the file can't be read, or holds no settings of a known kind.
    """
    for path, key_path in _files(text):
        if os.path.exists(path):  # a folder, too: the error of reading it says what is wrong
            file = Path(path)
            root = parse_yaml(read_text(file, file.name, known.files), file.name)
            return _of_file(root, file.name, key_path, known)
    if not _PAIRS.match(text):
        raise UsageError(f"{OPTION}: {text[:200]!r} is neither a file nor key=value settings", known.how)
    return _pairs(text, known)


def _files(text: str) -> Iterator[tuple[str, str | None]]:
    """Yield the files and key paths that a text may mean, the longest file name first."""
    yield text, None
    end = len(text)
    while (end := text.rfind(":", 0, end)) >= 0 and len(text) - end <= _LONGEST_KEY_PATH:
        yield text[:end], text[end + 1 :]


def _of_file(root: Node, name: str, key_path: str | None, known: Known[AnyKind]) -> tuple[AnyKind, Settings]:
    """Read the training's settings from a file, at `key_path` or where they are found; other keys may be code."""
    if not isinstance(root.value, dict):
        raise ResultError(f"{name} holds no settings by name", known.settings)
    references = References(root, name)
    kind, block = _block(references, key_path, known)
    if (refusal := kind.refusal(block, name)) is not None:
        raise refusal
    tag = block.node.tag
    if tag is not None and tag.startswith("!include"):
        problem = f"the settings are in another file ({tag[:60]})"
        raise ResultError(f"{name}, line {block.node.line}: {problem}", "Give that file to --current.")
    nodes = {key: (node, block.chain) for key, node in block.settings.items() if key in kind.keys}
    nodes |= {key: found for key in kind.inherited if key not in nodes and (found := block.nearest(key)) is not None}
    values = {key: references.plain(node, chain) for key, (node, chain) in nodes.items()}
    lines = {key: node.line for key, (node, _) in nodes.items()}
    return kind, Settings(values=values, source=name, key_path=".".join(block.keys) or None, lines=lines)


def _block(references: References, key_path: str | None, known: Known[AnyKind]) -> tuple[AnyKind, Block]:
    """Find the mapping that holds the settings, and their kind."""
    root, name = references.root, references.name
    if key_path is None:
        for kind in known.kinds:
            if (block := kind.find(references)) is not None:
                return kind, block
        what = next(
            (what for key, what in known.incomplete.items() if root.get(key) is not None), "holds no batching settings"
        )
        raise ResultError(f"{name} {what} that are known", f"{known.settings} Or say where: {OPTION} {name}:KEY.PATH.")
    keys = tuple(key_path.split("."))
    block = block_at(root, keys)
    if block is None:
        raise ResultError(
            f"{name} has no settings at {shortened(key_path)}", "Give the path of a mapping, with dots between."
        )
    for kind in known.kinds:
        inner = None if kind.inner is None else block_at(root, (*keys, kind.inner))
        for found in filter(None, (inner, block)):
            if kind.claims(found.settings, found.keys):
                return kind, found
    raise ResultError(f"{name}: {key_path} holds no batching settings that are known", known.settings)


def _pairs(text: str, known: Known[AnyKind]) -> tuple[AnyKind, Settings]:
    if len(text) > _LONGEST_TEXT:
        raise UsageError(f"{OPTION}: the settings are longer than {_LONGEST_TEXT:,} characters", known.how)
    values: dict[str, Any] = {}
    for pair in text.split(","):
        name, separator, value = (part.strip() for part in pair.partition("="))
        if not separator or not name:
            raise UsageError(f"{OPTION}: {pair.strip()[:60]!r} is not key=value", known.how)
        if name in values:
            raise UsageError(f"{OPTION}: {name} is given twice", "Give each setting once.")
        if not value:
            raise UsageError(f"{OPTION}: {name} has no value", known.how)
        # A number, a list of numbers, true, false, or the word itself.
        numbers = [_number(part) for part in value.split(":")]
        words = {"true": True, "false": False, "none": None, "null": None}
        values[name] = words.get(value.lower(), numbers if ":" in value else numbers[0])
    kind = next((kind for kind in known.kinds if kind.claims(values)), None)
    names: Sequence[str] = known.examples if kind is None else kind.keys
    if kind is not None and values.keys() <= set(names):
        return kind, Settings(values=values)
    unknown = [name for name in values if not any(name in kind.keys for kind in known.kinds)]
    for name in set(unknown) & known.refused.keys():
        raise UsageError(f"{OPTION}: {name} is {known.refused[name]}", known.settings)
    if not (wrong := unknown or [name for name in values if name not in names]):
        raise UsageError(f"{OPTION}: {', '.join(values)} alone says nothing about the batches", known.settings)
    problem, hint = unknown_settings(wrong, names)
    raise UsageError(f"{OPTION}: {problem}", hint)


def unknown_settings(names: Sequence[str], known: Sequence[str]) -> tuple[str, str]:
    """Return a problem, that these names are not settings, and a hint with the known ones, the closest first."""
    shown = ", ".join(repr(name[:60]) for name in names)
    problem = f"{shown} {'is not a setting that goes' if len(names) == 1 else 'are not settings that go'} here"
    near = dict.fromkeys(match for name in names for match in difflib.get_close_matches(name, known, n=1))
    did_you_mean = f"Did you mean {' and '.join(near)}? " if near else ""
    return problem, f"{did_you_mean}Known: {', '.join(known)}."


def _number(text: str) -> float | int | str:
    text = text.strip()
    formula = evaluated(text) if any(sign in text[1:] for sign in "*/") else None
    if formula is None and not _NUMBER.fullmatch(text):
        return text
    number = float(text) if formula is None else float(formula)
    return int(number) if math.isfinite(number) and number == int(number) and abs(number) < 2**53 else number
