"""The table that `scan` writes is sorted: the order of the data set is put back, or missing and refused."""

import pandas
import pyarrow.parquet
import pytest

from batchtune.errors import ManifestError
from batchtune.manifests import ReadOptions, load_lengths, load_stream, scan
from batchtune.manifests.reading import load_ordered_lengths

LENGTHS = [5, 9, 2, 9, 7, 1]


@pytest.fixture
def sources(tmp_path):
    """Two tables that form one data set, with targets."""
    paths = [tmp_path / "0.csv", tmp_path / "1.csv"]
    paths[0].write_text("duration,words\n5,50\n9,90\n")
    paths[1].write_text("duration,words\n2,20\n9,90\n7,70\n1,10\n")
    return paths


def scanned(sources, **options):
    path = sources[0].with_name("lengths.parquet")
    scan(sources, ReadOptions(target_key="words", **options), path)
    return path


def test_the_order_of_the_data_set_is_put_back(sources):
    table = scanned(sources)
    assert pandas.read_parquet(table)["length"].tolist() == sorted(LENGTHS)[::-1]
    for found in (load_stream(table), load_ordered_lengths(table)):
        assert found.values.tolist() == LENGTHS
        assert found.targets.tolist() == [10 * length for length in LENGTHS]
    rows = [(number, x, 10.0 * x) for number, x in enumerate(LENGTHS)]
    lengths = load_lengths(table)
    assert (list(lengths.rows), lengths.unit) == (rows, "s")


def test_scanned_tables_can_be_scanned_again(sources):
    first = scanned(sources, min_length=2)
    again = first.with_name("again.parquet")
    scan(first, ReadOptions(), again)
    for table in (first, again):
        in_order = pandas.read_parquet(table).sort_values("row")
        assert in_order["length"].tolist() == LENGTHS[:-1]


def test_what_scan_left_out_is_missing_for_a_sampler(sources):
    table = scanned(sources, max_length=8)
    assert load_stream(table).values.tolist() == [5, 2, 7, 1]
    with pytest.raises(ManifestError, match="lacks examples of its data set"):
        load_ordered_lengths(table)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.drop_columns(["row"]), "its column 'row' is gone"),
        (lambda table: table.slice(1).take([0, 0, 1]), "does not name each row once"),
        (
            lambda table: table.set_column(4, "row", pyarrow.nulls(6, "int64")),
            "does not name each row once",
        ),
    ],
)
def test_a_table_without_its_order_is_refused(sources, change, message):
    table = scanned(sources)
    pyarrow.parquet.write_table(change(pyarrow.parquet.read_table(table)), table)
    with pytest.raises(ManifestError, match=message):
        load_stream(table)
