"""A recommendation written into a user's own SpeechBrain YAML: the numbers change, all else stays byte for byte.

The file is parsed for the places of its pieces, by the YAML parser's own events: nothing is constructed, and nothing is
written anew but the pieces that change. What comes out is parsed again and compared.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from batchtune.errors import ResultError, shortened
from batchtune.exports.base import Chosen, Tuned
from batchtune.exports.caps import kept_cap
from batchtune.exports.snippets import LengthLimits, commented, one_line
from batchtune.exports.speechbrain import (
    flow_list,
    leaving_out,
    length_function,
    needed_cap,
    number,
    plain_row,
    table_row,
)
from batchtune.exports.yaml_places import DEEPEST, PASTE_IN, Keys, Node, Tree, reference_path
from batchtune.results import Row, Sweep, unproven_sizes

_MOST_LISTED = 8

_LIMITS = ("max_batch_length", "max_batch_len")
_BUCKETS = ("num_buckets", "bucket_boundaries")
# Settings of old recipes, which their train.py picks one by one: it can't be given new ones.
_BY_NAME = ("max_batch_len", "shuffle_ex", "max_batch_len_val")
_GONE = ("left_bucket_length", "left_bucket_len", "bucket_length_multiplier", "multiplier", "num_quantiles")
_KNOWN = (*_LIMITS, *_BUCKETS, "max_batch_ex", "feats_hop_size", "shuffle_ex", "max_batch_len_val", *_GONE)
_NOT_TRAINING = re.compile(r"val|valid|validation|dev|test|eval|infer|inference", re.IGNORECASE)
_REFERENCE = re.compile(r"<([^<>]*)>")


@dataclass(frozen=True, slots=True)
class Patched:
    """A patched file.

    Attributes:
        text: The new text; the same where the file holds these numbers already.
        notes: What the user should know of it, as full sentences.
    """

    text: str
    notes: tuple[str, ...]


def patch_speechbrain(text: str, tuned: Tuned, *, key_path: str | None = None, name: str = "the file") -> Patched:
    """A recipe's YAML with the recommended numbers in the settings of its DynamicBatchSampler.

    - The table goes to `max_batch_length` and `bucket_boundaries`, which takes the place of `num_buckets`. Where the
      block has the names of old recipes (`max_batch_len`, `shuffle_ex`), whose train.py knows no `bucket_boundaries`,
      `num_buckets` is set, with the best row that it can express, and a comment says so.
    - A `max_batch_ex` of the user's is kept where it makes batches smaller, and a note says what that costs. It is
      lowered where batches would else be larger than those that were swept (--max-batch-size), and added likewise.
    - A value `!ref <key>` is changed at that key where nothing else in the file refers to it; else the reference is
      replaced by the number. An alias is replaced by the number.
    - A comment is added where the lengths are not seconds, which the length functions of recipes return, and where
      examples were left out at tuning.

    Args:
        text: The file, line ends as they are.
        tuned: The run.
        key_path: Where the settings are, keys with dots between; None to look for them. Of several blocks the one
            with `train` in its name is taken, then one that is not named for validation or test.
        name: What to call the file in messages.

    Raises:
        ResultError: The file is no YAML, has no such block or several, shares it with something else, or has the
            values in a form that can't be changed; or no row can be expressed.
    """
    tree = Tree(text, one_line(name))
    path, block = _found(tree, key_path)
    patch = _Patch(tree, path, block, tuned.sweep, str(Path(tuned.config).parent))
    patch.plan()
    result = patch.applied()
    _check(tree, _reparsed(result, tree), patch)
    return Patched(result, tuple(patch.notes))


def _found(tree: Tree, key_path: str | None) -> tuple[Keys, Node]:
    """The block with the sampler's settings."""
    if key_path is not None:
        path = tuple(key_path.split("."))
        node = tree.at(path)
        if node is None or node.kind != "mapping":
            raise ResultError(
                f"{tree.name} has no settings at {shortened(one_line(key_path))}",
                "Give the path of a mapping, dots between.",
            )
        if not any(key in _keys(node) for key in (*_LIMITS, *_BUCKETS)):
            raise tree.wrong(node, f"{key_path} holds no settings of a DynamicBatchSampler (max_batch_length)")
        return path, node
    blocks = [(path, node) for path, node in tree.mappings if any(key in _keys(node) for key in _LIMITS)]
    # References start from settings at the top: the block is what the sampler gets.
    nested = [(path, node) for path, node in blocks if path]
    blocks = nested or [(path, node) for path, node in blocks if any(key in _keys(node) for key in _BUCKETS)]
    blocks = [block for block in blocks if not _is_validation(block[0])] or blocks
    blocks = [block for block in blocks if "train" in ".".join(block[0])] or blocks
    if not blocks:
        raise ResultError(f"{tree.name} has no settings of a DynamicBatchSampler (max_batch_length)", PASTE_IN)
    if len(blocks) > 1:
        paths = [one_line(".".join(path)) for path, _ in blocks]
        listed = ", ".join(paths[:_MOST_LISTED]) + (", ..." if len(paths) > _MOST_LISTED else "")
        raise ResultError(
            f"{tree.name} has {len(blocks)} blocks of a DynamicBatchSampler's settings: {listed}",
            f"Say which one: --key-path {paths[0]}.",
        )
    return blocks[0]


def _is_validation(path: Keys) -> bool:
    return any(_NOT_TRAINING.fullmatch(word) for key in path for word in re.split(r"[^A-Za-z]+", key))


def _keys(block: Node) -> dict[str, Node]:
    """Known key → value, those that `<<` brings in included."""
    sources = [block]
    merged = block.pair("<<")
    if merged is not None:
        named = [merged[1]] if merged[1].kind != "list" else merged[1].items
        sources += [source for node in named if (source := node.target if node.kind == "alias" else node) is not None]
    found: dict[str, Node] = {}
    for source in sources:
        for key in _KNOWN:
            pair = source.pair(key)
            if pair is not None:
                found.setdefault(key, pair[1])
    return found


@dataclass(slots=True)
class _Patch:
    """What is to change, gathered and then done; `run` is the run folder."""

    tree: Tree
    path: Keys
    block: Node
    sweep: Sweep
    run: str = ""
    edits: list[tuple[int, int, str]] = field(default_factory=list)
    changed: set[Keys] = field(default_factory=set)
    wanted: dict[str, float | list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def plan(self) -> None:
        """Finds the edits.

        Raises:
            ResultError: A value can't be changed without changing something else.
        """
        keys = _keys(self.block)
        if self.block.tag is not None and self.block.tag.startswith("!include"):
            raise self.tree.wrong(self.block, "the settings are in another file", "Patch that file.")
        self._refuse_sharing()
        plain = any(key in keys for key in _BY_NAME) and "bucket_boundaries" not in keys
        self._refuse_old(keys)
        chosen = plain_row(self.sweep) if plain else table_row(self.sweep)
        limit = next((key for key in _LIMITS if key in keys), _LIMITS[0])
        self.wanted = {limit: self.sweep.max_batch_length}
        if plain:
            self.wanted["num_buckets"] = chosen.row.num_buckets
        else:
            self.wanted["bucket_boundaries"] = list(chosen.row.boundaries)
        cap = self._cap(keys.get("max_batch_ex"), chosen.row)
        self.notes += [f"{remark}." for remark in LengthLimits.of(self.sweep).left_out]
        if LengthLimits.of(self.sweep):
            self.notes.append("train.py must leave them out, too: the comment in the file says how.")
        if cap is not None:
            self.wanted["max_batch_ex"] = cap
        self._set_all(limit, keys)
        self._refuse_references()
        self._comment(limit, chosen, plain)

    def applied(self) -> str:
        """The new text."""
        text = self.tree.text
        for start, end, replacement in sorted(self.edits, key=lambda edit: edit[:2], reverse=True):
            text = text[:start] + replacement + text[end:]
        return text

    def _refuse_old(self, keys: dict[str, Node]) -> None:
        gone = [key for key in _GONE if key in keys]
        if gone and not any(key in keys for key in _BUCKETS):
            raise self.tree.wrong(
                keys[gone[0]], f"{gone[0]} belongs to an old sampler of SpeechBrain, which takes no bucket table"
            )
        unit = self.sweep.lengths.unit
        if "feats_hop_size" in keys and unit != "frames":
            raise self.tree.wrong(
                keys["feats_hop_size"],
                f"max_batch_len counts frames here (feats_hop_size), but the lengths that were tuned with count "
                f"{unit or 'an unknown unit'}",
                "Sweep again with lengths in frames: --length-scale 100 --unit frames for seconds and a hop of 0.01 s.",
            )

    def _refuse_sharing(self) -> None:
        """A block that something else uses, too, can't be changed for one of them."""
        holders = [self.tree.at(self.path[:depth]) for depth in range(1, len(self.path) + 1)]
        shared = [
            (path, node)
            for path, node in self.tree.aliases
            if any(node.target is holder for holder in holders) and (_is_validation(path) or "<<" in path)
        ]
        shared += [
            (path, node)
            for path, node, targets in self.tree.references
            if _is_validation(path) and any(target and self.path[: len(target)] == target for target in targets)
        ]
        if shared:
            path, node = shared[0]
            raise self.tree.wrong(
                node,
                f"{'.'.join(path)} takes the settings of {'.'.join(self.path)} and would change with them",
                "Write out its own settings there.",
            )

    def _refuse_references(self) -> None:
        """A value that is referred to from elsewhere can't be changed for the sampler alone."""
        inside = [path for path in self.changed if path[:-1] == self.path]
        for where, node, targets in self.tree.references:
            own = where[:-1] == self.path and where[-1] in (*self.wanted, *_BUCKETS)
            for path in inside:
                if path in targets and not own:
                    raise self.tree.wrong(
                        node,
                        f"{'.'.join(where)} refers to {'.'.join(path)}, which has to change",
                        "Write it out there.",
                    )

    def _cap(self, current: Node | None, row: Row) -> int | None:
        """The `max_batch_ex` to write; None to leave it as it is."""
        needed = needed_cap(self.sweep, row)
        if current is None:
            return needed
        known = self._resolved(current)
        if known is not None and known.kind == "scalar" and known.tag is None and known.style is None:
            none = known.text.lower() in ("", "null", "~")
            cap = int(known.text) if known.text.isdecimal() and len(known.text) < 16 else 0
            if none and needed is None:
                return None
            if cap >= 1:
                kept = kept_cap(cap, row, self.sweep, self.run)
                self.notes += kept.notes
                return None if kept.cap == cap else kept.cap
        if known is None or known.tag != "!PLACEHOLDER":
            was = one_line((current if known is None else known).text)[:60]
            self.notes.append(
                f"Warning: max_batch_ex was {was or 'empty'!r}, which is no number here; the largest batch size of the "
                "table takes its place."
            )
        return needed or max(row.batch_sizes)

    def _resolved(self, node: Node) -> Node | None:
        """The node that references and aliases lead to; None where they don't lead to one."""
        for _ in range(DEEPEST):
            if node.kind == "alias":
                found = node.target
            elif node.kind == "scalar" and node.tag in ("!ref", "!copy"):
                whole = _REFERENCE.fullmatch(node.text.strip())
                found = None if whole is None or "." in whole[1] else self.tree.at(reference_path(whole[1]))
            else:
                return node
            if found is None:
                return None
            node = found
        return None

    def _set_all(self, limit: str, keys: dict[str, Node]) -> None:
        for key, value in self.wanted.items():
            written = flow_list(value) if isinstance(value, list) else number(value)
            own = self.block.pair(key)
            if own is not None:
                self._set(own, key, written)
            elif key == "bucket_boundaries" and self.block.pair("num_buckets") is not None:
                self._replace_num_buckets(written)
            elif key not in keys or not self._holds(keys[key], value):
                self._insert(limit, key, written)

    def _replace_num_buckets(self, written: str) -> None:
        pair = self.block.pair("num_buckets")
        assert pair is not None  # the caller has looked
        key, value = pair
        self._in_place(pair, written)
        self.edits.append((key.start, key.end, "bucket_boundaries"))
        self._refuse_anchored(key)
        self._refuse_anchored(value)
        self.changed |= {(*self.path, "num_buckets"), (*self.path, "bucket_boundaries")}

    def _set(self, pair: tuple[Node, Node], key: str, written: str) -> None:
        """Changes a value at its source where that is used for nothing else, in place otherwise."""
        if self._holds(pair[1], self.wanted[key]):
            return
        path = (*self.path, key)
        for _ in range(DEEPEST):
            source = self._source(path, pair[1])
            if source is None:
                break
            path, pair = source
        self._refuse_anchored(pair[1])
        self._in_place(pair, written)
        self.changed.add(path)

    def _source(self, path: Keys, node: Node) -> tuple[Keys, tuple[Node, Node]] | None:
        """Where a reference leads, if to a plain value that nothing else uses."""
        whole = _REFERENCE.fullmatch(node.text.strip()) if node.kind == "scalar" and node.tag == "!ref" else None
        if whole is None or "." in whole[1]:
            return None
        target = reference_path(whole[1])
        holder = self.tree.at(target[:-1])
        pair = None if holder is None else holder.pair(target[-1])
        if pair is None:
            raise self.tree.wrong(node, f"<{whole[1]}> is not in the file", "Mend the reference.")
        uses = [
            where
            for where, _, targets in self.tree.references
            if where != path and any(other[: len(target)] == target[: len(other)] for other in targets)
        ]
        value = pair[1]
        aliased = value.anchor is not None and any(alias.target is value for _, alias in self.tree.aliases)
        simple = (
            value.kind == "scalar" and value.tag in (None, "!ref", "!PLACEHOLDER") and value.style not in ("|", ">")
        )
        return (target, pair) if simple and not uses and not aliased else None

    def _refuse_anchored(self, node: Node) -> None:
        uses = [alias for _, alias in self.tree.aliases if alias.target is node]
        if uses:
            raise self.tree.wrong(
                uses[0], f"*{node.anchor} repeats a value that has to change (line {node.line})", "Write it out there."
            )

    def _holds(self, node: Node, wanted: float | list[float]) -> bool:
        found = self._resolved(node)
        return found is not None and _value(found) == wanted

    def _in_place(self, pair: tuple[Node, Node], written: str) -> None:
        """Puts a value in the place of another."""
        key, value = pair
        if value.kind == "mapping" or value.style in ("|", ">"):
            raise self.tree.wrong(value, f"{key.text} is no number or list that could be replaced")
        anchor = "" if value.anchor is None else f"&{value.anchor} "
        if value.kind == "list" and value.style != "flow":
            self._replace_lines(pair, f" {anchor}{written}")
        elif value.end == value.start:  # `key:` with nothing behind it
            colon = self._after_colon(key)
            self.edits.append((colon, colon, f" {anchor}{written}"))
        else:
            self.edits.append((value.start, value.end, f"{anchor}{written}"))

    def _replace_lines(self, pair: tuple[Node, Node], written: str) -> None:
        """Puts a list on its key's line, where it stood one entry a line beneath."""
        key, value = pair
        colon = self._after_colon(key)
        if value.tag is not None or value.anchor is not None:
            raise self.tree.wrong(value, f"{key.text} is a list with a tag or an anchor", "Write it as [1, 2, 3].")
        first, last = self._line_start(value.start), self._line_end(value.end)
        self.edits.append((colon, colon, written))
        # From the end of the line before, so that the file's last line keeps its end, or has none.
        before = len(self.tree.text[:first].rstrip("\r\n"))
        if self.tree.text[before:first].count("\n") > 1:
            before = first - (2 if self.tree.text[first - 2 : first] == "\r\n" else 1)
        self.edits.append((max(before, colon), last, ""))

    def _insert(self, limit: str, key: str, written: str) -> None:
        """Adds a setting: after the limit where the block has that itself, else before its first setting."""
        own = self.block.pair(limit)
        self.changed.add((*self.path, key))
        if own is None:
            first = self.block.pairs[0][0]
            between = ", " if self.block.style == "flow" else self._line_break() + " " * first.column
            self.edits.append((first.start, first.start, f"{key}: {written}{between}"))
        elif self.block.style == "flow":
            if own[1].end == own[1].start:
                raise self.tree.wrong(own[0], f"{limit} has no value", "Give it one.")
            self.edits.append((own[1].end, own[1].end, f", {key}: {written}"))
        else:
            end = self._line_end(max(own[0].end, own[1].end))
            self.edits.append((end, end, f"{self._line_break()}{' ' * own[0].column}{key}: {written}"))

    def _comment(self, limit: str, chosen: Chosen, plain: bool) -> None:
        """Says above the settings what the numbers alone don't."""
        sentences = []
        if self.sweep.lengths.unit not in ("s", None) and "feats_hop_size" not in _keys(self.block):
            sentences.append(length_function(self.sweep.lengths.unit))
        if plain:
            sentences += [
                "These names are of old recipes, whose train.py knows no bucket_boundaries: num_buckets is all that "
                "can be set",
                *chosen.remarks,
            ]
        if (sizes := unproven_sizes(chosen.row)) is not None:
            sentences.append(f"{sizes}: `batchtune report` says why")
        if not self.edits:
            return
        pair = self.block.pair(limit)
        place = (self.block if self.block.style == "flow" or pair is None else pair[0]).start
        start = self._line_start(place)
        line = self.tree.text[start:place]
        indent = line[: len(line) - len(line.lstrip(" "))]
        text = commented(sentences, indent=indent) + leaving_out(self.sweep, indent=indent)
        text = text.replace("\n", self._line_break())
        if text and not self.tree.text[:start].endswith(text):
            self.edits.append((start, start, text))

    def _after_colon(self, key: Node) -> int:
        match = re.compile(r"[ \t]*:").match(self.tree.text, key.end)
        if match is None:
            raise self.tree.wrong(key, f"{key.text} is not written as key: value", "Write it so.")
        return match.end()

    def _line_start(self, place: int) -> int:
        return self.tree.text.rfind("\n", 0, place) + 1

    def _line_end(self, place: int) -> int:
        match = re.compile(r"\r?\n|\r|\Z").search(self.tree.text, place)
        return len(self.tree.text) if match is None else match.start()

    def _line_break(self) -> str:
        match = re.compile(r"\r?\n").search(self.tree.text)
        return "\n" if match is None else match[0]


def _value(node: Node) -> float | list[float] | None:
    """A number or a list of them; None for anything else."""
    try:
        if node.kind == "list":
            return [float(item.text) for item in node.items if item.kind == "scalar" and item.style is None]
        return float(node.text) if node.kind == "scalar" and node.style is None and node.tag is None else None
    except ValueError:
        return None


def _reparsed(text: str, before: Tree) -> Tree:
    try:
        return Tree(text, before.name)
    except ResultError as error:
        raise _unpatchable(before) from error


def _check(before: Tree, after: Tree, patch: _Patch) -> None:
    """Makes sure that the new text says what it has to, and all else is what it was."""

    def others(tree: Tree) -> dict[Keys, tuple[str | None, ...]]:
        changed = patch.changed
        return {
            path: leaf
            for path, leaf in tree.leaves.items()
            if not any(path[:length] in changed for length in range(len(path) + 1))
        }

    block = after.at(patch.path)
    keys = {} if block is None else _keys(block)
    new = _Patch(after, patch.path, after.root, patch.sweep)
    right = all(key in keys and new._holds(keys[key], value) for key, value in patch.wanted.items())
    if not right or others(before) != others(after):
        raise _unpatchable(before)


def _unpatchable(tree: Tree) -> ResultError:
    return ResultError(f"{tree.name} is written in a way in which single values can't be replaced safely", PASTE_IN)
