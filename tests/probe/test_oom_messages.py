"""What is a lack of memory and what is not, by the texts that the libraries really write."""

import errno
import os

import pytest
import torch

from batchtune.probe.failures import error_verdict, message_verdict

KERNEL_ERRORS = (
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
OOM = [
    # CUDA, torch 2
    (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.19 GiB "
        "is free. Including non-PyTorch memory, this process has 138.61 GiB memory in use. 125.82 GiB allowed; Of the "
        "allocated memory 124.02 GiB is allocated by PyTorch, and 1.21 GiB is reserved by PyTorch but unallocated. If "
        "reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid "
        "fragmentation.  See documentation for Memory Management  "
        "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    ),
    # CUDA, torch 1
    (
        "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 10.76 GiB total capacity; 9.71 GiB already allocated; "
        "5.56 MiB free; 9.82 GiB reserved in total by PyTorch)"
    ),
    # CUDA, in another's words
    "the training step failed: RuntimeError('CUDA out of memory. Tried to allocate 2 GiB')",
    # HIP
    (
        "HIP out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 255.98 GiB of which 244.65 GiB "
        "is free. 1.05 GiB allowed; Of the allocated memory 1017.01 MiB is allocated by PyTorch, with 17.00 MiB "
        "allocated in private pools (e.g., HIP Graphs), and 54.99 MiB is reserved by PyTorch but unallocated."
    ),
    # XPU
    (
        "XPU out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 15.56 GiB. Of the allocated "
        "memory 15.01 GiB is allocated by PyTorch, and 120.00 MiB is reserved by PyTorch but unallocated."
    ),
    # cudaMallocAsync
    (
        "Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated     : 9.31 GiB\n"
        "Requested               : 1.00 GiB\nDevice limit            : 139.80 GiB\n"
        "Free (according to CUDA): 130.00 GiB\nPyTorch limit (set by user-supplied memory fraction)\n"
        "                        : 10.00 GiB"
    ),
    # CUDA runtime
    f"CUDA error: out of memory\n{KERNEL_ERRORS}",
    # HIP runtime
    "HIP error: out of memory\nHIP kernel errors might be asynchronously reported at some other call",
    # CUDA driver
    "CUDA driver error: out of memory",
    # cuBLAS
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    # hipBLAS
    "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
    # cuSOLVER
    (
        "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`. "
        "If you keep seeing this error, you may use `torch.backends.cuda.preferred_linalg_library()` to try linear "
        "algebra operators with other supported backends."
    ),
    # cuFFT
    "cuFFT error: CUFFT_ALLOC_FAILED",
    # cuDNN
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    # cuDNN 9
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    # Triton
    "Triton Error [CUDA]: out of memory",
    # NCCL
    (
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3353, unhandled cuda error (run with "
        "NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nncclUnhandledCudaError: Call to CUDA function failed.\n"
        "Last error:\nCuda failure 2 'out of memory'"
    ),
    # NCCL, older
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 'out of memory'",
    # MPS
    (
        "MPS backend out of memory (MPS allocated: 8.00 GiB, other allocations: 1.00 GiB, max allowed: 9.07 GiB). "
        "Tried to allocate 256.00 MiB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit "
        "for memory allocations (may cause system failure)."
    ),
    # CPU, Linux
    (
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 4294967296 bytes. Error code 12 (Cannot allocate memory)"
    ),
    # CPU, Windows
    (
        "[enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: not enough memory: you tried to allocate "
        "4294967296 bytes."
    ),
    # C++
    "std::bad_alloc",
    # NCCL's buffers
    (
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error, NCCL version "
        "2.27.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
        "Failed to CUDA calloc 6291456 bytes"
    ),
    # NCCL's buffers, in a stream
    "Last error:\nFailed to CUDA calloc async 2432 bytes",
    # Numba
    "[2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY",
    # Numba, newer
    "[CUresult.CUDA_ERROR_OUT_OF_MEMORY] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY",
    # CuPy
    "cudaErrorMemoryAllocation: out of memory",
    # CuPy's driver
    "CUDA_ERROR_OUT_OF_MEMORY: out of memory",
    # DALI
    (
        "Critical error in pipeline:\nError in GPU operator `nvidia.dali.fn.spectrogram`:\n"
        "CUDA allocation failed\nCan't allocate 17179869184 bytes on device 0."
    ),
    # RMM
    (
        "std::bad_alloc: out_of_memory: CUDA error at: /include/rmm/mr/device/cuda_memory_resource.hpp:70: "
        "cudaErrorMemoryAllocation out of memory"
    ),
    # RMM's pool
    "RMM failure at:/include/rmm/mr/device/pool_memory_resource.hpp:313: Maximum pool size exceeded",
    # dlib
    (
        "Error while calling cudaMalloc(&data, new_size*sizeof(float)) in file /tmp/dlib/dlib/cuda/gpu_data.cpp:218. "
        "code: 2, reason: out of memory"
    ),
    # k2
    "[F] /k2/csrc/array.h:291:void k2::Init() Check failed: e == cudaSuccess (2 vs. 0)  Error: out of memory. ",
    # spconv
    "TensorStorage /io/include/tensorview/tensor.h 168\ncuda failed with error 2 out of memory.",
    # JAX
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes.",
    # JAX, a request
    "RESOURCE_EXHAUSTED: Failed to allocate request for 3.52GiB (3779592192B) on device ordinal 0",
    # TensorFlow
    "OOM when allocating tensor with shape[64,1024] and type float on /job:localhost/device:GPU:0",
    # NumPy, in another's words
    "_ArrayMemoryError: Unable to allocate 8.00 GiB for an array with shape (1,)",
    # a DataLoader's worker
    (
        "Caught OutOfMemoryError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        '  File "data.py", line 5, in __getitem__\n    return features.cuda()\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    ),
]
DISGUISED = [
    # cuBLAS
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    # cuDNN
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
    # cuDNN's engines
    "GET was unable to find an engine to execute this computation",
    # cuDNN's engines, lower
    "FIND was unable to find an engine to execute this computation",
    # cuFFT
    "cuFFT error: CUFFT_INTERNAL_ERROR",
    # NVML
    (
        'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":838, please report a bug '
        "to PyTorch. "
    ),
    # oneDNN
    "could not create a primitive",
    # oneDNN's memory
    "could not create a memory object",
    # threads
    "can't start new thread",
    # cuBLAS's handle
    "CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasCreate(handle)`",
    # cuDNN's inside
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    # cuDNN's kernel
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    # cuDNN 9's kernel
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED_CUDART",
    # cuSOLVER
    "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`",
    # 32-bit indices, asserted
    "canUse32BitIndexMath(input) INTERNAL ASSERT FAILED, must fit into 32-bit index math",
    # 32-bit indices, expected
    (
        "Expected canUse32BitIndexMath(input) && canUse32BitIndexMath(output) to be true, but got false.  (Could this "
        "error message be improved?  If so, please report an enhancement request to PyTorch.)"
    ),
    # 32-bit indices
    "input tensor must fit into 32-bit index math",
    # integers
    "integer out of range",
    # launch
    f"CUDA error: invalid configuration argument\n{KERNEL_ERRORS}",
    # warp-rnnt
    "rnnt_loss status 1",
    # warp-transducer
    "cuda memcpy or memset failed",
    # k2's exception
    (
        "\n    Some bad things happened. Please read the above error messages and stack\n    trace. If you are using "
        "Python, the following command may be helpful:\n\n      gdb --args python /path/to/your/code.py\n"
    ),
]
NEITHER = [
    # matmul
    "mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)",
    # broadcast
    "The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 1",
    # index
    "index 50001 is out of bounds for dimension 0 with size 50000",
    # range
    "IndexError: list index out of range",
    # assertion on the device
    f"CUDA error: device-side assert triggered\n{KERNEL_ERRORS}",
    # illegal address
    f"CUDA error: an illegal memory access was encountered\n{KERNEL_ERRORS}",
    # misaligned address
    "CUDA error: misaligned address",
    # no kernel
    f"CUDA error: no kernel image is available for execution on the device\n{KERNEL_ERRORS}",
    # cuBLAS
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m, n, k)`",
    # Triton's shared memory
    (
        "out of resource: shared memory, Required: 180224, Hardware limit: 101376. "
        "Reducing block sizes or `num_stages` may help."
    ),
    # NCCL
    "Last error:\nCuda failure 1 'invalid argument'",
    # cuBLAS's product
    "CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasSgemm( handle, opa, opb, m, n)`",
    # gRPC
    "RESOURCE_EXHAUSTED: Received message larger than max (5242880 vs. 4194304)",
    # a file's name
    "[Errno 2] No such file or directory: 'logs/out of memory.txt'",
    # a file's name, of a code
    "can't read clips/CUDA_ERROR_OUT_OF_MEMORY.wav",
    # a file's name, without quotes
    "can't read CUDA out of memory.wav: unknown format",
    # a folder's name
    "Error opening '/data/why CUDA out of memory happens/01.wav': System error.",
    # a folder's name, without quotes
    "no clips in data/CUDA out of memory",
    # a key
    "'CUDA out of memory'",
    # the source of a DataLoader's worker
    (
        "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        '  File "data.py", line 5, in __getitem__\n    raise ValueError("no clip")  # CUDA out of memory is elsewhere\n'
        "ValueError: no clip"
    ),
    # a file's name, as the libraries write it
    "[Errno 2] No such file or directory: 'CUDA out of memory.txt'",
    # a setting
    "unknown option on_oom: 'out of memory' is none of 'skip', 'raise'",
    # another's memory
    "the memory of the elephant",
    # nothing
    "",
]


@pytest.mark.parametrize(
    ("messages", "verdict"),
    [(OOM, "oom"), (DISGUISED, "disguised"), (NEITHER, None)],
    ids=["oom", "disguised", "none"],
)
def test_a_lack_of_memory_is_told_from_its_message(messages, verdict):
    found = {text: message_verdict(text) for text in messages}
    assert found == dict.fromkeys(messages, verdict)


def test_torchs_own_exception_needs_no_message():
    assert error_verdict(torch.OutOfMemoryError("unheard of")) == "oom"


def test_of_the_systems_errors_only_a_lack_of_memory_is_one():
    assert error_verdict(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))) == "oom"
    for number in (errno.ENOENT, errno.EAGAIN, errno.ENOSPC):
        assert error_verdict(OSError(number, os.strerror(number), "/data")) is None


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(
            errno.ENOENT, os.strerror(errno.ENOENT), "CUDA out of memory.txt"
        ),
        FileNotFoundError(
            "CUDA out of memory. Tried to allocate 2.00 GiB"
        ),  # as a DataLoader passes it on
        PermissionError(errno.EACCES, "Permission denied", "CUDA out of memory"),
        KeyError("CUDA out of memory"),
        KeyError("std::bad_alloc"),
        ModuleNotFoundError(
            "libcudart.so: cannot allocate memory in static TLS block: std::bad_alloc"
        ),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "CUDA out of memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_another_kind_is_none_whatever_it_names(error):
    assert error_verdict(error) is None


def test_a_lack_of_memory_of_the_system_is_one_in_a_worker_too():
    passed_on = "Caught OSError in DataLoader worker process 0.\nOSError: [Errno 12] Cannot allocate memory"
    assert error_verdict(OSError(passed_on)) == "oom"


LACK = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def raised(**how):
    """A workload's own error, with what Python notes of how it was raised."""
    error = ValueError("the training step failed")
    for name, value in how.items():
        setattr(error, f"__{name}__", value)
    return error


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (raised(cause=LACK), "oom"),
        (raised(cause=raised(cause=LACK)), "oom"),
        (raised(context=LACK), "disguised"),
        (raised(context=LACK, suppress_context=True), None),
    ],
    ids=["from it", "from one from it", "while handling it", "from None"],
)
def test_what_an_error_was_raised_from_is_looked_at(error, verdict):
    assert error_verdict(error) == verdict


def test_causes_that_run_in_a_circle_end():
    first = raised()
    second = raised(cause=first, context=first)
    first.__cause__ = first.__context__ = second
    assert error_verdict(first) is None
