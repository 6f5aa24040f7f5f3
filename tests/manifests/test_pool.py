"""Processes that read along: what is lost with one that is killed is read again, and none is waited for in vain."""

import os
import signal

import pytest

from batchtune.errors import ManifestError
from batchtune.manifests import ReadOptions, load_lengths, reading

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL"),
]


def parts_never_read(tasks):
    if tasks[0].source.name == "b.csv":
        signal.pause()
    return reading.read_together(tasks)


def killed_parts(tasks):
    """As the kernel ends a process that takes too much memory."""
    if tasks[0].source.name == "b.csv":
        os.kill(os.getpid(), signal.SIGKILL)
    return reading.read_together(tasks)


@pytest.fixture
def manifests(tmp_path, monkeypatch):
    for name in "abc":
        (tmp_path / f"{name}.csv").write_text("id,duration\nx,1\ny,2\n")
    monkeypatch.setattr(reading, "_WORTH_BYTES", 0)
    return str(tmp_path / "*.csv")


def test_a_source_that_kills_every_process_is_one_error(manifests, monkeypatch):
    monkeypatch.setattr(reading, "read_together", killed_parts)
    with pytest.raises(ManifestError, match="a process that read was killed") as caught:
        load_lengths(manifests, jobs=2)
    assert "memory" in caught.value.message


def test_busy_processes_are_not_waited_for(manifests, monkeypatch):
    monkeypatch.setattr(reading, "read_together", parts_never_read)
    _, tasks = reading.planned(manifests, ReadOptions())

    def interrupt(index, part):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # comes back
        reading.read_all(tasks, 2, None, interrupt)
