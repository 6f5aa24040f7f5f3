"""The three tiers of tests, by what they cost: a pytest plugin that holds them to it.

unit      Starts no process: the bulk.
process   Starts processes, and takes seconds: `@pytest.mark.process`.
slow      Takes longer, and runs with `-m slow`: `@pytest.mark.slow`.

A unit test that starts a process fails, `test_house.py` counts the tests of the other tiers, and each run ends with the
slowest tests of each tier, so that the next person sees where the time goes.
"""

import sys
from collections import Counter, defaultdict

import pytest

MOST_TESTS = {"process": 150, "slow": 120}
collected = Counter()
"""How many tests of each tier were collected, those included that `-m` leaves out."""
_SHOWN = 10
_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec"}

started = []
"""The processes that the running test has started."""
_seconds = defaultdict(lambda: defaultdict(float))


def tier_of(keywords):
    """The tier of a test with these keywords, which hold its markers' names."""
    if "slow" in keywords:
        return "slow"
    if "process" in keywords:
        return "process"
    return "unit"


def _note_start(event, arguments):
    if event in _STARTS:
        started.append(f"{event} {arguments[:2]}"[:200])


sys.addaudithook(_note_start)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    started.clear()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item):
    result = yield
    if started and tier_of(item.keywords) == "unit":
        pytest.fail(
            f"a unit test started a process ({started[0]}): mark it `process`, or test it without one",
            pytrace=False,
        )
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    collected.update(tier_of(item.keywords) for item in items)


def pytest_runtest_logreport(report):
    _seconds[tier_of(report.keywords)][report.nodeid] += report.duration


def pytest_terminal_summary(terminalreporter):
    for tier, seconds in sorted(_seconds.items()):
        count = len(seconds)
        total = sum(seconds.values())
        terminalreporter.section(f"{tier}: {count} tests, {total:.0f} s")
        slowest = sorted(seconds, key=seconds.__getitem__, reverse=True)
        for name in slowest[:_SHOWN]:
            terminalreporter.write_line(f"{seconds[name]:7.2f} s  {name}")
