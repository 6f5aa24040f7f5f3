"""BucketedStream in a plain loop: batches, epochs, resuming, bad input."""

from __future__ import annotations

import json
import math
import random
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
from exports.stream_runs import made_stream
from made_samplers import TABLE, ids, length_of, made_stream_of
from msgspec.structs import replace
from test_sampler import cuda_runs

from batchtune import BucketedStream
from batchtune.errors import ResultError
from batchtune.exports.run_configs import render_stream_yaml, stream_config

RANDOM = random.Random(0)
EXAMPLES = [{"id": number, "length": RANDOM.randint(1, 30)} for number in range(500)]
ALGORITHMS = ("bucket", "pivot")


def stream(source=EXAMPLES, **options):
    return made_stream_of(source, **options)


def of_lengths(*lengths):
    return [{"id": number, "length": length} for number, length in enumerate(lengths)]


def test_no_more_than_the_buffer_is_read_ahead():
    read = 0

    def counting():
        nonlocal read
        for read, example in enumerate(EXAMPLES, 1):  # noqa: B007  # counts what was read
            yield example

    out = 0
    for batch in stream(counting()):
        assert read - out <= 40
        out += len(batch)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_batch_leaves_when_the_bytes_are_exceeded(algorithm, shuffle):
    held = most = 0

    def bytes_of(example):
        nonlocal held, most
        held += 10 * example["length"]
        most = max(most, held)
        return 10 * example["length"]

    made = stream(
        buffer_bytes=2000,
        bytes_of=bytes_of,
        buffer_size=1000,
        algorithm=algorithm,
        shuffle=shuffle,
    )
    seen = []
    for batch in made:
        held -= sum(10 * EXAMPLES[number]["length"] for number in batch)
        seen += batch
    assert sorted(seen) == list(range(500))
    assert 2000 < most <= 2000 + 300


def test_each_pass_is_the_next_epoch_unless_it_is_set():
    one = stream()
    first, second = list(one), list(one)
    assert first != second and one.epoch == 2
    one.set_epoch(1)
    assert list(one) == second == list(stream(epoch=1))


def test_a_source_gets_the_epoch():
    asked = []

    class Source(list[Any]):
        def set_epoch(self, epoch):
            asked.append(epoch)

    for source in (Source(EXAMPLES), lambda epoch: asked.append(epoch) or EXAMPLES):
        one = stream(source)
        list(one)
        one.set_epoch(7)
        list(one)
    assert asked == [0, 7, 0, 7]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("nominal", [None, 300])
def test_a_plain_loop_resumes_in_mid_epoch(algorithm, nominal):
    made = partial(stream, algorithm=algorithm, batches_per_epoch=nominal)
    one = made()
    one.set_epoch(3)
    batches = iter(one)
    before = list(islice(batches, 17))
    state = json.loads(json.dumps(one.state_dict()))
    after = list(batches)
    assert before + after == list(made(epoch=3))
    other = made()
    other.load_state_dict(state)
    assert other.epoch == 3
    assert other.state_dict() == state
    assert list(other) == after
    assert list(other) == list(one)
    # As a loop over epochs says it.
    for epoch, expected in ((3, after), (4, list(made(epoch=4)))):
        other.load_state_dict(state)
        other.set_epoch(epoch)
        assert list(other) == expected


@pytest.mark.parametrize("nominal", [None, 20])
def test_a_state_after_the_epoch_begins_the_next(nominal):
    """A loop over a nominal epoch may stop at its last batch."""
    one, other = (stream(batches_per_epoch=nominal) for _ in range(2))
    list(islice(one, nominal))
    other.load_state_dict(one.state_dict())
    assert list(other) == list(one)


@pytest.mark.parametrize("source", [EXAMPLES[::-1], EXAMPLES[:80]])
def test_resuming_on_other_examples_is_an_error(source):
    one = stream()
    list(islice(iter(one), 40))
    other = stream(source)
    other.load_state_dict(one.state_dict())
    with pytest.raises(
        ValueError, match=r"does not give the examples again.*up to batch 40 of epoch 0"
    ):
        list(other)


def test_a_state_of_another_stream_is_refused():
    state = stream().state_dict()
    for other, said in [
        (stream(buffer_size=41), "its options is"),
        (stream(seed=1), "its options is"),
        (stream(rank=1, world_size=2), "its rank is 0, not 1"),
    ]:
        with pytest.raises(ValueError, match=said):
            other.load_state_dict(state)
    for damaged in ({"epoch": 1}, {"x" * 100_000: 1}, None):
        with pytest.raises(
            ValueError, match=r"^.{0,500}not a state of a stream.{0,500}$"
        ):
            stream().load_state_dict(damaged)


@pytest.mark.parametrize("source", [EXAMPLES, lambda epoch: iter(EXAMPLES)])
def test_a_nominal_epoch_reads_the_source_again(source):
    one = stream(source, batches_per_epoch=400)
    batches = list(one)
    assert len(batches) == len(one) == 400
    counts = np.bincount(list(chain(*batches)))
    assert counts.min() >= 1 and counts.max() == 3  # the source has some 190 batches
    with pytest.raises(TypeError, match="batches_per_epoch"):
        len(stream())


def test_ranks_have_equally_many_batches_of_their_own_examples():
    for rank in range(3):
        of_rank = {"rank": rank, "world_size": 3, "batches_per_epoch": 50}
        batches = list(stream(split=True, **of_rank))
        assert len(batches) == 50
        assert {number % 3 for number in chain(*batches)} == {rank}
        with pytest.warns(UserWarning, match="split=True"):
            list(stream(**of_rank))


def test_a_stage_makes_batches_of_what_it_is_called_with():
    stage = stream(None)
    assert list(stage(iter(EXAMPLES))) == list(stream())
    assert list(stage(iter(EXAMPLES))) == list(stream(epoch=1))
    with pytest.raises(TypeError, match="no source"):
        iter(stage)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_overlong_examples(algorithm):
    examples = of_lengths(3, 31, 4, 99, 5, 30)
    with pytest.raises(
        ValueError,
        match=r"example 1 of the stream has the length 31\.0, beyond .*boundaries, 30",
    ):
        list(stream(examples, algorithm=algorithm))
    batches = list(stream(examples, algorithm=algorithm, overlong="single"))
    assert [1] in batches and [3] in batches
    assert sorted(chain(*batches)) == [0, 1, 2, 3, 4, 5]
    dropping = stream(examples, algorithm=algorithm, overlong="drop", buffer_size=9)
    with pytest.warns(UserWarning, match="2 of 6 examples were dropped"):
        assert sorted(chain(*dropping)) == [0, 2, 4, 5]
    assert dropping.dropped_examples == 2


def test_shorter_examples_are_dropped_if_asked_to():
    examples = of_lengths(3, 0, 4, 2, 5, 30)
    dropping = stream(examples, min_length=3)
    with pytest.warns(
        UserWarning,
        match="2 of 6 examples were dropped, because they are .*shorter than min_length",
    ):
        assert sorted(chain(*dropping)) == [0, 2, 4, 5]
    for length in (-1, math.nan):
        with pytest.raises(ValueError, match="positive and finite"):
            list(stream(of_lengths(3, length, 4), min_length=3))
    for least in (0, 31, "3"):
        with pytest.raises(ValueError, match="min_length must be above 0 and at most"):
            stream(min_length=least)


def test_a_source_that_can_not_go_on_is_an_error():
    assert list(stream([])) == []
    for source in ([], of_lengths(*[31] * 100), iter(EXAMPLES)):
        with pytest.raises(
            ValueError, match=r"gives too few batches.*batches_per_epoch is 1000"
        ):
            list(stream(source, batches_per_epoch=1000, overlong="drop"))
    once = stream(iter(EXAMPLES))
    list(once)
    with pytest.raises(ValueError, match="has nothing left"):
        list(once)


def test_a_stream_yaml_makes_a_stream(tmp_path, monkeypatch):
    config = replace(
        stream_config(made_stream(recommended="pivot")),
        buffer_size=30,
        max_padding_ratio=0.25,
        batches_per_epoch=90,
        **TABLE,
    )
    config = replace(config, evidence=replace(config.evidence, allocator="expandable"))
    path = tmp_path / "stream.yaml"
    path.write_text(render_stream_yaml(config))
    make = partial(BucketedStream.from_config, length_of=length_of, collate_fn=ids)
    pivots = partial(
        stream, algorithm="pivot", max_padding_ratio=0.25, seed=config.seed
    )
    expected = pivots(buffer_size=30, batches_per_epoch=90)
    assert list(make(path, EXAMPLES)) == list(expected)
    # A stage can't read its examples again: there a nominal epoch is the pipeline's.
    stage = make(path, buffer_size=20)
    assert list(stage(EXAMPLES)) == list(pivots(buffer_size=20))
    with pytest.raises(ResultError, match=r"other\.yaml does not exist"):
        make(tmp_path / "other.yaml")
    cuda_runs(monkeypatch, False)
    with pytest.warns(UserWarning, match="measured with expandable segments, but"):
        list(stage(EXAMPLES))
