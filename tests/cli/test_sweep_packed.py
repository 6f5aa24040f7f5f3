"""`sweep-buckets --max-tokens`: packers, what they are compared with, and what follows from them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli.conftest import Run
from msgspec.structs import replace
from packed_records import TIME_MODEL, packed_probe
from ruamel.yaml import YAML

from batchtune import PackedBatchSampler, sampler_from_config
from batchtune.cli import tune
from batchtune.errors import ResultError
from batchtune.results import Probe, write_result

LENGTHS = np.random.default_rng(0).lognormal(5, 0.8, 600).clip(8, 1000).astype(int)
FAST = ("--num-buckets", 5, "--strategy", "quantile", "--unit", "tokens")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write(tmp_path / "text.csv", LENGTHS)


def write(path: Path, lengths: Any) -> Path:
    path.write_text("length\n" + "".join(f"{length}\n" for length in lengths))
    return path


def sweep_of(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        (tmp_path / "batchtune-run" / "sweep.json").read_text()
    )
    return found


def test_packers_are_compared_and_the_config_runs(
    batchtune: Run, text: Path, tmp_path: Path
) -> None:
    ran = batchtune(
        "sweep-buckets", text, *FAST, "--max-tokens", 2048, "--world-size", 2
    )
    assert ran.returncode == 0, ran.stderr
    swept = sweep_of(tmp_path)
    packing = swept["packing"]
    assert [row["packer"] for row in packing["rows"]] == [
        "even",
        "first-fit",
        "best-fit",
    ]
    # Without a probe, padded batches may have as many tokens.
    assert swept["max_batch_length"] == 2048
    row = packing["rows"][packing["recommended"]]
    assert row["tokens"] == LENGTHS.sum() and row["largest_tokens"] <= 2048
    assert row["lower_bound"] == -(-LENGTHS.sum() // 2048) <= row["batches"]
    assert "both have at most 2,048 in a batch" in packing["reason"]
    assert f"Set max_tokens = 2,048 with {row['packer']} packing" in ran.stdout
    assert f"Learning: {row['steps']:,} optimizer steps an epoch" in " ".join(
        ran.stdout.split()
    )
    config = tmp_path / "batchtune-run" / "sampler.yaml"
    sampler = sampler_from_config(config, LENGTHS, rank=0, world_size=2)
    assert isinstance(sampler, PackedBatchSampler)
    assert 2 * len(sampler) == row["batches"]
    gate = ("report", "--fail-if")
    assert batchtune(*gate, "packed.over_cap > 0").returncode == 0
    assert batchtune(*gate, "packed.largest_tokens < 99999").returncode != 0
    for name in ("markdown", "html"):
        assert "even" in batchtune("report", "--format", name).stdout
    verified = batchtune("verify", text)
    assert "describes packed micro-batches" in verified.stderr


def test_without_a_token_budget_nothing_is_packed(
    batchtune: Run, text: Path, tmp_path: Path
) -> None:
    batchtune("sweep-buckets", text, *FAST, "--max-batch-length", 2048)
    assert "packing" not in sweep_of(tmp_path)


def test_cut_sequences_are_counted(batchtune: Run, text: Path, tmp_path: Path) -> None:
    options = ("--max-tokens", 600, "--cut-at", 500)
    ran = batchtune("sweep-buckets", text, *FAST, *options)
    assert ran.returncode == 0, ran.stderr
    row = sweep_of(tmp_path)["packing"]["rows"][0]
    assert row["cut_sequences"] == np.count_nonzero(LENGTHS > 500)
    assert row["cut_tokens"] == np.maximum(LENGTHS - 500, 0).sum()
    assert "--cut-at cuts" in ran.stdout
    reason = sweep_of(tmp_path)["packing"]["reason"]
    assert "padded batches cut nothing" in reason and "both have" not in reason


@pytest.mark.parametrize(
    ("lengths", "options", "problem", "hint"),
    [
        (
            [10, 30, 40],
            ("--max-tokens", 20),
            "sequences longer than the token budget of 20: 2 of 3; the longest have 40, 30 tokens",
            "--cut-at 20",
        ),
        (
            [10, 2.5],
            ("--max-tokens", 20),
            "1 of 2 are fractional, such as 2.5",
            "--length-scale",
        ),
        (
            [10, 12],
            ("--max-tokens", 20, "--world-size", 4, "--accumulate", 2),
            "a step needs 8 micro-batches",
            "--accumulate",
        ),
        ([10, 12], ("--max-tokens", 0), "--max-tokens must be a whole number", ""),
        (
            [10, 12],
            ("--max-tokens", 20, "--cut-at", 30),
            "--cut-at must be at most",
            "",
        ),
        (
            [10, 12],
            ("--cut-at", 30),
            "--cut-at needs a token budget",
            "Add --max-tokens N",
        ),
        (
            [10, 12],
            ("--strategy", "packed"),
            "--strategy packed needs a token budget",
            "Add --max-tokens N",
        ),
        (
            [10, 12],
            ("--max-tokens", 20, "--current", "axolotl:sequence_len=20"),
            "'axolotl:sequence_len=20' is neither a file nor key=value settings",
            "by recording a training: `batchtune record -- COMMAND`",
        ),
    ],
)
def test_what_can_not_be_packed_is_one_clear_error(
    batchtune: Run,
    tmp_path: Path,
    lengths: list[float],
    options: tuple[Any, ...],
    problem: str,
    hint: str,
) -> None:
    manifest = write(tmp_path / "few.csv", lengths)
    ran = batchtune("sweep-buckets", manifest, *FAST, *options)
    assert ran.returncode != 0 and "Traceback" not in ran.stderr
    message = " ".join(ran.stderr.split())
    assert problem in message and hint in message
    assert not (tmp_path / "batchtune-run" / "sweep.json").exists()


class TestOfAProbe:
    """Budget, time law and proofs of a probe of packed batches."""

    @pytest.fixture
    def probed(self, tmp_path: Path) -> Callable[..., Probe]:
        """Writes the probe.json of `packed_probe` for the manifest."""

        def write_probe(max_tokens: int = 2048, **fields: Any) -> Probe:
            probe = packed_probe(LENGTHS, max_tokens, **fields)
            (tmp_path / "batchtune-run").mkdir(exist_ok=True)
            write_result(tmp_path / "batchtune-run" / "probe.json", probe)
            return probe

        return write_probe

    def test_budget_and_times_are_measured_and_written_to_the_config(
        self, batchtune: Run, text: Path, tmp_path: Path, probed: Callable[..., Probe]
    ) -> None:
        probed()
        ran = batchtune("sweep-buckets", text, *FAST, "--world-size", 2)
        assert ran.returncode == 0, ran.stderr
        swept = sweep_of(tmp_path)
        packing = swept["packing"]
        row = packing["rows"][packing["recommended"]]
        # Padded batches are for comparison: they may have as many tokens, and were not timed.
        assert swept["max_batch_length"] == packing["max_tokens"] == 2048
        assert {padded["estimated_epoch_seconds"] for padded in swept["rows"]} == {None}
        assert "padded batches were not timed" in packing["reason"]
        law = {
            "seconds_per_token": pytest.approx(2.2e-5),
            "seconds_per_squared_token": pytest.approx(1.1e-8),
            "seconds_per_sequence": pytest.approx(1.1e-5),
            "seconds_per_batch": pytest.approx(0.011),
        }
        assert packing["time_law"] == law
        assert row["unproven"] == 0 and row["simulated_epochs"] == 3
        config = tmp_path / "batchtune-run" / "sampler.yaml"
        sampler = sampler_from_config(config, LENGTHS, rank=0, world_size=2)
        assert asdict(sampler.budget.time_law) == law
        # The sampler's own first epoch takes as long.
        seconds = []
        for rank in range(2):
            of_rank = sampler_from_config(config, LENGTHS, rank=rank, world_size=2)
            batches = [LENGTHS[batch].astype(float) for batch in of_rank]
            seconds.append(
                [
                    0.011
                    + 2.2e-5 * held.sum()
                    + 1.1e-8 * (held**2).sum()
                    + 1.1e-5 * held.size
                    for held in batches
                ]
            )
        assert row["estimated_epoch_seconds"] == pytest.approx(
            np.max(seconds, axis=0).sum()
        )
        written = YAML().load(config)["evidence"]
        assert written["device"] == "NVIDIA H200" and written["unproven"] == 0
        output = " ".join(ran.stdout.split())
        assert "was run, or is no larger than one that was" in output
        assert batchtune("report", "--fail-if", "packed.unproven > 0").returncode == 0
        for name in ("markdown", "html"):
            assert batchtune("report", "--format", name).returncode == 0

    @pytest.mark.parametrize(
        ("fields", "options", "warning"),
        [
            ({"shares": (1.0, 0.0)}, (), "exceed each proven one in tokens"),
            ({}, ("--max-tokens", 4096), "more than the 2,048 tokens that the probe"),
            ({"proofs": []}, (), "interrupted before it proved a token budget"),
        ],
    )
    def test_what_is_not_proven_is_counted_with_a_remedy(
        self,
        batchtune: Run,
        text: Path,
        tmp_path: Path,
        probed: Callable[..., Probe],
        fields: dict[str, Any],
        options: tuple[Any, ...],
        warning: str,
    ) -> None:
        probed(**fields)
        ran = batchtune("sweep-buckets", text, *FAST, *options)
        assert ran.returncode == 0, ran.stderr
        packing = sweep_of(tmp_path)["packing"]
        assert packing["rows"][packing["recommended"]]["unproven"] > 0
        output = " ".join(ran.stdout.split())
        assert warning in output and "are not proven to fit" in output
        assert batchtune("report", "--fail-if", "packed.unproven > 0").returncode == 3

    @pytest.mark.parametrize(
        "edit",
        [
            ("seconds_per_token: ", "seconds_per_token: -"),
            ("seconds_per_token: ", "seconds_per_letter: "),
        ],
    )
    def test_a_damaged_time_law_is_named(
        self,
        batchtune: Run,
        text: Path,
        tmp_path: Path,
        probed: Callable[..., Probe],
        edit: tuple[str, str],
    ) -> None:
        probed()
        batchtune("sweep-buckets", text, *FAST)
        config = tmp_path / "batchtune-run" / "sampler.yaml"
        config.write_text(config.read_text().replace(*edit))
        with pytest.raises(ResultError, match="is damaged"):
            sampler_from_config(config, LENGTHS)

    def test_a_smaller_budget_is_taken_without_a_warning(
        self, batchtune: Run, text: Path, tmp_path: Path, probed: Callable[..., Probe]
    ) -> None:
        probed()
        batchtune("sweep-buckets", text, *FAST, "--max-tokens", 1024)
        packing = sweep_of(tmp_path)["packing"]
        assert packing["max_tokens"] == 1024 and packing["warnings"] == []

    @pytest.mark.parametrize("relative_error", [1.5, 0.02])
    def test_a_law_that_tells_nothing_is_not_taken(
        self,
        batchtune: Run,
        text: Path,
        tmp_path: Path,
        probed: Callable[..., Probe],
        relative_error: float,
    ) -> None:
        model = replace(
            TIME_MODEL,
            token=0.0 if relative_error < 1 else TIME_MODEL.token,
            squared_token=0.0,
            sequence=0.0,
            relative_error=relative_error,
        )
        probed(step_seconds=model)
        batchtune("sweep-buckets", text, *FAST)
        packing = sweep_of(tmp_path)["packing"]
        assert packing["time_law"] is None
        assert packing["rows"][0]["estimated_epoch_seconds"] is None

    def test_packed_rows_alone(
        self, batchtune: Run, text: Path, tmp_path: Path, probed: Callable[..., Probe]
    ) -> None:
        probed()
        ran = batchtune(
            "sweep-buckets", text, "--unit", "tokens", "--strategy", "packed"
        )
        assert ran.returncode == 0, ran.stderr
        swept = sweep_of(tmp_path)
        assert swept["rows"] == [] and len(swept["packing"]["rows"]) == 3
        assert "with a fixed batch size of" in " ".join(ran.stdout.split())
        for name in ("terminal", "html", "json"):
            assert batchtune("report", "--format", name).returncode == 0
        judged = batchtune("report", "--fail-if", "batches > 5")
        assert judged.returncode == 1
        assert "those of packed ones begin with packed., such as" in judged.stderr

    def test_learning_is_compared_with_the_users_padded_batches(
        self, batchtune: Run, text: Path, tmp_path: Path, probed: Callable[..., Probe]
    ) -> None:
        probed()
        ran = batchtune("sweep-buckets", text, *FAST, "--current", "batch_size=4")
        packing = sweep_of(tmp_path)["packing"]
        assert packing["padded_steps"] == 150
        order = np.random.default_rng(0).permutation(LENGTHS)
        totals = order.reshape(150, 4).sum(axis=1)
        assert packing["padded_step_tokens_deviation"] == pytest.approx(
            totals.std() / totals.mean(), rel=0.2
        )
        said = "150 with your current config (--min-steps 150 keeps as many)"
        assert said in " ".join(ran.stdout.split())

    def test_tune_takes_the_budget_of_its_probe(
        self,
        batchtune: Run,
        text: Path,
        tmp_path: Path,
        probed: Callable[..., Probe],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(tune, "_probe", lambda *_: probed())
        ran = batchtune("tune", text, *FAST, "--verify")
        assert ran.returncode == 0, ran.stderr
        assert sweep_of(tmp_path)["packing"]["max_tokens"] == 2048
        assert "Set max_tokens = 2,048" in ran.stdout
        assert "nothing to verify" in ran.stderr

    def test_another_run_is_the_baseline(
        self, batchtune: Run, text: Path, tmp_path: Path, probed: Callable[..., Probe]
    ) -> None:
        probed()
        sweep = ("sweep-buckets", text, "--unit", "tokens", "--strategy", "packed")
        batchtune(*sweep)
        batchtune(*sweep, "--max-tokens", 1024, "--run", "smaller")
        batchtune(
            *sweep[:-2], *FAST[:-2], "--max-batch-length", 2048, "--run", "padded"
        )
        gate = ("--fail-if", "packed.batches worse 2%")
        assert batchtune("report", "--baseline", "smaller", *gate).returncode == 0
        worse = batchtune("report", "smaller", "--baseline", "batchtune-run", *gate)
        assert worse.returncode == 3
        unknown = batchtune("report", "--baseline", "padded", *gate)
        assert unknown.returncode == 1
        assert "the baseline: packers were not compared" in unknown.stdout

    def test_other_commands_want_padded_batches(
        self, batchtune: Run, text: Path, probed: Callable[..., Probe]
    ) -> None:
        probed()
        ran = batchtune("sweep-stream", text, "--unit", "tokens")
        assert ran.returncode == 1
        assert "is about packed batches, not padded ones" in ran.stderr
