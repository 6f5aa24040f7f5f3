"""What is known of a user's current settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from batchtune.batching.table import BucketTable
from batchtune.lengths import Lengths
from batchtune.results import Sizing

Kind = Literal["speechbrain", "nemo", "fixed", "batchtune"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Current:
    """Batching settings as a user has them, checked but not yet applied to lengths.

    Attributes:
        kind: Whose settings they are.
        settings: By name, plain values that JSON can hold.
        source: `--current`, or the file's name without its folders.
        key_path: Where in the file; None for the top level and for `--current`.
        notes: What the file says that is not reproduced, sentences without a full stop.
    """

    kind: Kind
    settings: Mapping[str, Any]
    source: str
    key_path: str | None = None
    notes: tuple[str, ...] = ()

    def record(self, found: CurrentTable) -> dict[str, Any]:
        """What `sweep.json` keeps as `current_settings`, with what they come down to."""
        place = {} if self.key_path is None else {"key_path": self.key_path}
        return {"source": self.source, **place, "kind": self.kind, "describe": found.describe, **self.settings}


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentTable:
    """The batches that current settings make, as a table that can be evaluated.

    Attributes:
        table: Covers all of `lengths`.
        lengths: The examples that the settings keep; the given object itself where they keep all.
        sizing: `length` where batch sizes come of one max_batch_length, else `frontier`: sizes per bucket.
        max_batch_length: As the settings have it; None where they have none.
        describe: What the settings are, a few words.
        exact: Whether the framework makes these very numbers of batches.
        notes: Why not, or what to know; sentences without a full stop.
        left_out: Reason → number of examples that the settings leave out; empty where they keep all.
    """

    table: BucketTable
    lengths: Lengths
    sizing: Sizing
    max_batch_length: float | None
    describe: str
    exact: bool
    notes: tuple[str, ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def note(self) -> str | None:
        """All notes as one text; None where there is nothing to say."""
        return "; ".join(self.notes) or None
