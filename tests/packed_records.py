"""Made packers of a sweep."""

from __future__ import annotations

from typing import Any

import msgspec

from batchtune.results import PackedRow, PackingSweep, Sweep

MAX_TOKENS = 8192


def packed_row(packer: str = "even", **fields: Any) -> PackedRow:
    made: dict[str, Any] = {
        "packer": packer,
        "max_tokens": MAX_TOKENS,
        "pool_size": 8192,
        "batches": 640,
        "lower_bound": 625,
        "tokens": 5_120_000,
        "fill": 0.9765625,
        "largest_tokens": 8190,
        "over_cap": 0,
        "cut_sequences": 0,
        "cut_tokens": 0,
        "steps": 160,
        "step_tokens_deviation": 0.02,
        "slowest_rank": 1.01,
        "mates_again": 0.05,
    }
    return PackedRow(**{**made, **fields})


def with_packing(sweep: Sweep, text: str = "even", **fields: Any) -> Sweep:
    """Return the sweep of a training that packs; every string of its packers is `text`."""
    packing = PackingSweep(
        max_tokens=MAX_TOKENS,
        rows=[packed_row(text)],
        recommended=0,
        reason=text,
    )
    return msgspec.structs.replace(
        sweep, packing=msgspec.structs.replace(packing, **fields)
    )
