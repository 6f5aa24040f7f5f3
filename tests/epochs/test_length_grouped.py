"""Length-grouped batches, against Transformers' own sampler, example for example."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from batchtune.buckets.alternatives import fixed_baselines
from batchtune.buckets.epoch_cost import Pricing
from batchtune.epochs.measured_costs import Costs
from batchtune.epochs.simulation import length_grouped
from batchtune.epochs.table import Limits
from batchtune.lengths import Lengths
from batchtune.results import SweepSettings


def by_transformers(lengths: list[float], batch_size: int, seed: int) -> list[int]:
    trainer_pt_utils = pytest.importorskip("transformers.trainer_pt_utils")
    generator = torch.Generator().manual_seed(seed)
    return list(
        trainer_pt_utils.LengthGroupedSampler(
            batch_size, lengths=lengths, generator=generator
        )
    )


@pytest.mark.parametrize(
    ("count", "batch_size"), [(1, 4), (7, 8), (100, 8), (999, 3), (5000, 16)]
)
def test_the_order_is_that_of_transformers(count: int, batch_size: int) -> None:
    lengths = (
        np.random.default_rng(count).integers(1, 400, count) + np.arange(count) / 1e4
    )
    for seed in range(3):
        shuffled = torch.randperm(
            count, generator=torch.Generator().manual_seed(seed)
        ).numpy()
        ours = length_grouped(lengths, batch_size, shuffled)
        assert ours.tolist() == by_transformers(lengths.tolist(), batch_size, seed)


def test_the_baseline_costs_what_transformers_batches_cost() -> None:
    values = np.random.default_rng(1).lognormal(5, 1, 4000).round() + 1
    lengths = Lengths.of(values, unit="tokens")
    limit = 8 * lengths.longest
    costs = Costs(
        step_seconds=lambda sizes, longest, targets=None: 0.01 + sizes * longest * 1e-6
    )
    pricing = Pricing.of(lengths, limit, SweepSettings(), costs)
    found = fixed_baselines(pricing, Limits(max_batch_length=limit))[2]
    padded = []
    for seed in range(8):
        order = values[by_transformers(values.tolist(), 8, seed)]
        padded.append(8 * float(order.reshape(-1, 8).max(axis=1).sum()))
    assert (found.name, found.batch_size, found.batches) == ("length-grouped", 8, 500)
    assert found.padded_length == pytest.approx(np.mean(padded), rel=0.005)
    assert found.estimated_epoch_seconds == pytest.approx(
        500 * 0.01 + found.padded_length * 1e-6
    )
