"""The command line on real lengths, with the figures that are promised."""

import json

import pytest
from real_lengths import COMMON_VOICE, LIBRISPEECH


@pytest.mark.parametrize(
    ("source", "options", "limit", "speechbrain", "fixed", "optimal", "bound"),
    [
        (
            LIBRISPEECH,
            ["--length-scale", "1/16000", "--unit", "s"],
            600,
            {10: 2039, 15: 1359, 20: 1021},
            1190,
            {10: 638, 15: 627, 20: 621},
            604,
        ),
        (
            COMMON_VOICE,
            [],
            600_000,
            {10: 4196, 15: 2798, 20: 2098},
            1507,
            {10: 427, 15: 415, 20: 410},
            392,
        ),
    ],
    ids=["LibriSpeech", "Common Voice"],
)
def test_batch_counts_on_real_lengths(
    succeed, tmp_path, source, options, limit, speechbrain, fixed, optimal, bound
):
    swept = [
        "--num-buckets",
        "10,15,20",
        "--strategy",
        "speechbrain",
        "--strategy",
        "optimal",
    ]
    ran = succeed(
        "sweep-buckets", source, *options, *swept, "--max-batch-length", limit, "--json"
    )
    sweep = json.loads(ran.stdout)
    batches = {
        (row["strategy"], row["num_buckets"]): row["batches"] for row in sweep["rows"]
    }
    assert {
        count: batches["speechbrain", count] for count in speechbrain
    } == speechbrain
    assert {count: batches["optimal", count] for count in optimal} == optimal
    assert sweep["rows"][sweep["recommended"]]["strategy"] == "optimal"
    assert {baseline["batches"] for baseline in sweep["baselines"]} == {fixed}
    assert sweep["lower_bound"]["batches"] == bound
