"""What needs a CUDA device: skipped, by name, where there is none. Run with `python -m pytest tests/gpu`."""

import contextlib
import json
import os
from pathlib import Path

import pytest
from gpu.evidence import REPORT
from without_device import module_without

HERE = Path(__file__).parent

# Test processes that run side by side have emulated devices each (tests/emulated_cuda).
if "EMULATED_CUDA_STATE" in os.environ:
    os.environ["EMULATED_CUDA_STATE"] += os.environ.get("PYTEST_XDIST_WORKER", "")


def pytest_pycollect_makemodule(module_path, parent):
    import torch

    if torch.cuda.is_available() or REPORT in os.environ:
        return None
    return module_without("no CUDA device", module_path, parent)


def pytest_collection_modifyitems(items):
    done = passed_in(Path(os.environ.get(REPORT, os.devnull)))
    items[:] = [item for item in items if item.name not in done]
    import torch

    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.process)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def passed_in(report):
    """The tests that a report names, but for those that failed; a line that a kill cut short counts for nothing."""
    done = set()
    for line in report.read_text().splitlines() if report.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            test = json.loads(line)
            if not test["failed"]:
                done.add(test["test"])
    return done


def pytest_runtest_logreport(report):
    if REPORT not in os.environ or (report.when != "call" and report.passed):
        return
    line = {"test": report.nodeid.partition("::")[2], "failed": report.failed}
    with open(os.environ[REPORT], "a") as file:
        file.write("\n" + json.dumps(line))  # a line that a kill cut short ends here
