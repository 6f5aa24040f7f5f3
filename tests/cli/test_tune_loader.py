"""`batchtune tune-loader`, as a user types it."""

import sys

import pytest
from cli.conftest import flat, result_in
from ruamel.yaml import YAML

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="loaders are measured on Linux"
)

LOADERS = '''
import os, random, signal, time
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info


class Clips(Dataset):
    """Each example takes some milliseconds, in which nothing computes."""

    def __init__(self, seconds, fault=None, noise=False):
        self.seconds, self.fault, self.noise = seconds, fault, noise

    def __len__(self):
        return 240

    def __getitem__(self, index):
        time.sleep(self.seconds)
        if self.fault == "raises" and index == 37:
            raise ValueError("clip 37 is no audio")
        if self.fault == "hangs" and index == 9:
            time.sleep(3600)
        if self.fault == "dies" and get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGSEGV)
        return torch.full((50,), random.random() if self.noise else float(index))


def make(ms: float = 2.0):
    return {"dataset": Clips(ms / 1000), "batch_size": 8}


class Stream(IterableDataset):
    """Examples that each worker reads whole, or its part of them, in order or shuffled; all equal if `constant`."""

    def __init__(self, split, shuffled, constant):
        self.split, self.shuffled, self.constant = split, shuffled, constant

    def __iter__(self):
        info = get_worker_info()
        own = range(info.id if info else 0, 48, info.num_workers if info else 1) if self.split else range(48)
        if self.shuffled:
            own = torch.randperm(48).tolist()
        for index in own:
            yield torch.full((50,), 0.0 if self.constant else float(index))


def stream(split: bool = False, shuffled: bool = False, constant: bool = False):
    return {"dataset": Stream(split, shuffled, constant), "batch_size": 4}


def faulty(fault):
    return {"dataset": Clips(0.0005, fault), "batch_size": 8, "num_workers": 1}


def noisy(own: bool = False):
    random.seed(time.time() if own else 0)
    return {"dataset": Clips(0.0, noise=True), "batch_size": 8}


def few():
    return {"dataset": Clips(0.0), "batch_size": 500, "drop_last": True}


def words():
    return [["one", "two"]] * 40


def broken():
    raise RuntimeError("the corpus is not mounted")
'''
QUICK = ["--seconds", "0.2", "--trials", "1"]
PLAIN = ["--sweep", "multiprocessing_context=fork", "--sweep", "in_order=true"]
ALONE = ["--sweep", "num_workers=0", *PLAIN]


@pytest.fixture
def tuning(batchtune, tmp_path):
    """`tuning(name, *options)`: tunes the loader of this name in few and short measurements."""
    (tmp_path / "loaders.py").write_text(LOADERS)

    def tuning(name, *options, code=0):
        words = ("tune-loader", f"loaders.py:{name}", *QUICK, *options)
        return batchtune(*words, code=code)

    return tuning


@pytest.mark.slow
def test_the_fewest_workers_that_keep_up_are_recommended(
    batchtune, tuning, tmp_path, monkeypatch
):
    monkeypatch.setattr("batchtune.loaders.tuner._PACED_BATCHES", 60)
    swept = [*PLAIN, "--sweep", "num_workers=0,1", "--sweep", "prefetch_factor=2"]
    tuning("make", "--step-ms", "30", *swept)
    found = result_in(tmp_path, "loader")
    rows = {row["workers"]: row for row in found["rows"]}
    alone = rows[0]
    one = rows[1]
    # 16 ms to make a batch, 30 ms to train with it, one after the other or at the same time.
    assert 0.3 < alone["gpu_idle"] < 0.7
    assert one["gpu_idle"] < alone["gpu_idle"] / 2
    assert found["rows"][found["recommended"]] == one
    assert (found["epoch_batches"], found["demand"]["per"]) == (30, "batch")
    config = YAML(typ="safe").load(tmp_path / "batchtune-run" / "loader.yaml")
    assert (config["kind"], config["arguments"]) == ("torch", one["arguments"])
    batchtune("report", "--fail-if", "gpu_idle > 0.9", code=0)
    batchtune("report", "--fail-if", "loader.workers > 0", code=3)
    assert "--force" in tuning("few", code=1).stderr


@pytest.mark.slow
def test_settings_that_fail_are_named_and_the_rest_goes_on(tuning, tmp_path):
    swept = [*PLAIN, "--sweep", "num_workers=1", "--sweep", "prefetch_factor=2"]
    faults = ["--sweep", "fault=none,raises,hangs,dies"]
    ran = tuning("faulty", *swept, *faults, "--timeout", "1")
    found = result_in(tmp_path, "loader")
    rows = {row["arguments"]["fault"]: row for row in found["rows"]}
    outcomes = {None: "ok", "raises": "error", "hangs": "timeout", "dies": "crash"}
    assert {fault: row["outcome"] for fault, row in rows.items()} == outcomes
    assert "clip 37 is no audio" in rows["raises"]["error"]
    assert "DataLoader worker (pid" in rows["dies"]["error"]
    assert found["rows"][found["recommended"]]["arguments"]["fault"] is None
    assert "3 of 4" in ran.stdout


@pytest.mark.process
def test_workers_that_repeat_each_other_are_no_gain(tuning, tmp_path):
    swept = [*PLAIN, "--sweep", "num_workers=0,2", "--sweep", "prefetch_factor=2"]
    ran = tuning("stream", *swept, "--set", "shuffled=true", "--seconds", "0.4")
    said = flat(ran.stdout)
    assert "! Workers repeat each other: " in said
    assert "Split the data set by torch.utils.data.get_worker_info()" in said
    found = result_in(tmp_path, "loader")
    alone, two = found["rows"]
    assert (alone["workers"], alone["outcome"], found["recommended"]) == (0, "ok", 0)
    assert (two["workers"], two["outcome"]) == (2, "repeats")
    assert two["examples_per_second"] is None


@pytest.mark.process
def test_two_epochs_from_one_seed_are_compared(tuning, tmp_path):
    tuning("noisy", *ALONE, "--check-reproducible")
    same = {"batches": 30, "first_difference": None, "what": None}
    assert result_in(tmp_path, "loader")["reproduced"] == same
    tuning("noisy", *ALONE, "--check-reproducible", "--set", "own=true", "--force")
    assert result_in(tmp_path, "loader")["reproduced"]["first_difference"] == 0


UNUSABLE = [
    (["missing.py:make"], 1, "missing.py does not exist"),
    (["loaders.py:mak"], 1, "Did you mean 'make'?"),
    (["loaders.py:broken"], 1, "the corpus is not mounted"),
    (["loaders.py:make", "--set", "millis=1"], 2, "keyword argument 'millis'"),
    (["loaders.py:make", "--sweep", "worker=1"], 2, "num_workers"),
    (["loaders.py:make", "--sweep", "num_workers=two"], 2, "must be a whole number"),
    (["loaders.py:make", "--sweep", "multiprocessing_context=spwan"], 2, "spwan "),
]


@pytest.mark.process
@pytest.mark.usefixtures("tuning")
def test_a_target_that_cant_be_used_is_explained(batchtune):
    for arguments, code, expected in UNUSABLE:
        assert expected in batchtune("tune-loader", *arguments, code=code).stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--sweep", "num_workers"], "NAME=VALUES"),
        (["--sweep", "num_workers=4:1"], "a range goes from a smaller to a larger"),
        (["--sweep", "a=1", "--sweep", "a=2"], "given twice"),
        (["--kind", "tensorflow"], "--kind must be one of dali, torch, iterable"),
        (["--ranks-per-node", "100000"], "each rank needs one"),
        (["--step-ms", "0"], "--step-ms: must be a number of at least 0.001"),
        (["--seconds", "nan"], "--seconds: must be a number of at least 0.05"),
        (["--trials", "0"], "--trials: must be a whole number"),
        (["--seed", "-1"], "--seed: must be a whole number of at least 0"),
        (["--set", "ms=1e400"], "larger than any float"),
    ],
)
def test_wrong_options_are_refused(tuning, arguments, expected):
    assert expected in tuning("make", *arguments, code=2).stderr
