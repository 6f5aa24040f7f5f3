"""Workers come from a process that has PyTorch already, each as sound as if it were the first."""

import os
import sys

import pytest
from worker_processes import names_of, supervise

from batchtune.results import BatchShape

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux", reason="elsewhere workers are not forked"
    ),
]

ONE = BatchShape(1, 3.0)

# As if an import had used CUDA before the fork, after which a forked process can't.
SPOILT = """
import os, torch
importer = os.getpid()
torch._C._cuda_isInBadFork = lambda: os.getpid() != importer
"""


def test_a_worker_that_cant_use_cuda_after_a_fork_starts_alone(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(SPOILT)
    monkeypatch.setenv(
        "PYTHONPATH",
        os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]),
    )
    with supervise("Good", shared=False) as supervisor:
        supervisor.start()
        assert (
            sum(
                "processes/__init__.py batchtune.probe.worker" in name
                for name in names_of(os.getpid())
            )
            == 1
        )
        assert supervisor.measure(ONE, 0).trial.outcome == "ok"
