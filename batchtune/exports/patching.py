"""Numbers put into a user's own recipe by ruamel.yaml's round trip.

The layout may change; comments, tags and all other values stay. The result is parsed again and compared.
"""

from __future__ import annotations

import io
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

from batchtune.configs import (
    Block,
    Keys,
    Node,
    Recipe,
    entries,
    is_list,
    is_mapping,
    is_scalar,
    is_validation,
    reference_path,
    references_in,
    walk,
    whole_reference,
)
from batchtune.errors import ResultError, shortened
from batchtune.exports.text import list_of_texts, number, one_line

Value = float | list[float] | None

_STANDARD_TAG = "tag:yaml.org,2002:"
_COMMENT = re.compile(r"(?:^|(?<=\s))#.*", re.MULTILINE)
# A key with nothing behind it, and the spaces of the next line.
_INDENTED = re.compile(r"^[^\s#-][^#\n]*:(?: *!\S+)?[ \t]*(?:#.*)?\n( +)[^\s#-]", re.MULTILINE)
_MOST_REFERENCES = 32


def block_to_patch(recipe: Recipe, key_path: str | None, find: Callable[[], Block | None], lacks: ResultError) -> Block:
    """Return the block at `key_path`, or else the one that `find` returns; raise `lacks` without one."""
    if key_path is None:
        block = find()
        if block is None:
            raise lacks
    else:
        block = recipe.block_at(tuple(key_path.split(".")))
        if block is None:
            raise ResultError(
                f"{recipe.name} has no settings at {shortened(one_line(key_path))}",
                "Give the path of a mapping, dots between.",
            )
    recipe.check_block(block)
    return block


@dataclass(slots=True)
class RecipePatch:
    """The changes to a recipe; `paste_in` says what to do if it can't be patched.

    Attributes:
        wanted: Path of a setting → the value that it has to get.
        changed: The paths of all values that change.
        uses: Target → the places that repeat it, by a reference or an alias.
        comments: Path of a setting → what renders comments above it, indented by the given spaces.
    """

    text: str
    name: str
    paste_in: str
    recipe: Recipe = field(init=False)
    wanted: dict[Keys, Value] = field(default_factory=dict)
    changed: set[Keys] = field(default_factory=set)
    uses: dict[Keys, list[Keys]] = field(default_factory=lambda: defaultdict(list))
    comments: dict[Keys, Callable[[str], str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.recipe = Recipe.parse(self._plain_text, self.name)
        places: dict[int, Keys] = {}
        for path, node in walk(self.recipe.root):
            if id(node) in places:
                self.uses[places[id(node)]].append(path)
            places.setdefault(id(node), path)
            for target in references_in(node):
                self.uses[target].append(path)

    def put(self, block: Block, key: str, value: Value, *, before: str, replaces: str | None = None) -> None:
        """Set a block's setting; one that it lacks takes the place of `replaces`, or is added in front of `before`.

        Raises ResultError if the value can't be changed without changing something else.
        """
        path = (*block.keys, key)
        self.wanted[path] = value
        settings = block.settings
        if key not in settings and replaces in settings:
            renamed = next(name for name, _ in block.node.value if name.value == replaces)
            renamed.value = key
            self.changed |= {path, (*block.keys, replaces)}
            self._replace(block.node, key, value)
        elif key not in settings:
            names = [name.value for name, _ in block.node.value]
            index = names.index(before) if before in names else 0
            block.node.value.insert(index, (_node_of(key), _node_of(value)))
            self.changed.add(path)
        elif not self._stands_for(settings[key], value):
            source = self._source(path)
            self._replace(self._mapping(source[:-1]), source[-1], value)
            self.changed.add(source)
        self._refuse_other_uses(block)

    def comment(self, block: Block, above: str, render: Callable[[str], str]) -> None:
        """Add comments above a setting; `render` makes their lines, indented by the given spaces."""
        path = (*block.keys, above)
        self.comments[path] = render

    def result(self) -> str:
        """Return the new text, checked; the given text itself if nothing changes."""
        if not self.changed:
            return self.text
        text = self._written()
        self._check(text)
        for path, render in self.comments.items():
            text = self._commented(text, path, render)
        if "\r\n" in self.text:
            text = text.replace("\n", "\r\n")
        return f"\ufeff{text}" if self.text.startswith("\ufeff") else text

    @property
    def _plain_text(self) -> str:
        return self.text.removeprefix("\ufeff").replace("\r\n", "\n")

    def _mapping(self, path: Keys) -> Node:
        block = self.recipe.block_at(path)
        assert block is not None
        return block.node

    def _stands_for(self, node: Node, value: Value) -> bool:
        try:
            return bool(self.recipe.value(node) == value)
        except ResultError:
            return False

    def _source(self, path: Keys) -> Keys:
        """Return the path of the value to change: where a reference leads, if nothing else uses that."""
        for _ in range(_MOST_REFERENCES):
            node = entries(self._mapping(path[:-1]))[path[-1]]
            reference = whole_reference(node)
            if reference is None or "." in reference:
                return path
            target = reference_path(reference)
            holder = self.recipe.block_at(target[:-1])
            if holder is None or target[-1] not in holder.settings:
                raise self.recipe.wrong(node, f"<{reference}> is not in the file", "Fix the reference.")
            is_replaceable = is_scalar(holder.settings[target[-1]]) and set(self._users_of(target)) <= {path}
            if not is_replaceable:
                return path
            path = target
        return path

    def _users_of(self, path: Keys) -> Iterator[Keys]:
        """Yield the places that repeat a value, or something that it is part of."""
        for target, places in self.uses.items():
            if target and path[: len(target)] == target:
                yield from places

    def _replace(self, mapping: Node, key: str, value: Value) -> None:
        """Put a number or a list in the place of a value; its comments stay."""
        index = next(index for index, (name, _) in enumerate(mapping.value) if name.value == key)
        name, old = mapping.value[index]
        if is_mapping(old) or (is_scalar(old) and old.style in ("|", ">")):
            raise self.recipe.wrong(old, f"{key} is not a number or a list that could be replaced", self.paste_in)
        new = _node_of(value)
        new.comment = _comment_of(old)
        mapping.value[index] = (name, new)

    def _refuse_other_uses(self, block: Block) -> None:
        """Refuse to change a block or a value that something else uses, too."""
        for place in self._users_of(block.keys):
            if is_validation(place) or "<<" in place:
                raise self._shared(f"takes the settings of {block.path} and would change with them", place)
        for path in self.changed:
            for place in self.uses.get(path, ()):
                if place not in self.changed and path[:-1] == block.keys:
                    raise self._shared(f"refers to {'.'.join(path)}, which has to change", place)

    def _shared(self, problem: str, place: Keys) -> ResultError:
        return ResultError(f"{self.name}: {one_line('.'.join(place))} {problem}", "Write out its own settings there.")

    def _written(self) -> str:
        """Return the changed nodes as text."""
        from ruamel.yaml import YAML

        for _, node in walk(self.recipe.root):
            if isinstance(node.anchor, str):  # the serializer keeps the names of anchors in this form only
                node.anchor = SimpleNamespace(value=node.anchor, always_dump=True)
        yaml = YAML()
        yaml.width = sys.maxsize
        indented = _INDENTED.search(self._plain_text)
        if indented is not None:
            yaml.map_indent = len(indented[1])
        stream = io.StringIO()
        yaml.serialize(self.recipe.root, stream)
        return stream.getvalue()

    def _check(self, text: str) -> None:
        """Make sure that the new text says what it has to, and all else is what it was."""
        unsafe = ResultError(
            f"{self.name} is written in a way in which numbers can't be replaced safely", self.paste_in
        )
        try:
            after = Recipe.parse(text, self.name)
            for path, value in self.wanted.items():
                block = after.block_at(path[:-1])
                if block is None or after.value(block.settings[path[-1]]) != value:
                    raise unsafe
        except ResultError as error:
            raise unsafe from error
        before = Recipe.parse(self._plain_text, self.name)
        if self._other_values(before) != self._other_values(after):
            raise unsafe
        for comment in _COMMENT.findall(self._plain_text):
            if comment.rstrip() not in text:
                raise unsafe

    def _other_values(self, recipe: Recipe) -> dict[Keys, tuple[object, ...]]:
        values: dict[Keys, tuple[object, ...]] = {}
        for path, node in walk(recipe.root):
            if not any(path[:length] in self.changed for length in range(len(path) + 1)):
                values[path] = (node.id, node.tag, node.anchor, node.value if is_scalar(node) else None)
        return values

    def _commented(self, text: str, path: Keys, render: Callable[[str], str]) -> str:
        """Return the text with comments above the line of a setting."""
        block = Recipe.parse(text, self.name).block_at(path[:-1])
        assert block is not None  # _check has found it
        name = next(name for name, _ in block.node.value if name.value == path[-1])
        lines = text.splitlines(keepends=True)
        line = lines[name.start_mark.line]
        comment = render(" " * (len(line) - len(line.lstrip(" "))))
        if comment and comment not in text:
            lines.insert(name.start_mark.line, comment)
        return "".join(lines)


def _node_of(value: Value | str) -> Node:
    from ruamel.yaml.nodes import ScalarNode, SequenceNode

    if isinstance(value, list):
        numbers = [ScalarNode(f"{_STANDARD_TAG}{_kind(text)}", text) for text in list_of_texts(value)]
        return SequenceNode(f"{_STANDARD_TAG}seq", numbers, flow_style=True)
    if isinstance(value, str):
        return ScalarNode(f"{_STANDARD_TAG}str", value)
    if value is None:
        return ScalarNode(f"{_STANDARD_TAG}null", "null")
    text = number(value)
    return ScalarNode(f"{_STANDARD_TAG}{_kind(text)}", text)


def _kind(text: str) -> str:
    return "float" if "." in text else "int"


def _comment_of(node: Node) -> Node:
    """Return the comment that takes the place of a value's comments, those of a list's entries included."""
    if not is_list(node):
        return node.comment
    tokens: dict[int, Node] = {}
    for _, entry in walk(node):
        for token in _tokens(entry.comment):
            tokens[id(token)] = token
    if not tokens:
        return None
    first = next(iter(tokens.values()))
    first.value = "".join(token.value for token in tokens.values())
    return [first, None]


def _tokens(comment: Node) -> Iterator[Node]:
    """Yield the tokens of a node's comment: a list of tokens and lists of them."""
    for token in comment or ():
        if isinstance(token, list):
            yield from _tokens(token)
        elif token is not None:
            yield token
