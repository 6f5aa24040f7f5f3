"""The Python API: the command line's runs and records, from whatever holds the lengths, with DataFrames."""

import inspect
import json
import logging
import re
import sys
import types
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pandas as pd
import pytest
import torch
from shared_nursery import OF_SCRIPTS
from started import python

import batchtune
from batchtune import BatchtuneError
from batchtune.errors import ManifestError, ResultError, UsageError, WorkloadError
from batchtune.lengths import Lengths
from batchtune.reports import RunResults
from batchtune.results import (
    FrontierPoint,
    Probe,
    Row,
    Sweep,
    Trial,
    read_result,
)
from batchtune.workloads import load_function, spec_of

ROOT = Path(__file__).parents[1]
KNOWN = f"{ROOT / 'tests' / 'probe' / 'known_workload.py'}:Known"
LAW = "law:constant=220MiB,linear=1MiB,limit=460MiB"
VALUES = [5.0, 10.0, 20.0] * 12

pytestmark = pytest.mark.usefixtures("in_empty_folder")


@pytest.fixture
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    return batchtune.tune(
        KNOWN,
        np.array(VALUES),
        unit="s",
        device=LAW,
        num_lengths=3,
        num_buckets=[2, 3],
        run=tmp_path_factory.mktemp("api") / "run",
    )


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("api") / "swept"
    return batchtune.sweep(VALUES, max_batch_length=40, num_buckets=[3], run=folder)


# Results


def test_results_are_the_records_of_the_files(tuned):
    assert tuned.probe == read_result(tuned.folder / "probe.json", Probe)
    assert tuned.sweep == read_result(tuned.folder / "sweep.json", Sweep)
    again = batchtune.read_run(str(tuned.folder))
    assert (again.probe, again.sweep) == (tuned.probe, tuned.sweep)


def test_tables_have_a_row_per_entry_and_a_column_per_field(tuned):
    for table, kind in (
        (tuned.trials, Trial),
        (tuned.frontier, FrontierPoint),
        (tuned.rows, Row),
    ):
        assert tuple(table.columns) == kind.__struct_fields__
    assert tuned.frontier["length"].tolist() == [5.0, 10.0, 20.0]
    boundaries = [row.boundaries for row in tuned.sweep.rows]
    assert tuned.rows["boundaries"].tolist() == boundaries


def test_the_probe_alone_then_the_sweep_in_its_folder(tuned):
    given = {"unit": "s", "num_buckets": [2, 3], "run": tuned.folder}
    probed = batchtune.probe(KNOWN, VALUES, device=LAW, num_lengths=3, **given)
    assert (probed.probe, probed.sweep) == (tuned.probe, None)
    assert batchtune.sweep(VALUES, **given).sweep == tuned.sweep


def test_a_notebook_shows_the_headline_and_the_tables(tuned):
    html = tuned._repr_html_()
    assert repr(tuned) in html
    assert "<table" in html
    assert not re.search("<(script|style|html|link)", html)


def test_strings_of_a_run_are_no_html(swept):
    evil = msgspec.structs.replace(swept.sweep, warnings=["<script>alert(1)</script>"])
    shown = RunResults(name="run", sweep=evil)._repr_html_()
    assert "<script>" not in shown and "&lt;script&gt;" in shown


def test_what_a_run_lacks_is_an_error(swept):
    for table in ("trials", "frontier"):
        with pytest.raises(ResultError, match=f"no {table}"):
            getattr(swept, table)
    with pytest.raises(ResultError, match="no rows"):
        _ = RunResults(name="run").rows
    with pytest.raises(ResultError, match="holds no results"):
        batchtune.read_run(ROOT / "tests")


# Lengths


def lengths_in(data, **reading):
    swept = batchtune.sweep(
        data, max_batch_length=40, num_buckets=[3], force=True, **reading
    )
    return swept.sweep.lengths


@pytest.fixture
def frame():
    return pd.DataFrame(
        {"text": ["a"] * 3, "duration": [3.0, 1.0, 2.0], "chars": [30, 10, 20]}
    )


@pytest.mark.parametrize(
    "data",
    [
        torch.tensor([3.0, 1.0, 2.0]),
        pd.Series([3, 1, 2], index=[7, 8, 9]),
        Lengths.of([3, 1, 2]),
    ],
    ids=type,
)
def test_arrays_of_lengths(data):
    assert lengths_in(data).fingerprint == Lengths.of([3, 1, 2]).fingerprint


def test_a_column_of_a_table(frame):
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_pandas(frame)
    wanted = Lengths.of([3, 1, 2], [30, 10, 20])
    for table in (frame, frame[::-1], dict(frame), dataset, dataset.select([2, 1, 0])):
        read = lengths_in(table, length_key="duration", target_key="chars")
        assert (read.fingerprint, read.unit) == (wanted.fingerprint, "s")
        assert lengths_in(table, length_key="chars", unit="bytes").unit == "bytes"


def test_a_manifest_with_its_options(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("duration\n1\n2\n3\n")
    for manifest in (path, str(path)):
        read = lengths_in(manifest, max_length=2)
        assert (read.fingerprint, read.unit) == (Lengths.of([1, 2]).fingerprint, "s")


FRAME = pd.DataFrame({"x": [1.0], "text": ["a"]})
WRONG = {
    "text in an array": (["a", 1], {}, "not lengths"),
    "no examples": ([], {}, "non-empty"),
    "targets of an array": ([1.0], {"target_key": "x"}, "not lengths"),
    "another column": (FRAME, {"length_key": "y"}, "'y'"),
    "no column": (FRAME, {}, "not lengths.*length_key"),
    "text": (FRAME, {"length_key": "text"}, "not lengths"),
    "no file": ("missing.csv", {}, "does not exist"),
    "a filter": ([1.0], {"max_length": 1}, "'max_length' can't be used"),
    "unit": ([1.0], {"unit": "sec"}, "unknown --unit"),
    "a setting": ([1.0], {"memroy": "1GiB"}, "unknown settings: 'memroy'"),
    "a value": ([1.0], {"world_size": "x"}, "world-size"),
}


def assert_one_error(call, message):
    with pytest.raises((UsageError, ManifestError)) as caught:
        call()
    assert re.search(message, f"{caught.value} {caught.value.hint}", re.DOTALL)


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_one_error(case):
    data, arguments, message = WRONG[case]
    call = partial(batchtune.sweep, data, max_batch_length=10, **arguments)
    assert_one_error(call, message)


def test_a_data_set_without_a_column_is_not_read(frame):
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_pandas(frame)
    for data in (dataset, datasets.DatasetDict(dev=dataset)):
        call = partial(batchtune.sweep, data, max_batch_length=10)
        assert_one_error(call, "not lengths.*length_key")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"memory": 1 << 30}, "settings: 'memory'.*Did you mean memory_bytes"),
        ({"memory_fraction": "most"}, "--memory-fraction: must be a number"),
    ],
)
def test_a_wrong_setting_of_the_probe_is_named(setting, message):
    assert_one_error(partial(batchtune.probe, KNOWN, [1.0], **setting), message)


def test_sizes_may_have_units(tmp_path):
    probed = batchtune.probe(
        KNOWN, [1.0, 2.0], device=LAW, memory_bytes="500MiB", run=tmp_path
    )
    assert probed.probe.settings["memory_bytes"] == 500 << 20


# Workloads


def test_a_class_in_a_file_is_a_workload(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.chdir(ROOT)
    from custom_workload import TinyTagger

    assert spec_of(TinyTagger) == "examples/custom_workload.py:TinyTagger"
    spec = spec_of(load_function)
    assert spec == "batchtune.workloads:load_function"
    assert load_function(spec, {}, given=("spec", "options")) is load_function


@pytest.mark.process
def test_a_list_is_the_command_of_a_training_script(monkeypatch):
    monkeypatch.setattr("batchtune.probe.supervisor.Nursery", lambda *_: OF_SCRIPTS)
    with pytest.raises(BatchtuneError, match=r"no-such-program .* can't be started"):
        batchtune.probe(["no-such-program", "--epochs", "2"], VALUES, device="cpu")


def test_without_lengths_a_script_has_its_own(tmp_path, monkeypatch):
    asked = []

    def keep(folder, command, options, *rest, force):
        asked.append((folder, command, options, force))
        path = tmp_path / "lengths.csv"
        path.write_text("duration\n1\n2\n")
        return path, "The lengths are those of the script's own data set."

    def probe(workload, lengths, *_, **__):
        assert lengths.count == 2

    monkeypatch.setattr("batchtune.scripts.own_lengths.keep_own_lengths", keep)
    monkeypatch.setattr("batchtune.api._probe", probe)
    command = ["python", "train.py"]
    batchtune.probe(command, run=tmp_path, length_key="duration", force=True)
    assert asked == [(tmp_path, command, {"length_key": "duration"}, True)]
    with pytest.raises(UsageError, match="there are no lengths"):
        batchtune.tune(KNOWN)


def test_a_class_of_no_file_is_refused(monkeypatch):
    notebook = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    cell = vars(notebook)
    exec("class Step: ...", cell)
    for target in (cell["Step"], lambda: None):
        with pytest.raises(WorkloadError, match="can't be imported") as caught:
            batchtune.probe(target, [1.0])
        assert "%%writefile step.py" in caught.value.hint


# The package


ORDERS = (
    "import batchtune",
    "import batchtune, batchtune.probe",
    "import batchtune.probe.settings",
    "from batchtune.probe.settings import ProbeSettings; import batchtune",
    "import batchtune.api, batchtune",
    "from batchtune import probe, sweep; import batchtune",
)


# Each in a child of a process that has imported what they need.
IN_ORDERS = """
import json, os, sys
import msgspec, numpy
for imports in json.loads(sys.argv[1]):
    if os.fork():
        assert os.wait()[1] == 0, imports
        continue
    exec(imports)
    from batchtune import probe
    assert probe is batchtune.probe
    try:
        probe(print, [1.0])
    except batchtune.BatchtuneError as error:
        assert 'print' in str(error)
    from batchtune.probe.settings import ProbeSettings
    assert batchtune.probe.settings.ProbeSettings is ProbeSettings
    os._exit(0)
"""


@pytest.mark.process
def test_probe_is_a_function_in_all_import_orders():
    done = python("-c", IN_ORDERS, json.dumps(ORDERS))
    assert (done.stdout, done.stderr) == ("", "")


def test_nothing_is_printed_and_notes_are_logged(tmp_path, capsys, caplog):
    path = tmp_path / "lengths.csv"
    pd.DataFrame({"duration": VALUES}).to_csv(path)
    with caplog.at_level(logging.INFO, "batchtune"):
        batchtune.sweep(path, max_batch_length=40, num_buckets=[3])
    assert capsys.readouterr() == ("", "")
    assert [record.message for record in caplog.records] == [
        "Lengths are taken from column 'duration', in s."
    ]


def test_signatures_name_all_settings_with_their_defaults():
    for function in (batchtune.probe, batchtune.tune, batchtune.sweep):
        parameters = inspect.signature(function).parameters
        assert parameters["num_buckets"].default == tuple(range(10, 21))
        assert parameters["unit"].default is None
        assert "settings" not in parameters
        assert ("memory_fraction" in parameters) == (function is not batchtune.sweep)


@pytest.mark.parametrize("in_notebook", [False, True])
def test_a_notebook_shows_a_line_of_progress(monkeypatch, capsys, in_notebook):
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    if in_notebook:
        monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    batchtune.tune(KNOWN, VALUES, device=LAW, num_lengths=3, num_buckets=[2])
    printed = capsys.readouterr().out
    assert "\n" not in printed
    assert ("\r0 of 3 done, running 1 × 20" in printed) == in_notebook
    assert ("steps of the table done" in printed) == in_notebook


def test_an_interrupt_has_no_traceback_of_the_probe():
    def interrupt(line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="the same call continues") as raised:
        batchtune.probe(KNOWN, VALUES, device=LAW, on_progress=interrupt)
    assert len(raised.traceback) <= 3
    assert raised.value.__context__ is None


def test_errors_carry_their_hint_into_tracebacks():
    with pytest.raises(BatchtuneError) as caught:
        batchtune.sweep([1.0])
    assert caught.value.__notes__ == [caught.value.hint]


# The example page


@pytest.mark.slow
def test_the_examples_of_the_page_run(tmp_path, monkeypatch):
    page = (ROOT / "examples" / "PYTHON.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    names = {}
    for code in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        exec(code, names)
    assert isinstance(names["tuned"], RunResults)
