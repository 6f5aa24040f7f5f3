"""The probe of a workload that packs: the largest token budget of which the worst micro-batches fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from batchtune.errors import ResultError, UsageError
from batchtune.lengths import Lengths
from batchtune.probe import messages
from batchtune.probe.compositions import COMPOSITIONS
from batchtune.probe.confirmation import Turns, alternating
from batchtune.probe.flow import Probing, nothing_in_time
from batchtune.probe.packed_search import PackedKnowledge, PackedSearch
from batchtune.probe.settings import ProbeSettings
from batchtune.results import (
    BatchShape,
    ClosedBy,
    Models,
    PackedProbe,
    Probe,
    Trial,
)
from batchtune.run_folder import ANOTHER
from batchtune.units import format_length


def check_packed(lengths: Lengths, settings: ProbeSettings) -> None:
    """Raise UsageError if the lengths can't be packed, or the settings are for padded batches."""
    values = lengths.runs.values
    fractional = values != np.floor(values)
    if fractional.any():
        count = int(lengths.runs.counts[fractional].sum())
        raise UsageError(
            f"{settings.workload} packs, which needs whole lengths, but {count:,} of {lengths.count:,} are fractional, "
            f"such as {values[fractional][0]:g}",
            "Give lengths in tokens, or convert them with --length-scale.",
        )
    if lengths.has_targets:
        raise UsageError(
            f"{settings.workload} packs, and packed sequences have one length, but the examples have target lengths",
            "Leave out --target-key. If prompt and answer are one sequence, add them up: --length-key prompt+answer.",
        )
    if settings.max_batch_size is not None:
        raise UsageError(
            f"--max-batch-size is for padded batches, but {settings.workload} packs",
            "Bound the tokens of a packed batch with --max-tokens.",
        )
    if settings.max_tokens is not None and settings.max_tokens < lengths.longest:
        raise UsageError(
            f"--max-tokens {settings.max_tokens:,} is less than the longest sequence "
            f"({format_length(lengths.longest, lengths.unit)}), which must fit in a batch",
            f"Give at least that, leave out longer ones with --max-length {settings.max_tokens}, or, if your training "
            f"cuts them, add --truncate {settings.max_tokens}.",
        )


def refuse_other_kind(
    packed: bool, trials: Sequence[Trial], settings: ProbeSettings, folder: Path
) -> None:
    """Raise ResultError if the folder's trials are of padded batches and the workload packs, or the other way round.

    Raise UsageError if a token budget is given for a workload that pads.
    """
    words = {True: "packed batches", False: "padded batches"}
    for trial in trials:
        if (trial.sequences is not None) != packed:
            raise ResultError(
                f"{folder} holds a probe of {words[not packed]}, but {settings.workload} makes {words[packed]}",
                ANOTHER,
            )
    if not packed and settings.max_tokens is not None:
        raise UsageError(
            f"--max-tokens is for a workload that packs, but {settings.workload} pads its batches",
            "Leave it out; a workload that packs says so with packed = True.",
        )


@dataclass(slots=True, kw_only=True)
class PackedProbing(Probing):
    """The probe of packed batches."""

    search: PackedSearch = field(init=False)

    def __post_init__(self) -> None:
        self.search = PackedSearch(self.lengths, self.settings, self.device.limit_bytes)

    @property
    def _searching(self) -> PackedSearch:
        return self.search

    def _knows_something(self) -> bool:
        return self.search.known(self.trials).reached_budget is not None

    def _shapes(self) -> list[BatchShape]:
        """Return the batches that prove the budget, large and small ones in turns."""
        known = self.search.known(self.trials)
        budget = known.proven_budget
        if budget is None:
            return []
        shapes = set(known.shapes(budget).values())
        return alternating(
            sorted(
                shapes,
                key=lambda shape: (-(known.peaks.highest(shape) or 0), str(shape)),
            )
        )

    def _takes_in(self, turns: Turns) -> bool:
        self.search.task.steps += turns.steps
        known = self.search.known(self.trials)
        return all(map(known.is_proven, turns.confirmed))

    def _result(self, turns: Turns | None) -> Probe:
        """Return the result; `turns` is None if the probe was interrupted."""
        known = self.search.known(self.trials)
        budget = known.reached_budget
        proofs: list[int] = []
        if turns is not None:
            confirmed = self.search.known(self.trials, turns.confirmed)
            proven = confirmed.proven_budget
            if proven is not None:
                budget = proven
                proofs = _proofs(known, proven)
            elif self.out_of_time:
                turns = None  # they had too little time to prove anything
            else:
                raise messages.nothing_confirmed(turns)
        if budget is None:
            raise nothing_in_time(self.clock)
        unfinished = turns is None or self.out_of_time
        closed_by: ClosedBy = "time"
        if not unfinished:
            closed_by = self.search.closed_by(known, budget)
        margin = known.peaks.margin if known.peaks.are_known else None
        return self._probe(
            turns,
            known.peaks,
            frontier=[],
            models=Models(peak_bytes=None, step_seconds=None),
            max_batch_length=float(budget),
            warnings=[
                *self.changed,
                *messages.about_devices(self.run_device, self.device, self.trials),
                *messages.about_margin(margin, self.device),
                *messages.about_masks(known.needs_a_mask),
                *messages.about_the_end(unfinished, self.settings, None),
                *messages.about_turns(turns, self.device),
            ],
            packed=PackedProbe(
                max_tokens=budget,
                closed_by=closed_by,
                oom_tokens=known.oom_tokens,
                proofs=proofs,
                peak_bytes=known.peak_model,
                step_seconds=known.time_model,
            ),
        )


def _proofs(known: PackedKnowledge, budget: int) -> list[int]:
    """Return the trials of the budget's compositions, each once."""
    shapes = known.shapes(budget)
    indices = [known.passed_trial(shapes[name]).index for name in COMPOSITIONS]
    return list(dict.fromkeys(indices))
