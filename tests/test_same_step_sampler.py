"""`SameStepBatchSampler` around the samplers of torch, accelerate and Lightning: each step keeps its examples."""

import runpy
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from msgspec.structs import replace
from real_speechbrain import load_speechbrain
from report_records import made_sweep
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
)

from batchtune import SameStepBatchSampler, SameStepStream, sampler_from_config
from batchtune.errors import ResultError
from batchtune.exports.run_configs import render_sampler_yaml, sampler_config

EXAMPLE = Path(__file__).parents[1] / "examples" / "same_steps.py"
COUNT = 203
LENGTHS = np.random.default_rng(0).integers(1, 100, COUNT).astype(float)
OPTIONS = {
    "bucket_boundaries": [25, 50, 100],
    "bucket_batch_sizes": [16, 8, 4],
    "own_accumulate": 4,
}


PACKED = {"max_tokens": 350, "own_accumulate": 4}


def seedable(generator_seed):
    return SeedableRandomSampler(range(COUNT), data_seed=generator_seed)


def in_batches(sampler):
    return BatchSampler(sampler, 4, drop_last=False)


OWN = {
    "RandomSampler": lambda rank, ranks: in_batches(RandomSampler(range(COUNT))),
    "DistributedSampler": lambda rank, ranks: in_batches(
        DistributedSampler(range(COUNT), ranks, rank, seed=3)
    ),
    "BatchSamplerShard": lambda rank, ranks: BatchSamplerShard(
        in_batches(RandomSampler(range(COUNT))), ranks, rank
    ),
    "SeedableRandomSampler": lambda rank, ranks: BatchSamplerShard(
        in_batches(seedable(5)), ranks, rank
    ),
    "Lightning": lambda rank, ranks: in_batches(lightnings(rank, ranks)),
    "SpeechBrain": lambda rank, ranks: in_batches(speechbrains(rank, ranks)),
}


def lightnings(rank, ranks):
    wrapper = pytest.importorskip("lightning.fabric.utilities.distributed")
    return wrapper.DistributedSamplerWrapper(
        RandomSampler(range(COUNT)), num_replicas=ranks, rank=rank
    )


def speechbrains(rank, ranks):
    samplers = load_speechbrain()[0]
    own = samplers.ReproducibleRandomSampler(range(COUNT))
    if ranks == 1:
        return own
    return samplers.DistributedSamplerWrapper(own, num_replicas=ranks, rank=rank)


def examples_of_steps(batches, accumulate):
    """The sorted examples of each step of all ranks."""
    steps = []
    for start in range(0, len(batches[0]), accumulate):
        own = [rank[start : start + accumulate] for rank in batches]
        steps.append(sorted(chain(*chain(*own))))
    return steps


@pytest.mark.parametrize("options", [OPTIONS, PACKED], ids=["padded", "packed"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", OWN)
def test_each_step_has_the_examples_that_it_has_without(name, ranks, options):
    own = []
    cut = []
    for rank in range(ranks):
        torch.manual_seed(0)
        own.append(list(OWN[name](rank, ranks)))
        torch.manual_seed(0)
        sampler = SameStepBatchSampler(
            OWN[name](rank, ranks), LENGTHS, rank=rank, world_size=ranks, **options
        )
        cut.append(list(sampler))
        assert len(cut[-1]) == len(sampler)
    # A RandomSampler is not dealt to ranks: each cuts its own.
    groups = [slice(0, ranks)]
    if name == "RandomSampler":
        groups = [slice(rank, rank + 1) for rank in range(ranks)]
    for group in groups:
        assert examples_of_steps(cut[group], 4) == examples_of_steps(own[group], 4)
    if options is PACKED:
        assert max(LENGTHS[batch].sum() for rank in cut for batch in rank) <= 350
        return
    padded = [
        sum(len(batch) * LENGTHS[batch].max() for rank in batches for batch in rank)
        for batches in (own, cut)
    ]
    assert padded[1] < 0.8 * padded[0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_of_as_few_micro_batches_as_it_takes(ranks):
    options = {**OPTIONS, "bucket_batch_sizes": [32, 16, 4], "accumulate": "fewest"}
    steps = []
    for rank in range(ranks):
        own = OWN["SeedableRandomSampler"](rank, ranks)
        sampler = SameStepBatchSampler(
            own, LENGTHS, rank=rank, world_size=ranks, **options
        )
        loader = DataLoader(range(COUNT), batch_sampler=sampler, collate_fn=list)
        steps.append(list(sampler.steps(loader)))
        with pytest.raises(TypeError, match="varies"):
            len(sampler)
    numbers = [[len(step) for step in of_rank] for of_rank in steps]
    assert len(set(numbers[0])) > 1
    assert numbers[0] == numbers[-1]
    held = [sorted(chain(*chain(*of_ranks))) for of_ranks in zip(*steps, strict=True)]
    own = [list(OWN["SeedableRandomSampler"](rank, ranks)) for rank in range(ranks)]
    assert held == examples_of_steps(own, 4)


def test_the_example_loses_the_same_in_fewer_micro_batches():
    own, cut = runpy.run_path(str(EXAMPLE))["trained"]()
    assert cut[0] == pytest.approx(own[0], rel=1e-5)
    assert cut[1] < 0.7 * own[1] and cut[2] < 0.7 * own[2]


def config_file(folder, **fields):
    row = replace(made_sweep().rows[0], pool_size=16, accumulate=4)
    config = sampler_config(replace(made_sweep(), rows=[row], recommended=0))
    path = folder / "sampler.yaml"
    path.write_text(render_sampler_yaml(replace(config, **fields)))
    return path


def test_a_config_makes_it_around_the_own_batch_sampler(tmp_path):
    path = config_file(tmp_path)
    lengths = np.full(COUNT, 3.0)
    own = OWN["RandomSampler"](0, 1)
    with pytest.warns(UserWarning, match="was tuned on other lengths"):
        sampler = SameStepBatchSampler.from_config(path, own, lengths)
    loader = DataLoader(range(COUNT), batch_sampler=sampler)
    assert sorted(torch.cat(list(loader)).tolist()) == list(range(COUNT))
    with pytest.raises(ValueError, match=r"SameStepBatchSampler\.from_config"):
        sampler_from_config(path, lengths)
    with pytest.raises(ResultError, match="own_accumulate is None"):
        damaged = config_file(tmp_path, own_accumulate=None)
        SameStepBatchSampler.from_config(damaged, own, lengths)


def test_a_stream_keeps_the_examples_of_each_step(tmp_path):
    lengths = [1 + 7 * index % 20 for index in range(100)]
    stream = SameStepStream(
        config_file(tmp_path),
        range(100),
        length_of=lengths.__getitem__,
        rank=0,
        world_size=2,
    )
    in_order = [list(range(100))[first : first + 8] for first in range(0, 100, 8)]
    for _ in range(2):
        batches = list(DataLoader(stream, batch_size=None))
        assert examples_of_steps([batches], 4) == in_order


def test_a_stream_has_one_worker_and_steps_to_keep(tmp_path, monkeypatch):
    stream = SameStepStream(config_file(tmp_path), [1], length_of=float)
    workers = SimpleNamespace(num_workers=2)
    monkeypatch.setattr(
        "batchtune.sampler.micro_batches.get_worker_info", lambda: workers
    )
    with pytest.raises(RuntimeError, match="2 workers would each make steps"):
        next(iter(stream))
    path = tmp_path / "sampler.yaml"
    path.write_text(render_sampler_yaml(sampler_config(made_sweep())))
    with pytest.raises(ValueError, match="whose batches are of other steps"):
        SameStepStream(path, [1], length_of=float)


def test_a_step_that_does_not_fit_is_named():
    """With that number, 4, no step warns."""
    sampler = SameStepBatchSampler(
        OWN["SeedableRandomSampler"](0, 1), LENGTHS, accumulate=2, **OPTIONS
    )
    with pytest.warns(UserWarning, match="does not fit into its") as told:
        held = {index for batch in sampler for index in batch}
    assert held == set(range(COUNT))
    assert "accumulate=4 is the least" in str(told[-1].message)


def test_wrong_arguments_are_named():
    own = OWN["RandomSampler"](0, 1)
    for lengths, options, why in (
        (LENGTHS, {**OPTIONS, "accumulate": 0}, "accumulate"),
        (LENGTHS, {**OPTIONS, "pair_cost": -1}, "pair_cost must be finite"),
        (LENGTHS * 2, OPTIONS, "beyond the last"),
        (LENGTHS, {"own_accumulate": 4}, "or max_tokens for packed ones"),
        (LENGTHS, {**PACKED, "equal_counts": True}, "are for padded micro-batches"),
        (LENGTHS, {**PACKED, "max_tokens": 50}, "are longer than max_tokens"),
    ):
        with pytest.raises(ValueError, match=why):
            SameStepBatchSampler(own, lengths, **options)
