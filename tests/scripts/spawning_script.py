"""The small script, started by `mp.spawn`, which catches its errors: `spawning_script.py oom RANKS`."""

import os
import sys
import tempfile

import small_script
import torch
from torch import distributed

RANKS = int(sys.argv[2])


def run(rank, folder):
    if RANKS > 1:
        store = f"file://{folder}/store"
        distributed.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=RANKS
        )
    small_script.main()


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (folder,), nprocs=RANKS)
