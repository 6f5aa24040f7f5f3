"""Several ranks on the command line: what is refused, and with which command instead."""

import pytest
from cli.conftest import ANY_TIME, KNOWN, WORKLOAD, flat, write_manifest
from made_devices import made_device
from msgspec import structs

from batchtune.cli.ranks import parse_nproc, refuse_to_be_a_rank
from batchtune.errors import ResultError, UsageError
from batchtune.lengths import Lengths
from batchtune.probe.settings import ProbeSettings, begin_run, open_run
from batchtune.reports.measured import describe_device
from batchtune.results import (
    TRIALS_FILE,
    BatchShape,
    Probe,
    RankDevice,
    Sweep,
    Trial,
    Verification,
    read_result,
)
from batchtune.run_folder import append_trial

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
}
NODES = ["--node-rank", "0", "--nproc-per-node", "2", "--nnodes", "2"]
SRUN = "srun --ntasks-per-node=1 "
WORDS = ["probe-oom", "train.csv", "--workload", "train.py:My Step"]


@pytest.mark.parametrize(
    ("environment", "where", "launcher", "ranks"),
    [
        (TORCHRUN, "started inside torchrun", "", 2),
        ({"RANK": "3", "WORLD_SIZE": "4"}, "started as rank 3 of 4", "", 4),
        ({"SLURM_NTASKS_PER_NODE": "8"}, "SLURM starts 8 tasks", SRUN, 8),
        (
            {"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_NTASKS_PER_NODE": "1"},
            "SLURM starts 4 tasks",
            SRUN,
            4,
        ),
    ],
)
def test_a_rank_is_refused_with_the_right_command(environment, where, launcher, ranks):
    with pytest.raises(UsageError, match=where) as refused:
        refuse_to_be_a_rank(environment, WORDS)
    right = "batchtune probe-oom train.csv --workload 'train.py:My Step'"
    assert refused.value.hint.endswith(f" {launcher}{right} --nproc-per-node {ranks}")


def test_the_command_of_a_script_stays_as_it_is():
    words = ["tune", "--", "torchrun", "--nproc-per-node", "2", "train.py"]
    with pytest.raises(UsageError) as refused:
        refuse_to_be_a_rank(TORCHRUN, words)
    assert refused.value.hint == (
        "Start it once: batchtune tune -- torchrun --nproc-per-node 2 train.py"
    )


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"SLURM_NTASKS_PER_NODE": "1", "SLURM_STEP_TASKS_PER_NODE": "1(x4)"},
        {"SLURM_NTASKS_PER_NODE": "8", "SLURM_STEP_TASKS_PER_NODE": "1"},
    ],
)
def test_a_process_that_is_alone_on_its_machine_is_not_refused(environment):
    refuse_to_be_a_rank(environment, WORDS)


@pytest.mark.parametrize("command", ["probe-oom", "tune", "verify"])
def test_inside_torchrun_the_usage_is_wrong(batchtune, command):
    ran = batchtune(command, "lengths.csv", env=TORCHRUN, code=2)
    assert "inside torchrun" in ran.stderr


def test_auto_needs_a_gpu():
    with pytest.raises(UsageError, match="there is none to use here") as refused:
        parse_nproc("auto", "cpu")
    assert "--nproc-per-node 2" in refused.value.hint
    assert parse_nproc("3", None) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nproc-per-node", "0"], "must be auto or a number from 1 to 1024, got '0'"),
        (["--nproc-per-node", "gpus"], "must be auto or a number"),
        (["--nproc-per-node", "2", "--ddp"], "--ddp keeps room for gradient buckets"),
        (["--nproc-per-node", "2", "--device", "cuda:1"], "names one device"),
        (
            ["--nproc-per-node", "2", "--", "python", "train.py"],
            "--nproc-per-node 2 is for a workload",
        ),
        (
            ["--simulate-world-size", "64", "--nproc-per-node", "2"],
            "one process stand for all ranks, but --nproc-per-node starts them",
        ),
        (["--simulate-world-size", "64", "--ddp"], "with --simulate-world-size 64"),
        (
            ["--simulate-world-size", "64", "--", "python", "train.py"],
            "--simulate-world-size 64 is for a workload",
        ),
        (["--nnodes", "2"], "--nproc-per-node does not say how many each has"),
        (NODES, "--nnodes needs --rdzv-endpoint HOST:PORT"),
        ([*NODES, "--rdzv-endpoint", "node0"], "must be HOST:PORT, got 'node0'"),
        ([*NODES, "--rdzv-endpoint", "node0:65534"], "must be HOST:PORT"),
        ([*NODES, "--node-rank", "2"], "node rank 2 is not one of 2 nodes"),
        (NODES[2:], "which of the 2 nodes is this one?"),
        (["--rdzv-endpoint", "a:1"], "--rdzv-endpoint is for several machines"),
        (["--node-rank", "1"], "--node-rank is for several machines"),
    ],
)
def test_wrong_usage_says_what_is_right(batchtune, tmp_path, options, message):
    write_manifest(tmp_path / "lengths.csv")
    workload = [] if "--" in options else ["--workload", KNOWN]
    ran = batchtune("probe-oom", "lengths.csv", *workload, *options, code=2)
    assert message in ran.stderr


RANK = RankDevice(
    rank=0, host="here", name="made", limit_bytes=1, outside_bytes=None, base_bytes=0
)
ALONE = ProbeSettings(workload=KNOWN, options={}, device="cpu")
TWO_RANKS = structs.replace(ALONE, nproc_per_node=2)
TWO_NODES = structs.replace(TWO_RANKS, nnodes=2)
SIMULATED = structs.replace(ALONE, simulate_world_size=64)
ON_TWO = made_device(world_size=2, ranks=[RANK, structs.replace(RANK, rank=1)])


@pytest.mark.parametrize(
    ("ran", "device", "asked", "message"),
    [
        (TWO_RANKS, ON_TWO, ALONE, "2 ranks a machine, now a process without ranks"),
        (
            SIMULATED,
            made_device(world_size=64, simulated=True),
            TWO_RANKS,
            r"64 ranks \(simulated\), now 2 ranks a machine",
        ),
        (
            TWO_NODES,
            ON_TWO,
            TWO_RANKS,
            "a machine on 2 machines, now 2 ranks a machine",
        ),
    ],
    ids=["ranks", "simulated", "machines"],
)
def test_a_run_of_other_ranks_is_not_continued(tmp_path, ran, device, asked, message):
    lengths = Lengths.of([1.0, 2.0])
    begin_run(lengths, ran, tmp_path, device, force=False)
    append_trial(tmp_path / TRIALS_FILE, Trial.of(BatchShape(1, 1.0), "ok"))
    assert open_run(lengths, ran, tmp_path)[0] is not None
    with pytest.raises(ResultError, match=message):
        open_run(lengths, asked, tmp_path)


def test_settings_know_their_ranks():
    assert "nproc_per_node" not in ALONE.recorded()
    assert (TWO_RANKS.world_size, TWO_NODES.world_size) == (2, 4)
    assert not SIMULATED.failures_are_dear
    assert describe_device(ON_TWO).endswith(" for each of 2 ranks")


@pytest.mark.slow
def test_every_output_says_that_ranks_were_simulated(succeed, tmp_path):
    write_manifest(tmp_path / "lengths.csv")
    few = ("--num-lengths", 2, "--num-buckets", 2, "--simulate-world-size", 2)
    tuned = succeed("tune", "lengths.csv", *WORKLOAD, *few, "--verify", *ANY_TIME)
    assert "for each of 2 ranks (simulated)" in tuned.stderr
    run = tmp_path / "batchtune-run"
    probe = read_result(run / "probe.json", Probe)
    assert (probe.device.world_size, probe.device.backend) == (2, "fake")
    assert read_result(run / "sweep.json", Sweep).world_size == 2
    for name in ("probe.json", "sweep.json"):
        assert "Step times are without communication" in (run / name).read_text()
    verified = read_result(run / "verify.json", Verification)
    assert "one rank's shard of 2 ranks (simulated)" in verified.warnings[0]
    assert "2 ranks (simulated)" in (run / "sampler.yaml").read_text()
    frameworks = ("speechbrain", "nemo", "lhotse", "espnet", "fairseq", "pytorch")
    shown = [("export", "--to", framework) for framework in frameworks]
    shown += [("report", "--full"), ("report", "--format", "markdown")]
    shown.append(("report", "--format", "html"))
    for arguments in shown:
        written = succeed(*arguments).stdout
        assert "2 ranks (simulated)" in flat(written), arguments


def test_srun_says_which_node_this_is(batchtune):
    options = [*NODES[2:], "--rdzv-endpoint", "127.0.0.1:9", "--setup-timeout", "0.1"]
    second = {"SLURM_NODEID": "1"}
    ran = batchtune("verify", "lengths.csv", *options, env=second, code=1)
    said = flat(ran.stderr)
    assert "Node 1 of 2: starts ranks for node 0 (127.0.0.1:10)." in said
    assert "node 0 does not answer at 127.0.0.1:10 within" in said
