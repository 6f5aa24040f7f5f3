"""Which batches a probe confirms: the largest of each bucket of the table that would be recommended."""

from __future__ import annotations

import numpy as np

from batchtune.batching.table import BucketTable
from batchtune.cost import predict
from batchtune.lengths import Lengths
from batchtune.results import Probe
from batchtune.shapes import BatchShape
from batchtune.tuning.sweep import SweepSettings, sweep
from batchtune.tuning.sweeping import costs_of
from batchtune.tuning.verify_plan import alternating, worst_batches

# What takes less of the memory can't be what fails.
_TELLING_SHARE = 0.5


def shapes_to_confirm(lengths: Lengths, probe: Probe, settings: SweepSettings) -> list[BatchShape]:
    """The largest batch of each bucket, the one that needs most and the one that needs least memory in turns.

    Args:
        lengths: The data set.
        probe: What was measured, as far as it is known.
        settings: What the sweep that follows will compare.

    Returns:
        Shapes, each once; what takes less than half of the memory is left out.
    """
    found = sweep(lengths, probe.max_batch_length, settings, costs_of(probe))
    row = found.recommended_row or min(found.rows, key=lambda row: row.batches)
    model = probe.models.peak_bytes

    def needs(shape: BatchShape) -> float:
        if model is None:
            return shape.padded_length
        return float(predict(model, shape.batch_size, shape.length, shape.target_length))

    least = 0.0 if model is None else _TELLING_SHARE * probe.device.limit_bytes
    table = BucketTable(np.asarray(row.boundaries), np.asarray(row.batch_sizes))
    padded = lengths if settings.multiple_of is None else lengths.padded_to(settings.multiple_of)
    batches = worst_batches(padded, table, needs)
    telling = [planned for planned in batches if needs(planned.shape) >= least]
    return list(dict.fromkeys(planned.shape for planned in alternating(telling)))
