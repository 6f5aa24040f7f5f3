"""The settings of a loader's tuning."""

from __future__ import annotations

import contextlib
import difflib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from batchtune.errors import UsageError
from batchtune.loaders import KINDS
from batchtune.results import Argument, WorkloadRecord, argument_text

_WORDS: dict[str, Argument] = {"true": True, "false": False, "none": None}
_MAX_VALUES = 64
# The most that a quick tuning takes of these.
_QUICK_SECONDS = 1.0
_QUICK_TRIALS = 2
_QUICK_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSettings:
    """The loader to measure, and how.

    Attributes:
        target: `FILE.py:NAME`, the user's code that makes the loader; options: of `--set`.
        kind: Of the loader; None: recognised.
        sweep: Argument → values, instead of the kind's own.
        device: Where batches go: `auto`, `cpu` or `cuda:N`.
        ranks_per_node: Ranks that share the machine's processors.
        seconds: Of measuring each setting in the first round; twice as long in each next one.
        trials: Measurements of the settings of the last round; the median counts.
        timeout_seconds: For one batch.
        setup_timeout_seconds: For importing the code and building the loader.
        step_seconds: Of each training step; None: by the run's probe, if it has one.
        quick: Whether to measure few settings, for a short time, and to end after a minute.
        config: The run's `sampler.yaml`; None without one.

    Raises:
        UsageError: A value is out of range.
    """

    target: str
    options: Mapping[str, Any] = field(default_factory=dict)
    kind: str | None = None
    sweep: Mapping[str, Sequence[Argument]] = field(default_factory=dict)
    device: str = "auto"
    ranks_per_node: int = 1
    seconds: float = 2.0
    trials: int = 3
    timeout_seconds: float = 60.0
    setup_timeout_seconds: float = 600.0
    step_seconds: float | None = None
    quick: bool = False
    stages: bool = False
    check_reproducible: bool = False
    seed: int = 0
    config: str | None = None

    def __post_init__(self) -> None:
        if self.kind is not None and self.kind not in KINDS:
            raise UsageError(f"--kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        _check_range("--seconds", self.seconds, 0.05, 3600.0)
        _check_range("--trials", self.trials, 1, 100)
        _check_range("--timeout", self.timeout_seconds, 0.1, 1e6)
        _check_range("--setup-timeout", self.setup_timeout_seconds, 0.1, 1e6)
        if self.step_seconds is not None:
            _check_range("--step-ms", 1000 * self.step_seconds, 1e-3, 1e9)
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed must be from 0 to 2**63 - 1, got {self.seed}")
        if self.ranks_per_node < 1:
            raise UsageError(f"--ranks-per-node must be at least 1, got {self.ranks_per_node}")
        if self.ranks_per_node > len(all_processors()):
            raise UsageError(
                f"--ranks-per-node {self.ranks_per_node}: this machine has {len(all_processors())} processors, and "
                "each rank needs one",
                "Run on a machine like those you train on.",
            )

    @property
    def target_record(self) -> WorkloadRecord:
        """The user's code, as `loader.json` holds it."""
        return WorkloadRecord(spec=self.target, options=dict(self.options))

    def for_quick(self) -> LoaderSettings:
        """Return the settings of a quick tuning: shorter measurements, and fewer."""
        return replace(
            self,
            quick=True,
            seconds=min(self.seconds, _QUICK_SECONDS),
            trials=min(self.trials, _QUICK_TRIALS),
            timeout_seconds=min(self.timeout_seconds, _QUICK_TIMEOUT_SECONDS),
        )

    @property
    def processors(self) -> list[int]:
        """The processors of one rank: those that this process may use / ranks per node."""
        every = all_processors()
        return every[: len(every) // self.ranks_per_node]

    def record(self) -> dict[str, Any]:
        """Return them as `loader.json` holds them."""
        record: dict[str, Any] = {
            "sweep": {name: list(values) for name, values in self.sweep.items()},
            "seconds": self.seconds,
            "trials": self.trials,
            "timeout_seconds": self.timeout_seconds,
            "ranks_per_node": self.ranks_per_node,
        }
        if self.quick:
            record["quick"] = True
        record["processors"] = len(self.processors)
        record["seed"] = self.seed
        return record


def _check_range(option: str, number: float, low: float, high: float) -> None:
    if not low <= number <= high:  # NaN is not either
        raise UsageError(f"{option} must be from {low:g} to {high:g}, got {number:g}")


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
        name, equals, values = text.partition("=")
        if not (equals and values and name.isidentifier()):
            raise UsageError(f"--sweep {text!r} is not NAME=VALUES", "For example num_workers=0:8 or pin_memory=true.")
        if name in axes:
            raise UsageError(f"--sweep {name} is given twice", "List all values in one: num_workers=0,2,4.")
        axes[name] = _values(name, values)
    return axes


def _values(name: str, text: str) -> list[Argument]:
    first, colon, last = text.partition(":")
    if colon and first.isdecimal() and last.isdecimal():
        first_number = int(first)
        last_number = int(last)
        if first_number > last_number or last_number - first_number >= _MAX_VALUES:
            raise UsageError(
                f"--sweep {name}={text}: a range goes from a smaller to a larger number, {_MAX_VALUES} at most"
            )
        return list(range(first_number, last_number + 1))
    values = [_value(word.strip()) for word in text.split(",")]
    if "" in values:
        raise UsageError(f"--sweep {name}={text}: a value is empty", "Separate values by single commas.")
    return values


def _value(word: str) -> Argument:
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            number = kind(word)
            if math.isfinite(number):
                return number
    return word


def swept_axes(
    axes: Mapping[str, Sequence[Argument]],
    sweep: Mapping[str, Sequence[Argument]],
    takes: Sequence[str],
    types: Mapping[str, Any],
) -> dict[str, Sequence[Argument]]:
    """Return the kind's axes, with the user's values in their place; further ones that the function takes come last.

    `types` are those of the kind's arguments.

    Raises:
        UsageError: An argument is neither the kind's nor one of the function's parameters, or a value can't be.
    """
    for name, values in sweep.items():
        if name not in axes and name not in takes and name not in types:
            known = [*axes, *(other for other in takes if other not in axes)]
            near = difflib.get_close_matches(name, known, n=1)
            raise UsageError(
                f"--sweep {name}: neither an argument of this loader nor a parameter of your function",
                f"Did you mean {near[0]}?"
                if near
                else f"Let your function take it. Arguments now: {', '.join(known) or 'none'}.",
            )
        if name in types and name not in takes:
            for value in values:
                try:
                    msgspec.convert(value, types[name])
                except msgspec.ValidationError as error:
                    raise UsageError(f"--sweep {name}: {argument_text(value)} can't be: {error}") from None
    return {**axes, **sweep}


def quick_note(every: Mapping[str, Sequence[Argument]], quick: Mapping[str, Sequence[Argument]]) -> str:
    """Say which values of the axes a quick tuning leaves out."""
    words = []
    for name, values in every.items():
        if left_out := [argument_text(value) for value in values if value not in quick[name]]:
            words.append(f"{name}={','.join(left_out)}")
    note = "--quick measures each setting for a short time"
    if words:
        note += f", and leaves out {' '.join(words)}"
    return f"{note}."
