from __future__ import annotations

import pytest

from batchtune.buckets.strategies import checked_settings, parse_num_buckets
from batchtune.errors import UsageError


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("15", (15,)),
        ("10:13", (10, 11, 12, 13)),
        ("20, 10, 10", (10, 20)),
        ("5,10:12", (5, 10, 11, 12)),
    ],
)
def test_bucket_counts_are_read_in_ascending_order(
    text: str, counts: tuple[int, ...]
) -> None:
    assert parse_num_buckets(text) == counts


@pytest.mark.parametrize(
    "text", ["20:10", "0", "1:1001", "abc", "10:20:2", "", "9" * 5000]
)
def test_an_invalid_bucket_count_is_refused_with_the_rule(text: str) -> None:
    with pytest.raises(UsageError, match="from 1 to 1000, or ascending ranges, got '"):
        parse_num_buckets(text)


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"strategies": ("best",)}, "unknown strategy 'best'"),
        (
            {"strategies": ("linear",), "pool_sizes": (5,)},
            "--pool-size has no effect: --strategy linear makes no",
        ),
        (
            {"max_batch_size": 0},
            "--max-batch-size: must be a whole number of at least 1",
        ),
        ({"multiple_of": 0.0}, "--multiple-of: must be a number above 0"),
        ({"world_size": 0}, "--world-size: must be a whole number of at least 1"),
        ({"min_randomness": 0.0}, "--min-randomness: must be a number above 0"),
    ],
)
def test_settings_out_of_range_are_refused_with_the_rule(
    wrong: dict[str, object], rule: str
) -> None:
    with pytest.raises(UsageError, match=rule):
        checked_settings(**wrong)
