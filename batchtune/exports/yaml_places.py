"""A YAML file as the places of its pieces, for changing some of them and nothing else.

The file is parsed by the YAML parser's own events: nothing is constructed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from batchtune.errors import ResultError
from batchtune.exports.snippets import one_line

_LARGEST = 2 << 20
# The scanner takes time with the square of a line's length.
_LONGEST_LINE = 100_000
DEEPEST = 64
_STANDARD_TAG = "tag:yaml.org,2002:"
PASTE_IN = "`batchtune export --to speechbrain` writes a block to paste in by hand."
_REFERENCE = re.compile(r"<([^<>]*)>")

Keys: TypeAlias = tuple[str, ...]


@dataclass(slots=True, eq=False)
class Node:
    """A piece of the file.

    Attributes:
        text: A scalar's text, or an alias's name.
        tag: As written; None for YAML's own.
        start, end: Its place in the file, tag and anchor included; a block's end is that of its last piece.
        line: From 1.
        column: From 0.
        style: Of a scalar: None, quotes, `|` or `>`. Of a collection: `flow` or None.
    """

    kind: Literal["scalar", "alias", "list", "mapping"]
    text: str
    tag: str | None
    anchor: str | None
    start: int
    end: int
    line: int
    column: int
    style: str | None
    pairs: list[tuple[Node, Node]] = field(default_factory=list)
    named: dict[str, tuple[Node, Node]] = field(default_factory=dict)
    items: list[Node] = field(default_factory=list)
    target: Node | None = None

    def pair(self, key: str) -> tuple[Node, Node] | None:
        """The key and its value, as nodes; None where this is no mapping or has no such key of its own."""
        return self.named.get(key)

    def children(self) -> Iterator[tuple[str, Node]]:
        """What is in it, by key or by index."""
        for key, value in self.pairs:
            yield key.text, value
        for index, item in enumerate(self.items):
            yield str(index), item


class Tree:
    """A parsed file.

    Args:
        text: The file.
        name: What to call it.

    Raises:
        ResultError: It is no YAML of one mapping, or a key is repeated.
    """

    def __init__(self, text: str, name: str) -> None:
        self.text = text
        self.name = name
        self.aliases: list[tuple[Keys, Node]] = []
        self.references: list[tuple[Keys, Node, list[Keys]]] = []
        self.leaves: dict[Keys, tuple[str | None, ...]] = {}
        self.mappings: list[tuple[Keys, Node]] = []
        self.root = self._parsed()
        if self.root.kind != "mapping":
            raise ResultError(f"{name} holds no settings by name", "Give the YAML file of a SpeechBrain recipe.")
        self._walk()

    def wrong(self, node: Node, problem: str, hint: str = PASTE_IN) -> ResultError:
        """The error about a place in the file."""
        return ResultError(f"{self.name}, line {node.line}: {one_line(problem)}", hint)

    def _parsed(self) -> Node:
        from ruamel.yaml import YAML
        from ruamel.yaml.error import YAMLError

        if len(self.text) > _LARGEST:
            raise ResultError(f"{self.name} is too large for a recipe's YAML", "Give the recipe's hyperparameter file.")
        for index, line in enumerate(self.text.splitlines(), 1):
            if len(line) > _LONGEST_LINE:
                raise ResultError(f"{self.name}, line {index} has {len(line):,} characters", "Break the line.")
        builder = _Builder(self)
        try:
            for event in YAML(typ="safe", pure=True).parse(self.text):
                builder.take(event)
        # The scanner raises others than its own on some damaged escapes and directives.
        except (YAMLError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
            place = one_line(" ".join(str(error).split()))[:300]
            raise ResultError(
                f"{self.name} is no YAML that can be read: {place}", "Mend the file where it says."
            ) from error
        if builder.root is None:
            raise ResultError(f"{self.name} is empty", "Give the YAML file of a SpeechBrain recipe.")
        return builder.root

    def _walk(self) -> None:
        """Notes all pieces with their paths."""
        waiting: list[tuple[Keys, Node]] = [((), self.root)]
        while waiting:
            path, node = waiting.pop()
            self.leaves[path] = (node.kind, node.tag, node.anchor, node.text)
            if node.kind == "mapping":
                self.mappings.append((path, node))
            if node.kind == "alias":
                self.aliases.append((path, node))
            if node.kind == "scalar" and node.tag in ("!ref", "!copy"):
                paths = [reference_path(match) for match in _REFERENCE.findall(node.text)]
                self.references.append((path, node, paths))
            waiting += [((*path, key), child) for key, child in reversed(list(node.children()))]

    def at(self, path: Sequence[str]) -> Node | None:
        """The node at a path of keys; None where there is none."""
        node: Node | None = self.root
        for key in path:
            pair = None if node is None else node.pair(key)
            node = None if pair is None else pair[1]
        return node


def reference_path(reference: str) -> Keys:
    """`key[inner]` → (key, inner), as hyperpyyaml reads it; attributes of objects count as the object."""
    return tuple(part.strip("]") for part in reference.split(".")[0].split("["))


@dataclass(slots=True)
class _Builder:
    """Puts the parser's events together."""

    tree: Tree
    root: Node | None = None
    open: list[Node] = field(default_factory=list)
    keys: list[Node | None] = field(default_factory=list)
    anchors: dict[str, Node] = field(default_factory=dict)

    def take(self, event: Any) -> None:
        """Takes the next event.

        Raises:
            ResultError: A second document, a repeated key, an alias without an anchor, or too deep.
        """
        from ruamel.yaml import events

        if isinstance(event, events.AliasEvent):
            node = _node(event, "alias", str(event.anchor))
            node.target = self.anchors.get(node.text)
            if node.target is None:
                raise self.tree.wrong(node, f"*{node.text[:60]} is not defined before", "Mend the file there.")
            self._place(node)
        elif isinstance(event, events.ScalarEvent):
            self._place(_node(event, "scalar", str(event.value)))
        elif isinstance(event, events.CollectionStartEvent):
            self._open(_node(event, "mapping" if isinstance(event, events.MappingStartEvent) else "list", ""))
        elif isinstance(event, events.CollectionEndEvent):
            self._close(int(event.end_mark.index))
        elif isinstance(event, events.DocumentStartEvent) and self.root is not None:
            raise ResultError(f"{self.tree.name} holds more than one document", "Give a file of one.")

    def _open(self, node: Node) -> None:
        self._place(node)
        if len(self.open) >= DEEPEST:
            raise self.tree.wrong(node, f"the file nests more than {DEEPEST} levels deep")
        self.open.append(node)
        self.keys.append(None)

    def _close(self, end: int) -> None:
        node = self.open.pop()
        self.keys.pop()
        last = node.items[-1] if node.items else node.pairs[-1][1] if node.pairs else None
        if node.style == "flow":
            node.end = end
        elif last is not None:
            node.end = max(last.end, node.pairs[-1][0].end if node.pairs else 0)

    def _place(self, node: Node) -> None:
        if node.anchor is not None:
            self.anchors[node.anchor] = node
        if not self.open:
            self.root = node
            return
        parent = self.open[-1]
        key = self.keys[-1]
        if parent.kind == "list":
            parent.items.append(node)
        elif key is None:
            self.keys[-1] = node
        else:
            if key.kind == "scalar" and key.text in parent.named:
                raise self.tree.wrong(key, f"the key {key.text[:60]!r} stands here a second time", "Keep one of them.")
            parent.pairs.append((key, node))
            if key.kind == "scalar":
                parent.named[key.text] = (key, node)
            self.keys[-1] = None


def _node(event: Any, kind: Literal["scalar", "alias", "list", "mapping"], text: str) -> Node:
    tag = None if getattr(event, "tag", None) is None else str(event.tag)
    if kind == "scalar":
        style = event.style or None
    else:
        style = "flow" if getattr(event, "flow_style", False) else None
    return Node(
        kind=kind,
        text=text,
        tag=None if tag is None or tag.startswith(_STANDARD_TAG) or tag == "!" else tag,
        anchor=None if kind == "alias" else event.anchor,
        start=int(event.start_mark.index),
        end=int(event.end_mark.index),
        line=int(event.start_mark.line) + 1,
        column=int(event.start_mark.column),
        style=style,
    )
