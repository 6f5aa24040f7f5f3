from __future__ import annotations

import csv
import gzip
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reproduced.speechbrain import BATCH_ORDERINGS, speechbrain_batches

from batchtune.batching.epochs import EpochBatches
from batchtune.batching.expectation import expected_batches
from batchtune.batching.samplers import speechbrain_boundaries, speechbrain_table
from batchtune.lengths import FloatArray, Lengths

DATA = Path(__file__).parents[3] / "shared" / "data"

VALUES = st.lists(st.floats(0.01, 100), min_size=1, max_size=80)


def test_the_boundaries_are_those_of_speechbrain_to_the_bit(real_dynamic_batch_sampler: Any) -> None:
    for num_buckets, limit in product([1, 2, 3, 10, 15, 20, 60, 200], [0.5, 10, 600, 1234.56, 16_000_000]):
        real = real_dynamic_batch_sampler([0], limit, num_buckets, lengths_list=[1.0])
        assert speechbrain_boundaries(num_buckets, limit).tobytes() == real._bucket_boundaries.tobytes()


@given(
    values=VALUES,
    num_buckets=st.integers(1, 40),
    max_batch_length=st.floats(0.02, 2000),
    max_batch_ex=st.none() | st.integers(1, 30),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=25)
def test_batch_sizes_and_batch_count_match_speechbrain(
    real_dynamic_batch_sampler: Any,
    values: list[float],
    num_buckets: int,
    max_batch_length: float,
    max_batch_ex: int | None,
    seed: int,
) -> None:
    real = real_dynamic_batch_sampler(
        range(len(values)),
        max_batch_length,
        num_buckets,
        lengths_list=values,
        max_batch_ex=max_batch_ex,
        seed=seed,
    )
    histogram = Lengths.of(values).histogram
    table = speechbrain_table(histogram, max_batch_length, num_buckets=num_buckets, max_batch_ex=max_batch_ex)
    assert table.batch_sizes.tolist() == real._bucket_lens[: table.num_buckets]
    assert expected_batches(histogram, table).tally.batches == len(real)


@given(
    values=VALUES,
    bucket_boundaries=st.sets(st.integers(1, 100), min_size=1, max_size=12).map(sorted),
    max_batch_length=st.integers(1, 2000),
)
@settings(deadline=None, max_examples=25)
def test_given_boundaries_make_the_batches_of_speechbrain(
    real_dynamic_batch_sampler: Any,
    values: list[float],
    bucket_boundaries: list[int],
    max_batch_length: int,
) -> None:
    real = real_dynamic_batch_sampler(
        range(len(values)), max_batch_length, bucket_boundaries=bucket_boundaries, lengths_list=values
    )
    histogram = Lengths.of(values).histogram
    table = speechbrain_table(histogram, max_batch_length, bucket_boundaries=bucket_boundaries)
    assert table.batch_sizes.tolist() == real._bucket_lens[: table.num_buckets]
    assert expected_batches(histogram, table).tally.batches == len(real)


def test_lengths_on_boundaries_fall_into_speechbrains_buckets(
    real_dynamic_batch_sampler: Any,
) -> None:
    ends = speechbrain_boundaries(12, 600)
    values = np.concatenate((ends, np.nextafter(ends, 0), np.nextafter(ends, np.inf))).repeat(5).tolist()
    real = real_dynamic_batch_sampler(range(len(values)), 600, 12, lengths_list=values)
    histogram = Lengths.of(values).histogram
    assert expected_batches(histogram, speechbrain_table(histogram, 600, num_buckets=12)).tally.batches == len(real)


def test_a_table_needs_boundaries_or_their_number() -> None:
    with pytest.raises(ValueError, match="num_buckets or bucket_boundaries"):
        speechbrain_table(Lengths.of([1]).histogram, 10)


def permutations_of(seed: int) -> Callable[[int], npt.NDArray[np.int64]]:
    """What `torch.randperm` gives after a generator was seeded anew."""

    def permutation(size: int) -> npt.NDArray[np.int64]:
        generator = torch.Generator()
        generator.manual_seed(seed)
        return torch.randperm(size, generator=generator).numpy()

    return permutation


def ours(values: npt.ArrayLike, max_batch_length: float, *, seed: int, shuffle: bool, **options: Any) -> EpochBatches:
    """Our batches, where `seed` is SpeechBrain's seed + epoch."""
    draw = permutations_of(seed)
    permutation = draw(np.asarray(values).size) if shuffle else None
    return speechbrain_batches(values, max_batch_length, permutation=permutation, batch_permutation=draw, **options)


def random_lengths(draw: np.random.Generator) -> npt.NDArray[Any]:
    count = int(draw.integers(0, 60))
    match draw.integers(4):
        case 0:
            return draw.integers(1, 12, count)
        case 1:
            return draw.integers(1, 12, count) / 4
        case 2:
            return draw.lognormal(1, 1, count)
        case _:
            return draw.choice([0.1, 0.3, 1.0, 5.0, 1e9], count)


def random_options(draw: np.random.Generator) -> dict[str, Any]:
    """Options that SpeechBrain takes and we take too."""
    options: dict[str, Any] = {
        "batch_ordering": str(draw.choice(BATCH_ORDERINGS)),
        "max_batch_ex": None if draw.integers(2) else int(draw.integers(0, 12)),
        "drop_last": bool(draw.integers(2)),
    }
    kind = draw.integers(4)
    if kind == 0:
        options["bucket_boundaries"] = np.unique(draw.integers(1, 14, draw.integers(1, 8))).tolist()
    elif kind == 1:
        options["bucket_boundaries"] = np.unique(draw.lognormal(0, 1, draw.integers(1, 45))).tolist()
    else:
        options["num_buckets"] = int(draw.choice([1, 2, 3, 5, 10, 20, 33, 300]))
    return options


def test_every_batch_of_random_data_is_that_of_speechbrain(real_dynamic_batch_sampler: Any) -> None:
    draw = np.random.default_rng(0)
    for _ in range(100):
        values, options = random_lengths(draw), random_options(draw)
        max_batch_length = draw.choice([0.5, 3, 12, 12.5, 40, 600.0]).item()
        seed, epoch, shuffle = int(draw.integers(99)), int(draw.integers(4)), bool(draw.integers(2))
        real = real_dynamic_batch_sampler(
            range(values.size),
            max_batch_length,
            lengths_list=values.tolist(),
            seed=seed,
            epoch=epoch,
            shuffle=shuffle,
            **options,
        )
        for number in (epoch, int(draw.integers(1, 9))):
            real.set_epoch(number)
            found = ours(values, max_batch_length, seed=seed + number, shuffle=shuffle, **options)
            assert list(found) == real._batches, (values, max_batch_length, options)


def librispeech() -> FloatArray:
    path = DATA / "librispeech-wav2vec-tsv" / "train.tsv"
    if not path.exists():
        pytest.skip(f"{path.parent.name} is not here")
    return np.loadtxt(path, skiprows=1, delimiter="\t", usecols=1) / 16_000


def common_voice() -> FloatArray:
    path = DATA / "commonvoice-id" / "clip_durations.tsv.gz"
    if not path.exists():
        pytest.skip(f"{path.parent.name} is not here")
    with gzip.open(path, "rt") as lines:
        return np.array([float(row["duration[ms]"]) for row in csv.DictReader(lines, delimiter="\t")]) / 1000


@pytest.mark.parametrize("read", [librispeech, pytest.param(common_voice, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options",
    [
        {"num_buckets": 20, "batch_ordering": "descending", "drop_last": True},
        {"bucket_boundaries": [3, 6, 9, 12, 15.5], "batch_ordering": "ascending"},
    ],
)
def test_every_batch_of_real_data_is_that_of_speechbrain(
    real_dynamic_batch_sampler: Any, read: Callable[[], FloatArray], options: dict[str, Any]
) -> None:
    values = read()
    real = real_dynamic_batch_sampler(range(values.size), 600, lengths_list=values.tolist(), **options)
    assert list(ours(values, 600, seed=42, shuffle=True, **options)) == real._batches
    real.set_epoch(3)
    assert list(ours(values, 600, seed=45, shuffle=True, **options)) == real._batches
