"""The cost model's fit: what it finds, what it does not believe, and how well it meets real measurements."""

import json
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict

from batchtune.epochs.cost_model import fit_cost, needs_targets, predict
from batchtune.results import CostModel

MEASURED = json.loads((Path(__file__).parent / "measured_shapes.json").read_text())
LIMIT = 8e9
BASE = 1e9
OF_LENGTHS = {
    "linear": {"linear": 2e6},
    "quadratic": {"quadratic": 1e3},
    "affine": {"example": 3e7, "linear": 1e6},
    "hardly affine": {"example": 3e6, "linear": 1e6},
    "affine and quadratic": {"example": 3e7, "linear": 1e6, "quadratic": 500},
    "of the batch size and quadratic": {"example": 3e7, "quadratic": 1e3},
}
FLOORED = {
    "a floor": {"floor": 2.5e9, "linear": 1e6},
    "a floor below an affine law": {"floor": 2.5e9, "example": 3e7, "linear": 1e6},
}
OF_TARGETS = {
    "transducer": {"cross": 4e3},
    "affine transducer": {"example": 3e7, "linear": 1e6, "cross": 2e3},
    "transducer of nothing but its joint": {"example": 3e7, "cross": 4e3},
    "two inputs": {"linear": 1e6, "target_linear": 3e6},
    "two inputs, affine": {"example": 3e7, "linear": 1e6, "target_linear": 2e6},
    "pairs of all positions": {"quadratic": 1e3, "target_quadratic": 1e3, "cross": 2e3},
    "decoder-only, affine": {"example": 3e7, "linear": 1e6, "target_linear": 1e6},
    "affine, targets that cost nothing": {"example": 3e7, "linear": 1e6},
    "encoder-decoder": {
        "linear": 1e6,
        "quadratic": 500,
        "target_linear": 3e6,
        "target_quadratic": 2e3,
        "cross": 1e3,
    },
}
LAWS = OF_LENGTHS | OF_TARGETS | FLOORED


def fitted(name, shapes, costs):
    """The model of a law's measurements, which count targets only if the law does."""
    sizes, lengths, targets = shapes
    return fit_cost(sizes, lengths, costs, targets if name in OF_TARGETS else None)


def law_of(name):
    needed = ("floor", "linear", "quadratic", "relative_error", "largest_error")
    return CostModel(constant=BASE, **{**dict.fromkeys(needed, 0.0), **LAWS[name]})


def probed(cost, count, seed=0):
    """Shapes as a probe measures them: two thirds near the limit, at lengths from 20 to 1500; the others smaller."""
    random = np.random.default_rng(seed)
    near = 2 * count // 3
    lengths = np.geomspace(20, 1500, near).round()
    targets = random.integers(1, 400, near).astype(float)
    many = 1e6
    slope = (cost(2 * many, lengths, targets) - cost(many, lengths, targets)) / many
    sizes = np.maximum(1, (LIMIT - BASE) // slope)
    others = np.append([0, near - 1], random.integers(0, near, count - near - 2))
    share = np.append([0, 0], random.choice([0.02, 0.1, 0.25, 0.5], others.size - 2))
    smaller = np.maximum(1, np.floor(sizes[others] * share))
    return (
        np.append(sizes, smaller),
        np.append(lengths, lengths[others]),
        np.append(targets, targets[others]),
    )


def errors(model, shapes, cost):
    return predict(model, *shapes) / cost(*shapes) - 1


@pytest.mark.parametrize(
    ("name", "count"),
    [*product(OF_LENGTHS | OF_TARGETS, [15, 30]), *product(FLOORED, [24, 30])],
)
def test_a_law_is_found_from_the_shapes_of_a_probe(name, count):
    law = law_of(name)
    shapes = probed(partial(predict, law), count)
    model = fitted(name, shapes, predict(law, *shapes))
    assert model.largest_error < 1e-9
    assert asdict(model) == pytest.approx(asdict(law), rel=1e-6, abs=1e-3)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    "name", [name for name in LAWS if name not in FLOORED and name != "encoder-decoder"]
)
def test_noise_moves_a_law_by_about_as_much(name, seed):
    cost = partial(predict, law_of(name))
    shapes = probed(cost, 30, seed)
    noise = np.random.default_rng(seed).normal(1, 0.002, 30)
    model = fitted(name, shapes, cost(*shapes) * noise)
    assert 0.001 < model.relative_error < 0.003
    error = errors(model, probed(cost, 100, seed + 100), cost)
    assert np.sqrt(np.mean(error**2)) < 0.004


def the_longer_of_both(sizes, lengths, targets):
    return BASE + sizes * 2e6 * np.maximum(lengths, 3 * targets)


def test_a_law_the_form_cannot_express_shows_in_the_errors():
    shapes = probed(the_longer_of_both, 30)
    sizes, lengths, targets = shapes
    model = fit_cost(sizes, lengths, the_longer_of_both(*shapes), targets)
    error = np.abs(errors(model, shapes, the_longer_of_both))
    assert (model.relative_error, model.largest_error) == pytest.approx(
        (np.sqrt(np.mean(error**2)), error.max())
    )
    assert model.relative_error > 0.01


def test_targets_proportional_to_the_length_add_nothing():
    sizes = np.arange(1, 13)
    lengths = np.linspace(5000, 100, 12)
    targets = np.round(lengths * 0.2)
    costs = 1e8 + sizes * (1e4 * lengths + 500 * targets)
    model = fit_cost(sizes, lengths, costs, targets)
    assert not needs_targets(model)
    assert model.linear == pytest.approx(1e4 + 500 * 0.2, rel=0.01)


def test_of_a_single_length_its_targets_count_as_much_as_lengths():
    model = fit_cost([1, 2, 5], [8000] * 3, [3e8, 4e8, 7e8], [2000] * 3)
    # A short prompt with the longest answer is then no tiny batch.
    expected = pytest.approx(1e8 * 2010 / 10_000, rel=1e-6)
    assert model.per_example(10, 2000) == expected


@pytest.mark.parametrize(
    ("sizes", "lengths", "costs", "constant", "linear"),
    [
        ([1, 4], [10, 10], [200, 500], 100, 10),
        ([4, 4, 4, 4], [10, 20, 50, 200], [1.4e6, 1.8e6, 3e6, 9e6], 1e6, 1e4),
        ([1, 2, 4], [10, 10, 10], [100, 99, 98], 99, 0),
    ],
)
def test_few_measurements_give_a_line(sizes, lengths, costs, constant, linear):
    model = fit_cost(sizes, lengths, costs)
    assert (model.constant, model.linear) == pytest.approx((constant, linear), rel=0.01)
    assert (model.example, model.quadratic, model.floor) == (0, 0, 0)


@pytest.mark.parametrize(
    ("sizes", "lengths", "costs"),
    [
        ([1], [10], [5]),
        ([1, 1], [10, 10], [5, 6]),
        ([2, 1], [10, 20], [5, 6]),
        ([1, 2], [10, 10], [0, 6]),
        ([], [], []),
    ],
)
def test_measurements_that_tell_nothing_give_no_model(sizes, lengths, costs):
    assert fit_cost(sizes, lengths, costs) is None


@given(
    st.lists(
        st.tuples(
            st.integers(1, 500),
            st.floats(0.1, 1e5),
            st.floats(0, 1e4),
            st.floats(1e-3, 1e11),
        ),
        min_size=2,
        max_size=14,
    ),
    st.booleans(),
)
def test_whatever_was_measured_no_coefficient_is_negative(rows, with_targets):
    sizes, lengths, targets, costs = zip(*rows, strict=True)
    model = fit_cost(sizes, lengths, costs, targets if with_targets else None)
    if model is None:
        return
    values = np.array([*asdict(model).values()])
    assert np.isfinite(values).all()
    assert (values >= 0).all()


@given(
    st.permutations(range(15)),
    st.sampled_from(sorted(OF_TARGETS)),
    st.sampled_from([1 / 16000, 1000.0]),
)
def test_neither_the_order_nor_the_unit_matters(order, name, unit):
    cost = partial(predict, law_of(name))
    sizes, lengths, targets = (values[order] for values in probed(cost, 15))
    costs = cost(sizes, lengths, targets)
    model = fit_cost(sizes, lengths * unit, costs, targets * unit)
    again = predict(model, sizes, lengths * unit, targets * unit)
    assert again == pytest.approx(costs, rel=1e-5)


@pytest.mark.parametrize("name", ["conformer-ctc", "transformer-lm"])
def test_real_peaks_and_times_are_met(name):
    columns = np.array(MEASURED[name], dtype=float).T
    sizes, lengths, targets, peaks, seconds = columns
    targets = np.nan_to_num(targets)  # a model without targets has none in its file
    model = fit_cost(sizes, lengths, peaks, targets)
    error = np.abs(predict(model, sizes, lengths, targets) / peaks - 1)
    assert model.relative_error < 0.01
    assert error[peaks > 0.7 * peaks.max()].max() < 0.005
    assert fit_cost(sizes, lengths, seconds, targets).relative_error < 0.15
    # After four peaks, each next one is known to 1%.
    for known in range(4, peaks.size):
        model = fit_cost(sizes[:known], lengths[:known], peaks[:known], targets[:known])
        predicted = predict(model, sizes[known], lengths[known], targets[known])
        assert predicted == pytest.approx(peaks[known], rel=0.01)
