"""Length-grouped batches, against Transformers' own sampler, example for example."""

import numpy as np
import pytest
import torch

from batchtune.epochs.measured_costs import Costs
from batchtune.epochs.pricing import Pricing, fixed_baselines
from batchtune.epochs.table import Limits
from batchtune.lengths import Lengths
from batchtune.results import SweepSettings


def test_the_baseline_costs_what_transformers_batches_cost():
    values = np.random.default_rng(1).lognormal(5, 1, 4000).round() + 1
    lengths = Lengths.of(values, unit="tokens")
    limit = 8 * lengths.longest
    costs = Costs(
        step_seconds=lambda sizes, longest, targets=None: 0.01 + sizes * longest * 1e-6
    )
    pricing = Pricing.of(lengths, limit, SweepSettings(), costs)
    found = fixed_baselines(pricing, Limits(max_batch_length=limit))[2]
    trainer_pt_utils = pytest.importorskip("transformers.trainer_pt_utils")
    padded = []
    for seed in range(8):
        theirs = trainer_pt_utils.LengthGroupedSampler(
            8,
            lengths=values.tolist(),
            generator=torch.Generator().manual_seed(seed),
        )
        order = values[list(theirs)]
        padded.append(8 * order.reshape(-1, 8).max(axis=1).sum())
    assert (found.name, found.batch_size, found.batches) == ("length-grouped", 8, 500)
    assert found.padded_length == pytest.approx(np.mean(padded), rel=0.005)
    assert found.estimated_epoch_seconds == pytest.approx(
        500 * 0.01 + found.padded_length * 1e-6
    )
