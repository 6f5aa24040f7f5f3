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
    outputs = [output for cell in cells for output in cell.outputs]
    data = [output.data for output in outputs if "data" in output]
    assert any("application/vnd.plotly.v1+json" in each for each in data)
    assert any("What an epoch costs" in each.get("text/html", "") for each in data)
    (error,) = (output for output in outputs if "ename" in output)
    assert error.ename == "KeyboardInterrupt"
    assert "the same call continues" in error.evalue
    lines = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(error.traceback)).splitlines()
    assert len(lines) <= 30
