"""Training steps to measure: their interface, the built-in ones by name, and options as the command line has them.

Importing this package does not import torch: a workload's module is imported where the workload is built, which is the
worker process.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from batchtune.errors import UsageError
from batchtune.results import BatchShape

if TYPE_CHECKING:
    import torch

_INTEGER = re.compile(r"[+-]?\d+")
_DECIMAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_WORDS: dict[str, Any] = {"true": True, "false": False, "none": None}


@runtime_checkable
class Workload(Protocol):
    """A training step that can be run at any batch shape.

    The worker process calls `setup` once, then `make_batch` and `step` for one shape after another, larger and smaller
    ones in any order. Between two steps, only parameters, gradients and the optimizer's state may stay in memory: a
    loss or an output that you keep holds its whole graph, and the next shape then measures too large. If memory runs
    out, the step's error must reach the caller unchanged.

    A workload that packs has an attribute `packed = True`. Then a shape is one row: `shape.sequences` holds the lengths
    of its examples, one after the other without padding, and `make_batch` makes exactly that row.
    """

    def setup(self, device: torch.device) -> None:
        """Build the model and its optimizer on the device, once; its memory limit is already in force."""

    def make_batch(self, shape: BatchShape) -> Any:
        """Make a padded batch of exactly this shape, on the device, and return whatever `step` takes.

        The values don't matter, the sizes and types do: make every example as long as the longest, the worst case of
        this shape. `length` and `target_length` (None if the manifest has no second length) are in the manifest's unit,
        such as seconds or tokens; the workload turns them into samples or frames.
        """

    def step(self, batch: Any) -> None:
        """Run one full training step: forward, loss, backward, optimizer step; a batch may come again."""


class Builtin(NamedTuple):
    """A built-in workload."""

    class_name: str  # in `workloads.builtin`, imported when it is asked for
    # Of the lengths that it stands in for if the user names no workload.
    units: tuple[str, ...]
    takes_unit: bool = False  # whether it has an option `unit`


BUILTINS: dict[str, Builtin] = {
    "conformer-ctc": Builtin(
        "ConformerCTC",
        ("s", "ms", "samples", "frames"),
        takes_unit=True,
    ),
    "transformer-lm": Builtin(
        "TransformerLM",
        ("tokens", "words", "characters", "bytes"),
    ),
}


def is_builtin(spec: str) -> bool:
    """Return whether a `--workload` value names a built-in, and so no code but batchtune's own."""
    return spec.startswith("builtin:") and spec.removeprefix("builtin:") in BUILTINS


def default_workload(unit: str | None) -> str | None:
    """Return the `--workload` value of the built-in that fits lengths of this unit; None if the unit is unknown."""
    for name, builtin in BUILTINS.items():
        if unit in builtin.units:
            return f"builtin:{name}"
    return None


def with_unit(
    spec: str, options: Mapping[str, Any], unit: str | None
) -> dict[str, Any]:
    """Return a workload's options, with the unit of the lengths if it is a built-in that takes one."""
    if (
        unit is None
        or not is_builtin(spec)
        or not BUILTINS[spec.removeprefix("builtin:")].takes_unit
    ):
        return dict(options)
    return {**options, "unit": options.get("unit", unit)}


def parse_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Read `--set key=value` options: `["layers=12", "dtype=bf16", "checkpoint=true"]`.

    `true`, `false` and `none` in any case are Python's; other values are an int, a float or the text itself. Raises
    UsageError for a pair without `=` or a key, or a repeated key.
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals_sign, text = pair.partition("=")
        key = key.strip()
        if not equals_sign or not key:
            raise UsageError(
                f"{pair!r} is not a workload option",
                "Write key=value, such as layers=12.",
            )
        if key in options:
            raise UsageError(
                f"the workload option {key!r} is set twice", f"Keep one --set {key}=..."
            )
        text = text.strip()
        if text.lower() in _WORDS:
            options[key] = _WORDS[text.lower()]
        elif _INTEGER.fullmatch(text):
            options[key] = int(text)
        elif _DECIMAL.fullmatch(text):
            options[key] = float(text)
            if math.isinf(options[key]):
                raise UsageError(
                    f"{pair!r} is larger than any float", "Write a smaller number."
                )
        else:
            options[key] = text
    return options
