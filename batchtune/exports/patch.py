"""A recommendation written into a user's own SpeechBrain YAML: the numbers change, all else stays byte for byte.

Only the pieces that change are written, at their places in the text. The result is parsed again and compared.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from batchtune.configs.recipes import BUCKETS, LIMITS, OLD_RULES, is_validation, training_block
from batchtune.configs.references import REFERENCE, References, reference_path
from batchtune.configs.tree import DEEPEST, Keys, Node, parse_yaml, walk, written_at
from batchtune.errors import ResultError, shortened
from batchtune.exports.base import Chosen, Patched, Tuned
from batchtune.exports.speechbrain import kept_cap, leaving_out, length_function, needed_cap, plain_row, table_row
from batchtune.exports.text import LengthLimits, commented, flow_list, number, one_line
from batchtune.results import Row, unproven_sizes

_PASTE_IN = "`batchtune export --to speechbrain` writes a block to paste in by hand."
# Settings of old recipes, whose train.py picks each by its name: it can't be given new ones.
_BY_NAME = ("max_batch_len", "shuffle_ex", "max_batch_len_val")


def patch_speechbrain(text: str, tuned: Tuned, *, key_path: str | None = None, name: str = "the file") -> Patched:
    """Put the recommended numbers into the settings of a recipe's DynamicBatchSampler.

    - The table goes to `max_batch_length` and `bucket_boundaries`, which replaces `num_buckets`. If the block has the
      names of old recipes (`max_batch_len`, `shuffle_ex`), whose train.py knows no `bucket_boundaries`, `num_buckets`
      is set to that of the best row that it can express, and a comment says so.
    - The user's own `max_batch_ex` is kept if it makes batches smaller, and a note tells the cost. It is lowered if
      batches would otherwise be larger than those that were swept (--max-batch-size), or added for that reason.
    - A value `!ref <key>` is changed at that key if nothing else in the file refers to it; otherwise the number
      replaces the reference. An alias is replaced by the number.
    - A comment is added if the lengths are not seconds, which the length functions of recipes return, and if examples
      were left out at tuning.

    `key_path` says where the settings are, keys with dots between; without it they are looked for as `training_block`
    does. `name` is what to call the file in messages.

    Raises:
        ResultError: The file is not YAML, has no such block or several, shares it with something else, or has the
            values in a form that can't be changed; or no row can be expressed.
    """
    name = one_line(name)
    root = parse_yaml(text, name)
    if not isinstance(root.value, dict):
        raise ResultError(f"{name} holds no settings by name", "Give the YAML file of a SpeechBrain recipe.")
    path = _path(root, name, key_path)
    block = written_at(root, path)
    if block is None:  # it is reached through an alias only
        raise _unpatchable(name)
    patch = _Patch(text, name, root, path, block, tuned)
    patch.plan()
    for start, end, replacement in sorted(patch.edits, key=lambda edit: edit[:2], reverse=True):
        text = text[:start] + replacement + text[end:]
    patch.check(text)
    return Patched(text, tuple(patch.notes))


def _path(root: Node, name: str, key_path: str | None) -> Keys:
    """Find the block with the sampler's settings."""
    if key_path is None:
        found = training_block(root, name, "--key-path ")
        if found is None:
            raise ResultError(f"{name} has no settings of a DynamicBatchSampler (max_batch_length)", _PASTE_IN)
        return found.keys
    path = tuple(key_path.split("."))
    node = written_at(root, path)
    if node is None or node.target is not None or not isinstance(node.value, dict):
        raise ResultError(
            f"{name} has no settings at {shortened(one_line(key_path))}", "Give the path of a mapping, dots between."
        )
    if node.value.keys().isdisjoint((*LIMITS, *BUCKETS)):
        holds = f"{one_line(key_path)} holds no settings of a DynamicBatchSampler (max_batch_length)"
        raise ResultError(f"{name}, line {node.line}: {holds}", _PASTE_IN)
    return path


@dataclass(slots=True)
class _Patch:
    """The changes to one file: gathered, then made, then checked.

    Attributes:
        path, block: The sampler's settings.
        edits: Start, end and new text of each place that changes.
        changed: The paths of values that change.
        wanted: What the block has to say, by key.
        notes: For the user.
        uses: Where each alias or reference is, and the paths that it repeats.
    """

    text: str
    name: str
    root: Node
    path: Keys
    block: Node
    tuned: Tuned
    edits: list[tuple[int, int, str]] = field(default_factory=list)
    changed: set[Keys] = field(default_factory=set)
    wanted: dict[str, float | list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    uses: list[tuple[Keys, Node, list[Keys]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        pieces = list(walk(self.root))
        places = {id(node): path for path, node in pieces}
        for path, node in pieces:
            targets = [places.get(id(node.target), ())] if node.target is not None else []
            if node.is_scalar and node.tag in ("!ref", "!copy"):
                targets = [reference_path(match) for match in REFERENCE.findall(node.text)]
            if targets:
                self.uses.append((path, node, targets))

    def plan(self) -> None:
        """Find the edits; raise ResultError if a value can't be changed without changing something else."""
        keys = self.block.value if isinstance(self.block.value, dict) else {}
        sweep = self.tuned.needed_sweep
        self._refuse_block(keys)
        plain = any(key in keys for key in _BY_NAME) and "bucket_boundaries" not in keys
        chosen = plain_row(sweep) if plain else table_row(sweep)
        limit = next((key for key in LIMITS if key in keys), LIMITS[0])
        self.wanted = {limit: sweep.max_batch_length}
        if plain:
            self.wanted["num_buckets"] = chosen.row.num_buckets
        else:
            self.wanted["bucket_boundaries"] = list(chosen.row.boundaries)
        cap = self._cap(keys.get("max_batch_ex"), chosen.row)
        limits = LengthLimits.of(sweep)
        self.notes += [f"{remark}." for remark in (*chosen.remarks, *limits.left_out)]
        if limits:
            self.notes.append("train.py must leave them out, too: the comment in the file says how.")
        if cap is not None:
            self.wanted["max_batch_ex"] = cap
        self._set_all(limit, keys)
        self._refuse_other_uses()
        if self.edits:
            self._comment(limit, chosen, plain)

    def check(self, result: str) -> None:
        """Make sure that the new text says what it has to, and all else is what it was."""
        try:
            after = parse_yaml(result, self.name)
        except ResultError as error:
            raise _unpatchable(self.name) from error

        def others(root: Node) -> dict[Keys, tuple[object, ...]]:
            return {
                path: (node.tag, node.anchor, node.text, node.target is None, node.is_scalar, type(node.value) is list)
                for path, node in walk(root)
                if not any(path[:length] in self.changed for length in range(len(path) + 1))
            }

        block, references = written_at(after, self.path), References(after, self.name)
        nodes = {key: None if block is None else block.get(key) for key in self.wanted}
        try:
            found = {key: references.plain(node, (after,)) for key, node in nodes.items() if node is not None}
        except ResultError as error:
            raise _unpatchable(self.name) from error
        if found != self.wanted or others(self.root) != others(after):
            raise _unpatchable(self.name)

    def _wrong(self, node: Node, problem: str, hint: str = _PASTE_IN) -> ResultError:
        return ResultError(f"{self.name}, line {node.line}: {one_line(problem)}", hint)

    def _refuse_block(self, keys: dict[str, Node]) -> None:
        if self.block.tag is not None and self.block.tag.startswith("!include"):
            raise self._wrong(self.block, "the settings are in another file", "Patch that file.")
        gone = [key for key in OLD_RULES if key in keys]
        if gone and keys.keys().isdisjoint(BUCKETS):
            problem = f"{gone[0]} belongs to an old sampler of SpeechBrain, which takes no bucket table"
            raise self._wrong(keys[gone[0]], problem)
        unit = self.tuned.needed_sweep.lengths.unit
        if "feats_hop_size" in keys and unit != "frames":
            raise self._wrong(
                keys["feats_hop_size"],
                "max_batch_len counts frames here (feats_hop_size), but the lengths that were tuned with count "
                f"{unit or 'an unknown unit'}",
                "Sweep again with lengths in frames: --length-scale 100 --unit frames for seconds and a hop of 0.01 s.",
            )

    def _refuse_other_uses(self) -> None:
        """Refuse to change a block or a value that something else uses, too."""
        inside = {path for path in self.changed if path[:-1] == self.path}
        for where, node, targets in self.uses:
            shares = any(target and self.path[: len(target)] == target for target in targets)
            if shares and (is_validation(where) or "<<" in where):
                raise self._wrong(
                    node,
                    f"{'.'.join(where)} takes the settings of {'.'.join(self.path)} and would change with them",
                    "Write out its own settings there.",
                )
            own = where[:-1] == self.path and where[-1] in (*self.wanted, *BUCKETS)
            for path in () if own else inside.intersection(targets):
                raise self._wrong(
                    node, f"{'.'.join(where)} refers to {'.'.join(path)}, which has to change", "Write it out there."
                )

    def _cap(self, current: Node | None, row: Row) -> int | None:
        """Return the `max_batch_ex` to write; None to leave it as it is."""
        needed = needed_cap(self.tuned.needed_sweep, row)
        if current is None:
            return needed
        cap = self._read(current)
        if cap is None and needed is None:
            return None
        if isinstance(cap, int) and cap is not True and 1 <= cap < 10**15:
            kept, notes = kept_cap(cap, row, self.tuned.needed_sweep, self.tuned.run)
            self.notes += notes
            return None if kept == cap else kept
        if current.tag != "!PLACEHOLDER":
            self.notes.append(
                f"Warning: max_batch_ex was {one_line(current.text)[:60] or 'empty'!r}, which is no number here; the "
                "largest batch size of the table takes its place."
            )
        return needed or max(row.batch_sizes)

    def _read(self, node: Node) -> Any:
        """Return the value that a node stands for; `...` if only the training can tell."""
        try:
            return References(self.root, self.name).plain(node.target or node, (self.root,))
        except ResultError:
            return ...

    def _set_all(self, limit: str, keys: dict[str, Node]) -> None:
        for key, value in self.wanted.items():
            written = flow_list(value) if isinstance(value, list) else number(value)
            own, replaced = self.block.pair(key), self.block.pair("num_buckets")
            if own is not None:
                self._set(own, key, written)
            elif key == "bucket_boundaries" and replaced is not None:
                self._in_place(replaced, written)
                self.edits.append((replaced[0].start, replaced[0].end, key))
                self.changed |= {(*self.path, "num_buckets"), (*self.path, key)}
            elif key not in keys or self._read(keys[key]) != value:
                self._insert(limit, key, written)

    def _set(self, pair: tuple[Node, Node], key: str, written: str) -> None:
        """Change a value at its source if nothing else uses that, in place otherwise."""
        if self._read(pair[1]) == self.wanted[key]:
            return
        path = (*self.path, key)
        for _ in range(DEEPEST):
            source = self._source(path, pair[1])
            if source is None:
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
            raise self._wrong(node, f"<{whole[1]}> is not in the file", "Fix the reference.")
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
            raise self._wrong(value, f"{key.text} is no number or list that could be replaced")
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
            raise self._wrong(value, f"{key.text} is a list with a tag or an anchor", "Write it as [1, 2, 3].")
        first, last = self._line_start(value.start), self._line_end(value.end)
        self.edits.append((colon, colon, written))
        # From the end of the line before, so that the file's last line keeps its end, or has none.
        before = len(self.text[:first].rstrip("\r\n"))
        if self.text[before:first].count("\n") > 1:
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
            raise self._wrong(own[0], f"{limit} has no value", "Give it one.")
        else:
            place, added = own[1].end, between + setting
        self.edits.append((place, place, added))

    def _comment(self, limit: str, chosen: Chosen, plain: bool) -> None:
        """Add comments above the settings on what the numbers alone don't say."""
        sweep = self.tuned.needed_sweep
        sentences = []
        if sweep.lengths.unit not in ("s", None) and self.block.get("feats_hop_size") is None:
            sentences.append(length_function(sweep.lengths.unit))
        if plain:
            sentences += [
                "These names are of old recipes, whose train.py knows no bucket_boundaries: num_buckets is all that "
                "can be set",
                *chosen.remarks,
            ]
        if (sizes := unproven_sizes(chosen.row)) is not None:
            sentences.append(f"{sizes}: `batchtune report` says why")
        pair = self.block.pair(limit)
        place = (self.block if self.block.style == "flow" or pair is None else pair[0]).start
        start = self._line_start(place)
        line = self.text[start:place]
        indent = line[: len(line) - len(line.lstrip(" "))]
        text = commented(sentences, indent=indent) + leaving_out(sweep, indent=indent)
        text = text.replace("\n", self._line_break)
        if text and not self.text[:start].endswith(text):
            self.edits.append((start, start, text))

    def _after_colon(self, key: Node) -> int:
        match = re.compile(r"[ \t]*:").match(self.text, key.end)
        if match is None:
            raise self._wrong(key, f"{key.text} is not written as key: value", "Write it so.")
        return match.end()

    def _line_start(self, place: int) -> int:
        return self.text.rfind("\n", 0, place) + 1

    def _line_end(self, place: int) -> int:
        match = re.compile(r"\r?\n|\r|\Z").search(self.text, place)
        return len(self.text) if match is None else match.start()

    @property
    def _line_break(self) -> str:
        return "\r\n" if re.match(r"[^\n]*\r\n", self.text) else "\n"


def _unpatchable(name: str) -> ResultError:
    return ResultError(f"{name} is written in a way in which single values can't be replaced safely", _PASTE_IN)
