"""`stream.yaml`: written, read back, refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from exports.stream_runs import (
    assert_snapshot,
    changed,
    made_stream,
    without_recommendation,
)
from msgspec.structs import replace
from report_records import proven_probe

from batchtune.errors import ResultError
from batchtune.exports.run_configs import (
    read_stream_yaml,
    render_stream_yaml,
    stream_config,
)

CONFIG = stream_config(made_stream())


def test_the_file_is_as_in_its_snapshot() -> None:
    assert_snapshot("stream.yaml", render_stream_yaml(CONFIG))


def test_if_speechbrain_is_recommended_it_is_the_best_of_our_own() -> None:
    made = made_stream(recommended="speechbrain")
    found = stream_config(made, proven_probe())
    assert (found.algorithm, found.batches_per_epoch, found.evidence.batches) == (
        "pool",
        320,
        640,
    )
    assert found.evidence.allocator == "native"
    assert found.evidence.margin_bytes == proven_probe().margin.bytes  # type: ignore[union-attr]
    unproven = [
        replace(row, unproven=int(row.algorithm == "pool")) for row in made.rows
    ]
    assert stream_config(replace(made, rows=unproven)).algorithm == "bucket"
    alone = replace(made, rows=made.rows[-1:], recommended=0, recommended_speechbrain=0)
    with pytest.raises(
        ResultError,
        match=r"batchtune\.BucketedStream can run no row of the sweep: it only runs the algorithm bucket",
    ):
        stream_config(alone)


def test_nothing_recommended_is_an_error() -> None:
    with pytest.raises(
        ResultError, match="The sweep recommends nothing: no row beats the baseline"
    ):
        stream_config(without_recommendation(made_stream()))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"format": "batchtune/sampler"},
            "has the format 'batchtune/sampler'; a file of the format",
        ),
        (
            {"algorithm": "speechbrain"},
            r"is damaged: Invalid enum value 'speechbrain' - at `\$\.algorithm`",
        ),
        ({"buffer_size": 0}, r"is damaged: Expected `int` >= 1 - at `\$\.buffer_size`"),
        (
            {"bucket_boundaries": [4.0, 3.0, 5.0, 6.0, 7.0, 8.0]},
            "is damaged: bucket_boundaries must ascend",
        ),
        (
            {"max_padding_ratio": 0.1},
            "is damaged: max_padding_ratio belongs to the algorithm pivot, but algorithm is",
        ),
    ],
)
def test_a_file_that_is_off_is_refused_with_the_field_named(
    tmp_path: Path, fields: Any, message: str
) -> None:
    path = changed(tmp_path / "stream.yaml", CONFIG, **fields)
    with pytest.raises(ResultError, match=message) as caught:
        read_stream_yaml(path)
    assert caught.value.message.startswith(str(path))
    assert "sweep-stream" in (caught.value.hint or "") or "newer" in (
        caught.value.hint or ""
    )
