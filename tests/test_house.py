"""The house rules: who may import whom, what starting up may cost, what the top level holds."""

import ast
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import tiers
from cli.conftest import write_lengths
from started import python
from without_torch import UNINSTALLED, blocking

from batchtune.cli.app import COMMANDS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "batchtune"

# Level by level, what may import what lies below. Packages on one level do not import each other.
BASE = {
    "allocators",
    "errors",
    "files",
    "lengths",
    "records",
    "results",
    "run_folder",
    "trust",
    "units",
}
# The one reads what `exports` writes, the others describe it.
LEVELS = [
    {"workloads"},  # the probe's worker builds them
    {"processes"},
    {"manifests", "epochs"},
    {"packing"},
    {"configs"},
    {"buckets"},
    {"probe", "streams"},
    {"loaders"},  # what is out of memory the probe knows
    {"reports", "exports"},
    {
        "sampler",
        "verify",  # it runs, rules out, and writes what `exports` writes
    },
    {"scripts"},  # they hand a script the probe's batches, or the sampler's
    {"api"},
    {"cli"},
    {"__main__", "__init__"},  # the entry point; the public names, imported lazily
]
HEAVY = {
    *(
        "torch",
        "pandas",
        "plotly",
        "pyarrow",
        "pynvml",
        "jinja2",
        "ruamel",
        "speechbrain",
    ),
    *("mutagen", "tokenizers", "webdataset", "lhotse", "datasets", "nvidia"),
    *("fsspec", "s3fs", "gcsfs", "aiohttp", "ray"),
}
TORCH_ALLOWED = {"workloads", "probe", "loaders", "sampler", "scripts"}


def modules():
    return sorted(PACKAGE.rglob("*.py"))


def part_of(path):
    """`batchtune/probe/worker.py` → `probe`; `batchtune/errors.py` → `errors`."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


@cache
def imports(path):
    """Every module that a file imports, anywhere in it, and whether that is for the type checker alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    guarded = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            guarded.update(ast.walk(node))
    found = []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            names = [str(node.module), *(f"{node.module}.{name}" for name in names)]
        found += [(name, node in guarded) for name in names]
    return found


def level_of(part):
    if part in BASE:
        return -1
    return next(number for number, parts in enumerate(LEVELS) if part in parts)


def test_imports_run_downwards():
    for path in modules():
        part = part_of(path)
        others = {
            name.split(".")[1]
            for name, _ in imports(path)
            if name.startswith("batchtune.")
        }
        for other in filter(is_part, others - {part}):
            both_low = level_of(part) == -1 == level_of(other)
            assert level_of(other) < level_of(part) or both_low, (
                f"{path}: {part} must not import {other}"
            )


def is_part(name):
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()


def test_torch_and_rich_are_imported_only_where_they_belong():
    for path in modules():
        part = part_of(path)
        roots = {
            name.split(".")[0] for name, for_types in imports(path) if not for_types
        }
        assert "torch" not in roots or part in TORCH_ALLOWED, path
        assert (
            "rich" not in roots
            or part == "cli"
            or path == PACKAGE / "reports" / "terminal.py"
        ), path


@pytest.mark.process
def test_help_imports_nothing_heavy():
    commands = [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)]
    ran = in_one_process(commands, {})
    assert ran.returncode == 0, ran.stderr
    told = [
        line.split() for line in ran.stderr.splitlines() if line.startswith("LOADED ")
    ]
    assert len(told) == len(commands)
    for command, (_, *loaded) in zip(commands, told, strict=True):
        assert not set(loaded) & (HEAVY | {"numpy", "rich", "msgspec"}), command


@pytest.mark.process
def test_all_but_measuring_runs_without_torch_and_extras(tmp_path):
    lengths = [1 + number % 17 for number in range(300)]
    manifest = str(write_lengths(tmp_path / "lengths.csv", lengths))
    run = str(tmp_path / "run")
    report = ["report", run]
    gate = ["--manifest", manifest, "--baseline", run, "--fail-if", "stale > 2%"]
    commands = [
        ["sweep-buckets", manifest, "--max-batch-length", "60", "--run", run],
        *(
            [*report, "--format", name]
            for name in ("terminal", "markdown", "html", "json")
        ),
        [*report, *gate],
        ["scan", manifest],
        ["doctor"],
        ["probe-oom", manifest, "--run", str(tmp_path / "other")],
    ]
    absent = blocking((*UNINSTALLED, "plotly", "scipy"), tmp_path)
    env = {"PYTHONPATH": os.pathsep.join([str(absent), str(ROOT)])}
    done = in_one_process(commands, env)
    assert done.stderr.count("LOADED") == len(commands) - 1, done.stderr
    assert "PyTorch" in done.stdout
    for told in (done.stdout, done.stderr):
        assert "The charts need plotly, which is not installed" in told
    *_, said = done.stderr.split("LOADED")
    assert done.returncode == 1
    assert "Error: " in said and "torch" in said.partition("Error: ")[2]
    assert "Traceback" not in said


def loaded_by(code):
    """The modules that are loaded where this has run."""
    return python("-c", f"import sys, {code}; print(*sys.modules)").stdout.split()


@pytest.mark.process
def test_packing_workloads_and_reports_need_no_slow_library():
    loaded = loaded_by("batchtune.workloads, batchtune.reports; batchtune.pack([1], 2)")
    assert not set(loaded) & {"torch", "jinja2", "rich", "pandas", "ruamel.yaml"}


@pytest.mark.process
def test_training_imports_little_of_batchtune():
    loaded = loaded_by("batchtune; batchtune.BucketBatchSampler")
    modules = [name for name in loaded if name.startswith("batchtune.")]
    assert len(modules) < 15
    own = {name.split(".")[1] for name in modules}
    assert not own & {"results", "manifests", "packing", "buckets", "probe", "streams"}
    assert not set(loaded) & {"pandas", "pyarrow", "plotly", "jinja2"}


def in_one_process(commands, env):
    """Runs commands until one fails; after each, the top-level modules that are loaded are a line on stderr."""
    code = (
        "import sys\n"
        "from batchtune.cli import main\n"
        f"for arguments in {commands!r}:\n"
        "    sys.argv = ['batchtune', *arguments]\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit as ended:\n"
        "        if ended.code:\n"
        "            raise\n"
        "    loaded = {name.split('.')[0] for name in sys.modules}\n"
        "    print('LOADED', *loaded, file=sys.stderr, flush=True)\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
    )


def test_public_names_are_there():
    import batchtune

    assert all(getattr(batchtune, name) for name in batchtune.__all__)
    assert dir(batchtune) == sorted(batchtune.__all__)
    with pytest.raises(AttributeError):
        batchtune.no_such_name  # noqa: B018  # the access is the test


@pytest.mark.process
def test_the_top_level_holds_what_was_agreed():
    agreed = {"batchtune", "tests", "examples", "pyproject.toml"}
    agreed |= {"README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md"}
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True
    )
    if tracked.returncode:
        pytest.skip("not a git checkout")
    top = {line.split("/")[0] for line in tracked.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} == agreed


def test_names_of_tests_have_at_most_60_characters():
    long_names = [
        re.findall(r"^ *def (test_\w{56,})", path.read_text(), re.MULTILINE)
        for path in (ROOT / "tests").rglob("test_*.py")
    ]
    assert [names for names in long_names if names] == []


def test_few_tests_start_processes_or_are_slow():
    for tier, most in tiers.MOST_TESTS.items():
        assert tiers.collected[tier] <= most, tier
