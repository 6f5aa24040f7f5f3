import sys

import pytest

from batchtune.errors import ManifestError, UsageError, WorkloadError
from batchtune.lengths import UNITS
from batchtune.workloads import default_workload, load_workload, parse_options

GOOD = """
class Good:
    def __init__(self, layers=2, *, name="x"):
        self.layers, self.name = layers, name
    def setup(self, device): ...
    def make_batch(self, shape): ...
    def step(self, batch): ...

def make(**anything):
    return Good(**anything)

def needs(path):
    return Good()

def fails(depth=0):
    if depth < 30:
        raise_it(depth + 1)

def raise_it(depth):
    if depth == 30:
        raise KeyError("weights")
    fails(depth)

def leaves():
    raise SystemExit(3)

def tells():
    from batchtune.errors import ManifestError
    raise ManifestError("no vocabulary in vocab.txt")

class Half:
    step = None
    def setup(self, device): ...

number = 3
_hidden = Good
"""


@pytest.fixture(autouse=True)
def _import_state_is_restored(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = set(sys.modules)
    yield
    for name in set(sys.modules) - modules:
        if "workload_under_test" in name or name.startswith("sibling"):
            del sys.modules[name]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "workload_under_test.py").write_text(GOOD)
    return tmp_path


def failure(spec, **options):
    with pytest.raises(WorkloadError) as caught:
        load_workload(spec, options)
    return caught.value


@pytest.mark.parametrize(
    "spec",
    [
        "workload_under_test:Good",  # a module of the working folder
        "workload_under_test.py:make",
    ],
)
def test_a_class_or_a_function_gets_the_options(folder, spec):
    assert load_workload(spec, {"layers": 5}).layers == 5


def test_a_file_may_import_its_siblings_from_another_folder(folder):
    (folder / "deep").mkdir()
    (folder / "deep" / "sibling_model.py").write_text("LAYERS = 7")
    (folder / "deep" / "workload_under_test_2.py").write_text(
        f"from sibling_model import LAYERS\n{GOOD}"
    )
    assert load_workload("deep/workload_under_test_2.py:Good", {}).layers == 2


def test_a_file_takes_no_other_module_s_place(folder):
    import string

    (folder / "string.py").write_text(GOOD)
    load_workload("string.py:Good", {})
    assert sys.modules["string"] is string


@pytest.mark.parametrize(
    ("spec", "message", "hint"),
    [
        (
            "",
            "'' names no class or function",
            "Write path/to/file.py:NAME or package.module:NAME.",
        ),
        (
            "builtin:conformer",
            "unknown built-in workload 'conformer'",
            "Did you mean 'conformer-ctc'? Built in: conformer-ctc, transformer-lm.",
        ),
        ("nowhere.py:Good", "nowhere.py does not exist", "Write path/to/file.py"),
        (
            "a/b:Good",
            "'a/b' is neither a .py file nor a module",
            "Write path/to/file.py",
        ),
        (
            "workload_under_test.py:Godo",
            "workload_under_test.py has no 'Godo'",
            "Did you mean 'Good'? Write path/to/file.py",
        ),
        (
            "workload_under_test.py:number",
            "number in workload_under_test.py is of type int, but a class or a function is needed",
            "Name the class",
        ),
        (
            "workload_under_test.py:Half",
            "workload_under_test.py:Half gives a Half without make_batch, step: that is not a workload",
            "A workload has the methods setup(device), make_batch(shape) and step(batch).",
        ),
        (
            "workload_under_test.py:needs",
            "the options of workload_under_test.py:needs: missing a required argument: 'path'",
            "It takes path.",
        ),
    ],
)
def test_what_can_not_be_found_or_is_no_workload_is_told(folder, spec, message, hint):
    error = failure(spec)
    assert message in error.message and error.hint.startswith(hint)
    assert error.traceback is None


def test_an_unknown_option_lists_the_options(folder):
    error = failure("workload_under_test.py:Good", layer=3)
    assert (error.message, error.hint) == (
        "the options of workload_under_test.py:Good: got an unexpected keyword argument 'layer'",
        "It takes layers, name.",
    )


def test_options_for_what_takes_none_are_told_so(folder):
    assert (
        failure("workload_under_test.py:leaves", layers=1).hint
        == "It takes no options."
    )


@pytest.mark.parametrize(
    ("suffix", "source", "message"),
    [
        (".py", "import torch\n1 / 0", "ZeroDivisionError: division by zero"),
        (
            "",
            "import no_such_thing",
            "ModuleNotFoundError: No module named 'no_such_thing'",
        ),
        (".py", "def broken(:", "SyntaxError: invalid syntax"),
        (".py", "raise SystemExit(2)", "SystemExit: 2"),
        ("", "raise RuntimeError()", "RuntimeError"),
    ],
)
def test_a_failing_import_is_told_with_its_traceback(folder, suffix, source, message):
    (folder / "workload_under_test_bad.py").write_text(source)
    location = f"workload_under_test_bad{suffix}"
    error = failure(f"{location}:Good")
    assert error.message.startswith(f"{location} can't be imported: {message}")
    assert error.traceback.splitlines()[-1].startswith(message)


def test_a_failing_constructor_is_reported_with_its_traceback(folder):
    error = failure("workload_under_test.py:fails")
    assert (
        error.message
        == "workload_under_test.py:fails can't be built: KeyError: 'weights'"
    )
    lines = error.traceback.splitlines()
    assert len(lines) <= 15 and lines[-1] == "KeyError: 'weights'"


def test_a_constructor_that_leaves_the_program_is_a_failure(folder):
    assert failure("workload_under_test.py:leaves").message.endswith(
        "can't be built: SystemExit: 3"
    )


def test_an_error_meant_for_the_user_comes_through_unchanged(folder):
    with pytest.raises(ManifestError, match=r"no vocabulary in vocab\.txt"):
        load_workload("workload_under_test.py:tells", {})


def test_a_traceback_shows_the_user_s_frames_and_no_library_s(folder):
    (folder / "workload_under_test_deep.py").write_text(
        "import torch\n\ndef deep():\n    torch.nn.Linear(2, 2)(torch.zeros(3))\n"
    )
    traceback = failure("workload_under_test_deep.py:deep").traceback
    assert (
        "workload_under_test_deep.py" in traceback and "site-packages" not in traceback
    )


def test_an_option_s_value_has_the_type_that_it_reads_as():
    values = {
        "12": 12,
        "-3": -3,
        "1e-3": 1e-3,
        ".5": 0.5,
        "2.": 2.0,
        "true": True,
        "False": False,
        "none": None,
        "bf16": "bf16",
        "": "",
        "a=b": "a=b",
        "1_000": "1_000",
        "nan": "nan",
        " 7 ": 7,
    }
    parsed = {text: parse_options([f"key={text}"])["key"] for text in values}
    assert parsed == values
    assert list(map(type, parsed.values())) == list(map(type, values.values()))


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (["layers"], "'layers' is not a workload option"),
        (["a=1", "b=2", "a=1"], "the workload option 'a' is set twice"),
    ],
)
def test_what_is_no_option_is_refused(pairs, message):
    with pytest.raises(UsageError) as caught:
        parse_options(pairs)
    assert caught.value.message == message


def test_the_unit_chooses_the_default_workload():
    assert all(map(default_workload, UNITS))
    assert default_workload("samples") == "builtin:conformer-ctc"
    assert default_workload("tokens") == "builtin:transformer-lm"
    assert default_workload(None) is default_workload("parsecs") is None


def test_the_working_folder_counts_only_for_its_packages(folder):
    with pytest.raises(WorkloadError):
        load_workload("json:loads", {})
    assert str(folder) not in sys.path
    (folder / "email").mkdir()  # data, with the name of an installed package
    with pytest.raises(WorkloadError):
        load_workload("email:message_from_string", {})
    assert str(folder) not in sys.path
    load_workload("workload_under_test:Good", {})
    assert sys.path[0] == str(folder)
