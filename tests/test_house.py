"""The house rules: who may import whom, what starting up may cost, what the top level holds."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from without_torch import UNINSTALLED, blocking

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "batchtune"

# Level by level, what may import what lies below. Packages on one level do not import each other.
BASE = {
    *("configs", "errors", "files", "lengths", "machine", "results", "shapes"),
    "trust",
    "units",
}
LEVELS = [
    {"workloads"},  # the probe's worker builds them
    {"manifests", "batching", "cost", "probe", "loaders"},
    {"tuning", "reports", "exports"},
    {"sampler", "schemas"},  # the one reads what `exports` writes, the others describe it
    {"cli"},
    {"__main__", "__init__"},  # the entry point; the public names, imported lazily
]
HEAVY = {
    *("torch", "pandas", "scipy", "plotly", "pyarrow", "pynvml", "jinja2", "ruamel", "speechbrain"),
    *("soundfile", "tokenizers", "webdataset", "lhotse", "datasets"),
}
TORCH_ALLOWED = {"workloads", "probe", "loaders", "sampler"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    """`batchtune/probe/worker.py` → `probe`; `batchtune/errors.py` → `errors`."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(path: Path) -> list[tuple[str, bool]]:
    """Every module that a file imports, anywhere in it, and whether that is for the type checker alone."""
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, for_types: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.extend((alias.name, for_types) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                found.append((child.module or "", for_types))
                found.extend((f"{child.module}.{alias.name}", for_types) for alias in child.names)
            guarded = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
            visit(child, for_types or guarded)

    visit(ast.parse(path.read_text(encoding="utf-8")), False)
    return found


def level_of(part: str) -> int:
    if part in BASE:
        return -1
    return next(number for number, parts in enumerate(LEVELS) if part in parts)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_downwards(path: Path) -> None:
    part = part_of(path)
    for name, _ in imports(path):
        names = name.split(".")
        if names[0] != "batchtune" or len(names) == 1 or not is_part(names[1]):
            continue
        other = names[1]
        assert other == part or level_of(other) < level_of(part) or level_of(part) == -1 == level_of(other), (
            f"{part} must not import {name}"
        )


def is_part(name: str) -> bool:
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_torch_and_rich_are_imported_only_where_they_belong(path: Path) -> None:
    part = part_of(path)
    roots = {name.split(".")[0] for name, for_types in imports(path) if not for_types}
    assert "torch" not in roots or part in TORCH_ALLOWED
    assert "rich" not in roots or part == "cli" or path == PACKAGE / "reports" / "terminal.py"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["tune", "--help"],
        ["probe-oom", "--help"],
        ["sweep-buckets", "--help"],
        ["scan", "--help"],
        ["doctor", "--help"],
        ["verify", "--help"],
        ["report", "--help"],
        ["schema", "--help"],
        ["export", "--help"],
    ],
    ids=" ".join,
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    loaded = loaded_after(arguments)
    assert not loaded & (HEAVY | {"numpy", "rich", "msgspec"})


@pytest.mark.slow
def test_a_sweep_and_a_report_run_without_torch(tmp_path: Path) -> None:
    manifest = tmp_path / "lengths.csv"
    manifest.write_text("id,duration\n" + "".join(f"{number},{1 + number % 17}\n" for number in range(300)))
    run = str(tmp_path / "run")
    assert "torch" not in loaded_after(["sweep-buckets", str(manifest), "--max-batch-length", "60", "--run", run])
    for report_format in ("terminal", "markdown", "html", "json"):
        assert "torch" not in loaded_after(["report", run, "--format", report_format])


def test_all_but_measuring_runs_where_torch_is_not_installed(tmp_path: Path) -> None:
    manifest, run = tmp_path / "lengths.csv", tmp_path / "run"
    manifest.write_text("id,duration\n" + "".join(f"{number},{1 + number % 17}\n" for number in range(300)))
    paths = [str(blocking(UNINSTALLED, tmp_path)), str(ROOT)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    def ran(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "batchtune", *map(str, arguments)]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)

    blocked = subprocess.run([sys.executable, "-c", "import torch"], env=env, capture_output=True, check=False)
    assert blocked.returncode == 1
    for arguments in (
        ("sweep-buckets", manifest, "--max-batch-length", 60, "--run", run),
        *(("report", run, "--format", name) for name in ("terminal", "markdown", "html", "json")),
        ("scan", manifest),
        ("doctor",),
    ):
        assert (found := ran(*arguments)).returncode == 0, found.stderr
    assert "PyTorch" in ran("doctor").stdout
    needs = ran("probe-oom", manifest, "--run", tmp_path / "other")
    assert needs.returncode == 1
    assert "torch" in needs.stderr and "Traceback" not in needs.stderr.splitlines()[0]


def loaded_after(arguments: list[str]) -> set[str]:
    """The top-level modules that a command has imported when it ends."""
    code = (
        "import sys, atexit\n"
        "atexit.register(lambda: sys.stderr.write('\\nLOADED ' + ' '.join({m.split('.')[0] for m in sys.modules})))\n"
        f"sys.argv = ['batchtune', *{arguments!r}]\n"
        "from batchtune.cli import main\n"
        "main()\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return set(ran.stderr.rsplit("LOADED ", 1)[1].split())


def test_importing_the_package_imports_nothing_but_the_standard_library() -> None:
    code = "import sys; import batchtune; print(' '.join({name.split('.')[0] for name in sys.modules}))"
    ran = subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(ran.stdout.split()) <= {*sys.stdlib_module_names, "batchtune", "__main__"}


def test_public_names_are_there() -> None:
    import batchtune

    assert all(getattr(batchtune, name) for name in batchtune.__all__)
    with pytest.raises(AttributeError):
        batchtune.no_such_name  # noqa: B018  # the access is the test


def test_the_top_level_holds_what_was_agreed() -> None:
    agreed = {"batchtune", "tests", "examples", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    top = {line.split("/")[0] for line in tracked.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} == agreed
