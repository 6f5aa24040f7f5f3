"""The figures of the evidence harness: records, their files, and the table that is made of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from batchtune.files import write_whole

FORMAT = "batchtune/evidence"


class Missing(Exception):
    """A part can't measure what it should; what it has stays."""


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One measured figure.

    Attributes:
        what: What was measured, as a row of a table says it.
        shown: The figure as text.
        values: The numbers in it, by name, with their units in the names.
    """

    what: str
    shown: str
    values: dict[str, Any]


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """`PART.json`.

    Attributes:
        command: What was run.
        device: As `--device` named it.
        machine: As `batchtune doctor --json` describes it.
        seconds: That the part took so far, in all calls.
        missing: What it should have measured and did not; empty where it is complete.
        notes: What to know of the figures.
        data: What they were worked out from.
    """

    format: str = FORMAT
    version: int = 1
    part: str
    command: str
    device: str
    machine: dict[str, Any]
    seconds: float
    complete: bool
    missing: list[str]
    notes: list[str]
    figures: list[Figure]
    data: dict[str, Any]

    @property
    def machine_name(self) -> str:
        """The GPU, or the CPU where that was measured."""
        if self.device.startswith("cpu"):
            return f"{self.machine['cpu']['name']} (CPU)"
        index = self.device if ":" in self.device else "cuda:0"
        return next(
            (gpu["name"] for gpu in self.machine["gpus"] if gpu["device"] == index),
            "unknown GPU",
        )


class Record:
    """One part's figures as they come: printed, and written at once, so that the next call goes on where this ends.

    Args:
        notes: What to know of the figures.
        earlier: What earlier calls have measured.
    """

    def __init__(
        self,
        part: str,
        path: Path,
        command: str,
        device: str,
        machine: dict[str, Any],
        notes: list[str],
        earlier: Evidence | None = None,
    ) -> None:
        self.data: dict[str, Any] = earlier.data if earlier else {}
        self.data.setdefault("done", [])
        self._path = path
        self._notes = list(dict.fromkeys([*(earlier.notes if earlier else []), *notes]))
        self._head = {
            "part": part,
            "command": command,
            "device": device,
            "machine": machine,
        }
        self._figures: list[Figure] = list(earlier.figures) if earlier else []
        self._missing: list[str] = []
        self._finished = False
        self._earlier_seconds = earlier.seconds if earlier else 0.0
        self._started = time.monotonic()
        self.save()

    @property
    def complete(self) -> bool:
        """Whether the part came to its end and nothing is missing."""
        return self._finished and not self._missing

    @property
    def seconds(self) -> float:
        """That the part took so far, in all calls."""
        return self._earlier_seconds + time.monotonic() - self._started

    def is_done(self, step: str) -> bool:
        """Whether this call or an earlier one came to the end of a step of the part."""
        return step in self.data["done"]

    def done(self, step: str) -> None:
        """Keeps that a step came to its end: no later call runs it again."""
        self.data["done"].append(step)
        self.save()

    def figure(self, what: str, shown: str, **values: Any) -> None:
        """Keeps and prints one, in the place of an earlier one of the same."""
        self._figures = [figure for figure in self._figures if figure.what != what]
        self._figures.append(Figure(what=what, shown=shown, values=values))
        print(f"  {what}: {shown}", flush=True)
        self.save()

    def miss(self, what: str) -> None:
        """Names what could not be measured."""
        self._missing.append(what)
        print(f"  missing: {what}", flush=True)
        self.save()

    def note(self, what: str) -> None:
        """Says what to know of the figures."""
        if what not in self._notes:
            self._notes.append(what)
        print(f"  note: {what}", flush=True)

    def finish(self) -> None:
        """Writes the file for the last time."""
        self._finished = True
        self.save()
        print(
            f"  {self._path}: {'complete' if self.complete else 'not complete'}",
            flush=True,
        )

    def save(self) -> None:
        """Writes the file."""
        evidence = Evidence(
            **self._head,
            seconds=round(self.seconds, 1),
            complete=self.complete,
            missing=self._missing
            if self._finished or self._missing
            else ["still running, or killed"],
            notes=self._notes,
            figures=self._figures,
            data=self.data,
        )
        write_whole(
            self._path,
            msgspec.json.format(msgspec.json.encode(evidence), indent=1) + b"\n",
        )


def read_evidence(path: Path) -> Evidence:
    """Reads one.

    Raises:
        ValueError: It is not a file of this harness.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Evidence)
    except (OSError, msgspec.MsgspecError) as error:
        raise ValueError(f"{path}: {error}") from None
    if (found.format, found.version) != (FORMAT, 1):
        raise ValueError(f"{path}: not a file of this harness, or of another version")
    return found


def summarise(folders: Sequence[Path]) -> int:
    """Prints all figures as rows of a Markdown table, machine by machine; 1 where files can't be read or are absent."""
    found: dict[str, list[Evidence]] = {}
    problems: list[str] = []
    for folder in folders:
        paths = sorted(folder.glob("*.json"))
        problems += [] if paths else [f"{folder}: no PART.json in it"]
        for path in paths:
            try:
                evidence = read_evidence(path)
            except ValueError as error:
                problems.append(str(error))
            else:
                found.setdefault(evidence.machine_name, []).append(evidence)
    for name, all_of_it in found.items():
        print("\n".join(_table(name, all_of_it)))
    for problem in problems:
        print(f"Error: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _table(name: str, all_of_it: Sequence[Evidence]) -> Iterator[str]:
    yield f"Measured on {name}:\n\n| what | figure | command |\n|---|---|---|"
    for evidence in all_of_it:
        for figure in evidence.figures:
            cells = (figure.what, figure.shown, f"`{evidence.command}`")
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    for evidence in all_of_it:
        for kind, texts in (("note", evidence.notes), ("missing", evidence.missing)):
            for text in texts:
                yield f"\n{evidence.part}: {kind}: {text}"
    yield ""
