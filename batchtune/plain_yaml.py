"""YAML from strangers as plain nodes: nothing is constructed, evaluated or included.

The tree is built from the parser's events, so tags (`!new:`, `!apply:`) stay names, aliases share one node, and
neither the depth nor the number of aliases can make the work grow beyond the size of the text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchtune.errors import ResultError, shortened
from batchtune.files import read_regular

LARGEST_BYTES = 2 << 20
# The scanner takes time with the square of a line's length.
_LONGEST_LINE = 100_000
_DEEPEST = 64
# Keys copied by `<<`: what a bomb of merges would multiply.
_MOST_MERGED = 100_000

_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False, "yes": True, "no": False}
# A long word may be broken anywhere.
_WORDS_BEGIN = re.compile(r"(?<!\S)::|\S{40,}")
_LINES_BEGIN = re.compile(r"^\s*::", re.MULTILINE)
_STANDARD_TAG = "tag:yaml.org,2002:"
_CORE_TAGS = {_STANDARD_TAG + name for name in ("int", "float", "bool", "null")}


@dataclass(slots=True, eq=False)
class Node:
    """A piece of the document.

    Attributes:
        value: A dict by key, a list, or a scalar: str, int, float, bool or None.
        tag: As written (`!ref`, `!new:torch.nn.GELU`); None for YAML's own types.
        line: From 1.
    """

    value: dict[str, Node] | list[Node] | str | int | float | bool | None
    tag: str | None
    line: int

    def get(self, key: str) -> Node | None:
        """The value of a key; None where this is no mapping or has no such key."""
        return self.value.get(key) if isinstance(self.value, dict) else None


def read_text(path: Path, name: str, hint: str | None = None) -> str:
    """The text of a small file.

    Args:
        path: Of the file.
        name: What to call it in messages.
        hint: What to give instead.

    Raises:
        ResultError: It can't be read, is no ordinary file, is larger than 2 MiB, or no UTF-8 text.
    """
    content = read_regular(path, LARGEST_BYTES, hint, name=name)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ResultError(f"{name} is no UTF-8 text: byte {error.start} is {error.reason}", hint) from error


def parse_yaml(text: str, name: str) -> Node:
    """Reads one YAML document without making anything but nodes.

    Args:
        text: The document.
        name: What to call it in messages.

    Raises:
        ResultError: No YAML, empty, several documents, nested too deeply, or with a repeated key.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    builder = _Builder(name)
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > _LONGEST_LINE:
            raise ResultError(
                f"{name}, line {number} has {len(line):,} characters: no configuration", "Break the line."
            )
    try:
        for event in YAML(typ="safe", pure=True).parse(text):
            builder.take(event)
    # The scanner raises ValueError, IndexError or OverflowError on some damaged escapes and directives.
    except (YAMLError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
        place = printable(" ".join(str(error).split()))[:300]
        raise ResultError(f"{name} is no YAML that can be read: {place}", "Mend the file where it says.") from error
    if builder.root is None:
        raise ResultError(f"{name} is empty", "Give the configuration of a training.")
    return builder.root


def printable(text: str) -> str:
    """Text of a stranger's file for a terminal: what could steer it becomes a question mark."""
    return "".join(character if character.isprintable() else "?" for character in text)


def without_commands(text: str, *, wrapped: bool = True) -> str:
    """Return text that GitHub Actions takes for no command where a log shows it.

    It takes `::name::` where that begins a line, and `##[name]` anywhere
    (https://github.com/actions/runner, `ActionCommand.cs`).

    Args:
        text: Any text.
        wrapped: Whether its lines may still be broken, between words or in a long one.
    """
    parted = (_WORDS_BEGIN if wrapped else _LINES_BEGIN).sub(lambda match: match[0].replace("::", ": :"), text)
    return parted.replace("##[", "## [")


def scalar_of(text: str) -> str | int | float | bool | None:
    """What an unquoted scalar means, where all versions of YAML agree; the text itself elsewhere."""
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
    """A node as Python's own dicts, lists and scalars; what aliases share stays shared."""
    made: dict[int, Any] = {}

    def plain(node: Node) -> Any:
        if not isinstance(node.value, (dict, list)):
            return node.value
        if id(node) not in made:
            made[id(node)] = None  # an anchor within itself
            if isinstance(node.value, dict):
                made[id(node)] = {key: plain(value) for key, value in node.value.items()}
            else:
                made[id(node)] = [plain(value) for value in node.value]
        return made[id(node)]

    return plain(node)


@dataclass(slots=True)
class _Open:
    """A collection that has begun: the key that waits for its value, if any."""

    node: Node
    key: str | None = None
    waiting: bool = False


@dataclass(slots=True)
class _Builder:
    """Puts events together."""

    name: str
    root: Node | None = None
    open: list[_Open] = field(default_factory=list)
    anchors: dict[str, Node] = field(default_factory=dict)
    merged: int = 0

    def take(self, event: Any) -> None:
        from ruamel.yaml import events

        if isinstance(event, events.AliasEvent):
            self._place(self._anchored(event), "")
        elif isinstance(event, events.ScalarEvent):
            self._add(Node(_scalar(event), _tag(event), _line(event)), event)
        elif isinstance(event, events.CollectionStartEvent):
            if len(self.open) >= _DEEPEST:
                raise self._wrong(_line(event), f"nests more than {_DEEPEST} levels deep")
            node = Node({} if isinstance(event, events.MappingStartEvent) else [], _tag(event), _line(event))
            self._add(node, event)
            self.open.append(_Open(node))
        elif isinstance(event, events.CollectionEndEvent):
            self._merge(self.open.pop().node)
        elif isinstance(event, events.DocumentStartEvent) and self.root is not None:
            raise self._wrong(_line(event), "holds a second document", "Give a file of one.")

    def _anchored(self, event: Any) -> Node:
        node = self.anchors.get(event.anchor)
        if node is None:
            raise self._wrong(_line(event), f"refers to *{event.anchor[:60]}, which is not defined before")
        return node

    def _add(self, node: Node, event: Any) -> None:
        if event.anchor is not None:
            self.anchors[event.anchor] = node
        self._place(node, event.value if isinstance(node.value, (str, int, float, bool, type(None))) else "")

    def _place(self, node: Node, text: str) -> None:
        """Puts a node where it belongs; `text` is what it is called where it turns out to be a key."""
        if not self.open:
            self.root = node
            return
        parent = self.open[-1]
        if isinstance(parent.node.value, list):
            parent.node.value.append(node)
        elif not parent.waiting:
            parent.key, parent.waiting = printable(text), True
        elif isinstance(parent.node.value, dict) and parent.key is not None:
            if parent.key in parent.node.value and parent.key != "":
                twice = f"has the key {shortened(parent.key)} a second time"
                raise self._wrong(node.line, twice, "Keep the one that counts.")
            parent.node.value[parent.key] = node
            parent.key, parent.waiting = None, False

    def _merge(self, node: Node) -> None:
        """Adds what `<<` names; a mapping's own keys go before, then the first named."""
        if not isinstance(node.value, dict) or "<<" not in node.value:
            return
        given = node.value.pop("<<")
        for source in given.value if isinstance(given.value, list) else [given]:
            if not isinstance(source.value, dict):
                raise self._wrong(given.line, "merges (<<) something that is no mapping")
            self.merged += len(source.value)
            if self.merged > _MOST_MERGED:
                raise self._wrong(given.line, f"merges (<<) more than {_MOST_MERGED:,} keys")
            for key, value in tuple(source.value.items()):
                node.value.setdefault(key, value)

    def _wrong(self, line: int, problem: str, hint: str = "Mend the file there.") -> ResultError:
        return ResultError(f"{self.name}, line {line}: the file {problem}", hint)


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


def _tag(event: Any) -> str | None:
    tag = None if event.tag is None else printable(str(event.tag))
    return None if tag is None or tag.startswith(_STANDARD_TAG) else tag


def _scalar(event: Any) -> str | int | float | bool | None:
    plain = event.tag is None and not event.style
    return scalar_of(event.value) if plain or str(event.tag) in _CORE_TAGS else str(event.value)
