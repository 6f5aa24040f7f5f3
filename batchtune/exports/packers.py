"""Frameworks that pack by a token budget of their own: the lines to set."""

from __future__ import annotations

from batchtune.errors import ResultError
from batchtune.exports.base import Export, Tuned
from batchtune.exports.templating import from_template, packed_fields


def _of_packer(name: str, title: str, file: str) -> Export:
    def render(tuned: Tuned) -> str:
        sweep = tuned.needed_sweep
        if sweep.packed is None:
            raise ResultError(
                f"{title} packs by a token budget, and the run has none",
                "Run `batchtune sweep-buckets MANIFEST --max-tokens N`.",
            )
        return from_template(
            f"{name}.{file.rpartition('.')[2]}.j2",
            title=title,
            cut_at=sweep.packed.cut_at,
            **packed_fields(tuned, sweep.packed, ()),
        )

    return Export(name=name, title=title, file=file, render=render)


EXPORTS = (
    _of_packer("verl", "verl", "batchtune_verl.txt"),
    _of_packer("openrlhf", "OpenRLHF", "batchtune_openrlhf.txt"),
    _of_packer("slime", "slime", "batchtune_slime.txt"),
    _of_packer("trl", "TRL", "batchtune_trl.py"),
    _of_packer("axolotl", "axolotl", "batchtune_axolotl.yaml"),
)
