"""The cost model's fit: what it finds, what it does not believe, and how well it meets real measurements."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.cost import fit_cost, needs_targets, per_example, predict
from batchtune.cost.models import FloatArray
from batchtune.results import CostModel

MEASURED = json.loads((Path(__file__).parent / "measured_shapes.json").read_text())

Cost = Callable[[FloatArray, FloatArray, FloatArray], FloatArray]
LAYERS: dict[str, tuple[Cost, bool]] = {
    "positions": (lambda b, x, t: 1e8 + b * 1e4 * x, False),
    "attention": (lambda b, x, t: 1e8 + b * (1e4 * x + 5 * x**2), False),
    "decoder-only": (lambda b, x, t: 1e8 + b * (1e4 * (x + t) + (x + t) ** 2), True),
    "encoder-decoder": (lambda b, x, t: 1e8 + b * (1e4 * x + x**2 + 2e4 * t + 2 * t**2 + 2 * x * t), True),
    "transducer": (lambda b, x, t: 1e8 + b * (1e4 * x + 20 * x * t), True),
    "targets that cost nothing": (lambda b, x, t: 1e8 + b * 1e4 * x, True),
}


def drawn(count: int, seed: int = 1) -> tuple[FloatArray, FloatArray, FloatArray]:
    random = np.random.default_rng(seed)
    return (
        random.integers(1, 40, count).astype(float),
        random.integers(10, 5000, count).astype(float),
        random.integers(1, 2000, count).astype(float),
    )


def fitted(
    sizes: FloatArray, lengths: FloatArray, costs: FloatArray, targets: FloatArray | None = None, **more: FloatArray
) -> CostModel:
    model = fit_cost(sizes, lengths, costs, targets, **more)
    assert model is not None
    return model


def errors(model: CostModel, shapes: tuple[FloatArray, FloatArray, FloatArray], cost: Cost) -> FloatArray:
    sizes, lengths, targets = shapes
    return predict(model, sizes, lengths, targets) / cost(sizes, lengths, targets) - 1


@pytest.mark.parametrize("count", [12, 40])
@pytest.mark.parametrize(("cost", "with_targets"), LAYERS.values(), ids=LAYERS)
def test_what_layers_cost_is_found_and_holds_for_other_shapes(cost: Cost, with_targets: bool, count: int) -> None:
    sizes, lengths, targets = drawn(count)
    model = fitted(sizes, lengths, cost(sizes, lengths, targets), targets if with_targets else None)
    assert model.relative_error < 1e-6
    assert np.abs(errors(model, drawn(200, seed=2), cost)).max() < 1e-5


def test_a_quadratic_is_found_from_four_lengths() -> None:
    sizes, lengths = np.array([1.0, 5, 20, 3]), np.array([4000.0, 1500, 500, 2500])
    model = fitted(sizes, lengths, 1e8 + sizes * (1e4 * lengths + 5 * lengths**2))
    assert (model.constant, model.linear, model.quadratic) == pytest.approx((1e8, 1e4, 5), rel=1e-5)


def test_a_floor_is_found() -> None:
    sizes, lengths, _ = drawn(30)
    model = fitted(sizes, lengths, np.maximum(3e8, 1e8 + 4e3 * sizes * lengths))
    assert (model.floor, model.constant, model.linear) == pytest.approx((3e8, 1e8, 4e3), rel=1e-5)


@pytest.mark.parametrize("seed", range(8))
def test_noise_is_not_taken_for_attention(seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes, lengths, _ = drawn(10, seed)
    model = fitted(sizes, lengths, (1e8 + 1e4 * sizes * lengths) * random.normal(1, 0.01, 10))
    # Four times as long as anything measured.
    assert float(predict(model, 10, 20_000)) == pytest.approx(1e8 + 1e4 * 2e5, rel=0.1)


@pytest.mark.parametrize("seed", range(8))
def test_noise_is_not_taken_for_a_cost_of_targets(seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes, lengths, targets = drawn(12, seed)
    model = fitted(sizes, lengths, (1e8 + 1e4 * sizes * lengths) * random.normal(1, 0.01, 12), targets)
    true = 1e8 + 1e4 * 40_000
    assert np.abs(predict(model, 10, 4000, np.array([1, 1000, 2000])) / true - 1).max() < 0.1


def test_targets_proportional_to_the_length_add_nothing() -> None:
    sizes, lengths, _ = drawn(12)
    targets = np.round(lengths * 0.2)
    model = fitted(sizes, lengths, 1e8 + sizes * (1e4 * lengths + 500 * targets), targets)
    assert not needs_targets(model)
    assert model.linear == pytest.approx(1e4 + 500 * 0.2, rel=0.01)


def test_of_a_single_length_its_targets_count_as_much_as_lengths() -> None:
    model = fitted(np.array([1.0, 2, 5]), np.full(3, 8000.0), np.array([3e8, 4e8, 7e8]), np.full(3, 2000.0))
    # A short prompt with the longest answer is then no tiny batch.
    assert float(per_example(model, 10, 2000)) == pytest.approx(1e8 * 2010 / 10_000, rel=1e-6)


def test_two_shapes_give_a_line_through_both() -> None:
    model = fitted(np.array([1.0, 4]), np.array([10.0, 10]), np.array([200.0, 500]))
    assert (model.constant, model.linear, model.quadratic, model.floor) == pytest.approx((100, 10, 0, 0))


@pytest.mark.parametrize(
    ("sizes", "lengths", "costs"),
    [
        ([1], [10], [5]),
        ([1, 1], [10, 10], [5, 6]),
        ([2, 1], [10, 20], [5, 6]),
        ([1, 2], [10, 10], [0, 6]),
        ([], [], []),
    ],
    ids=["one shape", "twice the same", "the same padded length", "a cost of 0", "none"],
)
def test_too_little_to_fit_is_no_model(sizes: list[float], lengths: list[float], costs: list[float]) -> None:
    assert fit_cost(sizes, lengths, costs) is None


def test_costs_that_fall_with_the_size_are_taken_for_constant() -> None:
    model = fitted(np.array([1.0, 2, 4]), np.full(3, 10.0), np.array([100.0, 99, 98]))
    assert float(per_example(model, 10)) == 0
    assert model.constant == pytest.approx(99, rel=0.01)


MEASUREMENTS = st.lists(
    st.tuples(st.integers(1, 500), st.floats(0.1, 1e5), st.floats(0, 1e4), st.floats(1e-3, 1e11)),
    min_size=2,
    max_size=14,
)


@given(MEASUREMENTS, st.booleans())
@settings(deadline=None, max_examples=150)
def test_whatever_was_measured_no_coefficient_is_negative(
    rows: list[tuple[int, float, float, float]], with_targets: bool
) -> None:
    sizes, lengths, targets, costs = zip(*rows, strict=True)
    model = fit_cost(sizes, lengths, costs, targets if with_targets else None)
    if model is None:
        return
    values = [getattr(model, name) for name in model.__struct_fields__]
    assert np.isfinite(values).all()
    assert min(values) >= 0


@given(st.permutations(range(12)), st.sampled_from(sorted(LAYERS)))
@settings(deadline=None, max_examples=30)
def test_the_order_of_the_measurements_does_not_matter(order: list[int], name: str) -> None:
    cost, _ = LAYERS[name]
    shapes = drawn(12)
    model = fitted(*(values[order] for values in (*shapes[:2], cost(*shapes), shapes[2])))
    assert np.abs(errors(model, drawn(50, seed=2), cost)).max() < 1e-5


@pytest.mark.parametrize("unit", [1 / 16000, 1000.0])
def test_the_unit_of_the_lengths_does_not_matter(unit: float) -> None:
    random = np.random.default_rng(0)
    sizes, lengths, _ = drawn(15)
    costs = (1e8 + sizes * (1e4 * lengths + 5 * lengths**2)) * random.normal(1, 0.02, 15)
    ours, theirs = fitted(sizes, lengths, costs), fitted(sizes, lengths * unit, costs)
    assert predict(theirs, sizes, lengths * unit) == pytest.approx(predict(ours, sizes, lengths), rel=1e-6)


def test_a_measurement_of_little_weight_decides_little() -> None:
    sizes, lengths, _ = drawn(10)
    costs = 1e8 + 1e4 * sizes * lengths
    costs[3] *= 3
    weights = np.where(np.arange(10) == 3, 1e-3, 1.0)
    assert fitted(sizes, lengths, costs, weights=weights).linear == pytest.approx(1e4, rel=1e-3)


def test_one_more_example_costs_what_the_predictions_differ_by() -> None:
    sizes, lengths, targets = drawn(12)
    model = fitted(sizes, lengths, LAYERS["encoder-decoder"][0](sizes, lengths, targets), targets)
    difference = predict(model, 8, lengths, targets) - predict(model, 7, lengths, targets)
    assert per_example(model, lengths, targets) == pytest.approx(difference)


def test_a_model_of_targets_predicts_nothing_without_them() -> None:
    sizes, lengths, targets = drawn(12)
    model = fitted(sizes, lengths, LAYERS["transducer"][0](sizes, lengths, targets), targets)
    with pytest.raises(ValueError, match="needs them to predict"):
        predict(model, 1, 100)


def measured(name: str, column: str) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray | None]:
    columns = dict(zip(MEASURED["columns"], zip(*MEASURED[name], strict=True), strict=True))
    targets = columns["target_length"]
    return (
        np.array(columns["batch_size"], dtype=float),
        np.array(columns["length"], dtype=float),
        np.array(columns[column], dtype=float),
        None if targets[0] is None else np.array(targets, dtype=float),
    )


@pytest.mark.parametrize("name", ["conformer-ctc", "transformer-lm"])
def test_real_peaks_are_met_to_within_one_percent_and_half_of_it_near_the_limit(name: str) -> None:
    sizes, lengths, peaks, targets = measured(name, "peak_bytes")
    model = fitted(sizes, lengths, peaks, targets)
    error = np.abs(predict(model, sizes, lengths, targets) / peaks - 1)
    assert model.relative_error < 0.01
    assert error[peaks > 0.7 * peaks.max()].max() < 0.005


@pytest.mark.parametrize("name", ["conformer-ctc", "transformer-lm"])
def test_from_the_fourth_real_peak_on_the_next_is_foretold_to_within_one_percent(name: str) -> None:
    sizes, lengths, peaks, targets = measured(name, "peak_bytes")
    for known in range(4, peaks.size):
        model = fitted(sizes[:known], lengths[:known], peaks[:known], None if targets is None else targets[:known])
        target = None if targets is None else targets[known]
        assert float(predict(model, sizes[known], lengths[known], target)) == pytest.approx(peaks[known], rel=0.01)


@pytest.mark.parametrize("name", ["conformer-ctc", "transformer-lm"])
def test_real_step_times_are_met_to_within_fifteen_percent(name: str) -> None:
    assert fitted(*measured(name, "step_seconds")).relative_error < 0.15
