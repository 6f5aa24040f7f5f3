"""`--reserve` and `--ddp`: what is kept free, and that it is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.conftest import KNOWN, Run
from report_records import made_probe

from batchtune.cli.progress import worker_bar
from batchtune.shapes import BatchShape
from batchtune.verify.verifying import VerifyProgress

MIB = 1 << 20
GRADIENT_BYTES = (64 * 64 + 64) * 4  # of the workload's one layer


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """So little data that every batch fits: nothing is searched for."""
    path = tmp_path / "few.csv"
    path.write_text("id,duration\na,1\nb,2\n")
    return path


def test_memory_kept_free_lowers_the_limit_and_is_noted(batchtune: Run, few: Path) -> None:
    options = ["--workload", KNOWN, "--device", "cpu", "--memory", "1GiB", "--memory-fraction", "0.5", "--json"]
    ran = batchtune("probe-oom", few, *options, "--reserve", "20MiB", "--ddp")
    assert ran.returncode == 0, ran.stderr
    device = json.loads(ran.stdout)["device"]
    assert device["limit_bytes"] == 512 * MIB - 20 * MIB - GRADIENT_BYTES
    assert (device["reserve_bytes"], device["ddp_bytes"]) == (20 * MIB, GRADIENT_BYTES)
    for note in (
        "; limit 492 MiB.",
        "Kept free for DDP's gradient buckets: 16.2 KiB, a copy of the gradients.\n",
        "Kept free by --reserve: 20 MiB.\n",
    ):
        assert note in ran.stderr


def test_nothing_to_keep_for_ddp_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    progress = VerifyProgress(
        phase="worst", shape=BatchShape(1, 1.0), done=0, total=1, seconds_left=None, device=made_probe().device
    )
    with worker_bar("s", ddp=True, quiet=False) as bar:
        bar.verifying(progress)
    assert "Warning: --ddp keeps nothing free" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["0", "many", "-1MiB"])
def test_a_reserve_that_is_no_size_is_refused(batchtune: Run, few: Path, size: str) -> None:
    ran = batchtune("probe-oom", few, "--workload", KNOWN, "--device", "cpu", f"--reserve={size}")
    assert ran.returncode == 2
    assert f"Error: {size!r} is not a memory size" in ran.stderr
