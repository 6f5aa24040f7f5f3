"""Python code around batchtune's own sampler and stream, which can run every row, for PyTorch and its trainers."""

from __future__ import annotations

from functools import partial

from batchtune.exports.base import Chosen, Export, Tuned, choose_stream, recommended_row
from batchtune.exports.fields import LengthLimits, Loading, stream_fields, table_fields
from batchtune.exports.run_configs import OWN_STREAM
from batchtune.exports.text import from_template, literal
from batchtune.results import STREAM_ALGORITHMS, ReadingRecord

# The DataLoader arguments that all versions of Transformers have; only 5 has the others.
_OF_TRAINING_ARGUMENTS = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")


def _render_sampler(tuned: Tuned, *, name: str, title: str) -> str:
    sweep = tuned.needed_sweep
    limits = LengthLimits.of(sweep)
    sides = [LengthLimits(limits.shortest, None), LengthLimits(None, limits.longest)]
    kept = [side.condition("lengths") for side in sides if side]
    reading = sweep.lengths.reading or ReadingRecord()
    values = ((option, getattr(reading, option)) for option in reading.__struct_fields__)
    arguments = Loading.of(tuned).arguments
    workers = "self.num_workers" if name == "lightning" else "num_workers"
    return from_template(
        f"{name}.py.j2",
        title=title,
        kept=" & ".join(kept if len(kept) == 1 else [f"({side})" for side in kept]),
        given=", ".join(f"{option}={literal(value)}" for option, value in values if isinstance(value, str)),
        config=tuned.config,
        subset=", Subset" if limits else "",
        in_arguments={f"dataloader_{one}": arguments[one] for one in _OF_TRAINING_ARGUMENTS if one in arguments},
        **table_fields(Chosen(recommended_row(sweep)), tuned, workers=workers),
    )


def _render_stream(tuned: Tuned, *, name: str, title: str) -> str:
    sweep = tuned.needed_stream
    return from_template(
        f"{name}.py.j2",
        title=title,
        config=tuned.stream_config,
        nominal=sweep.batches_per_rank is not None,
        **stream_fields(choose_stream(sweep, OWN_STREAM, *STREAM_ALGORITHMS), tuned),
    )


EXPORTS = tuple(
    Export(
        name=name,
        title=title,
        file=file,
        render=partial(render, name=name, title=title),
    )
    for name, title, file, render in (
        ("transformers", "Transformers", "batchtune_transformers.py", _render_sampler),
        ("accelerate", "Accelerate", "batchtune_accelerate.py", _render_sampler),
        ("lightning", "Lightning", "batchtune_lightning.py", _render_sampler),
        ("pytorch", "PyTorch", "batchtune_pytorch.py", _render_sampler),
        ("webdataset", "WebDataset", "webdataset_stream.py", _render_stream),
        ("hf-streaming", "Hugging Face streaming data sets", "hf_stream.py", _render_stream),
    )
)
