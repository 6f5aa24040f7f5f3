"""The interface of a report's sections: one for each kind of result that a run folder may hold."""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Generic, TypeVar

from batchtune.reports.rows import current_words, time_error, truncated_words
from batchtune.reports.run import RunResults
from batchtune.reports.table import UNKNOWN, Fact, Table
from batchtune.results import LoaderTuning, Probe, StreamSweep, Sweep
from batchtune.units import format_length, format_percent, with_full_stop

R = TypeVar("R", Probe, Sweep, StreamSweep, LoaderTuning)
S = TypeVar("S", Sweep, StreamSweep)

# A max_batch_length below this share of the one that fits is worth a warning; a rounded one is not.
_LOW_LIMIT = 0.95
# Times with a larger error say nothing about which batches are faster.
_MOST_TIME_ERROR = 0.3


class Section(ABC, Generic[R]):
    """The part of a report on one result of a run; the run's main result comes first.

    Attributes:
        title: Begins the sentences and heads the tables of a result that is not the main one.
    """

    title: ClassVar[str] = ""

    def __init__(self, run: RunResults, result: R) -> None:
        self.run = run
        self.result: R = result
        self.is_main = run.main is result

    @abstractmethod
    def sentences(self) -> Iterator[str]:
        """Say what to set, then what supports it, most important first."""

    @property
    def leading_sentences(self) -> int:
        """How many of the sentences a brief report shows."""
        return 3 if self.is_main else 1

    @abstractmethod
    def tables(self) -> Iterator[Table]:
        """Lay out everything that the result holds."""

    @abstractmethod
    def facts(self) -> Iterator[Fact]:
        """Name what was measured, where and how."""

    def warnings(self) -> Iterator[str]:
        """Yield all warnings, each with its remedy; first those of batches that are not safe."""
        yield from ()

    def steps(self) -> Iterator[Fact]:
        """Pair each next command, or file, with its purpose, in order."""
        yield from ()

    @abstractmethod
    def settings(self) -> dict[str, list[Fact]]:
        """Return all settings that the result records, by the title of their list."""

    @property
    def workload_flags(self) -> str:
        """The flags that name the user's own training step, which `verify` runs only if the user names it.

        A result file from a stranger may name any function: only a Python file's name is repeated.
        """
        workload = self.run.probe.workload if self.run.probe else None
        if workload is None or workload.spec.startswith("builtin:"):
            return ""
        spec = shlex.quote(workload.spec) if ".py:" in workload.spec else "W"
        return f" --workload {spec}{' --set ...' if workload.options else ''}"


class SweptSection(Section[S]):
    """A section on a sweep, of bucket tables or of a stream.

    Attributes:
        subject: Its name at the start of a sentence.
        command: How a warning says to run it again.
    """

    subject: ClassVar[str]
    command: ClassVar[str]

    @property
    def time_error(self) -> float | None:
        """The relative error of the estimated times, of two standard errors; None if it is unknown."""
        row = self.result.recommended_row
        errors = []
        if row is not None:
            errors.append(time_error(row))
        if self.run.probe is not None and self.run.probe.models.step_seconds is not None:
            errors.append(self.run.probe.models.step_seconds.relative_error)
        return max((error for error in errors if error is not None), default=None)

    @property
    def has_reliable_times(self) -> bool:
        """Whether rows can be compared by their estimated times; otherwise their batches are compared."""
        error = self.time_error
        return self.result.has_times and (error is None or error <= _MOST_TIME_ERROR)

    @property
    def leading_sentences(self) -> int:
        """As for every section; a brief report also says how many examples were truncated."""
        if not self.is_main:
            return 1
        return 3 if self.result.lengths.truncated else 2

    def doubts(self, kinds: str) -> Iterator[str]:
        """Say why batches of the swept `kinds` are compared and not times, if so."""
        row = self.result.recommended_row
        if row is None or self.has_reliable_times:
            return
        if row.estimated_epoch_seconds is None:
            yield f"Step times are not known, so {kinds} are compared by batches; the time saved may be much less."
        else:
            error = format_percent(self.time_error or 0.0)
            yield (
                f"The estimated times are not reliable: their error is {error}. Batches are compared here; the time "
                "saved may be much less. Probe again with --force on a machine that does nothing else."
            )

    def truncation(self) -> Iterator[str]:
        """Say how many examples were truncated, as training must truncate them, too."""
        truncated = truncated_words(self.result.lengths)
        if truncated and self.is_main:
            yield f"{truncated}: truncate in training, too."

    def facts(self) -> Iterator[Fact]:
        """As for every section."""
        swept = self.result
        if self.is_main:
            if self.run.probe is None and swept.device_name is not None:
                yield "Device", swept.device_name
            yield limit_fact(swept, self.limit_note)
        for text in current_words(swept):
            yield f"Current {self.title.lower()}".rstrip(), text

    def warnings(self) -> Iterator[str]:
        """Warn of another max_batch_length than was measured; unproven sizes have a warning already."""
        swept = self.result
        row = swept.recommended_row
        if self.run.probe is not None and (row is None or not row.unproven):
            used = swept.max_batch_length
            measured = self.run.probe.max_batch_length
            unit = swept.lengths.unit
            differs = (
                f"{self.subject} took max_batch_length = {format_length(used, unit)}, but the probe measured that "
                f"{format_length(measured, unit)} fits"
            )
            if used > measured * (1 + 1e-9):
                yield f"{differs}: training may run out of memory. {self.command} again without --max-batch-length."
            elif used < measured * _LOW_LIMIT:
                yield f"{differs}: memory is left unused. {self.command} again without --max-batch-length to use it."
        for warning in swept.warnings:
            yield with_full_stop(warning)

    @property
    def limit_note(self) -> str:
        """A note that follows max_batch_length."""
        return ""

    def settings(self) -> dict[str, list[Fact]]:
        """As for every section, with the user's own settings."""
        of_stream = f" of the {self.title.lower()}" if self.title else ""
        current = settings_facts(self.result.current_settings or {})
        return {self.title or "Sweep": settings_facts(self.result.settings), f"Current settings{of_stream}": current}


def limit_fact(result: Probe | Sweep | StreamSweep, note: str = "") -> Fact:
    """Return max_batch_length as a fact."""
    return "Limit", f"max_batch_length = {format_length(result.max_batch_length, result.lengths.unit)}{note}"


def settings_facts(settings: Mapping[str, Any]) -> list[Fact]:
    """Return settings as a file records them, in words."""
    return [(name, value_words(value)) for name, value in settings.items()]


def value_words(value: Any) -> str:
    """Return a setting's value in words: `yes`, `10, 20`."""
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(value_words, value)) if isinstance(value, list) else str(value)
