"""Python code around batchtune's own sampler and stream, which can run every row, for PyTorch and its trainers."""

from __future__ import annotations

from batchtune.exports.base import Chosen, Export, Tuned, choose_stream, recommended_row
from batchtune.exports.fields import stream_fields, table_fields
from batchtune.exports.run_configs import OWN_STREAM
from batchtune.exports.text import from_template
from batchtune.results import STREAM_ALGORITHMS, ReadingRecord


def _of_sampler(name: str, title: str, file: str) -> Export:
    def render(tuned: Tuned) -> str:
        sweep = tuned.needed_sweep
        reading = sweep.lengths.reading or ReadingRecord()
        values = {
            option: getattr(reading, option) for option in reading.__struct_fields__
        }
        return from_template(
            f"{name}.py.j2",
            title=title,
            reading={
                option: value
                for option, value in values.items()
                if isinstance(value, str)
            },
            config=tuned.config,
            **table_fields(Chosen(recommended_row(sweep)), tuned),
        )

    return Export(name=name, title=title, file=file, render=render)


def _of_stream(name: str, title: str, file: str) -> Export:
    def render(tuned: Tuned) -> str:
        sweep = tuned.needed_stream
        return from_template(
            f"{name}.py.j2",
            title=title,
            config=tuned.stream_config,
            nominal=sweep.batches_per_rank is not None,
            **stream_fields(
                choose_stream(sweep, OWN_STREAM, *STREAM_ALGORITHMS), tuned
            ),
        )

    return Export(name=name, title=title, file=file, render=render)


EXPORTS = (
    _of_sampler("transformers", "Transformers", "batchtune_transformers.py"),
    _of_sampler("accelerate", "Accelerate", "batchtune_accelerate.py"),
    _of_sampler("lightning", "Lightning", "batchtune_lightning.py"),
    _of_sampler("pytorch", "PyTorch", "batchtune_pytorch.py"),
    _of_stream("webdataset", "WebDataset", "webdataset_stream.py"),
    _of_stream("hf-streaming", "Hugging Face streaming data sets", "hf_stream.py"),
)
