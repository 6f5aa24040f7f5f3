"""Python code around batchtune's own sampler, which can run every row: for PyTorch and its trainers."""

from __future__ import annotations

from functools import partial

from batchtune.exports.base import Export, Tuned, choose_row
from batchtune.exports.text import LengthLimits, about_data, about_row, from_template, literal, padded_remark
from batchtune.results import ReadingRecord

_LEAVE_OUT = (
    "Leave them out of training, too: dataset, lengths = within_limits(dataset, lengths), before all else; the "
    "sampler refuses longer ones. `lengths` is then an array, not the path of the manifest"
)


def _render(tuned: Tuned, *, name: str, title: str) -> str:
    sweep = tuned.sweep
    limits = LengthLimits.of(sweep)
    after = [*padded_remark(sweep), *limits.left_out]
    kept = ""
    if limits:
        after.append(_LEAVE_OUT)
        sides = [LengthLimits(limits.shortest, None), LengthLimits(None, limits.longest)]
        conditions = [side.condition("lengths") for side in sides if side]
        kept = " & ".join(conditions if len(conditions) == 1 else [f"({side})" for side in conditions])
    else:
        reading = sweep.lengths.reading or ReadingRecord()
        values = ((name, getattr(reading, name)) for name in reading.__struct_fields__)
        if given := [f"{name}={literal(value)}" for name, value in values if isinstance(value, str)]:
            after.append(f"With the path of the manifest, from_config needs to know how it is read: {', '.join(given)}")
    return from_template(
        f"{name}.py.j2",
        about=[f"{title}: {about_row(choose_row(sweep, title).row, sweep)}", about_data(sweep)],
        after=after,
        kept=kept,
        condition=limits.condition("length"),
        config=literal(tuned.config),
        subset=", Subset" if limits else "",
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
