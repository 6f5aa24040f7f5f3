"""The cost model's fit: what it finds, what it does not believe, and how well it meets real measurements."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.epochs.cost_model import fit_cost, needs_targets, predict
from batchtune.lengths import FloatArray
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


LIMIT = 8e9
BASE = 1e9
OF_LENGTHS: dict[str, dict[str, float]] = {
    "linear": {"linear": 2e6},
    "quadratic": {"quadratic": 1e3},
    "affine": {"example": 3e7, "linear": 1e6},
    "hardly affine": {"example": 3e6, "linear": 1e6},
    "affine and quadratic": {"example": 3e7, "linear": 1e6, "quadratic": 500},
    "of the batch size and quadratic": {"example": 3e7, "quadratic": 1e3},
}
OF_TARGETS: dict[str, dict[str, float]] = {
    "transducer": {"cross": 4e3},
    "affine transducer": {"example": 3e7, "linear": 1e6, "cross": 2e3},
    "transducer of nothing but its joint": {"example": 3e7, "cross": 4e3},
    "two inputs": {"linear": 1e6, "target_linear": 3e6},
    "two inputs, affine": {"example": 3e7, "linear": 1e6, "target_linear": 2e6},
    "pairs of all positions": {"quadratic": 1e3, "target_quadratic": 1e3, "cross": 2e3},
    "decoder-only, affine": {"example": 3e7, "linear": 1e6, "target_linear": 1e6},
    "affine, targets that cost nothing": {"example": 3e7, "linear": 1e6},
}
LAWS = OF_LENGTHS | OF_TARGETS
COEFFICIENTS = ("floor", "constant", "example", "linear", "quadratic", "target_linear", "target_quadratic", "cross")
BEYOND: dict[str, Cost] = {
    "the longer of both": lambda b, x, t: BASE + b * 2e6 * np.maximum(x, 3 * t),
    "the root of the targets": lambda b, x, t: BASE + b * (1e6 * x + 3e7 * np.sqrt(t)),
    "blocks of 128": lambda b, x, t: BASE + b * 2e6 * 128 * np.ceil(x / 128),
    "another kernel from 500 on": lambda b, x, t: BASE + b * 2e6 * x * np.where(x > 500, 1.3, 1),
}


def law_of(name: str) -> CostModel:
    none = CostModel(floor=0.0, constant=BASE, linear=0.0, quadratic=0.0, relative_error=0.0)
    return msgspec.structs.replace(none, **LAWS[name])


def cost_of(law: CostModel) -> Cost:
    return lambda b, x, t: predict(law, b, x, t)


def probed(cost: Cost, count: int, seed: int = 0) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Shapes as a probe measures them: two thirds near the limit, at lengths from 20 to 1500; the others smaller."""
    random = np.random.default_rng(seed)
    near = 2 * count // 3
    lengths = np.exp(np.linspace(np.log(20), np.log(1500), near)).round()
    targets = random.integers(1, 400, near).astype(float)
    sizes = np.maximum(1, (LIMIT - BASE) // (cost(np.array(2), lengths, targets) - cost(np.array(1), lengths, targets)))
    others = np.concatenate(([0, near - 1], random.integers(0, near, count - near - 2)))
    share = np.concatenate(([0, 0], random.choice([0.02, 0.1, 0.25, 0.5], others.size - 2)))
    smaller = np.maximum(1, np.floor(sizes[others] * share))
    return np.append(sizes, smaller), np.append(lengths, lengths[others]), np.append(targets, targets[others])


def errors(model: CostModel, shapes: tuple[FloatArray, FloatArray, FloatArray], cost: Cost) -> FloatArray:
    sizes, lengths, targets = shapes
    return predict(model, sizes, lengths, targets) / cost(sizes, lengths, targets) - 1


SEEDS = [0, 1]


@pytest.mark.parametrize("count", [12, 40])
@pytest.mark.parametrize(("cost", "with_targets"), LAYERS.values(), ids=LAYERS)
def test_what_layers_cost_is_found_and_holds_for_other_shapes(cost: Cost, with_targets: bool, count: int) -> None:
    sizes, lengths, targets = drawn(count)
    model = fitted(sizes, lengths, cost(sizes, lengths, targets), targets if with_targets else None)
    assert model.relative_error < 1e-6
    assert np.abs(errors(model, drawn(200, seed=2), cost)).max() < 1e-5


def test_a_quadratic_is_found_from_four_lengths() -> None:
    sizes = np.array([1.0, 5, 20, 3])
    lengths = np.array([4000.0, 1500, 500, 2500])
    model = fitted(sizes, lengths, 1e8 + sizes * (1e4 * lengths + 5 * lengths**2))
    assert (model.constant, model.linear, model.quadratic) == pytest.approx((1e8, 1e4, 5), rel=1e-5)


@pytest.mark.parametrize("count", [15, 30])
@pytest.mark.parametrize("name", LAWS)
def test_a_law_is_found_from_the_shapes_of_a_probe(name: str, count: int) -> None:
    law = law_of(name)
    shapes = probed(cost_of(law), count)
    model = fitted(*shapes[:2], predict(law, *shapes), shapes[2] if name in OF_TARGETS else None)
    for coefficient in COEFFICIENTS:
        assert getattr(model, coefficient) == pytest.approx(getattr(law, coefficient), rel=1e-6, abs=1e-3), coefficient
    assert model.largest_error is not None and model.largest_error < 1e-9


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", LAWS)
def test_noise_moves_a_law_by_about_as_much(name: str, seed: int) -> None:
    law = law_of(name)
    shapes = probed(cost_of(law), 30, seed)
    noise = np.random.default_rng(seed).normal(1, 0.002, 30)
    model = fitted(*shapes[:2], predict(law, *shapes) * noise, shapes[2] if name in OF_TARGETS else None)
    assert 0.001 < model.relative_error < 0.003
    assert np.sqrt(np.mean(errors(model, probed(cost_of(law), 100, seed + 100), cost_of(law)) ** 2)) < 0.004


@given(st.tuples(*[st.floats(0.1, 1)] * 3), st.booleans(), st.integers(0, 100))
@settings(deadline=None, max_examples=20)
def test_whatever_its_coefficients_an_affine_law_is_found(
    shares: tuple[float, float, float], with_quadratic: bool, seed: int
) -> None:
    # Each term decides somewhere between 20 and 1500.
    example, linear, quadratic = np.array(shares) * (5e7, 1e6, 1e3 if with_quadratic else 0)
    law = CostModel(floor=0, constant=BASE, example=example, linear=linear, quadratic=quadratic, relative_error=0)
    sizes, lengths, _ = probed(cost_of(law), 20, seed)
    model = fitted(sizes, lengths, predict(law, sizes, lengths))
    found = (model.constant, model.example, model.linear, model.quadratic)
    assert found == pytest.approx((BASE, example, linear, quadratic), rel=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_constant_per_example_is_not_mistaken_for_targets(seed: int) -> None:
    random = np.random.default_rng(seed)
    cost = cost_of(law_of("affine"))
    sizes, lengths, _ = probed(cost, 24, seed)
    targets = (lengths * random.uniform(0.1, 0.3, 24) + 5).round()
    model = fitted(sizes, lengths, cost(sizes, lengths, targets) * random.normal(1, 0.002, 24), targets)
    assert np.abs(errors(model, (sizes, lengths, targets / 3), cost)).max() < 0.01


@pytest.mark.parametrize("affine", [0.0, 3e7])
def test_a_floor_below_a_law_is_found(affine: float) -> None:
    law = CostModel(floor=2.5e9, constant=BASE, example=affine, linear=1e6, quadratic=0, relative_error=0)
    sizes, lengths, _ = probed(cost_of(msgspec.structs.replace(law, floor=0)), 24)
    model = fitted(sizes, lengths, predict(law, sizes, lengths))
    found = (model.floor, model.constant, model.example, model.linear)
    assert found == pytest.approx((2.5e9, BASE, affine, 1e6), rel=1e-6)


@pytest.mark.parametrize("name", BEYOND)
def test_a_law_the_form_cannot_express_shows_in_the_errors(name: str) -> None:
    shapes = probed(BEYOND[name], 30)
    costs = BEYOND[name](*shapes)
    model = fitted(*shapes[:2], costs, shapes[2])
    error = np.abs(errors(model, shapes, BEYOND[name]))
    assert (model.relative_error, model.largest_error) == pytest.approx((np.sqrt(np.mean(error**2)), error.max()))
    assert model.relative_error > 0.01


def test_with_one_batch_size_the_per_example_cost_is_constant() -> None:
    lengths = np.array([10.0, 20, 50, 200, 1000])
    model = fitted(np.full(5, 4.0), lengths, 1e8 + 4 * (1e6 + 1e4 * lengths))
    assert (model.constant, model.example, model.linear) == pytest.approx((1.04e8, 0, 1e4))


def test_two_lengths_above_the_floor_determine_only_two_terms() -> None:
    sizes = np.array([1.0, 2, 4, 38, 74, 92, 101, 108, 1, 129])
    lengths = np.array([30.0, 30, 30, 30, 30, 30, 30, 30, 1.62, 25])
    model = fitted(sizes, lengths, np.maximum(1.3e9, 1e9 + sizes * (2e6 * lengths + 5e3 * lengths**2)))
    assert min(model.example, model.quadratic) == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_noise_is_not_taken_for_another_term(seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes, lengths, _ = drawn(10, seed)
    model = fitted(sizes, lengths, (1e8 + 1e4 * sizes * lengths) * random.normal(1, 0.01, 10))
    # A tenth of the shortest that was measured, and ten times as many as ever.
    assert float(predict(model, 400, lengths.min() / 10)) == pytest.approx(1e8 + 1e4 * 40 * lengths.min(), rel=0.1)
    # Four times as long as anything measured.
    assert float(predict(model, 10, 20_000)) == pytest.approx(1e8 + 1e4 * 2e5, rel=0.1)


@pytest.mark.parametrize("seed", SEEDS)
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
    assert float(model.per_example(10, 2000)) == pytest.approx(1e8 * 2010 / 10_000, rel=1e-6)


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
    assert float(model.per_example(10)) == 0
    assert model.constant == pytest.approx(99, rel=0.01)


MEASUREMENTS = st.lists(
    st.tuples(st.integers(1, 500), st.floats(0.1, 1e5), st.floats(0, 1e4), st.floats(1e-3, 1e11)),
    min_size=2,
    max_size=14,
)


@given(MEASUREMENTS, st.booleans())
@settings(deadline=None, max_examples=40)
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
    ours = fitted(sizes, lengths, costs)
    theirs = fitted(sizes, lengths * unit, costs)
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
    assert model.per_example(lengths, targets) == pytest.approx(difference)


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
def test_real_peaks_are_fitted_within_one_percent(name: str) -> None:
    sizes, lengths, peaks, targets = measured(name, "peak_bytes")
    model = fitted(sizes, lengths, peaks, targets)
    error = np.abs(predict(model, sizes, lengths, targets) / peaks - 1)
    assert model.relative_error < 0.01
    assert error[peaks > 0.7 * peaks.max()].max() < 0.005


@pytest.mark.parametrize("name", ["conformer-ctc", "transformer-lm"])
def test_after_four_real_peaks_the_next_is_within_one_percent(name: str) -> None:
    sizes, lengths, peaks, targets = measured(name, "peak_bytes")
    for known in range(4, peaks.size):
        model = fitted(sizes[:known], lengths[:known], peaks[:known], None if targets is None else targets[:known])
        target = None if targets is None else targets[known]
        assert float(predict(model, sizes[known], lengths[known], target)) == pytest.approx(peaks[known], rel=0.01)


@pytest.mark.parametrize("name", ["conformer-ctc", "transformer-lm"])
def test_real_step_times_are_met_to_within_fifteen_percent(name: str) -> None:
    assert fitted(*measured(name, "step_seconds")).relative_error < 0.15
