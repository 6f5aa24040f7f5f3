"""Numbers put into a user's own recipe by ruamel.yaml's round trip.

The layout may change; comments, tags and all other values stay. The result is parsed again and compared.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
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
    parse_yaml,
    references_in,
    walk,
)
from batchtune.errors import ResultError, shortened
from batchtune.exports.base import Patched
from batchtune.exports.templating import flow_list, number, one_line

Value = float | list[float] | None

_COMMENT = re.compile(r"(?:^|(?<=\s))#.*", re.MULTILINE)
# A key with nothing behind it, and the spaces of the next line.
_INDENTED = re.compile(
    r"^[^\s#-][^#\n]*:(?: *!\S+)?[ \t]*(?:#.*)?\n( +)[^\s#-]", re.MULTILINE
)
# A setting → the older one whose place it takes.
_REPLACED = {"bucket_boundaries": "num_buckets"}


class RecipePatch:
    """The changes to a recipe, which messages call `name`; `paste_in` says what to do if it can't be patched."""

    def __init__(self, text: str, name: str, paste_in: str) -> None:
        self.paste_in = paste_in
        self.recipe = Recipe.parse(text.removeprefix("\ufeff"), one_line(name))
        self._text = text
        # Path of a setting → the value that it gets.
        self._wanted: dict[Keys, Value] = {}
        # These paths, and those of the settings that they replace.
        self._changed: set[Keys] = set()

    def block_at(self, key_path: str) -> Block:
        """Return the mapping at a path with dots between keys; raise ResultError without one."""
        block = self.recipe.block_at(tuple(key_path.split(".")))
        if block is None:
            raise ResultError(
                f"{self.recipe.name} has no settings at {shortened(one_line(key_path))}",
                "Give the path of a mapping, dots between.",
            )
        return block

    def number_at(self, block: Block, key: str) -> float | None:
        """Return the number that a key has in a block or around it; None without one."""
        value = self._value(block.nearest(key))
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return value
        return None

    def put(self, block: Block, settings: Mapping[str, Value], *, before: str) -> None:
        """Set settings of a block; those that it lacks are added in front of `before`, else at the end.

        A number takes the place of a reference, which stays what it is elsewhere. Raises ResultError if a value can't
        be replaced.
        """
        for key, value in settings.items():
            if value is None or self._value(block.settings.get(key)) != value:
                self._put(block, key, value, before)

    def _put(self, block: Block, key: str, value: Value, before: str) -> None:
        path = (*block.keys, key)
        self._wanted[path] = value
        self._changed.add(path)
        new = _node_of(value)
        pairs = block.node.value
        names = [name.value for name, _ in pairs]
        replaced = key
        if key not in names:
            replaced = _REPLACED.get(key, key)
        if replaced not in names:
            place = [*names, before].index(before)
            pairs.insert(place, (parse_yaml(key, key), new))
            return
        place = names.index(replaced)
        name, old = pairs[place]
        if is_mapping(old) or (is_scalar(old) and old.style in ("|", ">")):
            problem = f"{replaced} is not a number or a list that could be replaced"
            raise self.recipe.wrong(old, problem, self.paste_in)
        self._changed.add((*block.keys, replaced))
        name.value = key
        new.comment = old.comment
        pairs[place] = (name, new)

    def patched(self, notes: Iterable[str]) -> Patched:
        """Return the new text, checked; the given text itself if nothing changes. `notes` get their full stops."""
        text = self._text
        if self._wanted:
            before = Recipe.parse(text.removeprefix("\ufeff"), self.recipe.name)
            self._refuse_other_uses(before)
            text = self._written()
            self._check(before, text)
        return Patched(text, tuple(f"{note}." for note in notes))

    def _check(self, before: Recipe, text: str) -> None:
        """Raise ResultError if the new text lacks a comment, or has other values than those that were asked for."""
        unsafe = ResultError(
            f"{before.name} is written so that its numbers can't be replaced safely",
            self.paste_in,
        )
        try:
            after = Recipe.parse(text, before.name)
        except ResultError as error:
            raise unsafe from error
        comments = _COMMENT.findall(self._text)
        kept = all(comment.rstrip() in text for comment in comments)
        if not kept or self._other_values(before) != self._other_values(after):
            raise unsafe
        for path, value in self._wanted.items():
            block = after.block_at(path[:-1])
            if block is None or after.value(block.settings[path[-1]]) != value:
                raise unsafe

    def _value(self, node: Node | None) -> Any:
        """Return what a node stands for; None without one, or if that can't be read."""
        if node is None:
            return None
        try:
            return self.recipe.value(node)
        except ResultError:
            return None

    def _refuse_other_uses(self, recipe: Recipe) -> None:
        """Refuse to change a value, or a block, that something else uses, too."""
        blocks = {path[:-1] for path in self._changed}
        for place, target in _uses(recipe):
            shares_block = any(
                target and block[: len(target)] == target for block in blocks
            )
            if target in self._changed or (
                shares_block and (is_validation(place) or "<<" in place)
            ):
                raise ResultError(
                    f"{recipe.name}: {one_line('.'.join(place))} takes {'.'.join(target)} and would change with it",
                    "Write out its own settings there.",
                )

    def _written(self) -> str:
        """Return the changed nodes as text."""
        from ruamel.yaml import YAML

        # The serializer keeps the names of anchors in this form only.
        for _, node in walk(self.recipe.root):
            if isinstance(node.anchor, str):
                node.anchor = SimpleNamespace(value=node.anchor, always_dump=True)
        yaml = YAML()
        yaml.width = sys.maxsize
        indented = _INDENTED.search(self._text)
        if indented is not None:
            yaml.map_indent = len(indented[1])
        stream = io.StringIO()
        yaml.serialize(self.recipe.root, stream)
        return stream.getvalue()

    def _other_values(self, recipe: Recipe) -> dict[Keys, tuple[object, ...]]:
        """Return the nodes that don't change, by path."""
        values: dict[Keys, tuple[object, ...]] = {}
        for path, node in walk(recipe.root):
            leading = (path[:length] for length in range(len(path) + 1))
            if self._changed.isdisjoint(leading):
                values[path] = (node.id, node.tag, node.anchor, None)
                if is_scalar(node):
                    values[path] = (node.id, node.tag, node.anchor, node.value)
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


def _node_of(value: Value) -> Node:
    text = "null"
    if isinstance(value, list):
        text = flow_list(value)
    elif value is not None:
        text = number(value)
    return parse_yaml(text, text)
