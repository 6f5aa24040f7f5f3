"""`sweep-buckets --max-tokens`: packers, what they are compared with, and what follows from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli.conftest import Run

from batchtune import PackedBatchSampler, sampler_from_config
from batchtune.buckets.current_packers import price_packer, read_packer
from batchtune.epochs.layout import Dealing
from batchtune.errors import BatchtuneError, UsageError
from batchtune.packing.twins import axolotl_batches, verl_micro_batches

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


@pytest.mark.parametrize(
    ("lengths", "options", "problem", "hint"),
    [
        (
            [10, 30, 40],
            ("--max-tokens", 20),
            "sequences longer than --max-tokens 20: 2 of 3; the longest have 40, 30 tokens",
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
        ([10, 12], ("--cut-at", 30), "--cut-at needs --max-tokens", ""),
        (
            [10, 12],
            ("--current", "verl:ppo_max_token_len_per_gpu=20"),
            "train_batch_size",
            "verl:key=value",
        ),
        (
            [10, 12],
            ("--current", "trl:max_length=20,packing=true"),
            "packing",
            "per_device_train_batch_size",
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


def test_verls_broken_cap_is_named(batchtune: Run, text: Path, tmp_path: Path) -> None:
    current = "verl:ppo_max_token_len_per_gpu=1024,train_batch_size=64,keeps_cap=false"
    ran = batchtune("sweep-buckets", text, *FAST, "--current", current)
    assert ran.returncode == 0, ran.stderr
    packing = sweep_of(tmp_path)["packing"]
    assert packing["max_tokens"] == 1024
    assert packing["current"]["over_cap"] > 0 and packing["current"]["left_out"] == 24
    output = " ".join(ran.stdout.split())
    assert "verl does not keep its cap of 1,024 tokens" in output
    assert "of the same tokens" in output


class TestPrices:
    """The user's own packer, priced by its twin."""

    def test_of_axolotl(self) -> None:
        row = priced("axolotl:micro_batch_size=2,sequence_len=500", Dealing())
        kept = LENGTHS <= 500
        order = np.random.default_rng(0).permutation(LENGTHS.size)
        batches = axolotl_batches(
            LENGTHS.tolist(), order[kept[order]].tolist(), 1000, bin_size=200
        )
        assert row.batches == len(batches) and row.max_tokens == 1000
        assert (row.left_out, row.cut_sequences) == (np.count_nonzero(~kept), 0)
        assert row.tokens == LENGTHS[kept].sum() and row.over_cap == 0

    def test_of_trl(self) -> None:
        row = priced("trl:max_length=500", Dealing(world_size=2, accumulate=3))
        assert row.cut_sequences > 0 == row.over_cap
        assert row.batches % 2 == 0 and row.steps == -(-row.batches // 6)

    def test_of_verl(self) -> None:
        row = priced(
            "verl:ppo_max_token_len_per_gpu=1000,train_batch_size=600", Dealing()
        )
        order = np.random.default_rng(0).permutation(LENGTHS.size)
        (packed,) = verl_micro_batches([LENGTHS[np.sort(order)].tolist()], 1000)
        assert abs(row.batches - len(packed)) <= 1
        assert (row.steps, row.left_out, row.over_cap) == (1, 0, 0)

    @pytest.mark.parametrize(
        "settings",
        [
            "verl:ppo_max_token_len_per_gpu=1000,train_batch_size=601",
            "verl:ppo_max_token_len_per_gpu=1000,train_batch_size=64,ppo_mini_batch_size=7",
            "axolotl:sequence_len=1",
        ],
    )
    def test_of_what_does_not_work(self, settings: str) -> None:
        with pytest.raises(BatchtuneError, match="--current"):
            priced(settings, Dealing(world_size=2))

    def test_values_that_can_be_listed_are(self) -> None:
        with pytest.raises(UsageError) as caught:
            read_packer("axolotl:sequence_len=99,excess_length_strategy=raise")
        assert caught.value.hint is not None
        assert "excess_length_strategy=drop|truncate" in caught.value.hint

    def test_of_no_packer(self) -> None:
        assert read_packer("batch_size=4") is None
        with pytest.raises(UsageError, match="ppo_max_token_len_per_gpu"):
            read_packer("verl:train_batch_size=4")


def priced(settings: str, dealing: Dealing) -> Any:
    current = read_packer(settings)
    assert current is not None
    return price_packer(current, LENGTHS.astype(np.int64), dealing, 0)
