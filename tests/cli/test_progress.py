"""The progress of a worker process on a terminal."""

from __future__ import annotations

import contextlib
import os
import pty

import pytest
from report_records import made_probe, made_trial

from batchtune.cli.progress import worker_bar
from batchtune.shapes import BatchShape
from batchtune.tuning.probing import ProbeProgress

SHAPE = BatchShape(12, 24.5)


def test_a_log_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    progress = ProbeProgress(shape=SHAPE, trial=None, done=1, total=3, seconds_left=90.0, device=made_probe().device)
    with worker_bar("s", ddp=False, quiet=False) as bar:
        for now in range(100):  # noqa: B007  # the clock
            bar.probing(progress)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Trying")]
    assert len(lines) == 4  # after 10, 20, 40 and 80 s
    assert lines[0] == "Trying 12 × 24.5 s, after 10 s, about 1 min 30 s left; Ctrl-C stops it."


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
    assert "Trying 12 × 24.5 s, about 1 min 30 s left" in seen.decode()
