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
    for name in ("custom_workload.py", "stdlib_lengths.csv"):
        shutil.copy(EXAMPLES / name, tmp_path)
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    # Raises where a cell fails that is not expected to.
    nbclient.NotebookClient(notebook, resources=resources).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = {cell.source: cell.outputs for cell in cells}
    (tuning,) = (
        shown for source, shown in outputs.items() if "batchtune.tune(" in source
    )
    assert "3 done" in tuning[0].text
    data = [
        output.data
        for shown in outputs.values()
        for output in shown
        if "data" in output
    ]
    assert any("application/vnd.plotly.v1+json" in each for each in data)
    assert "sampler.yaml" in outputs["tuned"][0].data["text/html"]
    (error,) = (each for shown in outputs.values() for each in shown if "ename" in each)
    assert error.ename == "KeyboardInterrupt"
    assert "the same call continues" in error.evalue
    lines = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(error.traceback)).splitlines()
    assert len(lines) <= 30
