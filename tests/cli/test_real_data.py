"""The command line on real lengths, with the figures that are promised."""

import pytest
from cli.conftest import result_in
from real_lengths import COMMON_VOICE, LIBRISPEECH


@pytest.mark.parametrize(
    (
        "source",
        "options",
        "lengths",
        "limit",
        "speechbrain",
        "fixed",
        "optimal",
        "bound",
    ),
    [
        (
            LIBRISPEECH,
            ["--length-scale", "1/16000"],
            [28539, 1.41, 24.525, "s"],
            600,
            [2039, 1359, 1021],
            1190,
            [638, 627, 621],
            604,
        ),
        (
            COMMON_VOICE,
            [],
            [58741, 1116, 15156, "ms"],
            600_000,
            [4196, 2798, 2098],
            1507,
            [427, 415, 410],
            392,
        ),
    ],
    ids=["LibriSpeech", "Common Voice"],
)
def test_batch_counts_on_real_lengths(
    succeed,
    tmp_path,
    source,
    options,
    lengths,
    limit,
    speechbrain,
    fixed,
    optimal,
    bound,
):
    swept = ["--num-buckets", "10,15,20", "--max-batch-length", limit]
    swept += ["--strategy", "speechbrain", "--strategy", "optimal"]
    succeed("sweep-buckets", source, *options, *swept)
    sweep = result_in(tmp_path)
    read = [sweep["lengths"][name] for name in ("count", "min", "max", "unit")]
    assert read == lengths
    batches = [row["batches"] for row in sweep["rows"]]
    assert batches == [*speechbrain, *optimal]
    assert sweep["rows"][sweep["recommended"]]["strategy"] == "optimal"
    assert {baseline["batches"] for baseline in sweep["baselines"]} == {fixed}
    assert sweep["lower_bound"]["batches"] == bound
