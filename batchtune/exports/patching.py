"""Numbers put into a user's own recipe by ruamel.yaml's round trip.

The layout may change; comments, tags and all other values stay. The result is parsed again and compared.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from batchtune.configs import (
    Block,
    Keys,
    Node,
    Recipe,
    is_mapping,
    is_scalar,
    is_validation,
    references_in,
    walk,
)
from batchtune.errors import ResultError, shortened
from batchtune.exports.templating import list_of_texts, number, one_line

Value = float | list[float] | None

_STANDARD_TAG = "tag:yaml.org,2002:"
_COMMENT = re.compile(r"(?:^|(?<=\s))#.*", re.MULTILINE)
# A key with nothing behind it, and the spaces of the next line.
_INDENTED = re.compile(
    r"^[^\s#-][^#\n]*:(?: *!\S+)?[ \t]*(?:#.*)?\n( +)[^\s#-]", re.MULTILINE
)


class RecipePatch:
    """The changes to a recipe, which messages call `name`; `paste_in` says what to do if it can't be patched."""

    def __init__(self, text: str, name: str, paste_in: str) -> None:
        self.text = text
        self.paste_in = paste_in
        self.recipe = Recipe.parse(text.removeprefix("\ufeff"), one_line(name))
        # Path of a setting → the value that it gets.
        self.wanted: dict[Keys, Value] = {}
        self._removed: set[Keys] = set()

    def block(
        self, key_path: str | None, find: Callable[[str], Block | None]
    ) -> Block | None:
        """Return the block at a path with dots between keys, else the one that `find` returns; ResultError without."""
        if key_path is None:
            return find("--key-path ")
        block = self.recipe.block_at(tuple(key_path.split(".")))
        if block is None:
            raise ResultError(
                f"{self.recipe.name} has no settings at {shortened(one_line(key_path))}",
                "Give the path of a mapping, dots between.",
            )
        return block

    def number_at(self, block: Block, key: str) -> float | None:
        """Return the number that a key has in a block or around it; None without one."""
        nearest = block.nearest(key)
        if nearest is None:
            return None
        value = self._value(nearest)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return value
        return None

    def put(
        self,
        block: Block,
        key: str,
        value: Value,
        *,
        before: str,
        replaces: str | None = None,
    ) -> None:
        """Set a block's setting; one that it lacks takes the place of `replaces`, or is added in front of `before`.

        A number takes the place of a reference, which stays what it is elsewhere. Raises ResultError if a value can't
        be replaced.
        """
        old = block.settings.get(key)
        if old is not None and value is not None and self._value(old) == value:
            return
        path = (*block.keys, key)
        self.wanted[path] = value
        pairs = block.node.value
        names = [name.value for name, _ in pairs]
        if key in names:
            index = names.index(key)
        elif replaces in names:
            index = names.index(replaces)
        else:
            pairs.insert(
                [*names, before].index(before), (_node_of(key), _node_of(value))
            )
            return
        name, old = pairs[index]
        if is_mapping(old) or (is_scalar(old) and old.style in ("|", ">")):
            problem = f"{name.value} is not a number or a list that could be replaced"
            raise self.recipe.wrong(old, problem, self.paste_in)
        self._removed.add((*block.keys, name.value))
        name.value = key
        new = _node_of(value)
        new.comment = old.comment
        pairs[index] = (name, new)

    def result(self) -> str:
        """Return the new text, checked; the given text itself if nothing changes."""
        if not self.wanted:
            return self.text
        before = Recipe.parse(self.text.removeprefix("\ufeff"), self.recipe.name)
        self._refuse_other_uses(before)
        text = self._written()
        unsafe = ResultError(
            f"{self.recipe.name} is written in a way in which numbers can't be replaced safely",
            self.paste_in,
        )
        try:
            after = Recipe.parse(text, self.recipe.name)
        except ResultError as error:
            raise unsafe from error
        kept = all(comment.rstrip() in text for comment in _COMMENT.findall(self.text))
        if not kept or self._other_values(before) != self._other_values(after):
            raise unsafe
        for path, value in self.wanted.items():
            block = after.block_at(path[:-1])
            if block is None or after.value(block.settings[path[-1]]) != value:
                raise unsafe
        return text

    def _value(self, node: Node) -> Any:
        """Return what a node stands for; None if that can't be read."""
        try:
            return self.recipe.value(node)
        except ResultError:
            return None

    def _refuse_other_uses(self, recipe: Recipe) -> None:
        """Refuse to change a value, or a block, that something else uses, too."""
        changed = self._removed | self.wanted.keys()
        blocks = {path[:-1] for path in changed}
        for place, target in _uses(recipe):
            shares_block = any(
                target and block[: len(target)] == target for block in blocks
            )
            if target in changed or (
                shares_block and (is_validation(place) or "<<" in place)
            ):
                raise ResultError(
                    f"{recipe.name}: {one_line('.'.join(place))} takes {'.'.join(target)} and would change with it",
                    "Write out its own settings there.",
                )

    def _written(self) -> str:
        """Return the changed nodes as text."""
        from ruamel.yaml import YAML

        for _, node in walk(self.recipe.root):
            if isinstance(
                node.anchor, str
            ):  # the serializer keeps the names of anchors in this form only
                node.anchor = SimpleNamespace(value=node.anchor, always_dump=True)
        yaml = YAML()
        yaml.width = sys.maxsize
        indented = _INDENTED.search(self.text)
        if indented is not None:
            yaml.map_indent = len(indented[1])
        stream = io.StringIO()
        yaml.serialize(self.recipe.root, stream)
        return stream.getvalue()

    def _other_values(self, recipe: Recipe) -> dict[Keys, tuple[object, ...]]:
        """Return the nodes that don't change, by path."""
        changed = self._removed | self.wanted.keys()
        values: dict[Keys, tuple[object, ...]] = {}
        for path, node in walk(recipe.root):
            if not any(path[:length] in changed for length in range(len(path) + 1)):
                values[path] = (
                    node.id,
                    node.tag,
                    node.anchor,
                    node.value if is_scalar(node) else None,
                )
        return values


def _uses(recipe: Recipe) -> Iterator[tuple[Keys, Keys]]:
    """Yield each place that repeats a value of the recipe, by a reference or an alias, and that value's path."""
    places: dict[int, Keys] = {}
    for path, node in walk(recipe.root):
        if id(node) in places:
            yield path, places[id(node)]
        places.setdefault(id(node), path)
        for target in references_in(node):
            yield path, target


def _node_of(value: Value | str) -> Node:
    from ruamel.yaml.nodes import ScalarNode, SequenceNode

    if isinstance(value, list):
        numbers = [_number_node(text) for text in list_of_texts(value)]
        return SequenceNode(f"{_STANDARD_TAG}seq", numbers, flow_style=True)
    if isinstance(value, str):
        return ScalarNode(f"{_STANDARD_TAG}str", value)
    if value is None:
        return ScalarNode(f"{_STANDARD_TAG}null", "null")
    return _number_node(number(value))


def _number_node(text: str) -> Node:
    from ruamel.yaml.nodes import ScalarNode

    return ScalarNode(f"{_STANDARD_TAG}{'float' if '.' in text else 'int'}", text)
