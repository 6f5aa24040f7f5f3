"""The benchmarks start."""

import subprocess
import sys
from pathlib import Path

import pytest

# Those that are run: what they share is imported by them.
BENCHMARKS = [
    path
    for path in sorted((Path(__file__).parent / "benchmarks").glob("*.py"))
    if "__main__" in path.read_text(encoding="utf-8")
]


@pytest.mark.slow
@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda path: path.stem)
def test_it_starts(benchmark: Path) -> None:
    # Its folder comes first, as it does for a script: no module of the tests may be hidden by a benchmark's name.
    code = "import runpy, sys; sys.path.insert(0, sys.argv[1]); runpy.run_path(sys.argv[2])"
    command = [sys.executable, "-c", code, str(benchmark.parent), str(benchmark)]
    subprocess.run(command, check=True)
