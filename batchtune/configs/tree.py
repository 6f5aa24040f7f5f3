"""Reads YAML from strangers as a tree of plain nodes with their places: nothing is constructed, evaluated or included.

The tree is built from the parser's events, so tags (`!new:`, `!apply:`) stay names, aliases share one node, and
neither the depth nor the number of aliases can make the work grow beyond the size of the text. Each node knows its
place in the text, so that a value can be replaced there while all else stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchtune.errors import ResultError, printable, shortened
from batchtune.files import read_regular

LARGEST_BYTES = 2 << 20
DEEPEST = 64
# The scanner's time grows with the square of a line's length.
_LONGEST_LINE = 100_000
# Keys copied by `<<`: what a bomb of merges would multiply.
_MOST_MERGED = 100_000

_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False, "yes": True, "no": False}
_STANDARD_TAG = "tag:yaml.org,2002:"
_CORE_TAGS = {_STANDARD_TAG + name for name in ("int", "float", "bool", "null")}

Keys = tuple[str, ...]


@dataclass(slots=True, eq=False, kw_only=True)
class Node:
    """A piece of the document.

    Attributes:
        value: A dict by key, a list, or a scalar, with aliases and merges (`<<`) followed.
        tag: As written (`!ref`, `!new:torch.nn.GELU`); None for YAML's own types.
        line, column: From 1 and from 0.
        start, end: Its place in the text, tag and anchor included; a block ends with its last piece.
        text: A scalar's text, or an alias's name.
        style: Of a scalar: None, quotes, `|` or `>`. Of a collection: `flow` or None.
        target: The node that an alias repeats; None for all others.
        pieces: A collection's content as written, aliases and `<<` included: keys (None in a list) with values.
    """

    value: dict[str, Node] | list[Node] | str | int | float | bool | None
    tag: str | None
    line: int
    column: int
    start: int
    end: int
    text: str = ""
    style: str | None = None
    anchor: str | None = None
    target: Node | None = None
    pieces: list[tuple[Node | None, Node]] = field(default_factory=list)

    def get(self, key: str) -> Node | None:
        """Return the value of a key; None without one."""
        return self.value.get(key) if isinstance(self.value, dict) else None

    def pair(self, key: str) -> tuple[Node, Node] | None:
        """Return the key and the value that are written here, not merged or aliased."""
        found = ((name, value) for name, value in self.pieces if name is not None and name.is_scalar)
        return next((pair for pair in found if pair[0].text == key), None)

    @property
    def is_scalar(self) -> bool:
        """Whether it is written as a single value."""
        return self.target is None and not isinstance(self.value, (dict, list))


def written_at(root: Node, path: Keys) -> Node | None:
    """Return the node that is written at a path of keys; None without one."""
    node: Node | None = root
    for key in path:
        pair = None if node is None else node.pair(key)
        node = None if pair is None else pair[1]
    return node


def walk(root: Node) -> Iterator[tuple[Keys, Node]]:
    """Yield all pieces as they are written, in order, with their paths of keys and indices."""
    waiting: list[tuple[Keys, Node]] = [((), root)]
    while waiting:
        path, node = waiting.pop()
        yield path, node
        inner = [(str(index) if key is None else key.text, value) for index, (key, value) in enumerate(node.pieces)]
        waiting += [((*path, key), value) for key, value in reversed(inner)]


def read_text(path: Path, name: str, hint: str | None = None) -> str:
    """Return the text of a small file, which messages call `name`; `hint` says what to give instead.

    Raises ResultError if it can't be read, is no ordinary file, is larger than 2 MiB, or not UTF-8 text.
    """
    content = read_regular(path, LARGEST_BYTES, hint, name=name)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ResultError(f"{name} is not UTF-8 text: byte {error.start} is {error.reason}", hint) from error


def parse_yaml(text: str, name: str) -> Node:
    """Parse one YAML document, which messages call `name`, into nodes.

    Raises ResultError if it is not YAML, empty, too large, nested too deeply, or has two documents or a repeated key.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    if len(text) > LARGEST_BYTES:
        raise ResultError(f"{name} is too large for a training's configuration", "Give a file of at most 2 MiB.")
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > _LONGEST_LINE:
            raise ResultError(f"{name}, line {number} has {len(line):,} characters", "Break the line.")
    builder = _Builder(name)
    try:
        for event in YAML(typ="safe", pure=True).parse(text):
            builder.take(event)
    # The scanner raises ValueError, IndexError or OverflowError on some damaged escapes and directives.
    except (YAMLError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
        place = printable(" ".join(str(error).split()))[:300]
        raise ResultError(f"{name} is not a readable YAML file: {place}", "Fix the file where it says.") from error
    if builder.root is None:
        raise ResultError(f"{name} is empty", "Give the configuration of a training.")
    return builder.root


def scalar_of(text: str) -> str | int | float | bool | None:
    """Return the meaning of an unquoted scalar, if all versions of YAML agree; else the text itself."""
    if len(text) > 64:
        return text
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text) and not text.lstrip("+-").isdigit():
        return float(text)
    return float(text.replace(".", "")) if _SPECIAL.fullmatch(text) else text


def plain_value(node: Node) -> Any:
    """Return a node as Python's own dicts, lists and scalars; values that aliases share stay shared."""
    made: dict[int, Any] = {}

    def plain(node: Node) -> Any:
        if isinstance(node.value, (dict, list)) and id(node) not in made:
            made[id(node)] = None  # an anchor within itself
            if isinstance(node.value, dict):
                made[id(node)] = {key: plain(value) for key, value in node.value.items()}
            else:
                made[id(node)] = [plain(value) for value in node.value]
        return made.get(id(node), node.value)

    return plain(node)


@dataclass(slots=True)
class _Builder:
    """Puts the parser's events together; `open` holds each open collection with the key that waits for its value."""

    name: str
    root: Node | None = None
    open: list[tuple[Node, Node | None]] = field(default_factory=list)
    anchors: dict[str, Node] = field(default_factory=dict)
    merged: int = 0

    def take(self, event: Any) -> None:
        from ruamel.yaml import events

        if isinstance(event, events.NodeEvent):
            node = self._node(event)
            self._place(node)
            if isinstance(event, events.CollectionStartEvent):
                if len(self.open) >= DEEPEST:
                    raise self._wrong(node, f"nests more than {DEEPEST} levels deep")
                self.open.append((node, None))
        elif isinstance(event, events.CollectionEndEvent):
            node, _ = self.open.pop()
            if node.style == "flow":
                node.end = int(event.end_mark.index)
            elif node.pieces:
                node.end = max(piece.end for piece in node.pieces[-1] if piece is not None)
            if isinstance(node.value, dict) and "<<" in node.value:
                self._merge(node.value.pop("<<"), node.value)
        elif isinstance(event, events.DocumentStartEvent) and self.root is not None:
            raise ResultError(f"{self.name} holds more than one document", "Give a file with one.")

    def _node(self, event: Any) -> Node:
        from ruamel.yaml import events

        start, end = event.start_mark, event.end_mark
        made = Node(value=None, tag=None, line=start.line + 1, column=start.column, start=start.index, end=end.index)
        if isinstance(event, events.AliasEvent):
            made.text, made.target = event.anchor, self.anchors.get(event.anchor)
            if made.target is None:
                raise self._wrong(made, f"refers to *{made.text[:60]}, which is not defined before")
            made.value = made.target.value
            return made
        tag = None if event.tag is None else printable(str(event.tag))
        made.tag = None if tag is None or tag == "!" or tag.startswith(_STANDARD_TAG) else tag
        if isinstance(event, events.ScalarEvent):
            made.text, made.style = str(event.value), event.style or None
            plain = event.tag is None and made.style is None
            made.value = scalar_of(made.text) if plain or tag in _CORE_TAGS else made.text
        else:
            made.value = {} if isinstance(event, events.MappingStartEvent) else []
            made.style = "flow" if event.flow_style else None
        made.anchor = event.anchor
        if made.anchor is not None:
            self.anchors[made.anchor] = made
        return made

    def _place(self, node: Node) -> None:
        if not self.open:
            self.root = node
            return
        (parent, key), found = self.open[-1], node.target or node
        if isinstance(parent.value, dict) and key is None:
            self.open[-1] = (parent, node)
            return
        parent.pieces.append((key, node))
        if isinstance(parent.value, list):
            parent.value.append(found)
        elif isinstance(parent.value, dict) and key is not None:
            name = printable(key.text) if key.is_scalar else ""
            if name in parent.value and name != "":
                raise self._wrong(key, f"has the key {shortened(name)} a second time", "Keep the one that counts.")
            parent.value[name] = found
            self.open[-1] = (parent, None)

    def _merge(self, given: Node, into: dict[str, Node]) -> None:
        """Add the keys that `<<` names; a mapping's own keys take precedence, then the first named."""
        for source in given.value if isinstance(given.value, list) else [given]:
            if not isinstance(source.value, dict):
                raise self._wrong(given, "merges (<<) something that is not a mapping")
            self.merged += len(source.value)
            if self.merged > _MOST_MERGED:
                raise self._wrong(given, f"merges (<<) more than {_MOST_MERGED:,} keys")
            for key, value in tuple(source.value.items()):
                into.setdefault(key, value)

    def _wrong(self, node: Node, problem: str, hint: str = "Fix the file there.") -> ResultError:
        return ResultError(f"{self.name}, line {node.line}: the file {problem}", hint)
