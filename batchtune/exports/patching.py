"""Values of a block of a user's own YAML, changed in the text: all else stays byte for byte.

Only the pieces that change are written, at their places in the text. The result is parsed again and compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from batchtune.configs.recipes import Block, block_at, is_validation
from batchtune.configs.references import REFERENCE, References, reference_path
from batchtune.configs.tree import DEEPEST, Keys, Node, parse_yaml, walk, written_at
from batchtune.errors import ResultError, shortened
from batchtune.exports.text import flow_list, number, one_line

Value = float | list[float] | None


def block_to_patch(
    root: Node, name: str, key_path: str | None, find: Callable[[], Block | None], lacks: ResultError
) -> Block:
    """Return the block at `key_path`, or else the one that `find` returns; raise `lacks` without one."""
    if not isinstance(root.value, dict):
        raise ResultError(f"{name} holds no settings by name", "Give the YAML file of a SpeechBrain recipe.")
    if key_path is None:
        found = find()
        if found is None:
            raise lacks
        return found
    path = tuple(key_path.split("."))
    node, block = written_at(root, path), block_at(root, path)
    if node is None or node.target is not None or block is None:
        raise ResultError(
            f"{name} has no settings at {shortened(one_line(key_path))}", "Give the path of a mapping, dots between."
        )
    return block


@dataclass(slots=True, kw_only=True)
class BlockPatch:
    """The changes to one block of a file: gathered, then made, then checked.

    Attributes:
        path, block: The settings.
        paste_in: What to do if the file can't be patched, a sentence.
        replaces: New key → the key whose place it takes.
        edits: Start, end and new text of each change.
        changed: The paths of values that change.
        wanted: Key → the value that the block has to get.
        uses: Where each alias or reference is, and the paths that it repeats.
    """

    text: str
    name: str
    root: Node
    path: Keys
    paste_in: str
    replaces: Mapping[str, str] = field(default_factory=dict)
    block: Node = field(init=False)
    edits: list[tuple[int, int, str]] = field(default_factory=list)
    changed: set[Keys] = field(default_factory=set)
    wanted: dict[str, Value] = field(default_factory=dict)
    uses: list[tuple[Keys, Node, list[Keys]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        block = written_at(self.root, self.path)
        if block is None:  # it is reached through an alias only
            raise self._unpatchable()
        self.block = block
        pieces = list(walk(self.root))
        places = {id(node): path for path, node in pieces}
        for path, node in pieces:
            targets = [places.get(id(node.target), ())] if node.target is not None else []
            if node.is_scalar and node.tag in ("!ref", "!copy"):
                targets = [reference_path(match) for match in REFERENCE.findall(node.text)]
            if targets:
                self.uses.append((path, node, targets))

    def result(self) -> str:
        """Return the new text, checked."""
        text = self.text
        for start, end, replacement in sorted(self.edits, key=lambda edit: edit[:2], reverse=True):
            text = text[:start] + replacement + text[end:]
        self._check(text)
        return text

    @property
    def keys(self) -> dict[str, Node]:
        """The block's values by key."""
        assert isinstance(self.block.value, dict)  # block_to_patch has checked
        return self.block.value

    def set_all(self, after: str) -> None:
        """Plan the edits that make the block say what is wanted; keys that it lacks are added after that key.

        Raises ResultError if a value can't be changed without changing something else.
        """
        if self.block.tag is not None and self.block.tag.startswith("!include"):
            raise self.wrong(self.block, "the settings are in another file", "Patch that file.")
        keys = self.keys
        for key, value in self.wanted.items():
            written = "null" if value is None else flow_list(value) if isinstance(value, list) else number(value)
            own = self.block.pair(key)
            replaced = self.block.pair(self.replaces[key]) if key in self.replaces else None
            if own is not None:
                self._set(own, key, written)
            elif replaced is not None:
                self._in_place(replaced, written)
                self.edits.append((replaced[0].start, replaced[0].end, key))
                self.changed |= {(*self.path, self.replaces[key]), (*self.path, key)}
            elif key not in keys or self.read(keys[key]) != value:
                self._insert(after, key, written)
        self._refuse_other_uses()

    def comment(self, above: str, render: Callable[[str], str]) -> None:
        """Add comments above a setting; `render` makes their lines, indented by the given spaces."""
        pair = self.block.pair(above)
        place = (self.block if self.block.style == "flow" or pair is None else pair[0]).start
        start = self._line_start(place)
        indent = re.match(" *", self.text[start:place])
        text = render(indent[0] if indent else "").replace("\n", self._line_break)
        if text and not self.text[:start].endswith(text):
            self.edits.append((start, start, text))

    def wrong(self, node: Node, problem: str, hint: str | None = None) -> ResultError:
        """Return the error to raise where a node can't be patched."""
        return ResultError(f"{self.name}, line {node.line}: {one_line(problem)}", hint or self.paste_in)

    def read(self, node: Node) -> Any:
        """Return the value that a node stands for; `...` if only the training can tell."""
        try:
            return References(self.root, self.name).plain(node.target or node, (self.root,))
        except ResultError:
            return ...

    def _check(self, result: str) -> None:
        """Make sure that the new text says what it has to, and all else is what it was."""

        def others(root: Node) -> dict[Keys, tuple[object, ...]]:
            return {
                path: (node.tag, node.anchor, node.text, node.target is None, node.is_scalar, type(node.value) is list)
                for path, node in walk(root)
                if not any(path[:length] in self.changed for length in range(len(path) + 1))
            }

        try:
            after = parse_yaml(result, self.name)
            block, references = written_at(after, self.path), References(after, self.name)
            nodes = {key: None if block is None else block.get(key) for key in self.wanted}
            found = {key: references.plain(node, (after,)) for key, node in nodes.items() if node is not None}
        except ResultError as error:
            raise self._unpatchable() from error
        if found != self.wanted or others(self.root) != others(after):
            raise self._unpatchable()

    def _refuse_other_uses(self) -> None:
        """Refuse to change a block or a value that something else uses, too."""
        inside = {path for path in self.changed if path[:-1] == self.path}
        for where, node, targets in self.uses:
            shares = any(target and self.path[: len(target)] == target for target in targets)
            if shares and (is_validation(where) or "<<" in where):
                raise self.wrong(
                    node,
                    f"{'.'.join(where)} takes the settings of {'.'.join(self.path)} and would change with them",
                    "Write out its own settings there.",
                )
            own = where[:-1] == self.path and where[-1] in (*self.wanted, *self.replaces, *self.replaces.values())
            for path in () if own else inside.intersection(targets):
                raise self.wrong(
                    node, f"{'.'.join(where)} refers to {'.'.join(path)}, which has to change", "Write it out there."
                )

    def _set(self, pair: tuple[Node, Node], key: str, written: str) -> None:
        """Change a value at its source if nothing else uses that, in place otherwise."""
        if self.read(pair[1]) == self.wanted[key]:
            return
        path = (*self.path, key)
        for _ in range(DEEPEST):
            if (source := self._source(path, pair[1])) is None:
                break
            path, pair = source
        self._in_place(pair, written)
        self.changed.add(path)

    def _source(self, path: Keys, node: Node) -> tuple[Keys, tuple[Node, Node]] | None:
        """Return where a reference leads, if to a plain value that nothing else uses."""
        whole = REFERENCE.fullmatch(node.text.strip()) if node.is_scalar and node.tag == "!ref" else None
        if whole is None or "." in whole[1]:
            return None
        target = reference_path(whole[1])
        holder = written_at(self.root, target[:-1])
        pair = None if holder is None else holder.pair(target[-1])
        if pair is None:
            raise self.wrong(node, f"<{whole[1]}> is not in the file", "Fix the reference.")
        value = pair[1]
        used = any(
            where != path and any(other[: len(target)] == target[: len(other)] for other in targets)
            for where, _, targets in self.uses
        )
        simple = value.is_scalar and value.tag in (None, "!ref", "!PLACEHOLDER") and value.style not in ("|", ">")
        return (target, pair) if simple and not used else None

    def _in_place(self, pair: tuple[Node, Node], written: str) -> None:
        """Put a value in the place of another."""
        key, value = pair
        own = value.target is None
        if (own and isinstance(value.value, dict)) or value.style in ("|", ">"):
            raise self.wrong(value, f"{key.text} is not a number or a list that could be replaced")
        anchor = "" if value.anchor is None else f"&{value.anchor} "
        if own and isinstance(value.value, list) and value.style != "flow":
            self._replace_lines(pair, f" {written}")
        elif value.end == value.start:  # `key:` with nothing behind it
            colon = self._after_colon(key)
            self.edits.append((colon, colon, f" {anchor}{written}"))
        else:
            self.edits.append((value.start, value.end, f"{anchor}{written}"))

    def _replace_lines(self, pair: tuple[Node, Node], written: str) -> None:
        """Put a list that stood one entry a line on its key's line."""
        key, value = pair
        colon = self._after_colon(key)
        if value.tag is not None or value.anchor is not None:
            raise self.wrong(value, f"{key.text} is a list with a tag or an anchor", "Write it as [1, 2, 3].")
        first, last = self._line_start(value.start), self._line_end(value.end)
        self.edits.append((colon, colon, written))
        # From the end of the line before, so that the file's last line keeps its end, or has none.
        before = first - (2 if self.text[first - 2 : first] == "\r\n" else 1)
        self.edits.append((max(before, colon), last, ""))

    def _insert(self, limit: str, key: str, written: str) -> None:
        """Add a setting: after the limit if the block has that itself, else before its first setting."""
        own, setting = self.block.pair(limit), f"{key}: {written}"
        self.changed.add((*self.path, key))
        first = self.block.pieces[0][0] if own is None else own[0]
        assert first is not None  # a mapping's
        between = ", " if self.block.style == "flow" else self._line_break + " " * first.column
        if own is None:
            place, added = first.start, setting + between
        elif self.block.style != "flow":
            place, added = self._line_end(max(own[0].end, own[1].end)), between + setting
        elif own[1].end == own[1].start:
            raise self.wrong(own[0], f"{limit} has no value", "Give it one.")
        else:
            place, added = own[1].end, between + setting
        self.edits.append((place, place, added))

    def _after_colon(self, key: Node) -> int:
        if (match := re.compile(r"[ \t]*:").match(self.text, key.end)) is None:
            raise self.wrong(key, f"{key.text} is not written as key: value", "Write it so.")
        return match.end()

    def _line_start(self, place: int) -> int:
        return self.text.rfind("\n", 0, place) + 1

    def _line_end(self, place: int) -> int:
        match = re.compile(r"\r?\n|\r|\Z").search(self.text, place)
        return len(self.text) if match is None else match.start()

    @property
    def _line_break(self) -> str:
        return "\r\n" if re.match(r"[^\n]*\r\n", self.text) else "\n"

    def _unpatchable(self) -> ResultError:
        return ResultError(
            f"{self.name} is written in a way in which single values can't be replaced safely", self.paste_in
        )
