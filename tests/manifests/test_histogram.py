"""Histograms: what `scan --histogram` writes gives what the examples themselves give, whatever their number."""

from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from buckets.speech import swept
from manifests.samples import audio_shard
from msgspec import structs

import batchtune.lengths
from batchtune.errors import ManifestError
from batchtune.lengths import Lengths
from batchtune.manifests import ReadOptions, load_lengths, load_stream, scan
from batchtune.manifests.formats.columnar import histogram_table
from batchtune.manifests.reading import load_ordered_lengths


@pytest.fixture
def table(tmp_path):
    """5,000 examples of few lengths, with targets, in no order."""
    random = np.random.default_rng(0)
    lengths = random.lognormal(2, 0.7, 5000).round(1) + 0.1
    targets = random.integers(0, 30, 5000)
    rows = zip(lengths, targets, strict=True)
    lines = [f"{length:.1f},{target}\n" for length, target in rows]
    path = tmp_path / "train.csv"
    path.write_text("duration,tokens\n" + "".join(lines))
    return path


COLUMNS = {"length_key": "duration", "target_key": "tokens"}
OF_TABLE = ReadOptions(**COLUMNS)


@pytest.fixture
def histogram(table, tmp_path):
    path = tmp_path / "histogram.parquet"
    scan(table, OF_TABLE, path, histogram=True)
    return path


def test_it_gives_what_the_examples_give(table, histogram, monkeypatch):
    # The fingerprint that was written does not depend on pieces.
    monkeypatch.setattr(batchtune.lengths, "_HASHED_AT_ONCE", 7)
    listed = load_lengths(table, OF_TABLE)
    counted = load_lengths(histogram)
    assert pyarrow.parquet.read_table(histogram).column_names == [
        "length",
        "target_length",
        "count",
    ]
    assert counted.fingerprint == counted.runs.fingerprint() == listed.fingerprint
    assert counted.values.tolist() == listed.values.tolist()
    summary = structs.replace(listed.summary(), reading=None)
    assert structs.replace(counted.summary(), reading=None) == summary
    tables = {"num_buckets": (5, 6)}
    assert swept(counted, 200, **tables).rows == swept(listed, 200, **tables).rows


def test_limits_leave_out_as_many(table, histogram):
    limits = {"min_length": 2.0, "max_length": 30.0, "truncate": 20.0}
    listed = load_lengths(table, ReadOptions(**COLUMNS, **limits))
    counted = load_lengths(histogram, ReadOptions(**limits))
    assert counted.left_out == listed.left_out
    assert counted.truncated == listed.truncated > 0
    # Of other lengths than those that were noted.
    assert counted.fingerprint == listed.fingerprint


def test_that_of_shards_is_that_of_all_their_examples(tmp_path):
    for number in range(3):
        content = audio_shard(1600, 1600, 3200, 4800)
        (tmp_path / f"{number}.tar").write_bytes(content)
    output = tmp_path / "histogram.parquet"
    scan(f"{tmp_path}/*.tar", ReadOptions(), output, histogram=True, jobs=2)
    rows = pyarrow.parquet.read_table(output).to_pylist()
    assert [tuple(row.values()) for row in rows] == [(0.3, 3), (0.2, 3), (0.1, 6)]
    assert load_lengths(output).unit == "s"


def test_ten_billion_examples_are_swept(tmp_path):
    lengths = np.arange(10, 3001, 10) / 100
    counts = np.full(lengths.size, 33_333_333)
    counts[0] += 10_000_000_000 - int(counts.sum())
    made = replace(Lengths.of(lengths, counts=counts, unit="s"), known_fingerprint="0")
    path = tmp_path / "histogram.parquet"
    pyarrow.parquet.write_table(histogram_table(made), path)
    read = load_lengths(path)
    assert read.count == 10_000_000_000
    ranks = {"strategies": ("optimal", "quantile"), "world_size": 8}
    found = swept(read, 600, num_buckets=(10,), **ranks)
    best = found.recommended_row
    assert found.lower_bound.batches < best.batches < 1.12 * found.lower_bound.batches
    assert best.batches % 8 == 0
    assert found.lengths.fingerprint == "0"
    with pytest.raises(ManifestError, match="too many to hold each of them"):
        _ = read.values


def test_where_each_example_is_needed_it_is_refused(histogram, tmp_path):
    targets = tmp_path / "targets.txt"
    targets.write_text("a b\n" * 5000)
    for use in (
        load_stream,
        load_ordered_lengths,  # the sampler's
        partial(load_lengths, options=ReadOptions(target_file=str(targets))),
        partial(scan, options=ReadOptions(), output=tmp_path / "lengths.parquet"),
    ):
        with pytest.raises(ManifestError, match="is a histogram: it counts"):
            use(histogram)


def test_an_edited_histogram_has_another_fingerprint(histogram):
    table = pyarrow.parquet.read_table(histogram)
    edited = table.slice(1)
    pyarrow.parquet.write_table(edited, histogram)
    lengths = load_lengths(histogram)
    assert lengths.fingerprint == lengths.runs.fingerprint()
    counts = np.array(edited.column("count")).copy()
    counts[2] = 0
    damaged = edited.set_column(2, "count", pyarrow.array(counts))
    pyarrow.parquet.write_table(damaged, histogram)
    with pytest.raises(ManifestError, match="row 3 counts 0 examples"):
        load_lengths(histogram)
