"""The part of a traceback that is the user's."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

import batchtune

LAST_LINES = 15
LONGEST_LINE = 1000

_OURS = str(Path(batchtune.__file__).parent)
_LIBRARIES = ("site-packages", "dist-packages")


def user_traceback(error: BaseException) -> str:
    """The last lines of an exception's traceback, with the user's own frames only.

    Frames of batchtune, of the import system, of the standard library and of installed packages say nothing
    about where the user's code is wrong, and a deep stack inside torch would push out what does. They stay
    only where no frame of the user's is left (an installed package that is itself the workload).

    Returns:
        At most `LAST_LINES` lines, the exception's own message last.
    """
    report = traceback.TracebackException.from_exception(error)
    _keep_own_frames(report, set())
    return "\n".join(printable(line) for line in "".join(report.format()).splitlines()[-LAST_LINES:])


def first_line(error: BaseException) -> str:
    """An exception's type and the first line of its message."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # its own __str__ fails
        lines = []
    return printable(f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__)


def printable(line: str) -> str:
    """A line that can be encoded and read: lone surrogates escaped, cut to `LONGEST_LINE` characters."""
    text = line.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= LONGEST_LINE else f"{text[:LONGEST_LINE]}…"


def _keep_own_frames(report: traceback.TracebackException, seen: set[int]) -> None:
    seen.add(id(report))
    foreign = [f for f in report.stack if not f.filename.startswith((_OURS, "<frozen"))]
    own = [f for f in foreign if not _is_library(f.filename)]
    report.stack = traceback.StackSummary.from_list(own or foreign)
    for linked in (report.__cause__, report.__context__):
        if linked is not None and id(linked) not in seen:
            _keep_own_frames(linked, seen)


def _is_library(filename: str) -> bool:
    if any(part in _LIBRARIES for part in Path(filename).parts):
        return True
    return filename.startswith(sysconfig.get_path("stdlib"))
