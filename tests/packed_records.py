"""Made packers of a sweep, and probes of packed batches."""

import numpy as np
from msgspec.structs import replace
from report_records import made_probe

from batchtune.lengths import Lengths
from batchtune.results import (
    BatchShape,
    Confirmation,
    Models,
    PackedModel,
    PackedProbe,
    PackedRow,
    PackingSweep,
    Trial,
)

MAX_TOKENS = 8192
TIME_MODEL = PackedModel(
    constant=0.01,
    token=2e-5,
    squared_token=1e-8,
    sequence=1e-5,
    relative_error=0.02,
    largest_error=0.05,
)
# Of the tokens, the share in the longest sequences; the rest is in the shortest.
LONG_SHARES = (1.0, 0.99, 0.9, 0.75, 0.5, 0.25, 0.0)


def packed_probe(
    lengths,
    max_tokens,
    shares=LONG_SHARES,
    **fields,
):
    """A probe that proved the budget with these compositions, and took 10% longer for them in turns."""
    values = np.sort(np.asarray(lengths))
    trials = []
    for index, share in enumerate(shares):
        long = taken(values[::-1], int(share * max_tokens))
        shape = BatchShape.packed(long + taken(values, max_tokens - sum(long)))
        trials.append(Trial.of(shape, "ok", index=index, steps=3, step_seconds=1.0))
    packed = PackedProbe(
        max_tokens=max_tokens,
        closed_by="memory",
        oom_tokens=None,
        proofs=list(range(len(trials))),
        peak_bytes=None,
        step_seconds=TIME_MODEL,
    )
    return replace(
        made_probe(),
        lengths=Lengths.of(values, unit="tokens").summary(),
        trials=trials,
        frontier=[],
        models=Models(peak_bytes=None, step_seconds=None),
        max_batch_length=float(max_tokens),
        confirmation=Confirmation(
            shapes=len(trials),
            steps=20,
            workers=2,
            alloc_retries=0,
            reserved_growth_bytes=0,
            given_up=0,
            time_ratio=1.1,
        ),
        packed=replace(packed, **fields),
    )


def taken(values, tokens):
    """The first of these sequences, cut so that they have so many tokens."""
    ends = np.minimum(np.cumsum(values), tokens)
    sequences = np.diff(ends, prepend=0)
    return [int(length) for length in sequences if length]


def packed_row(packer="even", **fields):
    made = {
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


def with_packing(sweep, text="even", **fields):
    """Return the sweep of a training that packs; every string of its packers is `text`."""
    packing = PackingSweep(
        max_tokens=MAX_TOKENS,
        padded_steps=634,
        padded_step_tokens_deviation=0.14,
        rows=[packed_row(text)],
        recommended=0,
        reason=text,
    )
    return replace(sweep, packing=replace(packing, **fields))
