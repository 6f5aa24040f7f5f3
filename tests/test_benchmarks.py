"""The benchmarks start."""

from pathlib import Path

import pytest
from started import python

# Those that are run: what they share is imported by them.
BENCHMARKS = [
    path
    for path in sorted((Path(__file__).parent / "benchmarks").glob("*.py"))
    if "__main__" in path.read_text(encoding="utf-8")
]


@pytest.mark.slow
def test_all_start():
    # Their folder comes first, as it does for a script: no module of the tests may be hidden by a benchmark's name.
    code = """
import runpy, sys

sys.path.insert(0, sys.argv[1])
for benchmark in sys.argv[2:]:
    print(benchmark, flush=True)
    runpy.run_path(benchmark)
"""
    names = [str(path) for path in BENCHMARKS]
    assert python("-c", code, BENCHMARKS[0].parent, *names).stdout.split() == names
