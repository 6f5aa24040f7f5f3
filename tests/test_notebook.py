"""The example's notebook, run as Jupyter runs it."""

import re
import shutil
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_notebook_runs_and_an_interrupt_is_short(tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    for name in ("custom_workload.py", "stdlib_lengths.csv"):
        shutil.copy(EXAMPLES / name, tmp_path)
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    # Raises where a cell fails that is not expected to.
    nbclient.NotebookClient(notebook, resources=resources).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = {cell.source: cell.outputs for cell in cells}
    (progress,) = (
        "".join(each.text for each in shown)
        for source, shown in outputs.items()
        if "batchtune.tune(" in source
    )
    assert "2 of 2 done" in progress
    data = [
        output.data
        for shown in outputs.values()
        for output in shown
        if "data" in output
    ]
    assert any("application/vnd.plotly.v1+json" in each for each in data)
    assert "What an epoch costs" in outputs["tuned"][0].data["text/html"]
    (error,) = (each for shown in outputs.values() for each in shown if "ename" in each)
    assert error.ename == "KeyboardInterrupt"
    assert "the same call continues" in error.evalue
    lines = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(error.traceback)).splitlines()
    assert len(lines) <= 30
