"""The main job for a training that packs, from end to end: probe, sweep, report, rules, sampler."""

import numpy as np
from cli.conftest import write_lengths

from batchtune import PackedBatchSampler, sampler_from_config
from batchtune.results import PROBE_FILE, SWEEP_FILE, Probe, Sweep, read_result

LENGTHS = np.random.default_rng(0).lognormal(4, 0.7, 400).clip(8, 300).astype(int)
LAW = "law:packed=1,constant=50MB,linear=120kB,limit=460MiB,seconds_linear=1e-5"


def test_tune_of_a_training_that_packs(batchtune, succeed, tmp_path):
    manifest = write_lengths(tmp_path / "text.csv", LENGTHS, "length")
    options = ["--device", LAW, "--unit", "tokens", "--num-buckets", "3", "--verify"]
    ran = succeed("tune", manifest, *options)
    assert "nothing to verify, because packed micro-batches" in ran.stderr
    run = tmp_path / "batchtune-run"
    probe = read_result(run / PROBE_FILE, Probe)
    packing = read_result(run / SWEEP_FILE, Sweep).packing
    budget = probe.packed.max_tokens
    assert packing.max_tokens == packing.proven_tokens == budget
    # Of the rows, at most a few have more sequences than the halves and longer ones than the shortest.
    unproven = packing.row.unproven
    assert unproven <= 0.05 * packing.row.batches * packing.row.simulated_epochs
    assert f"Set max_tokens = {budget:,} with" in ran.stdout
    assert "BucketBatchSampler" not in ran.stdout
    batchtune("report", "--fail-if", "packed.unproven > 0", code=3 if unproven else 0)
    verl = succeed("export", "--to", "verl").stdout
    assert f"ppo_max_token_len_per_gpu={budget}" in verl
    sampler = sampler_from_config(run / "sampler.yaml", LENGTHS)
    assert isinstance(sampler, PackedBatchSampler)
    assert max(LENGTHS[batch].sum() for batch in sampler) <= budget
