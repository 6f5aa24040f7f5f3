"""What it takes to read 100 million lengths from one file: `python tests/benchmarks/hundred_million.py`.

Makes a Parquet file of so many lengths (`--count`), samples at 16 kHz, in a process of its own; reads it in another,
and prints its seconds, its peak memory, the memory beyond the interpreter's with all modules, and the bytes that the
lengths themselves take, as JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_RATE = 16_000
_ROWS_AT_ONCE = 1_000_000


def write(path: Path, count: int) -> None:
    """Durations around 10 s, as samples."""
    import numpy as np
    import pyarrow
    import pyarrow.parquet

    draw = np.random.default_rng(1)
    schema = pyarrow.schema([("num_samples", pyarrow.int32())])
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        for start in range(0, count, _ROWS_AT_ONCE):
            seconds = draw.lognormal(2.3, 0.5, min(_ROWS_AT_ONCE, count - start))
            samples = np.maximum(1, seconds * _RATE).astype(np.int32)
            writer.write_table(pyarrow.table({"num_samples": samples}, schema=schema))


def read(path: Path) -> None:
    """Reads it and prints what that took."""
    import pyarrow.parquet  # noqa: F401  # what takes memory by being there is not the reading's

    from batchtune.manifests import load_lengths

    before = peak_bytes()
    started = time.perf_counter()
    lengths = load_lengths(path)
    seconds = time.perf_counter() - started
    peak = peak_bytes()
    found = {
        "count": lengths.count,
        "seconds": round(seconds, 2),
        "peak_bytes": peak,
        "peak_bytes_of_reading": peak - before,
        "lengths_bytes": lengths.values.nbytes,
    }
    print(json.dumps(found))


def peak_bytes() -> int:
    """The most memory that this process had at any time.

    Not from `getrusage` where there is another way: that still counts the process from which this one was started.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))


def main() -> None:
    """Writes, reads and prints, or does one of the first two in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=100_000_000, help="number of lengths")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        write(options.write, options.count)
    elif options.read:
        read(options.read)
    else:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "lengths.parquet"
            count = ["--count", str(options.count)]
            subprocess.run([sys.executable, __file__, *count, "--write", str(path)], check=True)
            command = [sys.executable, __file__, "--read", str(path)]
            found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)
            print(json.dumps({**found, "file_bytes": path.stat().st_size}))


if __name__ == "__main__":
    main()
