"""YAML files of others, as ruamel.yaml composes them: tags stay names, so nothing in a file is constructed or run."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchtune.errors import ResultError, printable
from batchtune.files import read_regular

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
            f"{name} is empty", again or "Give the configuration of a training."
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
        """Return the settings with any of these names that a recipe trains with; at its top only with any `needed`.

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
            node, "its references lead around in a circle, or too far", _GIVE
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
