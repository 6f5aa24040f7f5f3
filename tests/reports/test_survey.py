"""The survey of a data set's lengths: its figures against plain definitions, and what it cautions against."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchtune.lengths import Lengths, Unit
from batchtune.manifests import ReadOptions, load_lengths
from batchtune.reports.survey import MOST_BINS, survey
from batchtune.results import Percentiles, Scan, read_result, write_result

FLOATS = st.floats(1e-9, 1e15)
ANY_LENGTHS = st.one_of(
    st.lists(FLOATS, min_size=1, max_size=200),
    st.lists(st.floats(0.2, 40), min_size=1, max_size=200),
    st.lists(st.integers(1, 300).map(float), min_size=1, max_size=200),
    st.lists(st.integers(1, 10**6).map(float), min_size=1, max_size=200),
)


def nearest_rank(values: list[float], thousandths: int) -> float:
    """The smallest value that at least that share does not exceed, by counting."""
    return min(value for value in values if 1000 * sum(v <= value for v in values) >= thousandths * len(values))


def percentiles(spread: Percentiles) -> list[float]:
    return [spread.min, spread.median, spread.p95, spread.p99, spread.p999, spread.max]


def warnings_of(values: list[float], unit: Unit | None = None) -> list[str]:
    return survey(Lengths.of(values, unit=unit)).warnings


def spoken(count: int = 2000) -> list[float]:
    """Lengths as of spoken sentences: 1 s to 16 s, each different."""
    return [1 + 15 * (index + 0.37) / count for index in range(count)]


@given(ANY_LENGTHS)
@settings(deadline=None, max_examples=40)
def test_percentiles_are_the_nearest_ranks(values: list[float]) -> None:
    found = survey(Lengths.of(values))
    expected = [nearest_rank(values, thousandths) for thousandths in (0, 500, 950, 990, 999, 1000)]
    assert (percentiles(found.percentiles), found.distinct) == (expected, len(set(values)))


@given(st.lists(st.one_of(st.floats(0, 1e15), st.just(-0.0), st.integers(0, 9).map(float)), min_size=1, max_size=200))
@settings(deadline=None, max_examples=25)
def test_percentiles_of_targets_are_the_nearest_ranks(targets: list[float]) -> None:
    found = survey(Lengths.of(np.arange(1, len(targets) + 1), targets)).targets
    assert found is not None
    assert percentiles(found) == [nearest_rank(targets, part) for part in (0, 500, 950, 990, 999, 1000)]


@given(ANY_LENGTHS)
@settings(deadline=None, max_examples=40)
def test_the_bins_hold_each_example_once_in_descending_order(values: list[float]) -> None:
    bins = survey(Lengths.of(values)).histogram
    assert [one.count for one in bins] == [sum(one.from_ < value <= one.to for value in values) for one in bins]
    assert sum(one.count for one in bins) == len(values)
    assert [one.from_ for one in bins[:-1]] == [one.to for one in bins[1:]]
    assert all(one.from_ < one.to for one in bins)
    assert len(bins) <= MOST_BINS and bins[0].count and bins[-1].count


def test_bins_of_speech_have_even_round_edges() -> None:
    found = survey(Lengths.of([24.525, 14.1, 14.0, 1.41], unit="s"))
    assert [one.to for one in found.histogram] == [26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2]
    assert [one.count for one in found.histogram if one.count] == [1, 1, 1, 1]


def test_bins_of_a_long_tail_are_log_spaced() -> None:
    found = survey(Lengths.of([1, 300, 300, 3000, 961_000], unit="bytes"))
    assert [one.to for one in found.histogram][:3] == [1e6, 5e5, 2e5]
    assert (found.histogram[-1].from_, found.histogram[-1].to) == (0, 1)


def test_a_few_lengths_of_one_token_make_no_log_spaced_bins() -> None:
    bins = survey(Lengths.of([1, *range(1000, 8000)], unit="tokens")).histogram
    assert {one.to - one.from_ for one in bins} == {500}


def test_edges_at_decimal_fractions_are_the_nearest_floats() -> None:
    edges = [one.to for one in survey(Lengths.of([0.1, 0.2, 0.3, 1.1])).histogram]
    assert edges == [1.1, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]


def test_whole_lengths_never_have_bins_between_whole_numbers() -> None:
    edges = [one.from_ for one in survey(Lengths.of([1, 2, 3, 4, 5], unit="tokens")).histogram]
    assert edges == [4, 3, 2, 1, 0]


def test_ordinary_speech_gives_no_caution() -> None:
    assert warnings_of(spoken(), "s") == []


@pytest.mark.parametrize(
    ("values", "unit"),
    [
        ([0.2 + index / 100 for index in range(300)], "s"),  # commands of a second
        ([600.5 + 5.1 * index for index in range(2000)], "s"),  # podcasts of up to 3 hours
        ([200.0 + index for index in range(15_000)], "ms"),
        ([float(index) for index in range(1, 4000)], "tokens"),
        ([index * 16000 / 1000000 for index in range(10**6, 10**7, 10**5)], "samples"),
        ([index + 0.5 for index in range(1, 4000)], None),
    ],
    ids=["commands", "podcasts", "ms", "tokens", "scaled-samples", "fractions"],
)
def test_ordinary_data_give_no_caution(values: list[float], unit: Unit | None) -> None:
    assert warnings_of(values, unit) == []


def test_a_few_very_long_examples_come_with_cost_and_gain() -> None:
    (warning,) = warnings_of([*[16.2] * 3000, *spoken(997), 33.0, 34.0, 35.2], "s")
    assert warning == (
        "3 examples (0.075%) are longer than 17 s, up to 35.2 s: they alone decide how large a fixed batch can be. "
        "--max-length 17 leaves them out, 0.18% of the total length; a fixed batch size can then be 2.17 times as "
        "large for the same padded length."
    )


def test_a_single_outlier_among_hundreds_is_told() -> None:
    (warning,) = warnings_of([*spoken(300), 3600.0], "s")
    assert warning.startswith("1 example (0.33%) is longer than 16 s, up to 3600 s:")


@given(st.lists(st.floats(1, 20), min_size=200, max_size=300), st.floats(400, 1e6))
@settings(deadline=None, max_examples=25)
def test_the_max_length_of_a_remedy_leaves_out_what_it_says(values: list[float], outlier: float) -> None:
    lengths = Lengths.of([*values, outlier], unit="s")
    (warning,) = survey(lengths).warnings
    limit = float(warning.split("--max-length ")[1].split()[0])
    assert f" {sum(lengths.values > limit)} example" in f" {warning}"
    assert f"{outlier / max(v for v in lengths.values if v <= limit):,.0f} times" in warning


def test_many_examples_of_the_longest_length_look_cut_off() -> None:
    (warning,) = warnings_of([*spoken(2000), *[30.0] * 160], "s")
    assert warning.startswith("160 examples (7.4%) have exactly the longest length, 30 s: they look cut off there.")
    assert "--max-length 16 leaves" in warning


def test_texts_cut_at_a_number_of_tokens_look_cut_off() -> None:
    (warning,) = warnings_of([*map(float, range(1, 4096)), *[4096.0] * 50], "tokens")
    assert "--max-length 4095 leaves" in warning


def test_a_longest_length_of_usual_frequency_is_not_cut_off() -> None:
    assert warnings_of([float(1 + index % 17) for index in range(3000)], "tokens") == []


def test_a_few_examples_of_the_longest_length_are_not_cut_off() -> None:
    assert warnings_of([*spoken(2000), *[17.0] * 10], "s") == []


def test_equal_lengths_gain_nothing_from_dynamic_batching() -> None:
    (warning,) = warnings_of([30.0] * 1000, "s")
    assert warning.startswith("All 1,000 examples have the same length, 30 s:")
    assert "fixed batch size" in warning


def test_one_example_gives_no_caution() -> None:
    assert warnings_of([30.0], "s") == []


def test_lengths_of_zero_that_a_reader_left_out_are_told(tmp_path: Path) -> None:
    manifest = tmp_path / "sizes.csv"
    manifest.write_text("bytes\n" + "".join(f"{size}\n" for size in [0, 0, *range(100, 200)]))
    (warning,) = survey(load_lengths(manifest, ReadOptions(skip_invalid=True))).warnings
    assert warning.startswith("2 examples of length zero were left out.")
    assert "leave them out of the training data too" in warning


@pytest.mark.parametrize(
    ("median", "unit", "said", "remedy"),
    [
        (224_000.0, "s", "look like samples or milliseconds", "--length-scale 1/16000 --unit s"),
        (11_000.0, "s", "is 3 h 03 min for one example", "milliseconds (11 s), --length-scale 1/1000 --unit s"),
        (5_000_000.0, "ms", "look scaled once too often", "--length-scale 1 --unit ms"),
        (0.000875, "s", "look scaled once too often, or like hours", "--length-scale"),
        (14.08, "ms", "look like seconds", "--length-scale 1 --unit s"),
        (14.08, "samples", "is 880 µs at 16 kHz: these look like seconds", "--length-scale 1 --unit s"),
        (140.8, "frames", "Frames come in whole numbers, but 3 lengths (100.0%) are not, such as 169", "--unit s"),
        (14.08, "tokens", "such as 16.9", "--unit s"),
    ],
)
def test_a_unit_that_does_not_fit_the_median_is_told(median: float, unit: Unit, said: str, remedy: str) -> None:
    (warning,) = warnings_of([0.8 * median, median, 1.2 * median], unit)
    assert said in warning
    assert remedy in warning


def test_all_cautions_come_with_a_remedy_the_unit_first() -> None:
    lengths = Lengths.of(
        [*np.arange(100_000.0, 102_000.0), 5e6], unit="s", left_out={"invalid length (zero)": 1, "too odd": 3}
    )
    unit, zero, outlier = survey(lengths).warnings
    assert "samples" in unit and "zero was left out" in zero and "--max-length" in outlier


def test_a_scans_record_survives_its_file(tmp_path: Path) -> None:
    lengths = Lengths.of([1, 2, 3, 4], [0, 1, 1, 2], unit="tokens", left_out={"longer": 3}, notes=("Read twice.",))
    scan = survey(lengths, ["train.csv", "more.csv"])
    write_result(tmp_path / "scan.json", scan)
    assert read_result(tmp_path / "scan.json", Scan) == scan
    assert scan.percentiles.max == 4 and scan.targets is not None and scan.targets.min == 0
    assert scan.left_out == {"longer": 3} and scan.notes == ["Read twice."]


def test_a_scans_bins_say_from_and_to(tmp_path: Path) -> None:
    lengths = Lengths.of([1, 2], unit="tokens")
    write_result(tmp_path / "scan.json", survey(lengths))
    text = "".join((tmp_path / "scan.json").read_text().split())
    assert '"histogram":[{"from":1.0,"to":2.0,"count":1},{"from":0.0,"to":1.0,"count":1}]' in text
