"""What reading a million examples takes in each format: `python tests/benchmarks/reader_memory.py`.

Writes a manifest with a million examples (`--count`) by the writers that the tests use, reads each in a new process,
and prints, as JSON, examples per second and the peak memory beyond that of the interpreter, with the share of what is
allowed: 1.5 times the lengths' own 8 bytes each, and 300 MiB.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "manifests"))

from samples import SAMPLES

_ALLOWED_BYTES = 300 * 1024 * 1024
_MEASURED = """
import sys, time
from pathlib import Path
from batchtune.manifests import ReadOptions, load_lengths
def peak():
    return 1024 * next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
before, start = peak(), time.perf_counter()
load_lengths(Path(sys.argv[1]), ReadOptions(format=sys.argv[2]))
print(time.perf_counter() - start, peak() - before)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("formats", nargs="*", help="all unless given")
    arguments = parser.parse_args()
    draw = random.Random(1)
    values = [str(draw.randrange(1, 40)) for _ in range(arguments.count)]
    allowed = 12 * arguments.count + _ALLOWED_BYTES
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.formats or SAMPLES:
            path = Path(folder, name)
            path.write_bytes(SAMPLES[name].content(values))
            ran = subprocess.run(
                [sys.executable, "-c", _MEASURED, str(path), name], capture_output=True, text=True, check=True
            )
            seconds, peak = map(float, ran.stdout.split())
            result = {
                "format": name,
                "examples": arguments.count,
                "file_bytes": path.stat().st_size,
                "examples_per_second": round(arguments.count / seconds),
                "peak_bytes": int(peak),
                "share_of_allowed": round(peak / allowed, 2),
            }
            print(json.dumps(result), flush=True)
            path.unlink()


if __name__ == "__main__":
    main()
