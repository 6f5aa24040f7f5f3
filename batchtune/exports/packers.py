"""Frameworks that pack by a token budget of their own: the lines to set."""

from __future__ import annotations

from functools import partial

from batchtune.errors import ResultError
from batchtune.exports import export_of
from batchtune.exports.base import Tuned
from batchtune.exports.templating import from_template, packed_fields


def _render(name: str, tuned: Tuned) -> str:
    sweep = tuned.needed_sweep
    export = export_of(name)
    if sweep.packed is None:
        raise ResultError(
            f"{export.title} packs by a token budget, and the run has none",
            "Run `batchtune sweep-buckets MANIFEST --max-tokens N`.",
        )
    return from_template(
        f"{name}.{export.file.rpartition('.')[2]}.j2",
        title=export.title,
        cut_at=sweep.packed.cut_at,
        **packed_fields(tuned, sweep.packed, ()),
    )


RENDERS = {
    name: partial(_render, name)
    for name in ("verl", "openrlhf", "slime", "trl", "axolotl")
}
