"""The progress of a loader's tuning, as commands show it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from batchtune.results import Arguments, LoaderRow

Doing = Literal["opening", "comparing", "measuring", "starting", "confirming", "stages", "reproducing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderProgress:
    """The progress of a tuning: the setting that it measures, how many of the round are done, and then its row.

    `seconds` is how long what is done takes at most, where that is known.
    """

    doing: Doing
    arguments: Arguments = field(default_factory=dict)
    done: int = 0
    total: int = 1
    row: LoaderRow | None = None
    seconds: float | None = None


OnProgress = Callable[[LoaderProgress], None]
