"""Reads `--current`: settings written out, or the path of a file that holds them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from batchtune.configs.recipes import LIMITS, block_at
from batchtune.configs.references import References
from batchtune.configs.tree import Node, parse_yaml, read_text
from batchtune.errors import ResultError, UsageError, shortened
from batchtune.tuning.current.base import HOW, OPTION, Current, Settings, SettingsKind
from batchtune.tuning.current.nemo import NemoSettings
from batchtune.tuning.current.speechbrain import SpeechBrainSettings
from batchtune.tuning.current.tables import FixedSize, OwnTable

# In the order in which they are asked: a NeMo data set, too, may have a batch_size, and a recipe a loader with one.
KINDS: tuple[SettingsKind, ...] = (OwnTable(), NemoSettings(), SpeechBrainSettings(), FixedSize())

_KNOWN = (
    "Known are SpeechBrain's max_batch_length with num_buckets or bucket_boundaries (and max_batch_ex), NeMo's "
    "bucket_duration_bins with bucket_batch_size or batch_duration, bucket_boundaries with bucket_batch_sizes, "
    "and batch_size."
)
_FILES = "Give a SpeechBrain training YAML, a NeMo config or a sampler.yaml."
_PAIRS = re.compile(r"\s*[A-Za-z_]\w*\s*=", re.ASCII)
_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?(inf|nan)")
_LONGEST_TEXT = 1_000_000
_LONGEST_KEY_PATH = 10_000
# Sorted greedy batches are no buckets: equal lengths fall into different batches.
_GREEDY = {"max_tokens": "fairseq", "batch_bins": "ESPnet"}


def read_current(text: str) -> Current:
    """Read and check a user's current batching settings.

    The text is `key=value,key=value` (a list is written with colons, `bucket_boundaries=2:4:8.5`), the path of a
    SpeechBrain training YAML, a NeMo config or a sampler.yaml, or `PATH:KEY.PATH` for a block within one.

    Raises:
        UsageError: The text is neither, names an unknown key, or has a wrong value.
        ResultError: The file can't be read, or holds no settings that can be reproduced.
    """
    for path, key_path in _files(text):
        if _exists(path):
            file = Path(path)
            return _of_file(parse_yaml(read_text(file, file.name, _FILES), file.name), file.name, key_path)
    if not _PAIRS.match(text):
        raise UsageError(f"{OPTION}: {text[:200]!r} is neither a file nor key=value settings", HOW)
    return _pairs(text)


def _files(text: str) -> Iterator[tuple[str, str | None]]:
    """Yield the files and key paths that a text may name, the longest file first."""
    yield text, None
    end = len(text)
    while (end := text.rfind(":", 0, end)) >= 0 and len(text) - end <= _LONGEST_KEY_PATH:
        yield text[:end], text[end + 1 :]


def _exists(path: str) -> bool:
    try:
        # A folder too: the message of reading it says what is wrong.
        return bool(path) and Path(path).exists()
    except (OSError, ValueError):  # a name too long, or with a NUL
        return False


def _of_file(root: Node, name: str, key_path: str | None) -> Current:
    """Read the settings of the training from a file, at `key_path` or found; keys of no kind may be made by code."""
    if not isinstance(root.value, dict):
        raise ResultError(f"{name} holds no settings by name", _KNOWN)
    references = References(root, name)
    if key_path is None:
        candidates = ((kind, kind.find(references)) for kind in KINDS)
        kind, block = next(((kind, block) for kind, block in candidates if block is not None), (None, None))
        if kind is None or block is None:
            limit = next((key for key in LIMITS if root.get(key) is not None), None)
            what = (
                f"has {limit}, but neither num_buckets nor bucket_boundaries" if limit else "holds no batching settings"
            )
            raise ResultError(f"{name} {what} that are known", f"{_KNOWN} Or say where: {OPTION} {name}:KEY.PATH.")
    else:
        block = block_at(root, tuple(key_path.split(".")))
        if block is None:
            raise ResultError(
                f"{name} has no settings at {shortened(key_path)}", "Give the path of a mapping, with dots between."
            )
        kind = next((kind for kind in KINDS if kind.claims(block.settings, block.keys)), None)
        if kind is None:
            raise ResultError(f"{name}: {key_path} holds no batching settings that are known", _KNOWN)
    tag = block.node.tag
    if tag is not None and tag.startswith("!include"):
        where = f"{name}, line {block.node.line}"
        raise ResultError(f"{where}: the settings are in another file ({tag[:60]})", "Give that file to --current.")
    nodes = {key: node for key, node in block.settings.items() if key in kind.keys}
    for key in kind.inherited:
        if key not in nodes and (node := root.get(key)) is not None:
            nodes[key] = node
    values = {key: references.plain(node, block.chain) for key, node in nodes.items()}
    lines = {key: node.line for key, node in nodes.items()}
    return _checked(kind, Settings(values=values, source=name, key_path=".".join(block.keys) or None, lines=lines))


def _checked(kind: SettingsKind, settings: Settings) -> Current:
    return Current(
        kind=kind,
        settings=kind.read(settings),
        source=settings.source,
        key_path=settings.key_path,
        notes=tuple(kind.notes(settings)),
    )


def _pairs(text: str) -> Current:
    if len(text) > _LONGEST_TEXT:
        raise UsageError(f"{OPTION}: the settings are longer than {_LONGEST_TEXT:,} characters", HOW)
    values: dict[str, Any] = {}
    for pair in text.split(","):
        name, separator, value = (part.strip() for part in pair.partition("="))
        if not separator or not name:
            raise UsageError(f"{OPTION}: {pair.strip()[:60]!r} is not key=value", HOW)
        if name in values:
            raise UsageError(f"{OPTION}: {name} is given twice", "Give each setting once.")
        if not value:
            raise UsageError(f"{OPTION}: {name} has no value", HOW)
        # A number, a list of numbers, true, false, or the word itself.
        numbers = [_number(part) for part in value.split(":")]
        values[name] = {"true": True, "false": False}.get(value.lower(), numbers if ":" in value else numbers[0])
    kind = next((kind for kind in KINDS if kind.claims(values)), None)
    known = ("max_batch_length", "bucket_boundaries", "batch_size", "num_buckets") if kind is None else kind.keys
    if kind is not None and values.keys() <= set(known):
        return _checked(kind, Settings(values=values))
    unknown = [name for name in values if not any(name in kind.keys for kind in KINDS)]
    for name in set(unknown) & _GREEDY.keys():
        raise UsageError(
            f"{OPTION}: {name} is {_GREEDY[name]}'s, which sorts all examples and cuts them greedily: such batches are "
            "no bucket table, and are not reproduced",
            _KNOWN,
        )
    for name in unknown or [name for name in values if name not in known]:
        problem = f"{name[:60]!r} is not a setting that goes here"
        raise UsageError(f"{OPTION}: {problem}", f"Known: {', '.join(known)}.")
    raise UsageError(f"{OPTION}: {', '.join(values)} alone says nothing about the batches", _KNOWN)


def _number(text: str) -> float | int | str:
    text = text.strip()
    if not _NUMBER.fullmatch(text):
        return text
    number = float(text)
    return int(number) if math.isfinite(number) and number == int(number) and abs(number) < 2**53 else number
