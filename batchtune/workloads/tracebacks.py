"""The part of a traceback that is the user's."""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

import batchtune

LAST_LINES = 15
LONGEST_LINE = 1000

_OURS = str(Path(batchtune.__file__).parent)
_STANDARD = sysconfig.get_path("stdlib")
_PACKAGES = {"site-packages", "dist-packages"}

# As faulthandler writes them: the innermost first, after a line that says so.
_STACK_HEAD = "(most recent call first):\n"
_STACK_LINE = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


def user_traceback(error: BaseException) -> str:
    """Return the last lines of an exception's traceback, with the user's own frames only, and its message.

    Frames of batchtune, of the import system, of the standard library and of installed packages say nothing
    about where the user's code is wrong, and a deep stack inside torch would push out what does. They stay
    only if no frame of the user's is left (an installed package that is itself the workload).
    """
    report = traceback.TracebackException.from_exception(error)
    reports = [report]
    for one in reports:  # which grows
        one.stack = _own_frames(one.stack)
        linked = [other for other in (one.__cause__, one.__context__) if other is not None]
        reports += [other for other in linked if all(other is not known for known in reports)]
    return _last_lines("".join(report.format()))


def user_stack(output: str) -> str:
    """Return the user's own frames of the last stack that faulthandler printed, the innermost last; empty: none."""
    _, head, stack = output.rpartition(_STACK_HEAD)
    if not head:
        return ""
    frames = [traceback.FrameSummary(name, int(line), function) for name, line, function in _STACK_LINE.findall(stack)]
    return _last_lines("".join(_own_frames(frames[::-1]).format()))


def last_frame(stack: str) -> str:
    """`train.py, line 12, in setup`: the innermost frame of a stack as `user_stack` writes it."""
    name, line, function = re.findall(r'^  File "(.+)", line (\d+), in (.+)$', stack, re.MULTILINE)[-1]
    return f"{Path(name).name}, line {line}, in {function}"


def first_line(error: BaseException) -> str:
    """Return an exception's type and the first line of its message."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # its own __str__ fails
        lines = []
    return printable(f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__)


def printable(line: str) -> str:
    """Return a line that can be encoded and read: lone surrogates escaped, cut to `LONGEST_LINE` characters."""
    text = line.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= LONGEST_LINE else f"{text[:LONGEST_LINE]}…"


def _last_lines(text: str) -> str:
    return "\n".join(printable(line) for line in text.splitlines()[-LAST_LINES:])


def _own_frames(stack: Iterable[traceback.FrameSummary]) -> traceback.StackSummary:
    foreign = [frame for frame in stack if not frame.filename.startswith((_OURS, "<frozen"))]
    own = [
        frame
        for frame in foreign
        if not frame.filename.startswith(_STANDARD) and not _PACKAGES.intersection(Path(frame.filename).parts)
    ]
    return traceback.StackSummary.from_list(own or foreign)
