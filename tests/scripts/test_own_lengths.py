"""The lengths of a script's own data set: what it holds, and what its examples show."""

import random

import numpy as np
import pyarrow.parquet
import pytest
import torch
from made_data import padded

from batchtune.errors import WorkloadError
from batchtune.manifests.reading import ReadOptions, load_lengths
from batchtune.scripts.drawing import Drawn
from batchtune.scripts.own_lengths import own_table, rows_in_order


class Examples:
    """A data set with attributes, which may make an example of each of its rows."""

    def __init__(self, count=3, example=None, **attributes):
        self.__dict__.update(attributes)
        self.count = count
        self.example = example

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.example(self.rows[index])


class Stream:
    """A data set that doesn't know how many examples it has."""

    lengths = (3, 1)


def columns(**attributes):
    return own_table(Examples(**attributes), lambda: None, 60.0).to_pydict()


def test_an_attribute_with_a_number_for_each_example_counts():
    assert columns(lengths=[3, 1, 2]) == {"length": [3, 1, 2]}
    assert columns(durations=[0.5, 1.5, 1.0]) == {"duration": [0.5, 1.5, 1.0]}


def test_the_numbers_of_rows_count_also_as_texts():
    rows = [
        {"ID": f"a{index}", "duration": f"{index + 1}.5", "frames": 10 * index}
        for index in range(3)
    ]
    expected = {"duration": [1.5, 2.5, 3.5], "frames": [0.0, 10.0, 20.0]}
    assert columns(rows=rows) == expected


@pytest.mark.parametrize(
    "data",
    [
        Examples(lengths=[3, 1]),
        Examples(rows=[{"duration": "1"}] * 2),
        Examples(rows=[{"text": "a"}, {"text": "1"}, {"text": None}]),
        Stream(),
    ],
)
def test_without_numbers_for_each_example_it_is_an_error(data):
    with pytest.raises(WorkloadError, match="the lengths are unknown"):
        own_table(data, lambda: None, 60.0)


# What the examples show


def measured(data, collate, seconds=60.0):
    table = own_table(data, lambda: Drawn(data, collate, every=4), seconds)
    # In the data set's order, which a table of lengths is not known to have.
    assert table["row"].to_pylist() == list(range(len(data)))
    return table.drop_columns("row")


def read_again(table, folder):
    path = folder / "lengths.parquet"
    pyarrow.parquet.write_table(table, path)
    return load_lengths(str(path), ReadOptions())


def test_targets_that_are_longer_than_inputs_are_targets():
    """Of an encoder-decoder on a Hugging Face data set."""
    datasets = pytest.importorskip("datasets")
    made = random.Random(0)
    inputs = [min(400, max(3, int(made.lognormvariate(3, 0.9)))) for _ in range(400)]
    labels = [max(3, int(count * made.uniform(0.7, 1.4))) for count in inputs]
    rows = {
        "input_ids": [[1] * count for count in inputs],
        "labels": [[2] * count for count in labels],
    }
    data = datasets.Dataset.from_dict(rows)

    def collate(examples):
        return {
            key: padded([one[key] for one in examples])
            for key in ("input_ids", "labels")
        }

    table = measured(data, collate).to_pydict()
    assert table["num_tokens"] == table["length"] == inputs
    assert table["target_length"] == labels


def test_examples_are_measured_if_the_data_set_holds_no_numbers(tmp_path):
    lengths = [3 + 37 * number % 331 for number in range(300)]
    read = read_again(measured([[5] * n for n in lengths], padded), tmp_path)
    assert read.values.tolist() == sorted(lengths, reverse=True)
    assert read.unit == "tokens"


def test_the_column_is_used_that_the_examples_follow(tmp_path):
    def example(row):
        return torch.zeros(int(float(row["duration"]) * 24000) // 256 + 1, 4)

    rows = [
        {"duration": str(0.5 + 7 * n % 83 / 10), "num_tokens": 5 + n % 7}
        for n in range(300)
    ]
    table = measured(Examples(300, example, rows=rows), padded)
    read = read_again(table, tmp_path)
    assert read.unit == "s" and read.longest == 8.7


def test_texts_are_measured_whose_numbers_are_no_lengths():
    def tokenizing(texts):
        return padded([[len(word) for word in text.split()] for text in texts])

    rows = [{"speaker": n % 7, "text": "ab " * (9 + n % 50)} for n in range(90)]
    spoken = Examples(90, lambda row: row["text"], rows=rows)
    table = measured(spoken, tokenizing).to_pydict()
    assert table["length"] == [9 + n % 50 for n in range(90)]


def test_too_many_examples_to_measure_are_an_error():
    rows = [[5] * (3 + number) for number in range(300)]
    with pytest.raises(WorkloadError, match="to read all 300 examples would take"):
        measured(rows, padded, seconds=1e-6)


@pytest.mark.parametrize("count", [400, 60_000])
def test_rows_are_found_by_lengths_in_another_order(count):
    """A manifest may have rounded them, and of very many some are compared."""
    seconds = np.random.default_rng(3).uniform(1, 30, count)
    targets = np.arange(count) % 90 + 1

    class Data:
        durations = seconds
        sizes = targets

        def __len__(self):
            return count

    rounded = seconds.round(4)
    places = np.linspace(0, count - 1, min(count, 50_000)).astype(int)
    manifest = np.sort(rounded)[::-1][places][::-1].tolist()
    rows = rows_in_order(Data(), manifest, None)
    assert rows and all(row.length == seconds[row.number] for row in rows)
    both = rows_in_order(Data(), manifest, np.sort(targets).tolist())
    assert all(row.target == targets[row.number] for row in both)
    manifest[7] *= 1.01
    assert rows_in_order(Data(), sorted(manifest), None) == ()
    assert rows_in_order(Data(), rounded.tolist()[:9], [1.5] * 9) == ()
