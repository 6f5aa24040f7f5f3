"""Python code around batchtune's own sampler, which can run every row: for PyTorch and its trainers."""

from __future__ import annotations

from functools import partial

from batchtune.exports.base import Export, Tuned, recommended_row
from batchtune.exports.loader import Loading, loading_fields
from batchtune.exports.text import LengthLimits, about_data, about_row, from_template, literal, padded_remark
from batchtune.results import ReadingRecord

# Of the DataLoader's arguments; Transformers 5 has the others, too, older ones do not.
_OF_TRAINING_ARGUMENTS = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")


def _render(tuned: Tuned, *, name: str, title: str) -> str:
    sweep = tuned.needed_sweep
    limits = LengthLimits.of(sweep)
    sides = [LengthLimits(limits.shortest, None), LengthLimits(None, limits.longest)]
    kept = [side.condition("lengths") for side in sides if side]
    reading = sweep.lengths.reading or ReadingRecord()
    loading = Loading.of(tuned)
    arguments = {} if loading is None else loading.arguments
    values = ((option, getattr(reading, option)) for option in reading.__struct_fields__)
    return from_template(
        f"{name}.py.j2",
        title=title,
        about_row=about_row(recommended_row(sweep), sweep),
        about_data=about_data(sweep),
        padded=padded_remark(sweep),
        limits=limits,
        kept=" & ".join(kept if len(kept) == 1 else [f"({side})" for side in kept]),
        given=", ".join(f"{option}={literal(value)}" for option, value in values if isinstance(value, str)),
        config=tuned.config,
        subset=", Subset" if limits else "",
        in_arguments={f"dataloader_{one}": arguments[one] for one in _OF_TRAINING_ARGUMENTS if one in arguments},
        **loading_fields(tuned, workers="self.num_workers" if name == "lightning" else "num_workers"),
    )


EXPORTS = tuple(
    Export(name=name, title=title, file=f"batchtune_{name}.py", render=partial(_render, name=name, title=title))
    for name, title in (
        ("transformers", "Transformers"),
        ("accelerate", "Accelerate"),
        ("lightning", "Lightning"),
        ("pytorch", "PyTorch"),
    )
)
