import runpy
import sys
from pathlib import Path

import pandas as pd
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


def test_the_script_writes_a_row_for_each_library_function(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "twice.py").write_text("def f(): pass\ndef f(): return 1\n")
    table = tmp_path / "lengths.csv"
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "-o", str(table)])
    runpy.run_path(str(SCRIPT))["main"]()
    assert pd.read_csv(table)["id"].tolist() == ["twice:f", "twice:f#2"]
    assert capsys.readouterr().err == "2 functions; 0 files could not be read\n"


def test_the_committed_manifest_is_the_one_in_the_readme():
    lengths = pd.read_csv(MANIFEST)["num_tokens"]
    assert (len(lengths), lengths.median(), lengths.max()) == (7025, 45, 1602)


def test_the_custom_workload_has_at_most_30_lines():
    assert len((EXAMPLES / "custom_workload.py").read_text().splitlines()) <= 30


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
