"""The SpeechBrain export, read by hyperpyyaml and run by SpeechBrain's own sampler."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_records import hostile_results, made_sweep, with_recommended, without_recommendation

from batchtune.errors import ResultError
from batchtune.exports import export_of
from batchtune.exports.base import Tuned
from batchtune.exports.text import flow_list, number
from batchtune.lengths import Lengths
from batchtune.results import Row, Sweep
from batchtune.tuning.costs import Costs
from batchtune.tuning.sweep import sweep
from batchtune.tuning.sweep_settings import SweepSettings

LIBRISPEECH = Path(__file__).parents[3] / "shared" / "data" / "librispeech-wav2vec-tsv" / "train.tsv"
EXPORT = export_of("speechbrain")


@pytest.fixture(scope="module")
def librispeech() -> np.ndarray:
    if not LIBRISPEECH.exists():
        pytest.skip(f"{LIBRISPEECH.parent.name} is not here")
    return np.loadtxt(LIBRISPEECH, skiprows=1, delimiter="\t", usecols=1) / 16_000


def loaded(text: str) -> dict[str, Any]:
    """The file as a recipe's train.py gets it."""
    hyperpyyaml = pytest.importorskip("hyperpyyaml")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dict(hyperpyyaml.load_hyperpyyaml(text))


def render(result: Sweep) -> str:
    return EXPORT.render(Tuned(sweep=result))


def uncommented(text: str) -> str:
    """The alternative that stands in comments."""
    lines = text[text.index("# dynamic_batch_sampler:\n") :].splitlines()
    return "\n".join(line[2:] for line in lines if line.startswith(("# dynamic", "#     ")))


def batches(sampler: Any, values: Sequence[float] | np.ndarray, block: dict[str, Any]) -> int:
    return len(sampler([None] * len(values), lengths_list=list(values), **block))


def recommended(result: Sweep) -> Row:
    assert result.recommended_row is not None
    return result.recommended_row


@pytest.mark.parametrize("most", [None, 40])
def test_speechbrain_makes_the_rows_number_of_batches(sampler: Any, librispeech: np.ndarray, most: int | None) -> None:
    # The optimal boundaries make use of the cap so that it need not be written.
    strategies = ("speechbrain", "optimal" if most is None else "quantile")
    tried = SweepSettings(num_buckets=(10, 15), strategies=strategies, max_batch_size=most)
    result = sweep(Lengths.of(librispeech, unit="s"), 600, tried, Costs())
    block = loaded(render(result))["dynamic_batch_sampler"]
    assert block.get("max_batch_ex") == most
    assert batches(sampler, librispeech, block) == recommended(result).batches
    plain = loaded(uncommented(render(result)))["dynamic_batch_sampler"]
    best = min(row.batches for row in result.rows if row.strategy == "speechbrain")
    assert "num_buckets" in plain
    assert batches(sampler, librispeech, plain) == best


def test_lengths_in_other_units_keep_their_unit(sampler: Any, librispeech: np.ndarray) -> None:
    samples = np.round(librispeech * 16_000)
    result = sweep(Lengths.of(samples, unit="samples"), 9_600_000, SweepSettings(num_buckets=(10,)), Costs())
    text = render(result)
    block = loaded(text)["dynamic_batch_sampler"]
    assert "it must return samples here" in " ".join(text.replace("#", "").split())
    assert block["max_batch_length"] == 9_600_000
    assert all(isinstance(boundary, int) for boundary in block["bucket_boundaries"])
    assert batches(sampler, samples, block) == recommended(result).batches


def test_the_block_has_the_recommended_table() -> None:
    block = loaded(render(made_sweep()))["dynamic_batch_sampler"]
    row = recommended(made_sweep())
    assert list(block["bucket_boundaries"]) == row.boundaries
    assert (block["max_batch_length"], block["shuffle"], block["batch_ordering"]) == (600, True, "random")
    assert "max_batch_ex" not in block


def test_a_row_with_measured_sizes_is_replaced_and_said_to_be() -> None:
    result = made_sweep()
    rows = [
        msgspec.structs.replace(row, batch_sizes=[size + 1 for size in row.batch_sizes])
        if row.sizing == "frontier"
        else row
        for row in result.rows
    ]
    measured = next(i for i, row in enumerate(rows) if row.sizing == "frontier")
    text = " ".join(render(msgspec.structs.replace(result, rows=rows, recommended=measured)).replace("#", "").split())
    assert "SpeechBrain can't express: SpeechBrain derives each batch size from max_batch_length" in text


def test_padding_to_multiples_is_left_to_the_collate_function() -> None:
    result = made_sweep()
    text = render(msgspec.structs.replace(result, settings={"multiple_of": 8.0}))
    assert "padded to multiples of 8 s (--multiple-of)" in text


def test_without_speechbrain_rows_there_is_no_alternative() -> None:
    result = with_recommended(made_sweep(), "optimal", 13)
    rows = [row for row in result.rows if row.strategy == "optimal" and row.sizing == "length"]
    text = render(msgspec.structs.replace(result, rows=rows, recommended=0))
    assert "this sweep has no row" in text
    assert "num_buckets:" not in text


def test_the_best_row_of_plain_num_buckets_leads_to_its_name() -> None:
    assert loaded(render(with_recommended(made_sweep(), "speechbrain", 20)))["dynamic_batch_sampler"]


def test_without_a_recommendation_there_is_nothing_to_write() -> None:
    with pytest.raises(ResultError, match="recommends no bucket table"):
        render(without_recommendation(made_sweep()))


@pytest.mark.parametrize("text", ["\nmax_batch_length: 1\n", "\u2028evil: 1", "s\x85evil: 1", "\x1b[2J", "# x"])
def test_strings_of_the_sweep_stay_in_comments(text: str) -> None:
    written = render(hostile_results(text).sweep)
    assert loaded(written).keys() == loaded(render(made_sweep())).keys()
    assert all(line.isprintable() for line in written.split("\n"))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(min_value=1e-7, max_value=1e18), min_size=1, max_size=12))
def test_numbers_survive_hyperpyyaml_exactly(values: list[float]) -> None:
    found = loaded(f"a: {{b: {flow_list(values)}, c: {number(values[0])}}}\n")["a"]
    assert (list(found["b"]), found["c"]) == (values, values[0])
