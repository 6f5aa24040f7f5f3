"""Reads `--current`: settings written out, or those of a SpeechBrain recipe, whose values are never executed."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, TypeVar

import msgspec

from batchtune.configs import (
    Recipe,
    RecipeBlock,
    entries,
    product_of,
    read_text,
    scalar_value,
    word_or_number,
)
from batchtune.errors import (
    BatchtuneError,
    ResultError,
    UsageError,
    invalid_field,
    printable,
    shortened,
)

OPTION = "--current"
YOURS = "your current config"
_PAIRS = re.compile(r"\s*[A-Za-z_]\w*\s*=", re.ASCII)
_LONGEST_TEXT = 1_000_000
# Written with colons between the numbers; one number alone is a list, too.
_LISTS = ("bucket_boundaries", "bucket_batch_sizes")
# As SpeechBrain called them before 1.0.
_OLD_NAMES = {"max_batch_len": "max_batch_length", "shuffle_ex": "shuffle"}

# No length is outside this range, in any unit; beyond it, boundaries would overflow or coincide.
SettingLength = Annotated[float, msgspec.Meta(ge=1e-9, le=1e15)]
SettingSize = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
Boundaries = Annotated[
    list[SettingLength], msgspec.Meta(min_length=1, max_length=100_000)
]
SettingSizes = Annotated[
    list[SettingSize], msgspec.Meta(min_length=1, max_length=100_000)
]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the kinds of settings; the fields are what a user may set.

    Attributes:
        NAME: The kind's name in `sweep.json` or `stream.json`.
        SIGNS: Any of these settings gives the kind away.
        AROUND: Settings that may also stand in a mapping around; the innermost counts.
    """

    NAME: ClassVar[str]
    SIGNS: ClassVar[tuple[str, ...]]
    AROUND: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def find(cls, recipe: Recipe) -> RecipeBlock | None:
        """Return the settings of the training in a recipe; None without any, ResultError if there are several."""
        return None

    @classmethod
    def check_block(cls, recipe: Recipe, block: RecipeBlock) -> None:
        """Raise ResultError if a block of a recipe can't be reproduced."""
        recipe.check_block(block)


AnySettings = TypeVar("AnySettings", bound=Settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known(Generic[AnySettings]):
    """The kinds of settings that a command takes; the first that fits is taken.

    Attributes:
        hint: How to write settings, and which are known, in full sentences.
        lacking: What a recipe without such settings lacks.
    """

    kinds: Sequence[type[AnySettings]]
    hint: str
    lacking: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenSettings(Generic[AnySettings]):
    """Settings as a user gave them: `source` is `--current` or the file's name, `key_path` the place in the file.

    `names` are those of the settings that a user wrote; the others have their defaults.
    """

    settings: AnySettings
    source: str
    names: frozenset[str] = frozenset()
    key_path: str | None = None

    @property
    def from_file(self) -> bool:
        """Whether they come from a file rather than from the command line."""
        return self.source != OPTION

    def wrong(self, problem: str, hint: str | None = None) -> BatchtuneError:
        """Return the error to raise about them."""
        return _wrong(self.source, self.key_path, problem, hint)

    def record(self, describe: str, values: dict[str, Any]) -> dict[str, Any]:
        """Return them as `sweep.json` and `stream.json` keep them."""
        record: dict[str, Any] = {"source": self.source}
        if self.key_path is not None:
            record["key_path"] = self.key_path
        return {**record, "kind": self.settings.NAME, "describe": describe, **values}


def read_settings(text: str, known: Known[AnySettings]) -> GivenSettings[AnySettings]:
    """Read and check settings.

    The text is `key=value,key=value` (a list is written with colons, `bucket_boundaries=2:4:8.5`), the path of a
    SpeechBrain recipe, or `PATH:KEY.PATH` for a block within one. Raises UsageError if it is neither, or settings are
    wrong, and ResultError if the file can't be read, holds no settings of a known kind, or wrong ones.
    """
    if os.path.exists(text):
        return _of_file(Path(text), None, known)
    path, _, key_path = text.rpartition(":")
    if path and os.path.exists(path):
        return _of_file(Path(path), key_path, known)
    if not _PAIRS.match(text) or len(text) > _LONGEST_TEXT:
        raise UsageError(
            f"{OPTION}: {text[:200]!r} is neither a file nor key=value settings",
            known.hint,
        )
    return _written_out(text, known)


def _of_file(
    file: Path, key_path: str | None, known: Known[AnySettings]
) -> GivenSettings[AnySettings]:
    """Read the training's settings from a recipe, at `key_path` or where they are found; other keys may be code."""
    recipe = Recipe.parse(
        read_text(file, file.name, "Give a SpeechBrain training YAML."), file.name
    )
    file_format = entries(recipe.root).get("format")
    if file_format is not None and str(scalar_value(file_format)).startswith(
        "batchtune/"
    ):
        raise ResultError(
            f"{file.name} is a config that batchtune wrote, and {OPTION} FILE reads a SpeechBrain recipe",
            known.hint,
        )
    kind, block = _settings_in(recipe, key_path, known)
    kind.check_block(recipe, block)
    values = {}
    for key, node in block.settings.items():
        if _OLD_NAMES.get(key, key) in kind.__struct_fields__:
            values[key] = recipe.value(node)
    for key in kind.AROUND:
        nearest = block.nearest(key)
        if nearest is not None:
            values[key] = recipe.value(nearest)
    return _checked(kind, values, file.name, printable(block.path) or None, known)


def _settings_in(
    recipe: Recipe, key_path: str | None, known: Known[AnySettings]
) -> tuple[type[AnySettings], RecipeBlock]:
    """Return the kind of the training's settings, or of those at a path of keys, and their place in the recipe."""
    for kind in known.kinds:
        if key_path is None:
            block = kind.find(recipe)
        else:
            block = recipe.block_at(key_path, kind.SIGNS)
        if block is not None:
            return kind, block
    if key_path is None:
        raise ResultError(
            f"{recipe.name} has no {known.lacking}",
            f"{known.hint} Or say where: {OPTION} {recipe.name}:KEY.PATH.",
        )
    raise ResultError(
        f"{recipe.name} has no known batching settings at {shortened(key_path)}",
        known.hint,
    )


def _written_out(text: str, known: Known[AnySettings]) -> GivenSettings[AnySettings]:
    values: dict[str, Any] = {}
    for pair in text.split(","):
        name, separator, value = (part.strip() for part in pair.partition("="))
        if not separator or not name or name in values:
            raise UsageError(
                f"{OPTION}: {pair.strip()[:60]!r} is not key=value, or the key is given twice",
                known.hint,
            )
        values[name] = _value(name, value)
    for kind in known.kinds:
        if not values.keys().isdisjoint(kind.SIGNS):
            return _checked(kind, values, OPTION, None, known)
    raise UsageError(
        f"{OPTION}: {printable(', '.join(values))[:200]} says nothing about the batches",
        known.hint,
    )


def _value(name: str, text: str) -> Any:
    """Return a number or a product of numbers, true, false, None, a list written with colons, or the word itself."""
    if name in _LISTS:
        return [word_or_number(part.strip()) for part in text.split(":")]
    if text.lower() == "none":
        return None
    product = product_of([word_or_number(factor.strip()) for factor in text.split("*")])
    return word_or_number(text) if product is None else product


def _checked(
    kind: type[AnySettings],
    values: dict[str, Any],
    source: str,
    key_path: str | None,
    known: Known[AnySettings],
) -> GivenSettings[AnySettings]:
    renamed = {}
    for name, value in values.items():
        whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
        renamed[_OLD_NAMES.get(name, name)] = int(value) if whole else value
    try:
        settings = msgspec.convert(renamed, kind)
    except msgspec.ValidationError as error:
        raise _wrong(source, key_path, invalid_field(error), known.hint) from error
    names = frozenset(renamed)
    return GivenSettings(
        settings=settings, names=names, source=source, key_path=key_path
    )


def _wrong(
    source: str, key_path: str | None, problem: str, hint: str | None
) -> BatchtuneError:
    kind = UsageError if source == OPTION else ResultError
    where = source if key_path is None else f"{source}: {key_path}"
    return kind(f"{where}: {problem}", hint)
