"""What the libraries on a GPU say when memory runs out, or when they hide it behind another error."""

OOM_MESSAGES = (
    r"(CUDA|HIP) out of memory",
    r"(CUDA|Cuda|HIP)( driver)? [Ee]rror: out of memory",
    r"CUDA_ERROR_OUT_OF_MEMORY",  # Numba, CuPy
    r"(cuda|hip)Error(MemoryAllocation|OutOfMemory)",  # CuPy, RMM
    r"((CU|HIP)BLAS_STATUS|CUSOLVER_STATUS|CUDNN_STATUS|CUFFT)_ALLOC_FAILED",
    r"CUDNN_STATUS_INTERNAL_ERROR_(DEVICE|HOST)_ALLOCATION_FAILED",
    r"Triton Error \[(CUDA|HIP)\]: out of memory",
    r"Cuda failure (2 )?'out of memory'",  # NCCL
    r"Failed to CUDA (host )?[cm]?alloc",  # NCCL
    r"CUDA allocation failed",  # DALI
    r"RMM failure at:.{0,300}Maximum pool size exceeded",
    r"Error while calling cuda\w{1,30}\(.{0,300}reason: out of memory",  # dlib
    r"Check failed: [^(\n]{0,200}\((2 vs\. 0|0 vs\. 2)\).{0,40}out of memory",  # k2
    r"cuda failed with error 2 out of memory",  # spconv
)
"""Patterns of errors that mean out of memory on a GPU."""

DISGUISED_MESSAGES = (
    r"(CU|HIP)BLAS_STATUS_NOT_INITIALIZED",
    r"(CU|HIP)BLAS_STATUS_INTERNAL_ERROR when calling `(cu|hip)blasCreate",
    r"CUDNN_STATUS_(NOT_SUPPORTED|INTERNAL_ERROR|EXECUTION_FAILED)",
    r"CUSOLVER_STATUS_INTERNAL_ERROR",
    r"unable to find an engine",
    r"CUFFT_INTERNAL_ERROR",
    r"NVML_SUCCESS.{0,40}INTERNAL ASSERT FAILED",
    # Batches of more elements than 32 bits can count, or of more blocks than a GPU starts.
    r"\w*32.?[Bb]it.?[Ii]ndex",
    r"integer out of range",
    r"invalid configuration argument",
    r"rnnt_loss status [1-9]",  # warp-rnnt
    r"cuda memcpy or memset failed",  # warp-transducer
    r"Some bad things happened\. Please read the above error messages",  # k2, which prints why
)
"""Patterns of errors that mean it if a smaller shape passes."""
