"""How true and how dear the probe is on memory laws: `python tests/benchmarks/laws.py [NAME]...`.

For each law and data set: the probe, the sweep that follows, and later sweeps with 5, 8, 12 and 30 buckets; then the
truth by brute force. Columns: lengths measured; trials for each; OOMs for each (those in turns included); how many
buckets of the recommended table, of later tables and of those over two lengths may run out of memory, as may a batch
by max_batch_length; and what the recommended table costs above one made with exact knowledge of all sizes.
Exits with 1 where a target does not hold.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from memory_laws import LAWS, TARGET_LAWS, LawDevice, made_lengths

from batchtune.buckets.sweep import sweep
from batchtune.epochs.measured_costs import Costs, Frontier, costs_of
from batchtune.epochs.table import BucketTable, batch_sizes_for
from batchtune.probe.flow import run_probe
from batchtune.probe.messages import ProbeHooks
from batchtune.probe.settings import ProbeSettings
from batchtune.results import (
    BatchShape,
    FrontierPoint,
    SweepSettings,
)

DATA = ("speech", "sentences", "tokens")
LATER = (5, 8, 12, 30)
MOST_TRIALS, MOST_OOMS, MOST_LOSS = 3.0, 0.5, 0.015


@dataclass(frozen=True)
class Figures:
    """What one probe showed."""

    lengths: int
    trials: int
    ooms: int
    above: int
    above_later: int
    above_joint: int
    above_max_batch_length: int
    loss: float

    @property
    def all_above(self):
        """How many sizes may not fit: of the table, of later ones, over two lengths, by max_batch_length."""
        return (
            self.above,
            self.above_later,
            self.above_joint,
            self.above_max_batch_length,
        )

    def holds(self, law):
        """Whether every target holds."""
        cheap = (
            self.trials <= MOST_TRIALS * self.lengths
            and self.ooms <= MOST_OOMS * self.lengths
        )
        return not law.monotone or (
            not any(self.all_above) and cheap and self.loss <= MOST_LOSS
        )


def law_settings(*, dear=False):
    """Settings under which failures are cheap, or dear."""
    return ProbeSettings(
        workload="made.py:Made",
        options={},
        device="cuda",
        memory_fraction=1.0,
        command=["python", "made.py"] if dear else None,
    )


def probe_law(
    device,
    num_buckets=tuple(range(10, 21)),
):
    """The probe of a made device."""
    with tempfile.TemporaryDirectory() as folder:
        swept = SweepSettings(num_buckets=num_buckets)
        return run_probe(
            device.lengths,
            law_settings(),
            Path(folder),
            sweep_settings=swept,
            hooks=ProbeHooks(measurer=device),
        )


def measure(
    law,
    lengths,
    strategies=(),
):
    """Probes, sweeps and compares with the truth."""
    device = LawDevice(law, lengths)
    probe = probe_law(device)
    found = sweep(
        lengths,
        probe.max_batch_length,
        SweepSettings(strategies=strategies),
        costs_of(probe),
    )
    wider = SweepSettings(strategies=strategies, num_buckets=LATER)
    later = sweep(lengths, probe.max_batch_length, wider, costs_of(probe))
    assert found.recommended_table is not None, found.reason
    row = found.rows[found.recommended_table]
    ooms = sum(trial.outcome == "oom" for trial in probe.trials)
    searched = [trial for trial in probe.trials if not trial.timing]
    lengths_tried = {(trial.length, trial.target_length) for trial in searched}
    return Figures(
        lengths=len(lengths_tried),
        trials=len(searched),
        ooms=ooms,
        above=device.above_truth(table_of(row)),
        above_later=sum(
            device.above_truth(table_of(other))
            for other in later.rows
            if not other.unproven
        ),
        above_joint=sum(joint_above(device, one) for one in (found, later)),
        above_max_batch_length=max_batch_length_above(device, probe.max_batch_length),
        loss=loss_of(device, probe, found, row),
    )


def table_of(row):
    return BucketTable(
        np.asarray(row.boundaries), np.asarray(row.batch_sizes, dtype=np.int64)
    )


def joint_above(device, found):
    """Buckets over two lengths that may not fit, each with its largest length and target."""
    return sum(
        not device.fits(BatchShape(size, length, target))
        for row in found.two_dimensional
        for (length, target), size in zip(row.buckets, row.batch_sizes, strict=True)
    )


def max_batch_length_above(device, limit):
    """At how many lengths a batch by max_batch_length may not fit."""
    histogram = device.lengths.histogram
    sizes = np.minimum(batch_sizes_for(histogram.lengths, limit), histogram.cumulative)
    return sum(
        not device.fits(
            BatchShape(
                int(size), float(length), device.lengths.worst_target(float(length))
            )
        )
        for length, size in zip(histogram.lengths, sizes, strict=True)
    )


def exact(device, probe):
    """What exact knowledge of all sizes would say: those that fit at each length and at all before it."""
    distinct = device.lengths.histogram.lengths
    targets = None
    if device.lengths.targets is not None:
        targets = np.array(
            [device.lengths.worst_target(float(length)) for length in distinct]
        )
    sizes = np.minimum.accumulate(np.maximum(1, device.largest(distinct, targets)))
    points = [
        FrontierPoint(
            length=float(length),
            target_length=None,
            batch_size=int(size),
            closed_by="oom",
            oom_batch_size=None,
            step_seconds=None,
            peak_bytes=None,
        )
        for length, size in zip(distinct, sizes, strict=True)
    ]
    return Costs(
        frontier=Frontier.of(points), step_seconds=costs_of(probe).step_seconds
    )


def loss_of(device, probe, found, row):
    """What the recommended table costs above the best with as many buckets and exact knowledge."""
    settings = SweepSettings(strategies=("optimal",), num_buckets=(row.num_buckets,))
    best = sweep(device.lengths, probe.max_batch_length, settings, exact(device, probe))
    return (
        cost(row)
        / min(cost(other) for other in best.rows if other.sizing == "frontier")
        - 1
    )


def cost(row):
    return (
        row.estimated_epoch_seconds
        if row.estimated_epoch_seconds is not None
        else float(row.batches)
    )


def main():
    """Prints a row for each law and data set."""
    wanted = sys.argv[1:]
    print(
        f"{'law':44} {'data':10} {'len':>4} {'tri/l':>6} {'oom/l':>6}  above (table, later, 2-D, M)     loss"
    )
    failed = 0
    for targets, laws in ((False, LAWS), (True, TARGET_LAWS)):
        for name, law in laws.items():
            if wanted and not any(part in name for part in wanted):
                continue
            for data in DATA:
                got = measure(law, made_lengths(data, targets=targets))
                holds = got.holds(law)
                failed += not holds
                print(
                    f"{name:44} {data:10} {got.lengths:4} {got.trials / got.lengths:6.2f} "
                    f"{got.ooms / got.lengths:6.2f}  {got.all_above!s:29}{got.loss:7.2%}{'' if holds else '  <--'}",
                    flush=True,
                )
    print(f"{failed} of them miss a target" if failed else "all targets hold")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
