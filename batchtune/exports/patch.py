"""A recommendation written into a user's own SpeechBrain YAML: the numbers change, all else stays byte for byte."""

from __future__ import annotations

from dataclasses import dataclass, field

from batchtune.configs.recipes import BUCKETS, LIMITS, OLD_RULES, training_block
from batchtune.configs.tree import Node, parse_yaml
from batchtune.errors import ResultError
from batchtune.exports.base import Chosen, Patched, Tuned
from batchtune.exports.patching import BlockPatch, block_to_patch
from batchtune.exports.speechbrain import kept_cap, leaving_out, length_function, needed_cap, plain_row, table_row
from batchtune.exports.text import LengthLimits, commented, one_line
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
    lacks = ResultError(f"{name} has no settings of a DynamicBatchSampler (max_batch_length)", _PASTE_IN)
    block = block_to_patch(root, name, key_path, lambda: training_block(root, name, "--key-path "), lacks)
    if key_path is not None and block.settings.keys().isdisjoint((*LIMITS, *BUCKETS)):
        holds = f"{one_line(key_path)} holds no settings of a DynamicBatchSampler (max_batch_length)"
        raise ResultError(f"{name}, line {block.node.line}: {holds}", _PASTE_IN)
    patch = _Patch(
        text=text,
        name=name,
        root=root,
        path=block.keys,
        paste_in=_PASTE_IN,
        replaces={"bucket_boundaries": "num_buckets"},
        tuned=tuned,
    )
    patch.plan()
    return Patched(patch.result(), tuple(patch.notes))


@dataclass(slots=True, kw_only=True)
class _Patch(BlockPatch):
    """The changes to the settings of a DynamicBatchSampler, and `notes` for the user."""

    tuned: Tuned
    notes: list[str] = field(default_factory=list)

    def plan(self) -> None:
        """Find the edits; raise ResultError if a value can't be changed without changing something else."""
        keys = self.keys
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
        self.set_all(limit)
        if self.edits:
            self._comment(limit, chosen, plain)

    def _refuse_block(self, keys: dict[str, Node]) -> None:
        gone = [key for key in OLD_RULES if key in keys]
        if gone and keys.keys().isdisjoint(BUCKETS):
            problem = f"{gone[0]} belongs to an old sampler of SpeechBrain, which takes no bucket table"
            raise self.wrong(keys[gone[0]], problem)
        unit = self.tuned.needed_sweep.lengths.unit
        if "feats_hop_size" in keys and unit != "frames":
            raise self.wrong(
                keys["feats_hop_size"],
                "max_batch_len counts frames here (feats_hop_size), but the lengths that were tuned with count "
                f"{unit or 'an unknown unit'}",
                "Sweep again with lengths in frames: --length-scale 100 --unit frames for seconds and a hop of 0.01 s.",
            )

    def _cap(self, current: Node | None, row: Row) -> int | None:
        """Return the `max_batch_ex` to write; None to leave it as it is."""
        needed = needed_cap(self.tuned.needed_sweep, row)
        if current is None:
            return needed
        cap = self.read(current)
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
        indent = self.indent(limit)
        self.comment(commented(sentences, indent=indent) + leaving_out(sweep, indent=indent), limit)
