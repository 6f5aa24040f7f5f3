"""How a process ended: whether it was out of memory, and the kernel's counter of what its OOM killer did."""

import signal

import pytest

from batchtune.processes.worker import judged_end, oom_kills


def test_this_machine_has_a_count():
    assert oom_kills() is not None


def test_a_kill_is_an_oom_only_if_the_kernel_counted_one(monkeypatch):
    cases = {
        (3, 3): "crash",
        (3, 4): "oom",
        (None, None): "oom",
        (3, None): "crash",
        (None, 3): "crash",
    }
    for (before, after), outcome in cases.items():
        monkeypatch.setattr(
            "batchtune.processes.worker.oom_kills", lambda after=after: after
        )
        judged = judged_end(-signal.SIGKILL, "", before)
        assert judged == (outcome, "was killed by SIGKILL"), (before, after)


@pytest.mark.parametrize(
    ("code", "output", "outcome", "how"),
    [
        (0, "", "crash", "ended with exit code 0"),
        (3, "MemoryError", "crash", "ended with exit code 3"),
        (1, "Traceback\nMemoryError\n", "oom", "ended with exit code 1"),
        (1, "MemoryError\nValueError: no", "crash", "ended with exit code 1"),
        (-signal.SIGABRT, "std::bad_alloc", "oom", "was killed by SIGABRT"),
        (-signal.SIGABRT, "Cannot allocate memory", "oom", "was killed by SIGABRT"),
        (-signal.SIGABRT, "assertion failed", "crash", "was killed by SIGABRT"),
        (-signal.SIGSEGV, "std::bad_alloc", "crash", "was killed by SIGSEGV"),
        (-200, "", "crash", "was killed by signal 200"),
    ],
)
def test_an_end_is_judged_by_exit_code_and_last_words(code, output, outcome, how):
    assert judged_end(code, output, oom_kills()) == (outcome, how)
