"""Torch's caching allocator on the emulated device: the figures that torch documents.

Blocks are multiples of 512 B. Requests up to 1 MiB share segments of 2 MiB, requests below 10 MiB share segments of
20 MiB, and larger ones get segments of their own, in multiples of 2 MiB.
https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management
"""

from __future__ import annotations

import pytest
from emulated_cuda.machine import CONTEXT, MIB

pytestmark = pytest.mark.process
NATIVE = {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}
EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
each_allocator = pytest.mark.parametrize(
    ("settings", "page"),
    [(NATIVE, 64 * MIB), (EXPANDABLE, 20 * MIB)],
    ids=["native", "expandable"],
)

REQUESTS = """
import json, sys, torch
figures = []
for size in map(int, sys.argv[1:]):
    held = torch.empty(size, dtype=torch.uint8, device="cuda")
    figures.append([torch.cuda.memory_allocated(), torch.cuda.memory_reserved()])
    del held
    torch.cuda.empty_cache()
    figures[-1].append(torch.cuda.memory_reserved())
print(json.dumps(figures))
"""

UNTIL_FULL = """
import json, sys, torch
fraction, block_mib = float(sys.argv[1]), int(sys.argv[2])
if fraction < 1:
    torch.cuda.set_per_process_memory_fraction(fraction)
held = []
try:
    while True:
        held.append(torch.empty(block_mib << 20, dtype=torch.uint8, device="cuda"))
except torch.OutOfMemoryError as error:
    message = str(error)
print(json.dumps([len(held), torch.cuda.memory_reserved(), message]))
"""

REUSE = """
import json, torch
def mib(size):
    return torch.empty(size << 20, dtype=torch.uint8, device="cuda")
held = [mib(64) for _ in range(20)]
del held
merged = mib(1024)
stats = torch.cuda.memory_stats()
print(json.dumps([torch.cuda.memory_reserved(), stats["num_alloc_retries"], stats["num_ooms"]]))
"""


def test_requests_are_rounded_and_segments_sized_as_documented(emulated_cuda):
    expected = {
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
    figures = emulated_cuda.figures(REQUESTS, *map(str, expected), **NATIVE)
    assert figures == [
        [allocated, reserved, 0] for allocated, reserved in expected.values()
    ]


def in_blocks(limit: int, page: int) -> tuple[int, int]:
    """How many blocks of 64 MiB the allocator finds room for in pages, and the size of the pages that hold them."""
    block = 64 * MIB
    count = limit // page * page // block
    pages = -(-count * block // page)
    return count, pages * page


@each_allocator
def test_a_full_device_is_out_of_memory(emulated_cuda, settings, page):
    blocks, reserved, message = emulated_cuda.figures(UNTIL_FULL, "1", "64", **settings)
    assert (blocks, reserved) == in_blocks(2048 * MIB - CONTEXT, page)
    assert message.startswith("CUDA out of memory. Tried to allocate 64.00 MiB.")
    assert "total capacity of 2.00 GiB" in message


@each_allocator
def test_the_limit_of_a_process_is_held(emulated_cuda, settings, page):
    figures = emulated_cuda.figures(UNTIL_FULL, "0.25", "64", **settings)
    blocks, reserved, message = figures
    assert (blocks, reserved) == in_blocks(512 * MIB, page)
    assert "512.00 MiB allowed" in message


def test_native_segments_are_freed_and_requested_again(emulated_cuda):
    # 20 segments of 64 MiB are cached; none can hold 1 GiB, and next to them the device has no room for it.
    assert emulated_cuda.figures(REUSE, **NATIVE) == [1024 * MIB, 1, 0]


def test_expandable_segments_merge_what_is_freed(emulated_cuda):
    assert emulated_cuda.figures(REUSE, **EXPANDABLE) == [20 * 64 * MIB, 0, 0]
