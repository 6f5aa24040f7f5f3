"""What `BucketedStream` is given from outside: NumPy's numbers are taken, anything odd is one short error."""

from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch

from batchtune import BucketedStream
from batchtune.sampler import truncated

LONG = "x" * 100_000
NAN = float("nan")
ERRORS = {"match": r"^.{1,600}$"}  # one line that can be read


def stream(**options):
    given = {
        "source": [1.0 + number % 20 for number in range(50)],
        "length_of": float,
        "bucket_boundaries": [10.0, 20.0],
        "bucket_batch_sizes": [4, 2],
    }
    return BucketedStream(**{**given, **options})


def size_of(value):
    return {"buffer_bytes": 50, "bytes_of": lambda example: value}


def lengths_of(*values):
    return {"source": range(len(values)), "length_of": lambda example: values[example]}


@pytest.mark.parametrize(
    "options",
    [
        {
            "buffer_size": np.int64(30),
            "seed": np.uint64(2**63),
            "epoch": np.int8(3),
            "min_length": np.float32(2),
            "shuffle": np.bool_(False),
            "drop_last": np.int64(1),
        },
        {"batches_per_epoch": np.int32(7), **size_of(np.float32(5))},
        {
            "algorithm": "pivot",
            "max_padding_ratio": np.float32(0.25),
            "rank": np.int64(1),
            "world_size": np.int16(2),
            "split": np.int64(1),
        },
    ],
)
@pytest.mark.filterwarnings("ignore:.*were dropped")
def test_numpys_numbers_are_numbers(options):
    plain = {
        name: value.item() if isinstance(value, np.generic) else value
        for name, value in options.items()
    }
    with_numpy = stream(**options)
    assert list(with_numpy) == list(stream(**plain))
    with_numpy.load_state_dict(stream(**plain).state_dict())


@pytest.mark.parametrize(
    "options",
    [
        *(
            {name: value}
            for name in ("buffer_size", "batches_per_epoch", "epoch")
            for value in (-1, 10**5000)
        ),
        *(
            {name: LONG}
            for name in (
                "seed",
                "algorithm",
                "overlong",
                "shuffle",
                "split",
                "length_of",
                "collate_fn",
                "rank",
            )
        ),
        *(
            {"algorithm": "pivot", "max_padding_ratio": value}
            for value in (NAN, LONG, 10**5000)
        ),
        {"buffer_size": NAN},
        {"buffer_size": torch.tensor(5)},
        {"rank": np.float64(-1), "world_size": 2},
        {"buffer_bytes": 5, "bytes_of": LONG},
        {"bucket_batch_sizes": [2**70, 2]},
        {"bucket_boundaries": [10, 10**400]},
    ],
)
def test_an_odd_argument_is_one_short_error(options):
    with pytest.raises(ValueError, **ERRORS):
        stream(**options)


@pytest.mark.parametrize(
    "options",
    [
        *(size_of(value) for value in (NAN, None, "5", torch.ones(2))),
        *(lengths_of(1.0, 2.0, value) for value in (0, NAN, 10**400, b"5", LONG)),
    ],
)
def test_an_odd_length_or_size_is_one_short_error(options):
    with pytest.raises(ValueError, **ERRORS):
        list(stream(**options))


@pytest.mark.parametrize("value", ["5", 10**400])
def test_a_truncated_length_is_checked_as_others_are(value):
    with pytest.raises(ValueError, match=r"length_of must return a number"):
        list(stream(length_of=partial(truncated, lambda example: value, 15.0)))


def test_lengths_as_tensors_and_numpy_numbers_are_read():
    values = [np.float32(3), np.int64(3), torch.tensor(3), 3, 3.0]
    assert sorted(chain(*stream(**lengths_of(*values)))) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "name", ["epoch", "batches", "finished", "read", "options", "rank", "worker"]
)
@pytest.mark.parametrize("value", [torch.tensor([1, 2]), 10**5000], ids=type)
def test_an_odd_state_is_one_short_error(name, value):
    one = stream()
    next(iter(one))
    with pytest.raises(ValueError, **ERRORS):
        stream().load_state_dict({**one.state_dict(), name: value})


def test_an_odd_epoch_is_one_short_error():
    with pytest.raises(ValueError, **ERRORS):
        stream().set_epoch(LONG)
