from __future__ import annotations

import importlib
import importlib.util
import types
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from reproduced import lhotse_batches, lhotse_boundaries

from batchtune.lengths import FloatArray

Lhotse = types.SimpleNamespace


@pytest.fixture(scope="module")
def lhotse() -> Lhotse:
    """The real one: its cuts, its estimate of buckets, its sampler and its constraint."""
    if importlib.util.find_spec("lhotse") is None:
        pytest.skip("lhotse is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sampling = importlib.import_module("lhotse.dataset.sampling.dynamic_bucketing")
        return Lhotse(
            cut=importlib.import_module("lhotse").MonoCut,
            estimate=sampling.estimate_duration_buckets,
            sampler=sampling.DynamicBucketingSampler,
            constraint=sampling.FixedBucketBatchSizeConstraint,
        )


def cuts_of(lhotse: Lhotse, values: Iterable[float]) -> list[Any]:
    return [
        lhotse.cut(id=str(i), start=0, duration=value, channel=0)
        for i, value in enumerate(values)
    ]


def random_lengths(draw: np.random.Generator) -> FloatArray:
    count = int(draw.integers(0, 70))
    match draw.integers(3):
        case 0:
            return draw.integers(1, 12, count).astype(np.float64)
        case 1:
            return draw.lognormal(1, 1, count)
        case _:
            return draw.choice([0.1, 0.3, 1.0, 5.0, 700.0], count)


def test_every_batch_is_that_of_lhotse(lhotse: Lhotse) -> None:
    draw = np.random.default_rng(0)
    for _ in range(40):
        values = random_lengths(draw)
        seed = int(draw.integers(99))
        buffer_size = int(draw.choice([1, 5, 20, 20_000]))
        bins = np.sort(
            draw.choice([0.5, 1.0, 2.0, 3.5, 5.0, 8.0], draw.integers(0, 7))
        ).tolist()
        edges = [*bins, 1e9]
        sizes = draw.integers(1, 9, len(bins) + 1).tolist()
        sampler = lhotse.sampler(
            cuts_of(lhotse, values.tolist()),
            constraint=lhotse.constraint(edges, sizes),
            duration_bins=bins,
            shuffle=True,
            seed=seed,
            buffer_size=buffer_size,
            world_size=1,
            rank=0,
        )
        wanted = [[int(cut.id) for cut in batch] for batch in sampler]
        assert (
            lhotse_batches(
                values, np.array(edges), sizes, seed=seed, buffer_size=buffer_size
            )
            == wanted
        )


def test_the_boundaries_are_those_of_lhotse_to_the_bit(lhotse: Lhotse) -> None:
    draw = np.random.default_rng(0)
    for _ in range(100):
        values = random_lengths(draw)
        if values.size < 2:
            continue
        num_buckets = int(draw.integers(2, values.size + 1))
        wanted = lhotse.estimate(cuts_of(lhotse, values.tolist()), num_buckets)
        assert (
            lhotse_boundaries(values, num_buckets).tobytes()
            == np.array(wanted, dtype=np.float64).tobytes()
        )
