"""The options of `sweep-buckets`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import Run

RECIPE = """\
seed: 1234
__set_seed: !apply:speechbrain.utils.seed_everything [!ref <seed>]
data_folder: !PLACEHOLDER
limit: 60
dynamic_batch_sampler:
    max_batch_length: !ref <limit>
    num_buckets: 20
    shuffle: True
"""


def sweep_of(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (tmp_path / "batchtune-run" / "sweep.json").read_text()
    )
    return found


def test_the_result_fits_on_a_screen_and_full_shows_all_tables(
    batchtune: Run, manifest: Path
) -> None:
    sweep = [
        "sweep-buckets",
        manifest,
        "--max-batch-length",
        60,
        "--num-buckets",
        "2:6",
    ]
    brief, full = (
        batchtune(*sweep, "--force").stdout,
        batchtune(*sweep, "--force", "--full").stdout,
    )
    assert len(brief.splitlines()) <= 20
    # The command that follows can be copied; a report made later does not know the manifest.
    assert f"batchtune probe-oom {manifest} --workload W" in brief
    brief, full = (
        text.replace(f"{manifest} --workload W", "MANIFEST --workload W ")
        for text in (brief, full)
    )
    assert "Bucket tables and pools compared" in full and "Bucket tables" not in brief
    assert (
        batchtune("report").stdout == brief
        and batchtune("report", "--full").stdout == full
    )
    assert batchtune("report", "-o", "report.txt").returncode == 0
    assert (
        batchtune("report", "--format", "terminal", "-o", "-", "--full").stdout == full
    )


def test_everything_at_once(batchtune: Run, manifest: Path, tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text(RECIPE)
    options = [
        "--max-batch-length",
        60,
        "--num-buckets",
        "2:6",
        "--current",
        "train.yaml",
        "--multiple-of",
        0.5,
    ]
    options += [
        "--world-size",
        4,
        "--same-bucket",
        "--accumulate",
        2,
        "--min-randomness",
        0.05,
    ]
    ran = batchtune("sweep-buckets", manifest, *options)
    assert ran.returncode == 0, ran.stderr
    assert "SpeechBrain, max_batch_length=60 s, num_buckets=20 (train.yaml" in " ".join(
        ran.stdout.split()
    )
    found = sweep_of(tmp_path)
    assert found["current"]["strategy"] == "current"
    assert found["current_settings"]["num_buckets"] == 20
    assert found["settings"]["world_size"] == 4
    assert all(
        boundary % 0.5 == 0 for row in found["rows"] for boundary in row["boundaries"]
    )


def test_the_report_says_how_to_keep_ones_optimizer_steps(
    batchtune: Run, manifest: Path, tmp_path: Path
) -> None:
    sweep = ["sweep-buckets", manifest, "--max-batch-length", 60, "--full"]
    sweep += ["--current", "batch_size=2"]
    usual = batchtune(*sweep)
    steps = sweep_of(tmp_path)["current"]["steps"]
    assert f"--min-steps {steps} keeps as many" in " ".join(usual.stdout.split())
    kept = batchtune(*sweep, "--min-steps", steps)
    assert kept.returncode == 0, kept.stderr
    found = sweep_of(tmp_path)
    assert found["rows"][found["recommended"]]["steps"] >= steps
    said = " ".join(kept.stdout.split())
    assert f"keeps at least {steps:,} optimizer steps" in said
    assert "less to compute, with padding, than with your current config" in said
    assert "keeps as many" not in said
    assert "keep it" not in said


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--current", "no-such.yaml"], (1, 2), "no-such.yaml"),
        (["--current", "max_batch_length=600,buckets=3"], (2,), "buckets"),
        (["--current", "max_batch_length=600,bucket_boundaries=4:2"], (2,), "ascend"),
        (["--current", "max_batch_length=600,bucket_boundaries=0:2"], (2,), "0"),
        (["--multiple-of", "0"], (2,), "--multiple-of"),
        (["--world-size", "0"], (2,), "--world-size"),
        (["--min-randomness", "nan"], (2,), "--min-randomness"),
        (["--min-steps", "1000000"], (2,), "--min-steps 1000000: an epoch of"),
        (["--min-steps", "0"], (2,), "--min-steps"),
    ],
)
def test_a_bad_value_is_one_message_and_no_file(
    batchtune: Run,
    manifest: Path,
    tmp_path: Path,
    options: list[str],
    code: tuple[int, ...],
    message: str,
) -> None:
    ran = batchtune("sweep-buckets", manifest, "--max-batch-length", 60, *options)
    assert ran.returncode in code, ran.stderr
    assert message in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not (tmp_path / "batchtune-run" / "sweep.json").exists()
