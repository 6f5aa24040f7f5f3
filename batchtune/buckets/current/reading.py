"""Reads `--current`: settings written out, or the path of a SpeechBrain recipe that holds them."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from batchtune.buckets.current.base import HOW, OPTION, Current, Settings, SettingsKind, TableKind
from batchtune.buckets.current.speechbrain import SpeechBrainSettings
from batchtune.buckets.current.tables import FixedSize, OwnTable
from batchtune.configs import Block, Recipe, entries, line_of, product_of, read_text, scalar_value, word_or_number
from batchtune.errors import ResultError, UsageError, printable, shortened

_PAIRS = re.compile(r"\s*[A-Za-z_]\w*\s*=", re.ASCII)
_LONGEST_TEXT = 1_000_000

AnyKind = TypeVar("AnyKind", bound=SettingsKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known(Generic[AnyKind]):
    """The kinds of settings that a command takes, in the order in which they are asked, and its hints.

    Attributes:
        how, settings: How to write settings, and which are known; a sentence each.
        lacking: What a recipe without such settings lacks.
        refused: Name of a setting that can't be reproduced → why, a phrase after that name.
    """

    kinds: Sequence[AnyKind]
    how: str
    settings: str
    lacking: str
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of all settings."""
        keys: list[str] = []
        for kind in self.kinds:
            keys += kind.keys
        return tuple(dict.fromkeys(keys))


# Equal lengths fall into different batches.
_GREEDY = (
    "{}'s, which sorts all examples and cuts them greedily: such batches form no bucket table, and are not reproduced"
)
_NEMO = "NeMo's: give its bins as bucket_boundaries, with a batch size for each in bucket_batch_sizes"
TABLES: Known[TableKind] = Known(
    kinds=(OwnTable(), SpeechBrainSettings(), FixedSize()),
    how=HOW,
    settings=(
        "Known are SpeechBrain's max_batch_length with num_buckets or bucket_boundaries (and max_batch_ex), "
        "bucket_boundaries with bucket_batch_sizes, and batch_size."
    ),
    lacking="settings of a DynamicBatchSampler (max_batch_length with num_buckets or bucket_boundaries)",
    refused={
        "max_tokens": _GREEDY.format("fairseq"),
        "batch_bins": _GREEDY.format("ESPnet"),
        **dict.fromkeys(("bucket_duration_bins", "bucket_batch_size", "batch_duration"), _NEMO),
    },
)


def read_current(text: str) -> Current:
    """Read and check a user's current batching settings.

    Raises as `read_settings` does, also for wrong values and for settings that can't be reproduced.
    """
    kind, settings = read_settings(text, TABLES)
    return Current(kind=kind, given=settings, settings=kind.read(settings))


def read_settings(text: str, known: Known[AnyKind]) -> tuple[AnyKind, Settings]:
    """Read settings, without checking them yet, and find their kind.

    The text is `key=value,key=value` (a list is written with colons, `bucket_boundaries=2:4:8.5`), the path of a
    SpeechBrain recipe, or `PATH:KEY.PATH` for a block within one. Raises UsageError if it is neither, or names an
    unknown key, and ResultError if the file can't be read, or holds no settings of a known kind.
    """
    if os.path.exists(text):
        return _of_file(Path(text), None, known)
    path, _, key_path = text.rpartition(":")
    if path and os.path.exists(path):
        return _of_file(Path(path), key_path, known)
    if not _PAIRS.match(text):
        raise UsageError(f"{OPTION}: {text[:200]!r} is neither a file nor key=value settings", known.how)
    return _written_out(text, known)


def _of_file(file: Path, key_path: str | None, known: Known[AnyKind]) -> tuple[AnyKind, Settings]:
    """Read the training's settings from a recipe, at `key_path` or where they are found; other keys may be code."""
    recipe = Recipe.parse(read_text(file, file.name, "Give a SpeechBrain training YAML."), file.name)
    file_format = entries(recipe.root).get("format")
    if file_format is not None and str(scalar_value(file_format)).startswith("batchtune/"):
        raise ResultError(
            f"{file.name} is a config that batchtune wrote, and {OPTION} FILE reads a SpeechBrain recipe",
            f"Write its settings as {OPTION} key=value,key=value. {known.settings}",
        )
    if key_path is None:
        kind, block = _training_settings(recipe, known)
    else:
        kind, block = _settings_at(recipe, tuple(key_path.split(".")), known)
    kind.check_block(recipe, block)
    nodes = {key: node for key, node in block.settings.items() if key in kind.keys}
    for key in kind.inherited:
        nearest = block.nearest(key)
        if nearest is not None:
            nodes[key] = nearest[0]
    return kind, Settings(
        values={key: recipe.value(node) for key, node in nodes.items()},
        source=file.name,
        key_path=printable(block.path) or None,
        lines={key: line_of(node) for key, node in nodes.items()},
    )


def _training_settings(recipe: Recipe, known: Known[AnyKind]) -> tuple[AnyKind, Block]:
    for kind in known.kinds:
        block = kind.find(recipe)
        if block is not None:
            return kind, block
    raise ResultError(
        f"{recipe.name} has no {known.lacking}",
        f"Write {OPTION} key=value,key=value. {known.settings} Or say where: {OPTION} {recipe.name}:KEY.PATH.",
    )


def _settings_at(recipe: Recipe, keys: tuple[str, ...], known: Known[AnyKind]) -> tuple[AnyKind, Block]:
    path = ".".join(keys)
    block = recipe.block_at(keys)
    if block is None:
        raise ResultError(
            f"{recipe.name} has no settings at {shortened(path)}", "Give the path of a mapping, with dots between."
        )
    for kind in known.kinds:
        inner = None if kind.inner is None else recipe.block_at((*keys, kind.inner))
        if inner is not None and inner.has_any(kind.signs):
            return kind, inner
        if block.has_any(kind.signs):
            return kind, block
    raise ResultError(f"{recipe.name}: {printable(path)} holds no batching settings that are known", known.settings)


def _written_out(text: str, known: Known[AnyKind]) -> tuple[AnyKind, Settings]:
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
        values[name] = _value(value)
    for kind in known.kinds:
        if not values.keys().isdisjoint(kind.signs):
            _refuse_unknown([name for name in values if name not in kind.keys], kind.keys, known)
            return kind, Settings(values=values)
    _refuse_unknown([name for name in values if name not in known.keys], known.keys, known)
    raise UsageError(f"{OPTION}: {', '.join(values)} alone says nothing about the batches", known.settings)


def _refuse_unknown(unknown: Sequence[str], keys: Sequence[str], known: Known[AnyKind]) -> None:
    """Raise UsageError if there are unknown settings."""
    if not unknown:
        return
    for name in unknown:
        if name in known.refused:
            raise UsageError(f"{OPTION}: {name} is {known.refused[name]}", known.settings)
    problem, hint = unknown_settings(unknown, keys)
    raise UsageError(f"{OPTION}: {problem}", hint)


def unknown_settings(names: Sequence[str], known: Sequence[str]) -> tuple[str, str]:
    """Return a problem, that these names are not settings, and a hint with the known ones, the closest first."""
    shown = ", ".join(repr(name[:60]) for name in names)
    verb = "is not a setting that goes" if len(names) == 1 else "are not settings that go"
    close = [difflib.get_close_matches(name, known, n=1) for name in names]
    suggested = dict.fromkeys(match[0] for match in close if match)
    hint = f"Known: {', '.join(known)}."
    if suggested:
        hint = f"Did you mean {' and '.join(suggested)}? {hint}"
    return f"{shown} {verb} here", hint


def _value(text: str) -> Any:
    """Return a number, true, false, None, a list written with colons, or the word itself."""
    if text.lower() == "none":
        return None
    if ":" in text:
        return [_number(part.strip()) for part in text.split(":")]
    return _number(text)


def _number(text: str) -> Any:
    """Return a number or a product of numbers, a whole one as an int; other words as they are."""
    product = product_of([word_or_number(factor.strip()) for factor in text.split("*")])
    if product is None:
        return word_or_number(text)
    if product == int(product) and abs(product) < 2**53:
        return int(product)
    return product
