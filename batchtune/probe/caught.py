"""Notices a lack of memory that the workload catches itself, so that its step returns as if it had passed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from batchtune.probe.oom import error_verdict
from batchtune.workloads.tracebacks import first_line


@contextmanager
def noting_ooms(found: list[str]) -> Iterator[None]:
    """Notes the first lack of memory that is raised within, whether or not it gets out.

    Python calls back for every exception that passes a frame of this thread (`sys.settrace`), and for every call: a
    step takes a little longer, so none that is timed should run in here.

    Args:
        found: Gets the error's first line and where it was raised, once.
    """

    def on_event(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "call":
            frame.f_trace_lines = False
        elif event == "exception" and not found and error_verdict(argument[1]) == "oom":
            found.append(f"{first_line(argument[1])} ({Path(frame.f_code.co_filename).name}, line {frame.f_lineno})")
        return on_event

    before = sys.gettrace()
    sys.settrace(on_event)
    try:
        yield
    finally:
        sys.settrace(before)
