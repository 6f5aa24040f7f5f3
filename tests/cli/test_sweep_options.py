"""The options of `sweep-buckets`."""

import numpy as np
import pytest
from cli.conftest import flat, result_in

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


def test_the_result_fits_on_a_screen_and_full_shows_all_tables(succeed, manifest):
    sweep = ["sweep-buckets", manifest.name, "--max-batch-length", 60]
    sweep += ["--num-buckets", "2:6", "--force"]
    brief = succeed(*sweep).stdout
    full = succeed(*sweep, "--full").stdout
    assert len(brief.splitlines()) <= 24
    # The command that follows can be copied; a report made later does not know the manifest.
    assert f"batchtune probe-oom {manifest.name} --workload W" in brief
    assert "Bucket tables and pools compared" in full and "Bucket tables" not in brief
    named = (f"{manifest.name} --workload W", "MANIFEST --workload W ")
    assert succeed("report").stdout == brief.replace(*named)
    succeed("report", "-o", "report.txt")
    to_stdout = ("--format", "terminal", "-o", "-", "--full")
    assert succeed("report", *to_stdout).stdout == full.replace(*named)


def test_everything_at_once(succeed, manifest, tmp_path):
    (tmp_path / "train.yaml").write_text(RECIPE)
    options = ["--max-batch-length", 60, "--num-buckets", "2:6"]
    options += ["--current", "train.yaml", "--multiple-of", 0.5, "--world-size", 4]
    options += ["--same-bucket", "--accumulate", 2, "--min-randomness", 0.05]
    ran = succeed("sweep-buckets", manifest, *options)
    current = "SpeechBrain, max_batch_length=60 s, num_buckets=20 (train.yaml"
    assert current in flat(ran.stdout)
    found = result_in(tmp_path)
    assert found["current"]["strategy"] == "current"
    assert found["current_settings"]["num_buckets"] == 20
    assert found["settings"]["world_size"] == 4
    for row in found["rows"]:
        halves = np.multiply(2, row["boundaries"])
        assert halves == pytest.approx(halves.round())


def test_the_report_says_how_to_keep_ones_optimizer_steps(succeed, manifest, tmp_path):
    sweep = ["sweep-buckets", manifest, "--max-batch-length", 60, "--full"]
    sweep += ["--current", "batch_size=2"]
    usual = succeed(*sweep, "--keep", "nothing")
    steps = result_in(tmp_path)["current"]["steps"]
    assert f"--min-steps {steps} keeps as many" in flat(usual.stdout)
    # As many by default, too.
    kept = succeed(*sweep)
    found = result_in(tmp_path)
    assert found["rows"][found["recommended"]]["steps"] >= steps
    said = flat(kept.stdout)
    assert f"keeps at least {steps:,} optimizer steps; batches hold 1 to " in said
    assert "less to compute, with padding, than with your current config" in said
    assert "keeps as many" not in said
    assert "keep it" not in said
