from __future__ import annotations

import csv
import gzip
from pathlib import Path

import numpy as np
import pytest

from batchtune.lengths import Lengths
from batchtune.results import Sweep
from batchtune.tuning.costs import Costs
from batchtune.tuning.sweep import sweep
from batchtune.tuning.sweep_settings import SweepSettings

DATA = Path(__file__).parents[3] / "shared" / "data"


def swept(values: np.ndarray) -> Sweep:
    return sweep(Lengths.of(values, unit="s"), 600, SweepSettings(num_buckets=(10, 15, 20)), Costs())


def batches(result: Sweep, strategy: str) -> list[int]:
    return [row.batches for row in result.rows if row.strategy == strategy]


@pytest.fixture(scope="module")
def librispeech() -> Sweep:
    path = DATA / "librispeech-wav2vec-tsv" / "train.tsv"
    if not path.exists():
        pytest.skip(f"{path.parent.name} is not here")
    return swept(np.loadtxt(path, skiprows=1, delimiter="\t", usecols=1) / 16_000)


@pytest.fixture(scope="module")
def common_voice() -> Sweep:
    path = DATA / "commonvoice-id" / "clip_durations.tsv.gz"
    if not path.exists():
        pytest.skip(f"{path.parent.name} is not here")
    with gzip.open(path, "rt") as lines:
        rows = csv.DictReader(lines, delimiter="\t")
        return swept(np.array([float(row["duration[ms]"]) for row in rows]) / 1000)


def test_speechbrain_on_librispeech(librispeech: Sweep) -> None:
    assert batches(librispeech, "speechbrain") == [2039, 1359, 1021]


def test_optimal_buckets_on_librispeech(librispeech: Sweep) -> None:
    assert batches(librispeech, "optimal") == [638, 627, 621]


def test_a_fixed_batch_size_on_librispeech(librispeech: Sweep) -> None:
    assert [baseline.batches for baseline in librispeech.baselines] == [1190, 1190]


def test_the_bound_on_librispeech(librispeech: Sweep) -> None:
    assert librispeech.lower_bound.batches == 604


def test_speechbrain_on_common_voice(common_voice: Sweep) -> None:
    assert batches(common_voice, "speechbrain") == [4196, 2798, 2098]


def test_optimal_buckets_on_common_voice(common_voice: Sweep) -> None:
    assert batches(common_voice, "optimal") == [427, 415, 410]


def test_the_recommendation_on_real_data_is_optimal(librispeech: Sweep, common_voice: Sweep) -> None:
    rows = [librispeech.recommended_row, common_voice.recommended_row]
    assert [row.strategy for row in rows if row is not None] == ["optimal", "optimal"]
