"""The progress of a worker process: a bar on a terminal, lines in a log."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pty
from dataclasses import dataclass

from msgspec.structs import replace
from report_records import made_probe, made_trial

from batchtune.cli.console import Progress, worker_bar
from batchtune.probe.messages import ProbeProgress
from batchtune.probe.settings import ProbeSettings
from batchtune.results import BatchShape
from batchtune.verify import VerifyProgress

SHAPE = BatchShape(12, 24.5)
DEVICE = made_probe().device
LAW = "law:constant=100MB,linear=1MB,limit=8GB"
WORKLOAD = ProbeSettings(workload="step.py:Step", options={})


def progress_of(**changes):
    made = ProbeProgress(
        shape=SHAPE, trial=None, done=1, total=3, seconds_left=90.0, device=DEVICE
    )
    return dataclasses.replace(made, **changes)


@dataclass
class Clock:
    """Passes half a second with each wait, up to an end; stands for the monotonic clock and for the event."""

    seconds: float
    now: float = 0.0

    def monotonic(self):
        return self.now

    def wait(self, seconds):
        self.now += seconds
        return self.now > self.seconds


def test_a_log_is_never_silent_for_30_s(monkeypatch, capsys):
    clock = Clock(seconds=300)
    monkeypatch.setattr("time.monotonic", clock.monotonic)
    bar = Progress("Building the workload", started=0.0)
    # And then nothing more: one long trial.
    bar.update("1 of 3 lengths done", 1, 3, 90.0)
    bar.write_lines(clock)
    lines = capsys.readouterr().err.splitlines()
    first = "1 of 3 lengths done, after 10 s, about 1 min 20 s left; Ctrl-C stops it."
    assert lines[0] == first
    # After 10, 20 and 40 s, then every 29 s.
    assert len(lines) == 11


def test_confirmation_and_proof_name_n_of_m():
    with worker_bar("s", WORKLOAD, quiet=True) as shown:
        shown.probing(progress_of(confirming=True, done=4, total=17))
        assert shown.bar.doing == "Confirming interleaved batches, 5 of 17: 12 × 24.5 s"
        step = {"shape": SHAPE, "done": 4, "total": 17, "device": DEVICE}
        shown.verifying(VerifyProgress(phase="shuffled", process=2, **step))
        assert shown.bar.doing == "Shuffled batches in process 2, 5 of 17: 12 × 24.5 s"
        shown.verifying(VerifyProgress(phase="replayed", **step))
    replaying = "Replaying the memory requests of 17 steps, such as 12 × 24.5 s"
    assert shown.bar.doing == replaying


def test_what_the_user_set_and_what_changes_is_explained(capsys):
    with worker_bar("s", WORKLOAD, quiet=True) as bar:
        bar.probing(progress_of(total=12))
        assert bar.bar.doing == "1 of 12 lengths done, trying 12 × 24.5 s"
        bar.probing(progress_of(total=16))
    assert "lengths done (4 added where the bucket tables gain)" in bar.bar.doing
    taken = replace(WORKLOAD, memory_bytes=2 * DEVICE.limit_bytes)
    with worker_bar("s", taken, quiet=False) as bar:
        bar.probing(progress_of(total=12))
    assert "(no more is free on the device)" in capsys.readouterr().err


def test_a_script_s_first_batches_have_the_setups_time_limit():
    script = replace(WORKLOAD, command=["train.py"], setup_timeout_seconds=90.0)
    with worker_bar("s", script, quiet=True) as shown:
        why = "Waiting for the script's first batches, at most 1 min 30 s (--setup-timeout)"
        assert shown.bar.doing == why


def test_a_terminal_shows_each_trial_and_the_time_left(monkeypatch):
    ours, theirs = pty.openpty()
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        with worker_bar("s", replace(WORKLOAD, ddp=True), quiet=False) as bar:
            for trial in (None, made_trial(0, "oom")):
                bar.probing(progress_of(trial=trial))
    seen = b""
    # Raised once all is read, as the other side is closed.
    with contextlib.suppress(OSError):
        while data := os.read(ours, 1 << 16):
            seen += data
    os.close(ours)
    text = seen.decode()
    assert f"Device: {DEVICE.name}" in text
    assert "Warning: --ddp keeps nothing free" in text
    assert "12 × 24.5 s  out of memory" in text
    assert "trying 12 × 24.5 s, about 1 min 30 s left" in text


def test_memory_kept_free_lowers_the_limit_and_is_noted(succeed, tmp_path):
    # Every batch fits: nothing is searched for.
    (tmp_path / "few.csv").write_text("id,duration\na,1\nb,2\n")
    memory = ["--device", LAW, "--memory", "1GiB", "--memory-fraction", "0.5"]
    ran = succeed("probe-oom", "few.csv", *memory, "--reserve", "20MiB", "--ddp")
    assert "; limit 492 MiB (50% of --memory, by --memory-fraction)." in ran.stderr
    assert "20 MiB are kept free" in ran.stderr
