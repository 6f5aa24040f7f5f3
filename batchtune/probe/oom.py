"""Was it a lack of memory? Told from the exception's type, then from the messages along its causes.

The messages are those of the libraries themselves: PyTorch's allocators (CUDA, HIP, XPU, MPS, CPU), the CUDA
driver and runtime, cuBLAS, cuSOLVER, cuFFT, cuDNN, oneDNN, Triton and NCCL.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

OOM_MESSAGES = tuple(
    re.compile(pattern)
    for pattern in (
        r"(CUDA|HIP|XPU) out of memory",
        r"would exceed allowed memory",
        r"(CUDA|HIP) error: out of memory",
        r"CUDA driver error: out of memory",
        r"CUBLAS_STATUS_ALLOC_FAILED",
        r"CUSOLVER_STATUS_ALLOC_FAILED",
        r"CUFFT_ALLOC_FAILED",
        r"CUDNN_STATUS_ALLOC_FAILED",
        r"Triton Error \[CUDA\]: out of memory",
        r"Cuda failure 2 'out of memory'",
        r"MPS backend out of memory",
        r"DefaultCPUAllocator: (can't allocate memory|not enough memory)",
        r"std::bad_alloc",
    )
)

DISGUISED_MESSAGES = tuple(
    re.compile(pattern)
    for pattern in (
        r"CUBLAS_STATUS_NOT_INITIALIZED",
        r"CUDNN_STATUS_NOT_SUPPORTED",
        r"unable to find an engine",
        r"CUFFT_INTERNAL_ERROR",
        r"NVML_SUCCESS.*INTERNAL ASSERT FAILED",
        r"could not create a (primitive|memory object)",
    )
)

_OOM_TYPES = {"OutOfMemoryError", "MemoryError", "_ArrayMemoryError"}

Verdict = Literal["oom", "disguised"]


def message_verdict(message: str) -> Verdict | None:
    """What an error message says: `oom`, `disguised` (an OOM if a smaller shape passes), or None for neither."""
    if any(pattern.search(message) for pattern in OOM_MESSAGES):
        return "oom"
    if any(pattern.search(message) for pattern in DISGUISED_MESSAGES):
        return "disguised"
    return None


def error_verdict(error: BaseException) -> Verdict | None:
    """What an exception says, its own type and message first, then those of its causes."""
    verdicts: list[Verdict | None] = []
    for cause in _causes(error):
        if isinstance(cause, MemoryError) or any(kind.__name__ in _OOM_TYPES for kind in type(cause).__mro__):
            return "oom"
        try:
            verdicts.append(message_verdict(str(cause)))
        except Exception:  # its own __str__ fails: it says nothing
            verdicts.append(None)
    return "oom" if "oom" in verdicts else "disguised" if "disguised" in verdicts else None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The exception and what it was raised from, each once."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__
