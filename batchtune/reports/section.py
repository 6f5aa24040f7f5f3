"""The interface of a report's sections: one for each kind of result that a run folder may hold."""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Generic, TypeVar

from batchtune.reports.rows import current_words, truncated_words
from batchtune.reports.run import RunResults
from batchtune.reports.table import UNKNOWN, Fact, Table
from batchtune.reports.verification import verification_sentences
from batchtune.results import LoaderTuning, Probe, StreamSweep, Sweep
from batchtune.units import format_length, with_full_stop

R = TypeVar("R", Probe, Sweep, StreamSweep, LoaderTuning)
S = TypeVar("S", Sweep, StreamSweep)

# A max_batch_length below this share of the one that fits is worth a warning; a rounded one is not.
_LOW_LIMIT = 0.95


class Section(ABC, Generic[R]):
    """The part of a report on one result of a run; the run's main result comes first.

    Attributes:
        title: Begins the sentences and heads the tables of a result that is not the main one.
        brief: Whether only what matters most is wanted, for one screen.
    """

    title: ClassVar[str] = ""

    def __init__(self, run: RunResults, result: R, *, brief: bool) -> None:
        self.run, self.brief = run, brief
        self.result: R = result
        self.is_main = run.main is result

    @abstractmethod
    def headline(self) -> str:
        """Say what to set, in one sentence; empty where the main result makes that unnecessary."""

    @abstractmethod
    def sentences(self) -> Iterator[str]:
        """Say what supports the headline, most important first; brief: what a table of the numbers leaves to say."""

    def evidence(self) -> Iterator[str]:
        """Say what was run for real."""
        verified = self.run.verification
        if self.is_main and verified is not None and verified.holds:
            yield from verification_sentences(verified)

    @abstractmethod
    def facts(self) -> Iterator[Fact]:
        """Name what was measured, where and how."""

    @abstractmethod
    def tables(self) -> Iterator[Table]:
        """Lay out everything that the result holds."""

    def comparison(self) -> Iterator[Table]:
        """Compare the recommended row with its alternatives, for a brief report."""
        yield from ()

    def urgent_warnings(self) -> Iterator[str]:
        """Warn of anything that makes the recommended batches unsafe or the measurements doubtful."""
        yield from ()

    def warnings(self) -> Iterator[str]:
        """Yield all other warnings."""
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

    def evidence(self) -> Iterator[str]:
        """As for every section; and whether examples were truncated, as training must."""
        yield from super().evidence()
        if self.is_main and (truncated := truncated_words(self.result.lengths)):
            yield f"{truncated}: truncate in training, too."

    def facts(self) -> Iterator[Fact]:
        """As for every section."""
        swept = self.result
        if self.is_main:
            if self.run.probe is None and swept.device_name is not None:
                yield "Device", swept.device_name
            yield limit_fact(swept, self.limit_note)
        yield from ((f"Current {self.title.lower()}".rstrip(), text) for text in current_words(swept))

    def urgent_warnings(self) -> Iterator[str]:
        """Warn if the sweep took another max_batch_length than was measured; unproven sizes have a warning already."""
        swept, probe = self.result, self.run.probe
        if probe is None or (swept.recommended_row is not None and swept.recommended_row.unproven):
            return
        used, measured, unit = swept.max_batch_length, probe.max_batch_length, swept.lengths.unit
        took, fits = format_length(used, unit), format_length(measured, unit)
        differs = f"{self.subject} took max_batch_length = {took}, but the probe measured that {fits} fits"
        if used > measured * (1 + 1e-9):
            yield f"{differs}: training may run out of memory. {self.command} again without --max-batch-length."
        elif used < measured * _LOW_LIMIT:
            yield f"{differs}: memory is left unused. {self.command} again without --max-batch-length to use it."

    def warnings(self) -> Iterator[str]:
        """Yield the sweep's own warnings."""
        yield from map(with_full_stop, self.result.warnings)

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
