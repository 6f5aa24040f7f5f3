"""Python code around batchtune's own stream: for WebDataset, and for streaming data sets of Hugging Face."""

from __future__ import annotations

from functools import partial

from batchtune.exports.base import Export, Tuned
from batchtune.exports.loader import loading_fields
from batchtune.exports.stream import OWN, choose_stream, stream_fields, swept_workers
from batchtune.exports.text import from_template, padded_remark
from batchtune.results import STREAM_ALGORITHMS


def _render(tuned: Tuned, *, name: str, title: str) -> str:
    sweep = tuned.needed_stream
    return from_template(
        f"{name}.py.j2",
        title=title,
        config=tuned.stream_config,
        nominal=sweep.batches_per_rank is not None,
        padded=padded_remark(sweep),
        **stream_fields(choose_stream(sweep, OWN, STREAM_ALGORITHMS), sweep),
        **loading_fields(tuned, swept_workers(sweep)),
    )


EXPORTS = tuple(
    Export(name=name, title=title, file=file, render=partial(_render, name=name, title=title))
    for name, title, file in (
        ("webdataset", "WebDataset", "webdataset_stream.py"),
        ("hf-streaming", "Hugging Face streaming data sets", "hf_stream.py"),
    )
)
