"""The settings of a loader's tuning."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from batchtune.errors import UsageError, did_you_mean, invalid_field
from batchtune.loaders import KINDS, LoaderKind, SweptArguments
from batchtune.results import Argument, Seed, WorkloadRecord, argument_text
from batchtune.workloads import parse_options

_MAX_VALUES = 64
_Timeout = Annotated[float, msgspec.Meta(ge=0.1, le=1e6)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSettings:
    """The loader to measure, and how; `results.checked` checks the types and ranges.

    Attributes:
        target: `FILE.py:NAME`, the user's code that makes the loader; options: of `--set`.
        kind: Of the loader; None: recognised.
        sweep: Argument → values, instead of the kind's own.
        device: Where batches go: `auto`, `cpu` or `cuda:N`.
        ranks_per_node: Ranks that share the machine's processors.
        seconds: Of measuring each setting.
        trials: Measurements of the best settings; the median counts.
        timeout_seconds: For one batch.
        setup_timeout_seconds: For importing the code and building the loader.
        step_ms: Time of a training step; None: by the run's probe, if it has one.
        config: The run's `sampler.yaml`; None without one.

    Raises:
        UsageError: There is no such kind, or too few processors.
    """

    target: str
    options: Mapping[str, Any] = field(default_factory=dict)
    kind: str | None = None
    sweep: Mapping[str, Sequence[Argument]] = field(default_factory=dict)
    device: str = "auto"
    ranks_per_node: int = 1
    seconds: Annotated[float, msgspec.Meta(ge=0.05, le=3600)] = 2.0
    trials: Annotated[int, msgspec.Meta(ge=1, le=100)] = 3
    timeout_seconds: _Timeout = 60.0
    setup_timeout_seconds: _Timeout = 600.0
    step_ms: Annotated[float, msgspec.Meta(ge=1e-3, le=1e9)] | None = None
    check_reproducible: bool = False
    seed: Seed = 0
    config: str | None = None

    def __post_init__(self) -> None:
        if self.kind is not None and self.kind not in KINDS:
            raise UsageError(
                f"--kind must be one of {', '.join(KINDS)}, got {self.kind!r}"
            )
        processors = len(all_processors())
        if not 1 <= self.ranks_per_node <= processors:
            raise UsageError(
                f"--ranks-per-node {self.ranks_per_node}: this machine has {processors} processors, and each rank "
                "needs one",
                "Run on a machine like those you train on.",
            )

    @property
    def target_record(self) -> WorkloadRecord:
        """The user's code, as `loader.json` holds it."""
        return WorkloadRecord(spec=self.target, options=dict(self.options))

    @property
    def processors(self) -> list[int]:
        """The processors of one rank: those that this process may use / ranks per node."""
        every = all_processors()
        return every[: len(every) // self.ranks_per_node]

    def record(self) -> dict[str, Any]:
        """Return them as `loader.json` holds them."""
        names = (
            "seconds",
            "trials",
            "timeout_seconds",
            "ranks_per_node",
            "seed",
        )
        return {
            "sweep": {name: list(values) for name, values in self.sweep.items()},
            "processors": len(self.processors),
            **{name: getattr(self, name) for name in names},
        }


def all_processors() -> list[int]:
    """Return the processors that this process may use, in order."""
    return sorted(os.sched_getaffinity(0))


def parse_sweep(texts: Sequence[str]) -> dict[str, list[Argument]]:
    """Read `num_workers=0:8`, `prefetch_factor=2,4` or `eval_mode=eager,sync_cpu` of `--sweep`.

    Raises:
        UsageError: One is not of that form, or an argument is given twice.
    """
    axes: dict[str, list[Argument]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        if not (values and name.isidentifier()):
            raise UsageError(
                f"--sweep {text!r} is not NAME=VALUES",
                "For example num_workers=0:8 or pin_memory=true.",
            )
        if name in axes:
            raise UsageError(
                f"--sweep {name} is given twice",
                "List all values in one: num_workers=0,2,4.",
            )
        axes[name] = _values(text, values)
    return axes


def _values(text: str, values: str) -> list[Argument]:
    first, _, last = values.partition(":")
    if first.isdecimal() and last.isdecimal():
        numbers = range(int(first), int(last) + 1)
        if not 0 < len(numbers) <= _MAX_VALUES:
            raise UsageError(
                f"--sweep {text}: a range goes from a smaller to a larger number, {_MAX_VALUES} at most"
            )
        return list(numbers)
    words = values.split(",")
    if not all(map(str.strip, words)):
        raise UsageError(
            f"--sweep {text}: a value is empty", "Separate values by single commas."
        )
    return [parse_options([f"value={word}"])["value"] for word in words]


def swept_axes(
    kind: LoaderKind, axes: SweptArguments, sweep: SweptArguments, takes: Sequence[str]
) -> SweptArguments:
    """Return the axes with the user's values in their place; further ones come last.

    Raises:
        UsageError: An argument is neither the kind's nor one of the function's parameters, or a value can't be.
    """
    for name, values in sweep.items():
        if name not in (*axes, *takes, *kind.ARGUMENTS):
            known = list(dict.fromkeys([*axes, *takes]))
            raise UsageError(
                f"--sweep {name}: neither an argument of this loader nor a parameter of your function",
                f"{did_you_mean(name, known)}Arguments now: {', '.join(known) or 'none'}.",
            )
        if name in kind.ARGUMENTS and name not in takes:
            for value in values:
                try:
                    msgspec.convert(value, kind.ARGUMENTS[name])
                except msgspec.ValidationError as error:
                    raise UsageError(
                        f"--sweep {name}: {argument_text(value)} {invalid_field(error)}"
                    ) from None
    return {**axes, **sweep}
