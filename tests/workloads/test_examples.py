import csv
import sys
from pathlib import Path

import pytest
import torch

from batchtune.results import BatchShape
from batchtune.workloads import load_workload

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "stdlib_lengths.py"
MANIFEST = EXAMPLES / "stdlib_lengths.csv"


@pytest.fixture(autouse=True)
def _path_is_restored(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture(scope="module")
def script():
    import runpy

    return runpy.run_path(str(SCRIPT))


def rows_of(path):
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def test_the_script_writes_a_row_for_each_library_function(
    script, tmp_path, monkeypatch, capsys
):
    (tmp_path / "twice.py").write_text("def f(): pass\ndef f(): return 1\n")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "-o", str(tmp_path / "lengths.csv")])
    script["main"]()
    assert [row["id"] for row in rows_of(tmp_path / "lengths.csv")] == [
        "twice:f",
        "twice:f#2",
    ]
    assert capsys.readouterr().err == "2 functions; 0 files could not be read\n"


def test_the_committed_manifest_is_the_one_in_the_readme():
    lengths = sorted(int(row["num_tokens"]) for row in rows_of(MANIFEST))
    assert (len(lengths), lengths[len(lengths) // 2], lengths[-1]) == (7025, 45, 1602)


def test_the_custom_workload_has_at_most_30_lines():
    assert (
        len((EXAMPLES / "custom_workload.py").read_text(encoding="utf-8").splitlines())
        <= 30
    )


def test_the_custom_workload_trains_on_one_batch_repeatedly():
    workload = load_workload(
        f"{EXAMPLES / 'custom_workload.py'}:TinyTagger", {"dim": 16, "vocab": 20}
    )
    workload.setup(torch.device("cpu"))
    before = workload.model[-1].weight.detach().clone()
    batch = workload.make_batch(BatchShape(3, 11))
    for _ in range(2):
        workload.step(batch)
    assert not torch.equal(workload.model[-1].weight, before)
