"""What needs a CUDA device: skipped, by name, where there is none. Run with `python -m pytest tests/gpu`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NoReturn

import pytest

from batchtune.processes.worker import Nursery

REPORT = "EVIDENCE_REPORT"
"""Environment variable: a file that gets a line of JSON after each test."""
DONE = "EVIDENCE_DONE"
"""Environment variable: names of tests to leave out, one a line."""


HERE = Path(__file__).parent

# Test processes that run side by side have emulated devices each (tests/emulated_cuda).
if "EMULATED_CUDA_STATE" in os.environ:
    os.environ["EMULATED_CUDA_STATE"] += os.environ.get("PYTEST_XDIST_WORKER", "")


class ModuleWithoutDevice(pytest.Module):
    """A module of tests on a machine without a device: skipped as a whole, if no report names each test."""

    def collect(self) -> NoReturn:
        pytest.skip("no CUDA device")


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    import torch

    if torch.cuda.is_available() or REPORT in os.environ:
        return None
    return ModuleWithoutDevice.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    done = os.environ.get(DONE, "").splitlines()
    items[:] = [item for item in items if item.name not in done]
    import torch

    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.process)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if REPORT not in os.environ or (report.when != "call" and report.passed):
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    line = {
        "test": report.nodeid.partition("::")[2],
        "outcome": report.outcome,
        "seconds": round(report.duration, 1),
        "raised_in": f"{crash.path}:{crash.lineno}" if crash else "",
        "message": crash.message[:300] if crash else "",
    }
    with open(os.environ[REPORT], "a") as file:
        file.write("\n" + json.dumps(line))  # a line that a kill cut short ends here


@pytest.fixture
def a_nursery_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """For workers with other environment variables than those of the file's other tests."""
    monkeypatch.setattr("batchtune.probe.supervisor.Nursery", Nursery)
