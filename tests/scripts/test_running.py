"""`batchtune run`: a script that is not changed trains on exactly the recommended batches."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli.conftest import run_here_in, write_lengths
from frames import Rows, collate
from msgspec import structs
from report_records import made_probe
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from training_lines import START, step, write

from batchtune import sampler_from_config
from batchtune.allocators import VARIABLES
from batchtune.configs import read_any_sampler_yaml
from batchtune.exports.run_configs import render_sampler_yaml
from batchtune.results import PROBE_FILE, last_recording, write_result
from batchtune.scripts import running
from batchtune.scripts.running import LENGTHS_FILE, random_batch_size, unsafe

SCRIPT = Path(__file__).with_name("trained.py")
LENGTHS = np.array([1.0 + index * 7 % 23 for index in range(60)])
SAME_STEPS = ["--max-batch-length", 100, "--current", "batch_size=4"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
TORCHRUN += ["--standalone"]


@pytest.fixture(scope="module")
def folder(made_once):
    """A manifest and a run of it."""

    def make(folder):
        write_lengths(folder / "train.csv", LENGTHS)
        write_lengths(folder / "short.csv", LENGTHS[:30])
        (folder / "stream").mkdir()
        (folder / "stream" / "stream.yaml").touch()
        for options in (
            ["--max-batch-length", 100, "--num-buckets", 3],
            ["--max-tokens", 80, "--run", "packed"],
            [*SAME_STEPS, "--accumulate", 3, "--run", "same"],
            [*SAME_STEPS, "--world-size", 2, "--run", "same-on-ranks"],
        ):
            ran = run_here_in(folder, "sweep-buckets", "train.csv", *options)
            assert ran.returncode == 0, ran.stderr

    return made_once("tuned-for-scripts", make)


def loader_of(lengths, **options):
    data = [torch.ones(int(length)) for length in lengths]
    return DataLoader(data, collate_fn=collate, **options)


class Stream(IterableDataset[Any]):
    def __iter__(self):
        return iter(Rows(LENGTHS))


def recommended(folder, epoch, run="batchtune-run", **options):
    config = folder / run / "sampler.yaml"
    return list(sampler_from_config(config, LENGTHS, epoch=epoch, **options))


@pytest.fixture
def run(folder, capfd):
    """`run(command, *words)`: runs the script; the lines that it printed, and what batchtune and it said beside."""

    def run(command, *script, to="batchtune-run"):
        words = [*command, str(SCRIPT), *script]
        ran = run_here_in(folder, "run", "train.csv", "--run", to, "--", *words)
        said = capfd.readouterr()
        assert ran.returncode == 0, ran.stderr + said.err
        lines = [json.loads(line) for line in said.out.splitlines()]
        return [tuple(line) for line in lines], ran.stderr + said.err

    return run


def batches(lines, what, epoch, rank=0):
    return [line[3] for line in lines if line[:3] == (what, rank, epoch)]


@pytest.mark.process
def test_a_script_trains_on_the_recommended_batches(folder, run):
    lines, stderr = run([sys.executable], "--workers", "1")
    for epoch in range(2):
        assert batches(lines, "train", epoch) == recommended(folder, epoch)
        in_order = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        assert batches(lines, "validate", epoch) == in_order
    epochs = [recommended(folder, epoch) for epoch in range(2)]
    assert epochs[0] != epochs[1]
    assert batches(lines, "length", 0) == [[len(epochs[0]), 3]]
    (said,) = stderr.splitlines()
    assert said.endswith(f"{os.sep}sampler.yaml, {len(epochs[0])} an epoch.")


@pytest.mark.slow
def test_each_of_two_ranks_trains_on_its_batches(folder, run):
    pytest.importorskip("accelerate")
    lines, stderr = run(TORCHRUN, "--accelerate")
    for rank in range(2):
        for epoch in range(2):
            expected = recommended(folder, epoch, rank=rank, world_size=2)
            assert batches(lines, "train", epoch, rank) == expected
        assert batches(lines, "length", 0, rank) == [[len(expected), 3]]
        # accelerate steps the schedule, which is made before, once for each rank.
        assert batches(lines, "before", 0, rank) == [[2 * len(expected)]]
    assert stderr.count(f"{len(expected)} an epoch on each rank") == 1


@pytest.fixture
def started(folder, tmp_path, monkeypatch):
    """`started(run)`: the options of a script that was started with the batches of this run, in this process."""
    LENGTHS.tofile(tmp_path / LENGTHS_FILE)

    def start(name):
        monkeypatch.setattr(running, "_given", None)
        run = str(folder / name)
        return {
            "run": run,
            "scratch": str(tmp_path),
            "force": False,
            "recorder": {"run": str(tmp_path)},
        }

    return start


def rows_of(lengths, **options):
    options = {"batch_size": 4, **options}
    return DataLoader(Rows(10 * lengths), collate_fn=collate, **options)


def given_by(loader, options):
    return running.wrap(loader, lambda: DataLoader.__iter__(loader), options)


def trained_on(loader, options, *epochs, ahead=0):
    """The examples of each step of epochs whose steps take so many batches, of which the loop fetches some ahead."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    steps = []
    for numbers in epochs:
        given = given_by(loader, options)
        fetched = list(itertools.islice(given, ahead))
        for number in numbers:
            fetched += itertools.islice(given, number)
            examples = torch.cat([batch[:, 0] for batch in fetched[:number]])
            steps.append(examples.tolist())
            del fetched[:number]
            optimizer.step()
    return steps


def test_a_script_that_pads_gets_packed_batches_only_by_force(folder, started):
    options = started("packed")
    loader = rows_of(LENGTHS)
    with pytest.raises(SystemExit, match="it pads its batches"):
        next(given_by(loader, options))
    options["force"] = True
    for epoch in range(2):
        expected = recommended(folder, epoch, "packed")
        assert running.length(loader, len, options) == len(expected)
        assert trained_on(loader, options, [1] * len(expected)) == expected
    assert running.length(rows_of(LENGTHS[:10]), len, options) == 3


@pytest.mark.parametrize("ahead", [0, 1])
def test_each_step_has_its_own_examples_in_other_micro_batches(started, ahead):
    """Also in a loop that fetches a batch ahead, as accelerate's loaders do."""
    options = started("same")
    loader = rows_of(LENGTHS, shuffle=True)
    assert running.length(loader, len, options) == 15
    torch.manual_seed(0)
    own = torch.cat([batch[:, 0] for batch in loader]).reshape(5, 12)
    torch.manual_seed(0)
    steps = trained_on(loader, options, [3] * 5, ahead=ahead)
    assert list(map(sorted, steps)) == own.sort().values.tolist()


def test_two_ranks_keep_the_examples_of_each_step(started, monkeypatch):
    """The epoch is that of the script's own sampler."""
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    own = []
    given = []
    for rank in range(2):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        sampler = DistributedSampler(LENGTHS, 2, rank)
        sampler.set_epoch(5)
        loader = rows_of(LENGTHS, sampler=sampler)
        own.append([batch[:, 0].tolist() for batch in loader])
        given.append(trained_on(loader, started("same-on-ranks"), [1] * len(own[0])))
    for one, other, new, new_other in zip(*own, *given, strict=True):
        assert sorted([*one, *other]) == sorted([*new, *new_other])
    assert given != own


@pytest.mark.parametrize("batches", [1, 6])
def test_a_script_that_steps_otherwise_is_told_its_accumulation(
    started, batches, tmp_path
):
    """A step of more batches, too, which may be without mixed precision's first steps. An earlier recording counts."""
    earlier = write(tmp_path, [START, step((2, 10))])
    with pytest.raises(SystemExit, match="with a gradient accumulation of 3"):
        trained_on(rows_of(LENGTHS), started("same"), [batches] * 4)
    assert last_recording(earlier).start == START


def test_batches_of_another_size_end_the_script(started):
    """Before its first step."""
    with pytest.raises(SystemExit, match="keeps steps of 12"):
        given_by(rows_of(LENGTHS, shuffle=True, batch_size=6), started("same"))


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("last", [[3, 3], [3, 2], [2, 3], [6]])
def test_a_later_step_of_other_batches_is_warned_of(started, capsys, ahead, last):
    """But for the last one of an epoch, which may have fewer."""
    epochs = ([3] * 5, [3] * 3 + last)
    trained_on(rows_of(LENGTHS), started("same"), *epochs, ahead=ahead)
    assert ("stepped after 2 batches" in capsys.readouterr().err) == (last == [2, 3])


@pytest.mark.parametrize(
    ("loader", "reason", "line", "name"),
    [
        (
            loader_of(LENGTHS[:59], batch_size=4),
            *("59 examples, but the manifest 60", "sampler_from", "batchtune-run"),
        ),
        (DataLoader(Stream()), "a stream", "BucketedStream.from", "batchtune-run"),
        (DataLoader(Stream()), "a stream", "SameStepStream(", "same"),
    ],
    ids=["another number", "a stream", "a stream's steps"],
)
def test_a_script_that_can_t_be_given_batches_ends(started, loader, reason, line, name):
    with pytest.raises(SystemExit) as ended:
        trained_on(loader, started(name), [1])
    said = str(ended.value)
    assert reason in said and line in said
    assert "Change three lines" in said


@pytest.mark.process
def test_the_exit_code_is_the_command_s(folder):
    words = ["run", "train.csv", "--"]
    assert run_here_in(folder, *words, "sh", "-c", "exit 7").returncode == 7
    assert run_here_in(folder, *words, "sh", "-c", "kill -9 $$").returncode == 137
    done = run_here_in(folder, *words, "true")
    assert done.returncode == 0
    assert "Warning: nothing was changed" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.csv"], "no command to run"),
        (["--", "true"], "the manifest is missing: batchtune-run was tuned"),
        (
            ["train.csv", "--run", "none", "--", "true"],
            "tune train.csv --run none -- true`",
        ),
        (
            ["short.csv", "--", "true"],
            "has 30 examples up to 23 s, the tuned one had 60",
        ),
        (["train.csv", "--run", "stream", "--", "true"], "BucketedStream.from_config"),
    ],
)
def test_bad_input_ends_before_the_command_starts(folder, words, message):
    ran = run_here_in(folder, "run", *words)
    assert ran.returncode in (1, 2)
    assert message in ran.stderr


@pytest.mark.process
def test_without_a_manifest_the_lengths_of_the_run_folder_count(folder, tmp_path):
    own = shutil.copytree(folder / "batchtune-run", tmp_path / "batchtune-run")
    scanned = run_here_in(folder, "scan", "train.csv", "-o", own / "lengths.parquet")
    assert scanned.returncode == 0, scanned.stderr
    ran = run_here_in(tmp_path, "run", "--", "true")
    assert ran.returncode == 0, ran.stderr
    assert not list(own.glob("script-*"))


OLD = "PYTORCH_CUDA_ALLOC_CONF"
NEW = "PYTORCH_ALLOC_CONF"
THRESHOLD = "MALLOC_MMAP_THRESHOLD_"
EXPANDABLE = "expandable_segments:True"


@pytest.mark.parametrize(
    ("limit", "measured", "user", "expected", "warns"),
    [
        (None, "expandable", {}, {OLD: EXPANDABLE, NEW: EXPANDABLE}, False),
        (None, None, {NEW: EXPANDABLE}, {NEW: EXPANDABLE}, False),
        (None, "native", {NEW: EXPANDABLE}, {NEW: EXPANDABLE}, True),
        (1 << 20, None, {}, {}, False),
        (1 << 50, None, {}, {THRESHOLD: "16384"}, False),
    ],
    ids=["expandable", "user's", "another", "cpu", "cpu without room"],
)
def test_a_script_runs_with_the_measured_allocator(
    folder, tmp_path, monkeypatch, limit, measured, user, expected, warns
):
    config = read_any_sampler_yaml(folder / "batchtune-run" / "sampler.yaml")
    evidence = structs.replace(config.evidence, allocator=measured)
    config = structs.replace(config, evidence=evidence)
    (tmp_path / "sampler.yaml").write_text(render_sampler_yaml(config))
    probe = made_probe()
    device = probe.device
    if limit is not None:
        device = structs.replace(device, kind="cpu", limit_bytes=limit)
    write_result(tmp_path / PROBE_FILE, structs.replace(probe, device=device))
    for name in (*VARIABLES, THRESHOLD):
        monkeypatch.delenv(name, raising=False)
    for name, value in user.items():
        monkeypatch.setenv(name, value)
    given = []

    def note(words, environment):
        names = {*VARIABLES, THRESHOLD} & environment.keys()
        given.append({name: environment[name] for name in names})
        return 1

    monkeypatch.setattr("batchtune.cli.script.run_to_the_end", note)
    manifest = folder / "train.csv"
    ran = run_here_in(tmp_path, "run", manifest, "--run", tmp_path, "--", "true")
    assert given == [expected], ran.stderr
    said = (
        "was measured without expandable segments, but your environment asks for "
        "expandable_segments:True"
    )
    assert (said in " ".join(ran.stderr.split())) == warns


# The script's loaders


@pytest.mark.parametrize(
    ("options", "batch_size"),
    [
        ({"batch_size": 8, "shuffle": True}, 8),
        ({"batch_size": 8, "sampler": DistributedSampler(LENGTHS, 2, 0)}, 8),
        ({"batch_size": 8}, None),
        ({"batch_size": 8, "sampler": SubsetRandomSampler(range(60))}, None),
        ({"batch_sampler": BatchSampler(RandomSampler(LENGTHS), 8, True)}, 8),
        ({"batch_sampler": [[0, 1], [2]]}, None),
    ],
    ids=["shuffled", "dealt", "in order", "subset", "sampler", "own"],
)
def test_the_size_of_random_batches_is_known(options, batch_size):
    assert random_batch_size(loader_of(LENGTHS, **options)) == batch_size
    assert random_batch_size(DataLoader(Stream(), batch_size=6)) == 6


@pytest.mark.parametrize(("split", "batch_size"), [(False, 8), (True, None)])
def test_accelerates_loader_shows_the_scripts_own(split, batch_size):
    shards = pytest.importorskip("accelerate.data_loader")
    own = BatchSampler(RandomSampler(LENGTHS), 8, drop_last=False)
    shard = shards.BatchSamplerShard(own, 2, 0, split_batches=split)
    assert random_batch_size(loader_of(LENGTHS, batch_sampler=shard)) == batch_size


@pytest.mark.slow
def test_the_checks_hold_no_memory_of_the_script():
    """NumPy's correlations and fits set up BLAS, which holds 32 MiB from then on."""
    code = """
import numpy, psutil, torch
from batchtune.scripts.relations import fitted
from batchtune.results import PROBE_FILE, write_result
from batchtune.scripts import running
from batchtune.scripts.running import LENGTHS_FILE
from batchtune.scripts.running import unsafe

lengths = numpy.arange(1.0, 101.0)
examples = [torch.zeros(int(length)) for length in lengths]
loader = torch.utils.data.DataLoader(examples, batch_size=4)
list(torch.utils.data.DataLoader(examples, batch_size=1))
held = psutil.Process().memory_info().data
assert unsafe(loader, lengths) is None
assert fitted("L", lengths, numpy.ceil(lengths / 3) + 1) is not None
print(psutil.Process().memory_info().data - held)
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert int(ran.stdout) < 16 << 20


def test_examples_in_another_order_are_noticed():
    shuffled = np.random.default_rng(0).permutation(LENGTHS)
    assert unsafe(loader_of(10 * LENGTHS + 2), LENGTHS) is None
    assert "in different orders" in unsafe(loader_of(10 * shuffled), LENGTHS)
    assert unsafe(loader_of(np.full(60, 30)), LENGTHS) is None
    noise = np.random.default_rng(1).uniform(0.9, 1.1, 60)
    assert unsafe(loader_of(100 * LENGTHS * noise), LENGTHS) is None


@pytest.mark.parametrize(
    "beside", [lambda row: row, lambda row: 1.7e9 + 3 * row + row % 5]
)
def test_an_index_or_a_time_says_nothing_about_the_order(beside):
    ascending = np.sort(LENGTHS)
    for stored, noticed in ((LENGTHS, True), (ascending, False)):
        examples = [
            (torch.zeros(int(length)), beside(row)) for row, length in enumerate(stored)
        ]
        loader = DataLoader(examples, batch_size=1)
        assert ("different orders" in (unsafe(loader, ascending) or "")) == noticed


@pytest.mark.parametrize(
    ("sampler", "chooses"),
    [
        (WeightedRandomSampler([1.0] * 60, 60), True),
        (SubsetRandomSampler(range(60)), True),
        (RandomSampler(range(60)), False),
    ],
)
def test_a_sampler_that_chooses_examples_is_noticed(sampler, chooses):
    loader = loader_of(LENGTHS, sampler=sampler, batch_size=4)
    assert ("chooses among" in (unsafe(loader, LENGTHS) or "")) == chooses
    assert unsafe(loader, LENGTHS, draws=False) is None
