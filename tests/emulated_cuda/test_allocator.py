"""Torch's caching allocator on the emulated device: the figures that torch documents.

Blocks are multiples of 512 B. Requests up to 1 MiB share segments of 2 MiB, requests below 10 MiB share segments of
20 MiB, and larger ones get segments of their own, in multiples of 2 MiB.
https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management
"""

import pytest
from emulated_cuda.machine import CONTEXT, MIB

pytestmark = pytest.mark.process

# In turn: sizes, a full device, the limit of the process, and 1 GiB after 20 blocks of 64 MiB.
PROGRAM = """
import json, sys, torch
MIB = 1 << 20

def take(size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")

def rounded(size):
    held = take(size)
    figures = [torch.cuda.memory_allocated(), torch.cuda.memory_reserved()]
    del held
    torch.cuda.empty_cache()
    return [*figures, torch.cuda.memory_reserved()]

def until_full():
    held = []
    try:
        while True:
            held.append(take(64 * MIB))
    except torch.OutOfMemoryError as error:
        return [len(held), torch.cuda.memory_reserved(), str(error)]

def reused():
    torch.cuda.empty_cache()
    torch.cuda.reset_accumulated_memory_stats()
    held = [take(64 * MIB) for _ in range(20)]
    del held
    merged = take(1024 * MIB)
    stats = torch.cuda.memory_stats()
    return [torch.cuda.memory_reserved(), stats["num_alloc_retries"], stats["num_ooms"]]

figures = {"rounded": [rounded(size) for size in map(int, sys.argv[1:])]}
figures["full"] = until_full()
torch.cuda.empty_cache()
figures["reused"] = reused()
torch.cuda.empty_cache()
torch.cuda.set_per_process_memory_fraction(0.25)
figures["limited"] = until_full()
print(json.dumps(figures))
"""
# What is asked for, what is allocated for it, and the segment.
ROUNDED = {
    1: (512, 2 * MIB),
    513: (1024, 2 * MIB),
    MIB: (MIB, 2 * MIB),
    MIB + 1: (MIB + 512, 20 * MIB),
    10 * MIB - 512: (10 * MIB - 512, 20 * MIB),
    10 * MIB: (10 * MIB, 10 * MIB),
    # A rest of more than 1 MiB is left to others.
    11 * MIB: (12 * MIB, 12 * MIB),
    11 * MIB - 512: (11 * MIB - 512, 12 * MIB),
    100 * MIB + 1: (100 * MIB + 512, 102 * MIB),
}


def in_blocks(limit, page):
    """How many blocks of 64 MiB the allocator finds room for in pages, and the size of the pages that hold them."""
    block = 64 * MIB
    count = limit // page * page // block
    pages = -(-count * block // page)
    return count, pages * page


def check_full(figures, page):
    """A full device, and the limit of a process, are out of memory."""
    blocks, reserved, message = figures["full"]
    assert (blocks, reserved) == in_blocks(2048 * MIB - CONTEXT, page)
    assert message.startswith("CUDA out of memory. Tried to allocate 64.00 MiB.")
    assert "total capacity of 2.00 GiB" in message
    blocks, reserved, message = figures["limited"]
    assert (blocks, reserved) == in_blocks(512 * MIB, page)
    assert "512.00 MiB allowed" in message


def test_native_segments_are_as_documented_and_asked_for_again(emulated_cuda):
    native = {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}
    figures = emulated_cuda.figures(PROGRAM, *map(str, ROUNDED), **native)
    assert figures["rounded"] == [[*sizes, 0] for sizes in ROUNDED.values()]
    check_full(figures, page=64 * MIB)
    # 20 segments of 64 MiB are cached; none can hold 1 GiB, and next to them the device has no room for it.
    assert figures["reused"] == [1024 * MIB, 1, 0]


def test_expandable_segments_merge_what_is_freed(emulated_cuda):
    expandable = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    figures = emulated_cuda.figures(PROGRAM, **expandable)
    check_full(figures, page=20 * MIB)
    assert figures["reused"] == [20 * 64 * MIB, 0, 0]
