"""Finds the batching settings in a training's configuration."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from batchtune.errors import ResultError, shortened
from batchtune.plain_yaml import Node
from batchtune.tuning.current import buckets
from batchtune.tuning.current.kinds import KINDS, KNOWN, kind_of
from batchtune.tuning.current.records import Current, Kind
from batchtune.tuning.current.references import References
from batchtune.tuning.current.values import Settings

_LIMITS = ("max_batch_length", "max_batch_len", "left_bucket_length", "left_bucket_len")
_BUCKETS = ("num_buckets", "bucket_boundaries")
_NOT_TRAINING = re.compile(r"val|valid|validation|dev|test|eval|infer|inference", re.IGNORECASE)
_TRAIN_SETS = (("model", "train_ds"), ("train_ds",), ("data", "train_ds"))
_LOADERS = (
    "train_dataloader_opts",
    "train_dataloader_options",
    "dataloader_options",
    "dataloader_opts",
    "train_loader_kwargs",
)
_MOST_LISTED = 8

# The mappings from the document's top to a block, and the keys that lead there.
_Place = tuple[tuple[Node, ...], tuple[str, ...]]


def find_settings(root: Node, name: str, key_path: str | None) -> Current:
    """The settings of the training in a configuration.

    Args:
        root: The document.
        name: What to call the file.
        key_path: Where the user says that they are; None to look for them.

    Raises:
        ResultError: None are there, several are, or they are wrong.
    """
    if not isinstance(root.value, dict):
        raise ResultError(f"{name} holds no settings by name", KNOWN)
    if key_path is not None:
        return _chosen(root, name, key_path)
    declared = root.get("format")
    if declared is not None and isinstance(declared.value, str) and declared.value.startswith("batchtune/"):
        return _of_batchtune(root, name, declared.value)
    for keys in _TRAIN_SETS:
        place = _at(root, keys)
        if place is not None:
            return _read(place, name, "nemo")
    place = _dynamic(root, name)
    if place is not None:
        return _read(place, name, "speechbrain")
    return _fixed(root, name)


def _chosen(root: Node, name: str, key_path: str) -> Current:
    keys = tuple(key_path.split("."))
    place = _at(root, keys)
    if place is None:
        raise ResultError(
            f"{name} has no settings at {shortened(key_path)}", "Give the path of a mapping, with dots between."
        )
    kind = kind_of(tuple(_mapping(place)))
    if kind is None:
        raise ResultError(f"{name}: {key_path} holds no batching settings that are known", KNOWN)
    # A `train_ds` has a batch_size that may be all, and filters beside it.
    return _read(place, name, "nemo" if kind == "fixed" and keys[-1].endswith("_ds") else kind)


def _of_batchtune(root: Node, name: str, declared: str) -> Current:
    version = root.get("version")
    if declared != buckets.FORMAT:
        raise ResultError(
            f"{name} has the format {shortened(declared)}", "Of batchtune's files, only sampler.yaml is settings."
        )
    if version is not None and isinstance(version.value, int) and version.value > buckets.VERSION:
        raise ResultError(
            f"{name} has version {version.value}; this batchtune knows versions up to {buckets.VERSION}",
            "Install a newer batchtune.",
        )
    return _read(((root,), ()), name, "batchtune")


def _dynamic(root: Node, name: str) -> _Place | None:
    """SpeechBrain's block of the training; None where there is none, or `dynamic_batching` turns it off."""
    switch = root.get("dynamic_batching")
    if switch is not None and References(root, name).plain(switch, (root,)) is False:
        return None
    blocks = [place for place in _mappings(root) if _is_block(place)]
    # References start from settings at the top: the block is what the sampler gets.
    blocks = [place for place in blocks if place[1]] or blocks
    training = [place for place in blocks if not _named(place, _NOT_TRAINING)] or blocks
    training = [place for place in training if "train" in ".".join(place[1])] or training
    if not training:
        return None
    if len(training) > 1:
        paths = [".".join(keys) for _, keys in training]
        listed = ", ".join(paths[:_MOST_LISTED]) + (", ..." if len(paths) > _MOST_LISTED else "")
        raise ResultError(
            f"{name} has {len(training)} blocks of batching settings: {listed}",
            f"Say which one: --current {name}:{paths[0]}.",
        )
    return training[0]


def _is_block(place: _Place) -> bool:
    names = _mapping(place)
    limited = any(name in names for name in _LIMITS)
    return limited and (bool(place[1]) or any(name in names for name in _BUCKETS))


def _named(place: _Place, pattern: re.Pattern[str]) -> bool:
    """Whether a word of the keys on the way is one of the pattern's."""
    return any(pattern.fullmatch(word) for key in place[1] for word in re.split(r"[^A-Za-z]+", key))


def _fixed(root: Node, name: str) -> Current:
    for loader in _LOADERS:
        place = _at(root, (loader,))
        if place is not None and "batch_size" in _mapping(place):
            return _read(place, name, "fixed", root)
    if root.get("batch_size") is not None:
        return _read(((root,), ()), name, "fixed", root)
    limit = next((key for key in _LIMITS if root.get(key) is not None), None)
    what = f"has {limit}, but neither num_buckets nor bucket_boundaries" if limit else "holds no batching settings"
    raise ResultError(f"{name} {what} that are known", f"{KNOWN} Or say where: --current {name}:KEY.PATH.")


def _read(place: _Place, name: str, kind: Kind, beside: Node | None = None) -> Current:
    """Reads the known keys of a block; all others may be made by code and are left alone."""
    (chain, keys), mapping = place, dict(_mapping(place))
    if beside is not None and (sorting := beside.get("sorting")) is not None:
        mapping.setdefault("sorting", sorting)
    _check_not_made_elsewhere(chain[-1], name)
    references = References(chain[0], name)
    known = {key: node for key, node in mapping.items() if key in KINDS[kind].keys}
    settings = Settings(
        values={key: references.plain(node, chain) for key, node in known.items()},
        source=name,
        error=ResultError,
        key_path=".".join(keys) or None,
        lines={key: node.line for key, node in known.items()},
    )
    return KINDS[kind].read(settings)


def _check_not_made_elsewhere(node: Node, name: str) -> None:
    if node.tag is not None and node.tag.startswith("!include"):
        raise ResultError(
            f"{name}, line {node.line}: the settings are in another file ({node.tag[:60]})",
            "Give that file to --current.",
        )


def _at(root: Node, keys: Collection[str]) -> _Place | None:
    """The mapping at a path of keys; None where there is none."""
    chain: tuple[Node, ...] = (root,)
    for key in keys:
        found = chain[-1].get(key)
        if found is None:
            return None
        chain = (*chain, found)
    return (chain, tuple(keys)) if isinstance(chain[-1].value, dict) else None


def _mapping(place: _Place) -> dict[str, Node]:
    value = place[0][-1].value
    return value if isinstance(value, dict) else {}


def _mappings(root: Node) -> Iterator[_Place]:
    """All mappings that are reached through mappings, each once however many aliases it has."""
    seen: set[int] = set()
    waiting: list[_Place] = [((root,), ())]
    while waiting:
        chain, keys = waiting.pop()
        if id(chain[-1]) in seen:
            continue
        seen.add(id(chain[-1]))
        yield chain, keys
        inner = reversed(_mapping((chain, keys)).items())
        waiting += [((*chain, node), (*keys, key)) for key, node in inner if isinstance(node.value, dict)]
