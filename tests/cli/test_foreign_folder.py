"""The working folder may be anybody's: no Python file in it runs unless the command line names it."""

import sys
from multiprocessing import resource_tracker

import pytest
from cli.conftest import ended, start_in, write_manifest

from batchtune.processes.pool import run_in_processes

pytestmark = pytest.mark.process
PROGRAM = "from batchtune.cli import main\nmain()\n"
# Names of the standard library too, some of which Python imports itself while it starts a program.
NAMES = (
    "importlib",
    "runpy",
    "multiprocessing",
    "pickle",
    "struct",
    "socket",
    "tempfile",
    "random",
    "json",
    "resource",
    "torch",
    "numpy",
    "psutil",
    "msgspec",
    "pyarrow",
    "pandas",
    "pynvml",
    "typer",
    "rich",
    "jinja2",
    "plotly",
    "ruamel",
    "mutagen",
    "tokenizers",
    "sitecustomize",
    "usercustomize",
    "nvidia",
    "yaml",
)
LOADER = """
from torch.utils.data import DataLoader

try:
    import mutagen
except ImportError:
    mutagen = None

def make():
    return DataLoader([[1.0]] * 400, batch_size=4, num_workers=1, multiprocessing_context="spawn")
"""


@pytest.fixture
def foreign(tmp_path):
    """A folder in which modules of many names leave a mark, and a manifest."""
    folder = tmp_path / "foreign"
    folder.mkdir()
    for name in NAMES:
        marking = f"open({str(tmp_path / 'marks')!r}, 'a').write('{name} ')\n"
        (folder / f"{name}.py").write_text(
            f"{marking}raise ImportError('of the working folder')\n"
        )
    write_manifest(folder / "lengths.csv")
    return folder


def run(folder, *arguments, command=(), code=0):
    """Runs a command as the script `batchtune` does, or as `command`; fails if a file of the folder has run."""
    program = folder.parent / "bin" / "batchtune"
    program.parent.mkdir(exist_ok=True)
    program.write_text(PROGRAM)
    started = [sys.executable, *(command or (program,)), *arguments]
    ran = start_in(folder, list(map(str, started)), {})
    marks = folder.parent / "marks"
    assert not marks.exists(), marks.read_text()
    return ended(ran, code)


def test_reading_runs_nothing_of_the_working_folder(foreign):
    run(foreign, "scan", "lengths.csv", "-o", "lengths.parquet")
    assert "does not work here" not in run(foreign, "doctor").stdout


def test_as_a_module_it_runs_no_library_of_the_folder(foreign):
    for name in {*NAMES} & sys.stdlib_module_names:  # Python itself runs these
        (foreign / f"{name}.py").unlink()
    sweep = ("sweep-buckets", "lengths.csv", "--max-batch-length", 60)
    module = ("-m", "batchtune")
    run(foreign, *sweep, "--num-buckets", 2, command=module)


def where(_):
    return sys.path


def test_a_pool_runs_nothing_of_the_working_folder(foreign, monkeypatch):
    monkeypatch.chdir(foreign)
    monkeypatch.setattr(
        resource_tracker, "_resource_tracker", resource_tracker.ResourceTracker()
    )
    paths = {}
    run_in_processes(where, {0: 0}, 1, paths.__setitem__, lambda: None)
    assert paths and str(foreign) not in paths[0]
    assert not (foreign.parent / "marks").exists()


@pytest.mark.slow
def test_a_builtin_workload_runs_nothing_of_the_folder(foreign):
    workload = ("--workload", "builtin:transformer-lm", "--set", "size=none")
    ran = run(foreign, "probe-oom", "lengths.csv", *workload, "--device", "cpu", code=2)
    # It was imported, with torch.
    assert "builtin:transformer-lm: size: must be a text" in ran.stderr


@pytest.mark.slow  # measures
def test_a_loader_from_elsewhere_runs_nothing_of_the_folder(foreign):
    elsewhere = foreign.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "loaders.py").write_text(LOADER)
    settings = ("num_workers=1", "multiprocessing_context=spawn", "prefetch_factor=2")
    few = [f"--sweep={setting}" for setting in (*settings, "in_order=true")]
    few += ["--seconds", 0.2, "--trials", 1, "--step-ms", 1]
    run(foreign, "tune-loader", elsewhere / "loaders.py:make", *few)
