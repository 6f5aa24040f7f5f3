"""The drop-in batch sampler: what it refuses, its epochs, ranks and resumption."""

import itertools
import pickle
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_samplers import TABLE
from msgspec.structs import replace
from torch.utils.data import DataLoader
from verify.made_stepper import made_config

from batchtune import BucketBatchSampler, PooledBatchSampler, sampler_from_config
from batchtune.allocators import VARIABLES, in_words
from batchtune.configs import read_any_sampler_yaml
from batchtune.errors import UsageError
from batchtune.exports.run_configs import render_sampler_yaml
from batchtune.lengths import Lengths

LENGTHS = np.random.default_rng(0).integers(1, 31, 101).astype(np.float64)


POOLS = {**TABLE, "pool_size": 30}


def in_buckets(lengths=LENGTHS, **options):
    return BucketBatchSampler(lengths, **{**TABLE, **options})


def in_pools(lengths=LENGTHS, **options):
    return PooledBatchSampler(lengths, **{**POOLS, **options})


@pytest.fixture(
    scope="module", params=[in_buckets, in_pools], ids=["in buckets", "in pools"]
)
def made(request):
    """Makes a sampler of each kind."""
    return request.param


def examples(batches):
    return sorted(example for batch in batches for example in batch)


# What is refused.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"bucket_boundaries": []},
            "bucket_boundaries must be one-dimensional and not empty",
        ),
        ({"bucket_boundaries": [12, 5, 30]}, "must ascend, but entry 1 is 5"),
        ({"bucket_boundaries": [0, 5, 30]}, "positive and finite, but entry 0 is 0"),
        ({"bucket_boundaries": ["a", "b", "c"]}, "bucket_boundaries must be numbers"),
        (
            {"bucket_batch_sizes": [9, 4]},
            "2 bucket_batch_sizes for 3 bucket_boundaries: give one",
        ),
        (
            {"bucket_batch_sizes": [9, float("inf"), 2]},
            "whole numbers from 1 to 2\\*\\*53, but entry 1 is inf",
        ),
        (
            {"batch_ordering": "shuffled"},
            "batch_ordering must be one of random, ascending, descending",
        ),
        ({"overlong": "drop"}, "overlong must be error or single"),
        ({"epoch": 0.5}, "epoch must be a whole number, at least 0, got 0.5"),
        ({"seed": -1}, "seed must be a whole number, at least 0, got -1"),
        ({"shuffle": None}, "shuffle must be True or False, got None"),
        ({"same_bucket": 2}, "same_bucket must be True or False, got 2"),
        ({"drop_last": "x"}, "drop_last must be True or False, got 'x'"),
        ({"rank": 1}, "rank and world_size go together"),
        ({"rank": 2, "world_size": 2}, "rank must be at most 1, got 2"),
        ({"pool_size": 0}, "pool_size must be a whole number, at least 1, got 0"),
        (
            {"batch_overhead": float("nan")},
            "batch_overhead must be finite and at least 0, got nan",
        ),
    ],
)
def test_a_bad_argument_is_told(options, message):
    of_pools = not options.keys().isdisjoint(("pool_size", "batch_overhead"))
    make = in_pools if of_pools else in_buckets
    with pytest.raises(ValueError, match=message):
        make(**options)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([], "lengths must be one-dimensional and not empty"),
        (
            [3.0, float("nan")],
            "lengths must be positive and finite, but entry 1 is nan",
        ),
        (
            "train.csv",
            r"got shape \(\); for a manifest, use from_config; for a data set, also give it length_of=",
        ),
        (
            [{"text": "x"}] * 3,
            "must be numbers, got object; .* for a data set, also give it length_of=",
        ),
        (
            [[1, 2], [3]],
            "must be a list of numbers; .* for a data set, also give it length_of=",
        ),
    ],
)
def test_bad_lengths_are_told(made, lengths, message):
    with pytest.raises(ValueError, match=message):
        made(lengths)


def test_overlong_examples_are_told(made):
    with pytest.raises(
        ValueError,
        match=r"example 1 has the length 31.*30.0; 2 of 3 examples.*overlong=\"single\"",
    ):
        made([3, 31, 45])


def test_overlong_examples_may_be_batches_of_one(made):
    batches = list(made([3, 31, 3, 45], overlong="single"))
    assert sorted(map(sorted, batches)) == [[0, 2], [1], [3]]


# Epochs.


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=60),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["random", "ascending", "descending"]),
)
@pytest.mark.filterwarnings("ignore:drop_last leaves out all")
def test_len_matches_iteration_and_ranks_share_the_examples(
    made, lengths, world_size, shuffle, drop_last, same_bucket, batch_ordering
):
    ranks = [
        made(
            lengths,
            rank=rank,
            world_size=world_size,
            shuffle=shuffle,
            drop_last=drop_last,
            same_bucket=same_bucket,
            batch_ordering=batch_ordering,
        )
        for rank in range(world_size)
    ]
    wanted = {len(rank) for rank in ranks}
    dropped = ranks[0].dropped_examples
    batches = [list(rank) for rank in ranks]
    assert {len(of_rank) for of_rank in batches} == wanted
    assert len(wanted) == 1
    found = examples([batch for of_rank in batches for batch in of_rank])
    assert len(found) == len(lengths) + ranks[0].repeated_examples - dropped
    assert len(set(found)) == len(lengths) - dropped


def test_each_iteration_is_the_next_epoch(made):
    sampler = made(seed=3)
    epochs = [list(sampler) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert sampler.state_dict()["position"] == 0
    sampler.set_epoch(0)
    assert list(sampler) == epochs[0]
    assert sampler.epoch == 1
    for epoch, batches in enumerate(epochs):
        assert list(made(seed=3, epoch=epoch)) == batches


def test_set_epoch_during_an_iteration_is_for_the_next(made):
    sampler = made()
    running = iter(sampler)
    first = [next(running)]
    sampler.set_epoch(0)
    assert first + list(running) == list(made())
    assert sampler.epoch == 0


@pytest.mark.parametrize("lengths", [LENGTHS.tolist(), torch.tensor(LENGTHS)])
def test_lengths_may_be_any_array(made, lengths):
    assert list(made(lengths)) == list(made())


def test_it_can_be_pickled(made):
    assert list(pickle.loads(pickle.dumps(made()))) == list(made())


def test_an_epoch_without_a_batch_warns(made):
    sampler = made([3.0], drop_last=True)
    with pytest.warns(
        UserWarning,
        match="drop_last leaves out all 1 examples, as they don't fill a batch on each of 1 ranks: set",
    ) as told:
        assert list(sampler) == []
    assert told[0].filename == __file__
    assert (len(sampler), sampler.dropped_examples) == (0, 1)


# Resuming.


@pytest.mark.parametrize("batch_ordering", ["random", "ascending"])
@pytest.mark.parametrize("position", [0, 7, None])
def test_a_loaded_state_goes_on_batch_for_batch(made, position, batch_ordering):
    ordered = partial(made, batch_ordering=batch_ordering)
    sampler = ordered(epoch=2)
    batches = list(ordered(epoch=2))
    taken = len(sampler) if position is None else position
    running = iter(sampler)
    assert [next(running) for _ in range(taken)] == batches[:taken]
    resumed = ordered()
    resumed.load_state_dict(sampler.state_dict())
    assert list(resumed) == batches[taken:]
    assert list(resumed) == list(ordered(epoch=3))


def test_only_set_epoch_of_another_epoch_leaves_the_place(made):
    sampler, resumed = made(), made()
    next(iter(sampler))
    for epoch, batches in ((0, list(made())[1:]), (4, list(made(epoch=4)))):
        resumed.load_state_dict(sampler.state_dict())
        resumed.set_epoch(epoch)
        assert list(resumed) == batches


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": LENGTHS + 1e-9, "overlong": "single"}, "its digest is"),
        ({"bucket_batch_sizes": [8, 4, 2]}, "its digest is"),
        ({"drop_last": True}, "its digest is"),
        ({"seed": 4}, "its seed is 0, not 4"),
        ({"rank": 0, "world_size": 2}, "its world_size is 1, not 2"),
    ],
)
def test_the_state_of_another_sampler_is_refused(made, options, message):
    with pytest.raises(ValueError, match=message):
        made(**options).load_state_dict(made().state_dict())


@pytest.mark.parametrize(
    "other", [in_pools(pool_size=29), in_pools(batch_overhead=1.0)]
)
def test_the_state_of_other_pools_is_refused(other):
    with pytest.raises(ValueError, match="its digest is"):
        in_pools().load_state_dict(other.state_dict())


def test_a_damaged_state_is_refused(made):
    state = made().state_dict()
    with pytest.raises(
        ValueError, match=r"not a state of a .*: it has digest, epoch, position"
    ):
        made().load_state_dict(
            {name: value for name, value in state.items() if name != "position"}
        )
    with pytest.raises(ValueError, match="at batch 999, but its epoch has"):
        made().load_state_dict({**state, "position": 999})


# With a plain DataLoader.


def loader_of(sampler, **options):
    return DataLoader(
        range(LENGTHS.size), batch_sampler=sampler, collate_fn=list, **options
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"num_workers": 2}, marks=pytest.mark.process),
        pytest.param(
            {"num_workers": 2, "persistent_workers": True}, marks=pytest.mark.slow
        ),
        pytest.param({"num_workers": 1, "prefetch_factor": 20}, marks=pytest.mark.slow),
    ],
)
def test_a_plain_loader_resumes_behind_what_it_delivered(options):
    """While it runs, and after a break."""
    loader = loader_of(in_buckets(), **options)
    epochs = [list(in_buckets(epoch=epoch)) for epoch in range(3)]
    count = len(epochs[0])
    assert len(loader) == count
    assert [list(loader) for _ in range(3)] == epochs
    for taken, leave in itertools.product((1, count - 1, count), (False, True)):
        sampler = in_buckets()
        running = iter(loader_of(sampler, **options))
        before = [next(running) for _ in range(taken)]
        if leave:
            del running
        resumed = in_buckets()
        resumed.load_state_dict(sampler.state_dict())
        loader = loader_of(resumed, **options)
        after = [*loader, *loader]  # a pass that has nothing left of its epoch is empty
        assert (before + after)[: 2 * count] == epochs[0] + epochs[1]


def test_a_reader_ahead_may_say_how_many_batches_were_trained_on(made):
    sampler, resumed = made(), made()
    running = iter(sampler)
    for _ in range(6):
        next(running)
    resumed.load_state_dict(sampler.state_dict(batches=4))
    assert list(resumed) == list(made())[4:]
    with pytest.raises(
        ValueError, match="batches is 7, but the sampler has handed out 6"
    ):
        sampler.state_dict(batches=7)


# From sampler.yaml.


def config_of(lengths):
    made = made_config([5.0, 12.0, 30.0], [9, 4, 2], unit="s", seed=11)
    evidence = replace(made.evidence, fingerprint=lengths.fingerprint)
    return replace(made, evidence=evidence)


@pytest.fixture
def config(made, tmp_path):
    """The `sampler.yaml` of what `made` makes, with another seed."""
    config = config_of(Lengths.of(LENGTHS))
    if made is in_pools:
        config = replace(config, sampler="pooled", pool_size=30)
    path = tmp_path / "sampler.yaml"
    path.write_text(render_sampler_yaml(config), encoding="utf-8")
    return path


def manifest(path, scale=1):
    rows = "".join(
        f"{number},{int(length) * scale},{number + 1}\n"
        for number, length in enumerate(LENGTHS)
    )
    path.write_text("id,duration,words\n" + rows, encoding="utf-8")
    return path


def test_arguments_go_before_the_config(made, config):
    sampler = sampler_from_config(
        str(config), LENGTHS, seed=2, batch_ordering="descending", epoch=3
    )
    assert list(sampler) == list(made(seed=2, batch_ordering="descending", epoch=3))


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("array", {}),
        ("manifest in s", {}),
        ("manifest in ms", {"length_key": "duration", "length_scale": "1/1000"}),
        ("data set", {"length_of": lambda example: len(example["text"])}),
    ],
)
def test_a_config_makes_the_sampler_that_it_describes(
    made, config, tmp_path, source, options
):
    sources = {
        "array": LENGTHS,
        "manifest in s": manifest(tmp_path / "s.csv"),
        "manifest in ms": manifest(tmp_path / "ms.csv", scale=1000),
        "data set": [{"text": "x" * int(length)} for length in LENGTHS],
    }
    sampler = sampler_from_config(config, sources[source], **options)
    assert list(sampler) == list(made(seed=11))


@pytest.mark.parametrize("length", [None, "abc"])
def test_a_length_of_that_returns_no_number_is_an_error(config, length):
    lengths = [3, 4, length]
    with pytest.raises(
        ValueError,
        match="length_of must return a number, but for example 2 it returned",
    ):
        sampler_from_config(config, range(3), length_of=lambda index: lengths[index])


def test_a_config_is_run_by_its_own_class(made, config):
    both = [BucketBatchSampler, PooledBatchSampler]
    ours, other = both[::-1] if made is in_pools else both
    assert type(sampler_from_config(config, LENGTHS)) is ours
    assert list(ours.from_config(config, LENGTHS)) == list(made(seed=11))
    with pytest.raises(
        ValueError,
        match=f"but {other.__name__} is of the kind .*use batchtune.sampler_from_config",
    ):
        other.from_config(config, LENGTHS)


def test_other_lengths_than_those_tuned_on_are_a_warning(config):
    own = type(sampler_from_config(config, LENGTHS))
    for make in (sampler_from_config, own.from_config):
        with pytest.warns(
            UserWarning, match=r"sampler\.yaml was tuned on other lengths"
        ) as told:
            make(config, LENGTHS[:-1])
        assert told[0].filename == __file__


def cuda_runs(patch, *segments):
    """This process uses CUDA, and torch's allocator holds such segments there."""
    patch.setattr(torch.cuda, "is_initialized", lambda: True)
    patch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    held = [{"is_expandable": grows} for grows in segments]
    patch.setattr(torch.cuda, "memory_snapshot", lambda: held)
    for name in VARIABLES:
        patch.delenv(name, raising=False)


def measured_with(config, allocator):
    """The sampler of a config whose batches were measured with an allocator."""
    read = read_any_sampler_yaml(config)
    evidence = replace(read.evidence, allocator=allocator)
    config.write_text(render_sampler_yaml(replace(read, evidence=evidence)))
    return sampler_from_config(config, LENGTHS)


@pytest.mark.parametrize("grows", [False, True])
def test_another_allocator_than_was_measured_is_a_warning_once(
    config, monkeypatch, grows
):
    both = ["expandable", "native"]
    measured, now = both[::-1] if grows else both
    sampler = measured_with(config, measured)
    cuda_runs(monkeypatch, grows, grows)
    with pytest.warns(UserWarning) as told:
        list(sampler)
    list(sampler)
    (warning,) = told
    assert str(warning.message).startswith(
        f"measured {in_words(measured)}, but this process runs {in_words(now)}: batches that fit there may not fit "
        f"here. Set PYTORCH_ALLOC_CONF=expandable_segments:{not grows} before Python starts"
    )


def test_the_measured_allocator_is_no_warning(config, monkeypatch):
    sampler = measured_with(config, "expandable")
    list(sampler)  # before this process uses CUDA
    cuda_runs(monkeypatch)
    list(sampler)  # before it has allocated anything
    cuda_runs(monkeypatch, True)
    list(sampler)
    cuda_runs(monkeypatch, False)
    list(measured_with(config, None))


def test_target_lengths_belong_to_what_was_tuned_on(tmp_path):
    targets = np.arange(1.0, LENGTHS.size + 1)
    path = tmp_path / "sampler.yaml"
    path.write_text(
        render_sampler_yaml(config_of(Lengths.of(LENGTHS, targets))), encoding="utf-8"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sampler_from_config(path, LENGTHS, targets=targets)
        sampler_from_config(
            path, manifest(tmp_path / "lengths.csv"), target_key="words"
        )
    with pytest.warns(UserWarning, match="or with target lengths"):
        sampler_from_config(path, LENGTHS)


LEFT_OUT = "entry i of the lengths would no longer be that of example i"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"unit": "ms"}, ValueError, "has lengths in ms, .* in s: give the length_s"),
        ({"min_length": 2}, UsageError, LEFT_OUT),
        ({"max_length": 2}, UsageError, LEFT_OUT),
        ({"skip_invalid": True}, UsageError, LEFT_OUT),
    ],
)
def test_options_under_which_a_manifest_can_not_be_used(
    config, tmp_path, options, error, message
):
    with pytest.raises(error, match=message):
        sampler_from_config(config, manifest(tmp_path / "lengths.csv"), **options)


def test_options_of_a_manifest_need_one(config):
    message = "length_key: these are for the path of a manifest"
    with pytest.raises(TypeError, match=message):
        sampler_from_config(config, LENGTHS, length_key="duration")
