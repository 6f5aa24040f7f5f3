"""The kernel's counter of what its OOM killer did."""

import signal

import pytest

from batchtune.processes.worker import judged_end, oom_kills


def test_this_machine_has_a_count() -> None:
    assert oom_kills() is not None


def test_a_kill_is_an_oom_only_if_the_kernel_counted_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cases = {
        (3, 3): False,
        (3, 4): True,
        (None, None): True,
        (3, None): False,
        (None, 3): False,
    }
    for (before, after), killed in cases.items():
        monkeypatch.setattr(
            "batchtune.processes.worker.oom_kills", lambda after=after: after
        )
        outcome, how = judged_end(-signal.SIGKILL, "", before)
        assert outcome == ("oom" if killed else "crash"), (before, after)
        assert how == "was killed by SIGKILL"
