import numpy as np
import pytest
import torch

from batchtune.probe.oom import error_verdict, message_verdict

OOM = [
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB",
    "HIP out of memory. Tried to allocate 20.00 MiB",
    "XPU out of memory. Tried to allocate 20.00 MiB",
    "Allocation of 3.00 GiB would exceed allowed memory. (out of memory)",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "CUDA driver error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "cuFFT error: CUFFT_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "Triton Error [CUDA]: out of memory",
    "NCCL error: unhandled cuda error: Cuda failure 2 'out of memory'",
    "MPS backend out of memory (MPS allocated: 8.00 GiB, other allocations: 1.00 GiB, max allowed: 9.07 GiB)",
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 1",
    "DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes",
    "std::bad_alloc",
]
DISGUISED = [
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
    "GET was unable to find an engine to execute this computation",
    "cuFFT error: CUFFT_INTERNAL_ERROR",
    'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":838',
    "could not create a primitive",
]
NEITHER = [
    "mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)",
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: device-side assert triggered",
    "out of range",
    "the memory of the elephant",
]


@pytest.mark.parametrize("message", OOM)
def test_a_lack_of_memory_is_told_from_its_message(message: str) -> None:
    assert message_verdict(message) == "oom"


@pytest.mark.parametrize("message", DISGUISED)
def test_a_lack_of_memory_in_disguise_is_only_suspected(message: str) -> None:
    assert message_verdict(message) == "disguised"


@pytest.mark.parametrize("message", NEITHER)
def test_any_other_message_is_no_lack_of_memory(message: str) -> None:
    assert message_verdict(message) is None


def test_torchs_own_exception_needs_no_message() -> None:
    assert error_verdict(torch.OutOfMemoryError("unheard of")) == "oom"


def test_a_memory_error_of_python_or_numpy_is_one() -> None:
    with pytest.raises(MemoryError) as caught:
        np.ones(1 << 60, dtype=np.uint8)
    assert error_verdict(caught.value) == "oom"


def test_the_cause_is_looked_at() -> None:
    wrapped = RuntimeError("the training step failed")
    wrapped.__cause__ = RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
    assert error_verdict(wrapped) == "oom"


def test_causes_that_run_in_a_circle_end() -> None:
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert error_verdict(first) is None
