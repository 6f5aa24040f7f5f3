"""Starts a command in a terminal's foreground, as a shell does."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence

from batchtune.errors import UsageError


def run_to_the_end(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command to its end, and return its exit code, 128 + the signal that killed it.

    It gets this process's input and output, SIGTERM, and from a terminal Ctrl-C too. Raises UsageError if it can't be
    started.
    """
    try:
        process = subprocess.Popen(words, env=environment)
    except OSError as error:
        raise UsageError(
            f"{words[0]} can't be started: {error.strerror or error}",
            "Give the command as in a shell: -- python train.py",
        ) from error
    # Ctrl-C in a terminal reaches the script as well, which decides what to do.
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    on_termination = signal.signal(
        signal.SIGTERM, lambda *_: process.send_signal(signal.SIGTERM)
    )
    try:
        code = process.wait()
    finally:
        signal.signal(signal.SIGINT, on_interrupt)
        signal.signal(signal.SIGTERM, on_termination)
    return code if code >= 0 else 128 - code
