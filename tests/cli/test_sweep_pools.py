"""Pools in `sweep-buckets`, and what follows from them."""

import numpy as np
import pytest
from cli.conftest import result_in, write_lengths

POOLED = ["--max-batch-length", 300, "--strategy", "pooled"]


@pytest.fixture
def speech(tmp_path):
    """A data set that is large enough for pools to be worth it."""
    values = np.random.default_rng(3).gamma(5, 2, 3000) + 0.5
    return write_lengths(tmp_path / "speech.csv", values.round(2))


@pytest.mark.parametrize("largest", ["all", "99999999"])
def test_a_pool_holds_all_examples_at_most(succeed, speech, tmp_path, largest):
    succeed("sweep-buckets", speech, *POOLED, "--pool-size", f"20,{largest}")
    rows = result_in(tmp_path)["rows"]
    assert [row["pool_size"] for row in rows] == [20, 3000]


def test_pools_are_current_settings_like_tables(batchtune, succeed, speech, tmp_path):
    sweep = ("sweep-buckets", speech, *POOLED)
    succeed(*sweep, "--pool-size", 700)
    (row,) = result_in(tmp_path)["rows"]
    boundaries = ":".join(map(str, row["boundaries"]))
    sizes = ":".join(map(str, row["batch_sizes"]))
    current = f"bucket_boundaries={boundaries},bucket_batch_sizes={sizes},pool_size=700"
    if row["batch_overhead"] is not None:
        current += f",batch_overhead={row['batch_overhead']}"
    succeed(*sweep, "--pool-size", 700, "--current", current, "--force")
    found = result_in(tmp_path)["current"]
    for name in ("pool_size", "batches", "mates_again"):
        assert found[name] == row[name]
    refused = batchtune(*sweep, "--current", current.replace("=700", "=0"), code=2)
    assert "pool_size: must be a whole number of at least 1" in refused.stderr
