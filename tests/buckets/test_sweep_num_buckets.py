import pytest

from batchtune.buckets import checked_settings, parse_num_buckets
from batchtune.errors import UsageError


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("10:13", (10, 11, 12, 13)),
        ("20, 10, 10", (10, 20)),
        ("5,10:12", (5, 10, 11, 12)),
    ],
)
def test_bucket_counts_are_read_in_ascending_order(text, counts):
    assert parse_num_buckets(text) == counts


@pytest.mark.parametrize(
    "text", ["20:10", "0", "1:1001", "abc", "10:20:2", "", "9" * 5000]
)
def test_an_invalid_bucket_count_is_refused_with_the_rule(text):
    with pytest.raises(UsageError, match="from 1 to 1000, or ascending ranges, got '"):
        parse_num_buckets(text)


def test_pool_sizes_without_pools_are_refused():
    said = "--pool-size has no effect: --strategy linear makes no"
    with pytest.raises(UsageError, match=said):
        checked_settings(strategies=("linear",), pool_sizes=(5,))
