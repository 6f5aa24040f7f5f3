"""The progress of a worker process on a terminal."""

from __future__ import annotations

import contextlib
import os
import pty
from dataclasses import dataclass
from threading import Event
from typing import Any, cast

import pytest
from report_records import made_probe, made_trial

from batchtune.cli.progress import worker_bar
from batchtune.probe.hooks import ProbeProgress
from batchtune.shapes import BatchShape

SHAPE = BatchShape(12, 24.5)


def progress_of(**changes: Any) -> ProbeProgress:
    facts = {"shape": SHAPE, "trial": None, "done": 1, "total": 3, "seconds_left": 90.0, "device": made_probe().device}
    return ProbeProgress(**{**facts, **changes})


@dataclass
class Clock:
    """Passes half a second with each wait, up to an end; stands for the monotonic clock and for the event."""

    seconds: float
    now: float = 0.0

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        return self.now > self.seconds


def test_a_log_is_never_silent_for_30_s(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock(seconds=300)
    with worker_bar("s", ddp=False, quiet=True) as bar:
        monkeypatch.setattr("time.monotonic", clock.monotonic)
        bar.probing(progress_of())  # and then nothing more: one long trial
        bar.write_lines(cast(Event, clock))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "1 of 3 lengths done, trying 12 × 24.5 s, after 10 s, about 1 min 20 s left; Ctrl-C stops it."
    # After 10, 20 and 40 s, then every 29 s.
    assert len(lines) == 11


def test_the_confirmation_names_n_of_m_and_the_time_left() -> None:
    with worker_bar("s", ddp=False, quiet=True) as bar:
        bar.probing(progress_of(confirming=True, done=4, total=17, seconds_left=600.0))
        line = bar.line(45.0)
    assert line.startswith("Confirming in turns, step 5 of 17: 12 × 24.5 s, after 45 s, about ")
    assert line.endswith(" left; Ctrl-C stops it.")


def test_a_terminal_shows_each_trial_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    device = made_probe().device
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        with worker_bar("s", ddp=False, quiet=False) as bar:
            for trial in (None, made_trial(0, "oom")):
                bar.probing(ProbeProgress(shape=SHAPE, trial=trial, done=1, total=3, seconds_left=90.0, device=device))
    seen = b""
    with contextlib.suppress(OSError):  # raised once all is read, as the other side is closed
        while data := os.read(ours, 1 << 16):
            seen += data
    os.close(ours)
    assert f"Device: {device.name}" in seen.decode()
    assert "12 × 24.5 s  out of memory" in seen.decode()
    assert "trying 12 × 24.5 s, about 1 min 30 s left" in seen.decode()
