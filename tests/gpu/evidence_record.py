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
        seconds: That the part took so far.
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
        return next((gpu["name"] for gpu in self.machine["gpus"] if gpu["device"] == index), "unknown GPU")


class Record:
    """One part's figures as they come: printed, and written at once, so that nothing is lost."""

    def __init__(
        self, part: str, path: Path, command: str, device: str, machine: dict[str, Any], notes: list[str]
    ) -> None:
        self.data: dict[str, Any] = {}
        self._path, self._notes = path, notes
        self._head = {"part": part, "command": command, "device": device, "machine": machine}
        self._figures: list[Figure] = []
        self._missing: list[str] = []
        self._finished = False
        self._started = time.monotonic()
        self._write()

    @property
    def complete(self) -> bool:
        """Whether the part came to its end and nothing is missing."""
        return self._finished and not self._missing

    def figure(self, what: str, shown: str, **values: Any) -> None:
        """Keeps and prints one."""
        self._figures.append(Figure(what=what, shown=shown, values=values))
        print(f"  {what}: {shown}", flush=True)
        self._write()

    def miss(self, what: str) -> None:
        """Names what could not be measured."""
        self._missing.append(what)
        print(f"  missing: {what}", flush=True)
        self._write()

    def note(self, what: str) -> None:
        """Says what to know of the figures."""
        self._notes.append(what)
        print(f"  note: {what}", flush=True)

    def finish(self) -> None:
        """Writes the file for the last time."""
        self._finished = True
        self._write()
        print(f"  {self._path}: {'complete' if self.complete else 'not complete'}", flush=True)

    def _write(self) -> None:
        evidence = Evidence(
            **self._head,
            seconds=round(time.monotonic() - self._started, 1),
            complete=self.complete,
            missing=self._missing if self._finished or self._missing else ["still running, or killed"],
            notes=self._notes,
            figures=self._figures,
            data=self.data,
        )
        write_whole(self._path, msgspec.json.format(msgspec.json.encode(evidence), indent=1) + b"\n")


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
