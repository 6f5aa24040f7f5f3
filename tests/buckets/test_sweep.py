import dataclasses
import itertools

import msgspec
import numpy as np
import pytest
from buckets import speech
from buckets.speech import NONE_KNOWN, PROBED, SPEECH, epochs_of, step_seconds
from epochs.test_frontier import point
from hypothesis import example, given
from hypothesis import strategies as st
from memory_laws import made_lengths
from msgspec.structs import replace
from report_records import SCRIPT, made_probe

from batchtune.buckets import STRATEGIES
from batchtune.buckets.current import read_current
from batchtune.buckets.sweep import run_sweep
from batchtune.epochs import RankSplit
from batchtune.epochs.measured_costs import Costs, Frontier
from batchtune.errors import UsageError
from batchtune.lengths import Lengths
from batchtune.results import (
    PROBE_FILE,
    Sweep,
    SweepSettings,
    encode,
    write_result,
)

TABLES = tuple(name for name, strategy in STRATEGIES.items() if not strategy.in_pools)


def swept(
    values,
    max_batch_length=300,
    costs=NONE_KNOWN,
    **chosen,
):
    usual = {"strategies": tuple(STRATEGIES), "num_buckets": (3, 8), "seed": 7}
    return speech.swept(values, max_batch_length, costs, **{**usual, **chosen})


def test_there_is_a_row_for_every_strategy_and_bucket_count():
    """With a frontier, optimal is swept both ways."""
    rows = [
        (row.strategy, row.num_buckets, row.sizing)
        for row in swept(SPEECH, costs=PROBED, strategies=TABLES).rows
    ]
    by_length = [(name, number, "length") for name in TABLES for number in (3, 8)]
    assert rows == [*by_length, *(("optimal", number, "frontier") for number in (3, 8))]


def test_a_sweep_stays_below_the_batch_size_that_was_probed():
    costs = dataclasses.replace(PROBED, max_batch_size=9)
    for asked, most in ((None, 9), (5, 5)):
        result = swept(SPEECH, costs=costs, max_batch_size=asked)
        assert result.settings.max_batch_size == most
        assert max(max(row.batch_sizes) for row in result.rows) == most
        assert max(baseline.batch_size for baseline in result.baselines) == most


OF_TWO = Costs(frontier=lambda lengths: np.full(lengths.shape, 2))


@pytest.mark.parametrize(("costs", "size"), [(NONE_KNOWN, 3), (OF_TWO, 2)])
def test_the_fixed_batch_size_is_the_largest_for_the_longest(costs, size):
    baselines = swept([1, 2, 30], 100, costs).baselines
    assert [baseline.batch_size for baseline in baselines] == [size] * 3


def test_the_baselines_are_sorted_and_the_mean_over_all_orders():
    values = [1, 2, 3, 4, 10]
    padded = [
        2 * max(order[:2]) + 2 * max(order[2:4]) + order[4]
        for order in itertools.permutations(values)
    ]
    random, in_order, _ = swept(values, 20).baselines
    assert random.padded_length == pytest.approx(np.mean(padded))
    assert (in_order.batches, in_order.padded_length) == (3, 20 + 6 + 1)


def test_the_bound_is_exact_if_the_total_fills_whole_batches():
    assert swept([0.1] * 30, 0.3).lower_bound.batches == 10


@given(
    values=st.lists(st.floats(0.1, 50), min_size=1, max_size=60),
    max_batch_length=st.floats(1e-3, 300) | st.just(1e6),
    fits=st.none() | st.lists(st.integers(1, 40), min_size=6, max_size=6),
    max_batch_size=st.none() | st.integers(1, 20),
    seconds=st.sampled_from([None, step_seconds]),
)
@example([5.0], 20, None, None, step_seconds)
@example([5.0] * 9, 20, None, None, step_seconds)
@example([5.0, 5.0, 8.0], 1e-3, None, None, None)
def test_no_row_and_no_baseline_beats_the_bound(
    values, max_batch_length, fits, max_batch_size, seconds
):
    def uneven(lengths):
        return np.array(fits)[np.minimum(5, lengths // 10).astype(int)]

    costs = Costs(frontier=None if fits is None else uneven, step_seconds=seconds)
    result = swept(
        values,
        max_batch_length,
        costs,
        num_buckets=(1, 4),
        max_batch_size=max_batch_size,
    )
    # NaN and infinity would be null there.
    assert msgspec.json.decode(encode(result), type=Sweep) == result
    bound = result.lower_bound
    for found in (*result.rows, *result.baselines):
        assert found.batches >= bound.batches
        assert found.padded_length >= bound.padded_length
        assert (found.estimated_epoch_seconds or 0) >= (
            bound.estimated_epoch_seconds or 0
        ) * (1 - 1e-9)


@pytest.mark.parametrize("wrong", [0, float("nan"), float("inf")])
def test_a_max_batch_length_that_is_no_length_is_refused(wrong):
    with pytest.raises(
        UsageError, match="max_batch_length must be positive and finite"
    ):
        swept([1], wrong)


def test_the_same_inputs_give_the_same_bytes():
    some = SPEECH[:500]
    assert encode(swept(some, costs=PROBED)) == encode(swept(some[::-1], costs=PROBED))


def test_a_cap_by_speechbrains_bucket_count_is_reported_once():
    result = swept(
        [10.0] * 50 + [20.0],
        600,
        strategies=("speechbrain",),
        num_buckets=(10, 11, 12, 20),
    )
    assert result.warnings == [
        "speechbrain with num_buckets=10 can't make a batch of more than 14 examples whatever "
        "max_batch_length is: its fullest batch here is 280 of 600 s; "
        "raising max_batch_length changes nothing; the same holds up to num_buckets=20",
    ]


def test_every_strategy_rounds_boundaries_up_to_multiples():
    for row in swept(SPEECH, costs=PROBED, strategies=TABLES, multiple_of=0.5).rows:
        assert all(boundary % 0.5 == 0 for boundary in row.boundaries)
        assert row.boundaries[-1] >= SPEECH.max()
        assert row.padded_length >= SPEECH.sum()
        if row.sizing == "length":
            assert row.batch_sizes == [
                max(1, int(300 / boundary)) for boundary in row.boundaries
            ]


def test_sizes_beyond_the_longest_shrink_and_are_unproven():
    frontier = Frontier.of([point(1.0, 2700), point(30.0, 90)])
    costs = Costs(
        frontier=frontier, continued_frontier=frontier.continued, proven=frontier.proven
    )
    result = swept([1, 2, 30], 3000, costs, num_buckets=(1,), multiple_of=40)
    shrunk = int(90 * (30 / 40) ** 2)
    sizes = [row.batch_sizes for row in result.rows if row.boundaries == [40.0]]
    assert sizes and all(size == [shrunk] for size in sizes)
    assert result.baselines[0].batch_size == shrunk
    assert all(row.unproven for row in result.rows)


@pytest.mark.parametrize(
    ("world_size", "same_bucket"),
    [(1, False), (2, False), (2, True), (8, False), (64, True)],
)
def test_a_row_says_what_the_samplers_of_all_ranks_run(world_size, same_bucket):
    dealing = {"world_size": world_size, "same_bucket": same_bucket}
    values = SPEECH
    chosen = {"strategies": ("optimal", "linear"), "num_buckets": (7,)}
    for row in swept(values, 150, **chosen, **dealing).rows:
        cells = []
        steps = []
        for ranks in epochs_of(row, values, RankSplit(**dealing), 20):
            batches = list(itertools.chain(*ranks))
            together = zip(*ranks, strict=True)
            steps += [values[np.concatenate(step)].sum() for step in together]
            sizes = [len(batch) for batch in batches]
            assert row.batches == len(batches)
            examples = {*itertools.chain(*batches)}
            assert row.repeated_examples == sum(sizes) - len(examples)
            assert row.smallest_batch_size == min(sizes)
            assert row.largest_batch_size == max(sizes)
            mean = np.mean(sizes)
            assert row.mean_batch_size == pytest.approx(mean)
            assert row.batch_size_variation == pytest.approx(np.std(sizes) / mean)
            padded = [len(batch) * values[batch].max() for batch in batches]
            assert max(padded) <= row.largest_padded_length * (1 + 1e-9)
            cells.append(sum(padded))
        error = np.std(cells) / np.sqrt(len(cells))
        assert abs(np.mean(cells) - row.padded_length) < 4 * error
        deviation = np.std(steps) / np.mean(steps)
        assert row.step_tokens_deviation == pytest.approx(deviation, rel=0.25)
        assert row.padding_ratio == pytest.approx(1 - values.sum() / row.padded_length)
        assert row.fill == pytest.approx(values.sum() / (row.batches * 150))


@pytest.mark.parametrize(
    "chosen", [{}, {"world_size": 16}, {"world_size": 16, "same_bucket": True}]
)
def test_the_buckets_and_the_histogram_hold_the_whole_epoch(chosen):
    only = {"strategies": ("quantile",), "num_buckets": (7,)}
    found = swept(SPEECH, 150, **only, **chosen)
    row = found.rows[0]
    assert found.recommended == 0
    uses = [
        (use.examples, use.length, use.batches, use.padded_length)
        for use in found.buckets
    ]
    whole = [SPEECH.size, SPEECH.sum(), row.batches, row.padded_length]
    assert np.sum(uses, axis=0) == pytest.approx(whole)
    bins = found.histogram
    assert sum(one.count for one in bins) == SPEECH.size
    assert all(before.to == after.from_ for before, after in itertools.pairwise(bins))
    assert len(found.quantiles) == 1001 and found.quantiles == sorted(found.quantiles)
    assert set(found.quantiles) <= set(SPEECH.tolist())
    assert (found.quantiles[0], found.quantiles[-1]) == (SPEECH.min(), SPEECH.max())


def test_the_current_config_is_a_row_beside_the_others():
    given = {"current": "max_batch_length=300,num_buckets=8", "keep": "nothing"}
    result = swept(SPEECH, costs=PROBED, num_buckets=(8,), **given)
    same = next(row for row in result.rows if row.strategy == "speechbrain")
    assert replace(result.current, strategy="speechbrain", equal_to_best=None) == same
    assert result.current_settings == {
        "kind": "speechbrain",
        "source": "--current",
        "describe": "SpeechBrain, max_batch_length=300 s, num_buckets=8",
        "max_batch_length": 300.0,
        "num_buckets": 8,
    }
    assert result.learning_rate.relative_to == "current"
    assert result.learning_rate.from_batch_size == result.current.mean_batch_size


def test_the_learning_rate_starts_from_the_fixed_batch_size():
    found = swept(SPEECH)
    hint = found.learning_rate
    ratio = found.recommended_row.mean_batch_size / found.baselines[0].batch_size
    assert (hint.relative_to, hint.linear) == ("fixed-random", ratio)
    assert hint.square_root**2 == pytest.approx(ratio)


def test_joint_tables_are_compared_if_memory_depends_on_targets():
    random = np.random.default_rng(8)
    lengths = Lengths.of(SPEECH, random.exponential(20, SPEECH.size).round())
    costs = Costs(
        frontier=lambda long: np.maximum(
            1, 3000 / (long + lengths.targets.max())
        ).astype(np.int64),
        joint_frontier=lambda long, target: np.maximum(
            1, 3000 / (long + target)
        ).astype(np.int64),
    )
    result = swept(lengths, costs=costs, strategies=TABLES, num_buckets=(4, 12))
    assert [row.num_buckets for row in result.two_dimensional] == [4, 12]
    for row in result.two_dimensional:
        assert row.batches < row.one_dimensional_batches
        assert len(row.buckets) == len(row.batch_sizes) <= row.num_buckets


def test_a_script_is_compared_with_its_own_batch_size(tmp_path):
    """Unless the user gives other settings."""
    lengths = made_lengths("speech", count=2000)
    probe = replace(made_probe(), lengths=lengths.summary())
    chosen = SweepSettings(strategies=("linear",), num_buckets=(10,), min_steps=75)

    def with_accumulation(accumulation):
        script = replace(SCRIPT, accumulation=accumulation, batch_size=8)
        of_script = replace(probe.device, script=script)
        write_result(tmp_path / PROBE_FILE, replace(probe, device=of_script))
        found = run_sweep(lengths, chosen, tmp_path)
        assert found.current.batches == 250
        assert found.current.steps == 250 / accumulation
        assert found.rows[0].steps >= 75
        return found.current.estimated_epoch_seconds

    # A step of a trial trains on all batches of an optimizer step.
    assert with_accumulation(2) == pytest.approx(with_accumulation(1) / 2)
    current = read_current("batch_size=4")
    found = run_sweep(lengths, chosen, tmp_path, current=current)
    assert found.current.batches == 500
