"""The command line: parse, call, print, exit. The only code that prints or exits.

The exit code depends on the command alone: a reader that stops (`| head`) or a closed stdout (`>&-`) does not change
it, so a failing gate does not pass in a pipeline.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO


def main() -> None:
    """Run the command line: the entry point `batchtune`."""
    sys.stdout, sys.stderr = _outliving(sys.stdout, 1), _outliving(sys.stderr, 2)
    try:
        from batchtune.cli.app import app
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    app(prog_name="batchtune")


class _Dropping(io.FileIO):
    """A file descriptor that leads nowhere once its reader has gone. Other errors, such as a full disk, are raised."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return memoryview(data).nbytes


def _outliving(stream: TextIO | None, descriptor: int) -> TextIO:
    """Return a stream that drops what nobody reads any more, if it is a pipe, a file or closed."""
    # Closed when the process was started; a file opened later must not take its place.
    if stream is None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        if nowhere != descriptor:
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
        return open(descriptor, "w", encoding="utf-8", closefd=False)
    if not isinstance(stream, io.TextIOWrapper) or stream.isatty():
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(_Dropping(descriptor, "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
    )
