"""An epoch's batches, against SpeechBrain's DynamicBatchSampler: `python tests/benchmarks/sampler_epoch.py`.

SpeechBrain's `set_epoch` is measured at a million examples and extrapolated in proportion to as many as ours
has, ten million. Both have the same lengths, boundaries and batch sizes, run in turns, each in a new
process, and the medians count. Prints JSON:

- `their_set_epoch_seconds`: measured, at a million examples;
- `our_setup_seconds`: making the sampler, once; `our_epoch_seconds`: one epoch's batches, until the first is handed
  out; `our_lists_seconds`: handing out all others, as lists;
- `ratio_of_an_epoch`: theirs, extrapolated, to our epoch and lists together;
- `peak_bytes_per_example`: of our process beyond what it held when the lengths were there (`VmHWM`).
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

THEIRS = 1_000_000
OURS = 10_000_000
REPEATS = 3
_COMMON = """
import sys, time, types, json, logging
import numpy as np
count, max_batch_length, buckets = int(sys.argv[1]), 600.0, 20
lengths = np.random.default_rng(1).lognormal(2.3, 0.5, count).clip(0.5, 35)
reference = np.random.default_rng(1).lognormal(2.3, 0.5, 100_000).clip(0.5, 35)
boundaries = np.unique(np.append(np.quantile(reference, np.arange(1, buckets) / buckets), 35.0))
"""
_THEIRS = (
    _COMMON
    + """
try:
    import torchaudio
except (ImportError, OSError):
    sys.modules["torchaudio"] = types.ModuleType("torchaudio")
from speechbrain.dataio.sampler import DynamicBatchSampler
sampler = DynamicBatchSampler(
    range(count),
    max_batch_length,
    bucket_boundaries=boundaries.tolist(),
    lengths_list=lengths.tolist(),
)
start = time.perf_counter()
sampler.set_epoch(1)
print(json.dumps({"set_epoch": time.perf_counter() - start, "batches": len(sampler)}))
"""
)
_OURS = (
    _COMMON
    + """
from batchtune.sampler.base import BucketBatchSampler
from batchtune.epochs.table import batch_sizes_for
def memory(name):
    return 1024 * next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))
sizes = batch_sizes_for(boundaries, max_batch_length)
sampler_class = BucketBatchSampler
list(sampler_class(lengths[:1000], bucket_boundaries=boundaries, bucket_batch_sizes=sizes))
open("/proc/self/clear_refs", "w").write("5")
before = memory("VmRSS")
start = time.perf_counter()
sampler = sampler_class(lengths, bucket_boundaries=boundaries, bucket_batch_sizes=sizes)
made = time.perf_counter()
batches = iter(sampler)
next(batches)
ready = time.perf_counter()
rest = sum(1 for _ in batches)
end = time.perf_counter()
print(json.dumps({
    "setup": made - start, "epoch": ready - made, "lists": end - ready, "batches": rest + 1,
    "peak": memory("VmHWM") - before,
}))
"""
)


def measured(code, *arguments):
    """What a piece of code prints in a new process."""
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(ran.stdout.splitlines()[-1])
    return found


def main():
    theirs = []
    ours = []
    for _ in range(REPEATS):
        theirs.append(measured(_THEIRS, THEIRS))
        ours.append(measured(_OURS, OURS))

    def median(found, name):
        return statistics.median(one[name] for one in found)

    their_seconds = median(theirs, "set_epoch")
    extrapolated = their_seconds * OURS / THEIRS
    setup, epoch, lists = (median(ours, name) for name in ("setup", "epoch", "lists"))
    result = {
        "their_set_epoch_seconds": round(their_seconds, 3),
        "our_setup_seconds": round(setup, 3),
        "our_epoch_seconds": round(epoch, 3),
        "our_lists_seconds": round(lists, 3),
        "ratio_of_an_epoch": round(extrapolated / (epoch + lists), 1),
        "peak_bytes_per_example": round(median(ours, "peak") / OURS, 1),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
