"""Reads YAML files: batchtune's `sampler.yaml` and `stream.yaml`, and recipes; nothing in them is executed.

ruamel.yaml composes them: tags stay names, so nothing in a file is constructed or run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from batchtune.epochs.table import BucketTable
from batchtune.errors import ResultError, invalid_field, printable, shortened
from batchtune.files import read_regular
from batchtune.records import ConfigFile, PackedConfig, SamplerConfig, StreamConfig

LARGEST_BYTES = 2 << 20
# The scanner's time grows with the square of a line's length.
_LONGEST_LINE = 100_000
# And with the square of the depth of brackets: 1,500 take it half a minute.
_DEEPEST = 200
_MOST_REFERENCES = 32
_MOST_LISTED = 8

# Arguments of SpeechBrain's dynamic_bucketed_batch, in its `sampler_kwargs`.
STREAM_LIMITS = ("target_batch_numel", "max_batch_numel")
# Today's name, then the one before SpeechBrain 1.0.
LIMITS = ("max_batch_length", "max_batch_len")
BUCKETS = ("num_buckets", "bucket_boundaries")

REFERENCE = re.compile(r"<([^<>]*)>")
_REFERENCE_TAGS = ("!ref", "!copy")
_STANDARD_TAG = "tag:yaml.org,2002:"
_BRACKET = re.compile(r"[][{}]")
_NUMBER = re.compile(
    r"[-+]?((0|[1-9][0-9]{0,60})(\.[0-9]{0,60})?|\.[0-9]{1,60})([eE][-+]?[0-9]{1,5})?"
)
_WORDS = {
    "": None,
    "~": None,
    "null": None,
    "true": True,
    "false": False,
    "yes": True,
    "no": False,
}
_NOT_TRAINING = re.compile(
    r"val|valid|validation|dev|test|eval|infer|inference", re.IGNORECASE
)
_GIVE = "Write the number in the file, or give the settings as --current key=value,key=value."

# A node of ruamel.yaml, which has no types of its own.
Node = Any


def read_text(path: Path, name: str, hint: str | None = None) -> str:
    """Return the text of a small file, which messages call `name`; `hint` says what to give instead.

    Raises ResultError if it can't be read, is not an ordinary file, is larger than 2 MiB, or not UTF-8 text.
    """
    try:
        return read_regular(path, LARGEST_BYTES, hint, name=name).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ResultError(
            f"{name} is not UTF-8 text: byte {error.start} is {error.reason}", hint
        ) from error


def parse_yaml(text: str, name: str, again: str | None = None) -> Node:
    """Return the root node of one YAML document, which messages call `name`; `again` says how to get a whole one.

    Raises ResultError if it is not YAML, empty, too large, nested too deeply, or has two documents.
    """
    from ruamel.yaml import YAML

    if max(map(len, text.splitlines()), default=0) > _LONGEST_LINE:
        raise ResultError(
            f"{name} has a line of more than {_LONGEST_LINE:,} characters",
            "Break the line.",
        )
    depth = 0
    for bracket in _BRACKET.findall(text):
        depth = max(0, depth + (1 if bracket in "[{" else -1))
        if depth > _DEEPEST:
            raise ResultError(
                f"{name} is nested too deeply: it opens {_DEEPEST} brackets and more within each other",
                "Fix the file; no configuration needs that many.",
            )
    try:
        root = YAML().compose(text)
    except Exception as error:  # besides its own errors, whatever damaged escapes and deep nesting lead to
        place = printable(" ".join(str(error).split()))[:300]
        raise ResultError(
            f"{name} is not a readable YAML file: {place}",
            again or "Fix the file where it says.",
        ) from error
    if root is None:
        raise ResultError(
            f"{name} is empty", again or "Give the configuration of your training."
        )
    return root


def is_mapping(node: Node) -> bool:
    """Return whether a node is a mapping."""
    return bool(node.id == "mapping")


def is_scalar(node: Node) -> bool:
    """Return whether a node is a single value."""
    return bool(node.id == "scalar")


def is_reference(node: Node) -> bool:
    """Return whether a node is `!ref` with references to others in its text."""
    return is_scalar(node) and node.tag in _REFERENCE_TAGS


def entries(mapping: Node) -> dict[str, Node]:
    """Return the values of a mapping by key."""
    return {key.value: value for key, value in mapping.value if is_scalar(key)}


def plain_value(root: Node) -> Any:
    """Return a node as Python's own dicts, lists and scalars; values that aliases share stay shared."""
    made: dict[int, Any] = {}

    def plain(node: Node) -> Any:
        if is_scalar(node):
            return scalar_value(node)
        if id(node) not in made:
            made[id(node)] = None  # an anchor within itself
            if is_mapping(node):
                made[id(node)] = {
                    key: plain(value) for key, value in entries(node).items()
                }
            else:
                made[id(node)] = [plain(value) for value in node.value]
        return made[id(node)]

    return plain(root)


def scalar_value(node: Node) -> str | int | float | bool | None:
    """Return the meaning of an unquoted scalar without a tag of its own; else its text."""
    if node.style or not node.tag.startswith(_STANDARD_TAG):
        return str(node.value)
    return word_or_number(node.value)


def word_or_number(text: str) -> str | int | float | bool | None:
    """Return the number, true, false or null that a text means; else the text itself."""
    if not _NUMBER.fullmatch(text):
        return _WORDS.get(text.lower(), text)
    if text.lstrip("+-").isdigit():
        return int(text)
    return float(text)


def product_of(numbers: Sequence[Any]) -> int | float | None:
    """Return the product of numbers; None if one is not a number, or the product is not finite."""
    if not all(type(number) in (int, float) for number in numbers):
        return None
    product: int | float = math.prod(numbers)
    return product if abs(product) < math.inf else None


@dataclass(frozen=True, slots=True)
class RecipeBlock:
    """A mapping in a recipe: the last of a chain of mappings from the document's top, and the keys that lead there."""

    chain: tuple[Node, ...]
    keys: tuple[str, ...]

    @property
    def node(self) -> Node:
        """The mapping itself."""
        return self.chain[-1]

    @property
    def path(self) -> str:
        """Its path, keys with dots between."""
        return ".".join(self.keys)

    @property
    def is_validation(self) -> bool:
        """Whether its path is named for validation or test."""
        words = re.split(r"[^A-Za-z]+", self.path)
        return any(_NOT_TRAINING.fullmatch(word) for word in words)

    @property
    def settings(self) -> dict[str, Node]:
        """Its values by key."""
        return entries(self.node)

    @property
    def inner(self) -> list[RecipeBlock]:
        """The mappings among its values."""
        return [
            RecipeBlock((*self.chain, node), (*self.keys, key))
            for key, node in self.settings.items()
            if is_mapping(node)
        ]

    def has_any(self, names: Collection[str]) -> bool:
        """Return whether it has any of these keys."""
        return not self.settings.keys().isdisjoint(names)

    def nearest(self, key: str) -> Node | None:
        """Return a key's value, in this mapping or the innermost around it that has the key."""
        for mapping in reversed(self.chain):
            node = entries(mapping).get(key)
            if node is not None:
                return node
        return None


@dataclass(frozen=True, slots=True)
class Recipe:
    """The YAML of a SpeechBrain training, which messages call `name`; `root` is a mapping."""

    root: Node
    name: str

    @classmethod
    def parse(cls, text: str, name: str) -> Recipe:
        """Parse a recipe; raises ResultError as `parse_yaml` does, and for a file without keys."""
        root = parse_yaml(text, name)
        if not is_mapping(root):
            raise ResultError(
                f"{name} holds no settings by name",
                "Give the YAML file of a SpeechBrain recipe.",
            )
        return cls(root, name)

    def block_at(self, path: str, names: Collection[str]) -> RecipeBlock | None:
        """Return the mapping at a path of keys with dots between, if it has any of these names; None without one."""
        chain: list[Node] = [self.root]
        keys = path.split(".")
        for key in keys:
            node = entries(chain[-1]).get(key)
            if node is None or not is_mapping(node):
                return None
            chain.append(node)
        block = RecipeBlock(tuple(chain), tuple(keys))
        if not block.has_any(names):
            return None
        return block

    def blocks_with(self, names: Collection[str]) -> list[RecipeBlock]:
        """Return the mappings with any of these keys that are reached through mappings, each once despite aliases."""
        blocks: list[RecipeBlock] = []
        visited: set[int] = set()
        waiting = [RecipeBlock((self.root,), ())]
        while waiting:
            block = waiting.pop()
            if id(block.node) in visited:
                continue
            visited.add(id(block.node))
            if block.has_any(names):
                blocks.append(block)
            waiting += reversed(block.inner)
        return blocks

    def training_block(
        self, names: Collection[str], needed: Collection[str]
    ) -> RecipeBlock | None:
        """Return the training's settings with any of these names; those at a recipe's top only with any `needed`.

        That is the block with `train` in its path, else the one not named for validation or test; None without any. If
        several are left, ResultError names them, and the option that names one by its path of keys.
        """
        blocks = self.blocks_with(names)
        # References start from settings at the top: the block is what the sampler gets.
        inner = [block for block in blocks if block.keys]
        blocks = inner or [block for block in blocks if block.has_any(needed)]
        training = [block for block in blocks if not block.is_validation] or blocks
        training = [block for block in training if "train" in block.path] or training
        if len(training) > 1:
            paths = ", ".join(
                printable(block.path) for block in training[:_MOST_LISTED]
            )
            raise ResultError(
                f"{self.name} has {len(training)} blocks of batching settings: {paths}",
                f"Say which one: --current {self.name}:{printable(training[0].path)}.",
            )
        return next(iter(training), None)

    def check_block(self, block: RecipeBlock) -> None:
        """Raise ResultError if a block's settings are not all in it."""
        if block.node.tag.startswith("!include") or "<<" in block.settings:
            raise self.wrong(
                block.node,
                "the settings are in another file or merged (<<)",
                "Write them out.",
            )

    def value(self, node: Node) -> Any:
        """Return what a node stands for: a number, a word, None, or a list of these.

        A reference `!ref <key>` or `!ref <key[inner]>` is followed, also in a product with numbers or other references.
        Raises ResultError for a mapping, a value made by code, or any other reference.
        """
        target = self.followed(node)
        if target.id == "sequence" and target.tag.startswith(_STANDARD_TAG):
            return [self._single_value(self.followed(entry)) for entry in target.value]
        return self._single_value(target)

    def referenced(self, node: Node, reference: str) -> Node:
        """Return the node that `key[inner]` names, as hyperpyyaml reads it."""
        target = self.root
        # Attributes of objects count as the object.
        for part in reference.split(".")[0].split("["):
            key = part.strip("]")
            target = entries(target).get(key) if is_mapping(target) else None
            if target is None:
                raise self.wrong(
                    node,
                    f"<{reference}> points to {key!r}, which does not exist",
                    _GIVE,
                )
        return target

    def followed(self, node: Node) -> Node:
        """Return the node to which a chain of whole references leads; the node itself if it is none."""
        target = node
        for _ in range(_MOST_REFERENCES):
            reference = (
                REFERENCE.fullmatch(target.value.strip())
                if is_reference(target)
                else None
            )
            if reference is None:
                return target
            target = self.referenced(target, reference[1])
        raise self.wrong(
            node, "its references form a circle, or too long a chain", _GIVE
        )

    def wrong(self, node: Node, problem: str, hint: str | None) -> ResultError:
        """Return the error to raise about a node."""
        return ResultError(
            f"{self.name}, line {node.start_mark.line + 1}: {printable(problem)}", hint
        )

    def _single_value(self, node: Node) -> Any:
        if not is_reference(node):
            return self._plain(node)
        factors: list[Any] = []
        for part in node.value.split("*"):
            reference = REFERENCE.fullmatch(part.strip())
            if reference is None:
                factors.append(word_or_number(part.strip()))
            else:
                factors.append(
                    self._plain(self.followed(self.referenced(node, reference[1])))
                )
        product = product_of(factors)
        if product is None:
            raise self.wrong(
                node,
                f"{node.value[:60]!r} is not a product of numbers and references",
                _GIVE,
            )
        return product

    def _plain(self, node: Node) -> Any:
        if not is_scalar(node) or not node.tag.startswith(_STANDARD_TAG):
            problem = f"the value can't be read: a {node.id} ({node.tag[:60]}), not a plain number or word"
            raise self.wrong(node, problem, _GIVE)
        return scalar_value(node)


# The samplers of a `PackedConfig`.
_PACKED = ("packed", "same-step-packed")


def read_sampler_yaml(path: Path) -> SamplerConfig:
    """Read and check a `sampler.yaml` of padded batches.

    Raises ResultError as `_read_config` does, and for packed ones.
    """
    config = read_any_sampler_yaml(path)
    if isinstance(config, PackedConfig):
        raise ResultError(
            f"{path} describes packed micro-batches, and padded batches are needed here",
            "Run `batchtune sweep-buckets` without --max-tokens, in a run folder without a probe of packed batches.",
        )
    return config


def read_any_sampler_yaml(
    path: Path, command: str = "tune"
) -> SamplerConfig | PackedConfig:
    """Read and check a `sampler.yaml`, which `command` writes; raises ResultError as `_read_config` does."""
    config: SamplerConfig | PackedConfig = _read_config(
        path, SamplerConfig, "sampler.yaml", command
    )
    return config


def _check(config: SamplerConfig | PackedConfig | StreamConfig) -> None:
    """Raise ValueError if fields contradict each other."""
    if isinstance(config, PackedConfig):
        from batchtune.packing import budget_in

        budget_in(config)
        if (config.sampler == "packed") == config.keeps_examples:
            raise _wrong_for_sampler(config, "own_accumulate")
        return
    BucketTable.of(config.bucket_boundaries, config.bucket_batch_sizes)
    if isinstance(config, StreamConfig):
        if config.max_padding_ratio is not None and config.algorithm != "pivot":
            raise ValueError(
                f"max_padding_ratio belongs to the algorithm pivot, but algorithm is {config.algorithm}"
            )
        return
    sizes = config.bucket_batch_sizes
    of_table = {"num_buckets": len(sizes), "max_batch_size": max(sizes)}
    for name, value in of_table.items():
        if getattr(config, name) != value:
            raise ValueError(
                f"{name} is {getattr(config, name)}, but the table's is {value}"
            )
    if (config.sampler == "bucket") == (config.pool_size is not None):
        raise _wrong_for_sampler(config, "pool_size")
    if config.batch_overhead is not None and config.sampler != "pooled":
        raise ValueError(
            f"batch_overhead belongs to the sampler pooled, but sampler is {config.sampler}"
        )
    for name in ("accumulate", "own_accumulate"):
        if (config.sampler == "same-step") != (getattr(config, name) is not None):
            raise _wrong_for_sampler(config, name)


def _wrong_for_sampler(config: SamplerConfig | PackedConfig, name: str) -> ValueError:
    return ValueError(
        f"sampler is {config.sampler}, but {name} is {getattr(config, name)}"
    )


def read_stream_yaml(path: Path) -> StreamConfig:
    """Read and check a `stream.yaml`; raises ResultError as `_read_config` does."""
    config: StreamConfig = _read_config(
        path, StreamConfig, "stream.yaml", "sweep-stream"
    )
    return config


def _why_none(path: Path) -> str | None:
    """Return the reason of the sweep next to a config that does not exist; None unless it recommends nothing."""
    from batchtune.results import (
        STREAM_CONFIG_FILE,
        STREAM_FILE,
        SWEEP_FILE,
        StreamSweep,
        Sweep,
        read_if_written,
    )

    kind: type[Sweep | StreamSweep] = Sweep
    swept = path.with_name(SWEEP_FILE)
    if path.name == STREAM_CONFIG_FILE:
        kind = StreamSweep
        swept = path.with_name(STREAM_FILE)
    sweep = read_if_written(swept, kind)
    if sweep is None or not sweep.recommends_nothing:
        return None
    return sweep.reason


def _read_config(
    path: Path,
    kind: type[ConfigFile],
    name: str,
    command: str,
) -> Any:
    """Read a config, which `command` writes as `name`.

    Raises:
        ResultError: Missing, unreadable, not YAML, of another format, newer, or damaged; the message names the field.
    """
    if not path.exists():
        reason = _why_none(path)
        if reason is not None:
            raise ResultError(
                f"{path} does not exist: {reason}",
                f"Keep your current batches, or try `batchtune {command}` with other options.",
            )
        raise ResultError(
            f"{path} does not exist",
            f"`batchtune {command}` writes it. Another run folder is named with --run.",
        )

    again = f"Fix it, or create it again with `batchtune {command}`."
    text = read_text(path, str(path), again)
    document = plain_value(parse_yaml(text, str(path), again))
    header = document if isinstance(document, dict) else {}
    declared = header.get("format")
    if declared != kind.FORMAT:
        # Aliases may make the text of a list endless.
        named = declared if isinstance(declared, str) else None
        raise ResultError(
            f"{path} has the format {shortened(named)}; a file of the format {kind.FORMAT!r} is needed here",
            f"Give the {name} that `batchtune {command}` wrote.",
        )
    version = header.get("version")
    if isinstance(version, int) and version > kind.VERSION:
        raise ResultError(
            f"{path} has version {version} of {declared}; this batchtune knows versions up to {kind.VERSION}",
            "Install a newer batchtune.",
        )
    if kind is SamplerConfig and header.get("sampler") in _PACKED:
        kind = PackedConfig
    try:
        config: Any = msgspec.convert(document, type=kind)
        _check(config)
    except ValueError as error:  # msgspec's own, too
        problem = invalid_field(error)
        raise ResultError(f"{path} is damaged: {problem}", again) from error
    return config
