"""`sweep-buckets --max-tokens`: packers, what they are compared with, and what follows from them."""

from dataclasses import asdict

import numpy as np
import pytest
from cli.conftest import flat, result_in, write_lengths
from msgspec.structs import replace
from packed_records import TIME_MODEL, packed_probe
from report_records import SCRIPT
from ruamel.yaml import YAML

from batchtune import (
    PackedBatchSampler,
    SameStepBatchSampler,
    sampler_from_config,
)
from batchtune.results import write_result

LENGTHS = np.random.default_rng(0).lognormal(5, 0.8, 600).clip(8, 1000).astype(int)
FAST = ("--num-buckets", 5, "--strategy", "quantile", "--unit", "tokens")
STEPS = ("--max-tokens", 20, "--current", "batch_size=1", "--accumulate", 2)
ALONE = ("--unit", "tokens", "--strategy", "packed")


@pytest.fixture
def text(tmp_path):
    return write_lengths(tmp_path / "text.csv", LENGTHS, "length")


@pytest.fixture
def sweep(succeed, text, tmp_path):
    """`sweep(*options)`: what a sweep of the text prints, in one line, and its sweep.json."""

    def sweep(*options):
        ran = succeed("sweep-buckets", text, *FAST, *options)
        return flat(ran.stdout), result_in(tmp_path)

    return sweep


@pytest.fixture
def config(tmp_path):
    """Where a sweep writes its recommendation."""
    return tmp_path / "batchtune-run" / "sampler.yaml"


def recommended(packing):
    return packing["rows"][packing["recommended"]]


def test_packers_are_compared_and_the_config_runs(
    batchtune, succeed, text, config, sweep
):
    output, swept = sweep("--max-tokens", 2048, "--world-size", 2)
    packing = swept["packing"]
    packers = [row["packer"] for row in packing["rows"]]
    assert packers == ["even", "first-fit", "best-fit"]
    # Without a probe, padded batches may have as many tokens.
    assert swept["max_batch_length"] == 2048
    row = recommended(packing)
    assert row["tokens"] == LENGTHS.sum() and row["largest_tokens"] <= 2048
    assert row["lower_bound"] == -(-LENGTHS.sum() // 2048) <= row["batches"]
    assert "both have at most 2,048 in a batch" in packing["reason"]
    assert f"Set max_tokens = 2,048 with {row['packer']} packing" in output
    assert f"Learning: {row['steps']:,} optimizer steps an epoch" in output
    sampler = sampler_from_config(config, LENGTHS, rank=0, world_size=2)
    assert isinstance(sampler, PackedBatchSampler)
    assert 2 * len(sampler) == row["batches"]
    succeed("report", "--fail-if", "packed.over_cap > 0")
    assert "even" in batchtune("report", "--format", "html").stdout
    assert "describes packed micro-batches" in batchtune("verify", text).stderr


def test_cut_sequences_are_counted(sweep):
    output, swept = sweep("--max-tokens", 600, "--cut-at", 500)
    row = swept["packing"]["rows"][0]
    assert row["cut_sequences"] == np.count_nonzero(LENGTHS > 500)
    assert row["cut_tokens"] == np.maximum(LENGTHS - 500, 0).sum()
    assert "--cut-at cuts" in output
    reason = swept["packing"]["reason"]
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
            (*STEPS, "--equal-counts"),
            "is for padded micro-batches",
            "Leave it out",
        ),
        (
            [10, 12],
            (*STEPS, "--accumulate", 1, "--keep", "same"),
            "a step is one micro-batch",
            "--accumulate N",
        ),
    ],
)
def test_what_can_not_be_packed_is_one_clear_error(
    batchtune, tmp_path, lengths, options, problem, hint
):
    manifest = write_lengths(tmp_path / "few.csv", lengths, "length")
    message = flat(batchtune("sweep-buckets", manifest, *FAST, *options).stderr)
    assert problem in message and hint in message
    assert not (tmp_path / "batchtune-run" / "sweep.json").exists()


class TestOfAProbe:
    """Budget, time law and proofs of a probe of packed batches."""

    @pytest.fixture
    def write_probe(self, tmp_path):
        """Writes the probe.json of `packed_probe` for the manifest."""
        folder = tmp_path / "batchtune-run"
        folder.mkdir()

        def write_probe(**fields):
            probe = packed_probe(LENGTHS, 2048, **fields)
            write_result(folder / "probe.json", probe)
            return probe

        return write_probe

    @pytest.fixture
    def probe(self, write_probe):
        return write_probe()

    @pytest.mark.usefixtures("probe")
    def test_budget_and_times_are_measured_and_written_to_the_config(
        self, succeed, config, sweep
    ):
        output, swept = sweep("--world-size", 2)
        packing = swept["packing"]
        row = recommended(packing)
        # Padded batches are for comparison: they may have as many tokens, and were not timed.
        assert swept["max_batch_length"] == packing["max_tokens"] == 2048
        assert {padded["estimated_epoch_seconds"] for padded in swept["rows"]} == {None}
        assert "padded batches were not timed" in packing["reason"]
        law = {
            "seconds_per_token": 2.2e-5,
            "seconds_per_squared_token": 1.1e-8,
            "seconds_per_sequence": 1.1e-5,
            "seconds_per_batch": 0.011,
        }
        assert packing["time_law"] == pytest.approx(law)
        assert row["unproven"] == 0 and row["simulated_epochs"] == 3
        # The sampler's own first epoch takes as long.
        seconds = []
        for rank in range(2):
            sampler = sampler_from_config(config, LENGTHS, rank=rank, world_size=2)
            assert asdict(sampler.budget.time_law) == packing["time_law"]
            of_sequences = sampler.budget.time_law.of_sequences(LENGTHS)
            seconds.append([0.011 + of_sequences[batch].sum() for batch in sampler])
        epoch_seconds = np.max(seconds, axis=0).sum()
        assert row["estimated_epoch_seconds"] == pytest.approx(epoch_seconds)
        written = YAML().load(config)["evidence"]
        assert written["device"] == "NVIDIA H200" and written["unproven"] == 0
        assert "was run, or is no larger than one that was" in output
        succeed("report", "--fail-if", "packed.unproven > 0")

    @pytest.mark.parametrize(
        ("fields", "options", "warning"),
        [
            ({"shares": (1.0, 0.0)}, (), "exceed each proven one in tokens"),
            ({}, ("--max-tokens", 4096), "more than the 2,048 tokens that the probe"),
            ({"proofs": []}, (), "interrupted before it proved a token budget"),
        ],
    )
    def test_what_is_not_proven_is_counted_with_a_remedy(
        self, batchtune, sweep, write_probe, fields, options, warning
    ):
        write_probe(**fields)
        output, swept = sweep(*options)
        assert recommended(swept["packing"])["unproven"] > 0
        assert warning in output and "are not proven to fit" in output
        assert "not yet proven in shuffled training" in " ".join(output.split())
        batchtune("report", "--fail-if", "packed.unproven > 0", code=3)

    @pytest.mark.usefixtures("probe")
    def test_a_smaller_budget_is_taken_without_a_warning(self, sweep):
        packing = sweep("--max-tokens", 1024)[1]["packing"]
        assert packing["max_tokens"] == 1024 and packing["warnings"] == []

    @pytest.mark.parametrize(
        "changes", [{"relative_error": 1.5}, {"token": 0.0, "relative_error": 0.02}]
    )
    def test_a_law_that_tells_nothing_is_not_taken(self, sweep, write_probe, changes):
        model = replace(TIME_MODEL, squared_token=0.0, sequence=0.0, **changes)
        write_probe(step_seconds=model)
        packing = sweep()[1]["packing"]
        assert packing["time_law"] is None
        assert packing["rows"][0]["estimated_epoch_seconds"] is None

    @pytest.mark.usefixtures("probe")
    def test_packed_rows_alone(self, batchtune, succeed, text, tmp_path):
        ran = succeed("sweep-buckets", text, *ALONE)
        swept = result_in(tmp_path)
        assert swept["rows"] == [] and len(swept["packing"]["rows"]) == 3
        assert "with a fixed batch size of" in flat(ran.stdout)
        for name in ("terminal", "html", "json"):
            succeed("report", "--format", name)
        judged = batchtune("report", "--fail-if", "batches > 5", code=1)
        assert "figures of packed ones begin with packed., such as" in judged.stderr

    @pytest.mark.usefixtures("probe")
    def test_learning_is_compared_with_the_users_padded_batches(self, sweep):
        output, swept = sweep("--current", "batch_size=4")
        packing = swept["packing"]
        assert packing["padded_steps"] == 150
        deviation = swept["current"]["step_tokens_deviation"]
        assert packing["padded_step_tokens_deviation"] == deviation
        said = "150 with your current config (--min-steps 150 keeps as many)"
        assert said in output

    @pytest.mark.usefixtures("probe")
    @pytest.mark.parametrize("ranks", [1, 2])
    def test_steps_keep_their_sequences_in_fewer_micro_batches(
        self, sweep, succeed, config, ranks
    ):
        own = ("--current", "batch_size=2", "--accumulate", 16, "--world-size", ranks)
        output, swept = sweep(*own)
        packing = swept["packing"]
        row = recommended(packing)
        fewest = row["accumulate"]
        assert 1 < fewest < 16 and row["pool_size"] == 32 * ranks
        assert row["steps"] == packing["padded_steps"] == -(-600 // (32 * ranks))
        gain = packing["current"]["estimated_epoch_seconds"]
        gain /= row["estimated_epoch_seconds"]
        assert f"{gain:.2f} times faster than your current config; the same" in output
        assert f"gradient accumulation of {fewest} instead of 16" in output
        own = np.arange(600).reshape(-1, 2)
        sampler = SameStepBatchSampler.from_config(config, own, LENGTHS)
        assert sorted(np.concatenate(list(sampler)[:fewest])) == list(range(32))
        assert "SameStepBatchSampler" in succeed("export", "--to", "pytorch").stdout

    @pytest.mark.parametrize(
        ("accumulation", "said"),
        [(4, "Keep 32 sequences"), (1, "Set max_tokens = 1,568")],
    )
    def test_a_script_that_packs_keeps_its_steps(
        self, sweep, write_probe, tmp_path, accumulation, said
    ):
        probe = write_probe()
        script = replace(SCRIPT, batch_size=8, accumulation=accumulation)
        device = replace(probe.device, script=script)
        path = tmp_path / "batchtune-run" / "probe.json"
        write_result(path, replace(probe, device=device))
        output, swept = sweep()
        assert said in output
        assert recommended(swept["packing"])["steps"] >= 600 // (8 * accumulation)

    @pytest.mark.usefixtures("probe")
    def test_other_commands_want_padded_batches(self, batchtune, text):
        ran = batchtune("sweep-stream", text, "--unit", "tokens", code=1)
        assert "is about packed batches, not padded ones" in ran.stderr
        ran = batchtune("verify", text, code=1)
        assert "is of packed batches, and verify runs padded ones only" in ran.stderr
