/* The answers of cuBLAS, cuFFT and NVRTC that matter to torch; their other functions only succeed, or
 * refuse (see build.py). */
#define _GNU_SOURCE
#include "cuda_types.h"
#include "emulated.h"
#include <stdlib.h>
#include <string.h>

enum { LIBRARY_VERSION = 130101 };

static int new_object(void **to, size_t size) {
    enum { ALLOC_FAILED = 3 };
    *to = calloc(1, size);
    return *to ? SUCCESS : ALLOC_FAILED;
}

/* cuBLAS */

typedef struct {
    void *stream;
    int math_mode;
    int pointer_mode;
} Blas;

int cublasCreate_v2(Blas **handle) {
    take_library_memory(CUBLAS, settings()->cublas);
    return new_object((void **)handle, sizeof **handle);
}

int cublasDestroy_v2(Blas *handle) {
    free(handle);
    return SUCCESS;
}

int cublasSetStream_v2(Blas *handle, void *stream) {
    handle->stream = stream;
    return SUCCESS;
}

int cublasGetStream_v2(Blas *handle, void **stream) {
    *stream = handle->stream;
    return SUCCESS;
}

int cublasSetMathMode(Blas *handle, int mode) {
    handle->math_mode = mode;
    return SUCCESS;
}

int cublasGetMathMode(Blas *handle, int *mode) {
    *mode = handle->math_mode;
    return SUCCESS;
}

int cublasSetPointerMode_v2(Blas *handle, int mode) {
    handle->pointer_mode = mode;
    return SUCCESS;
}

int cublasGetPointerMode_v2(Blas *handle, int *mode) {
    *mode = handle->pointer_mode;
    return SUCCESS;
}

int cublasGetVersion_v2(Blas *handle, int *version) {
    *version = LIBRARY_VERSION;
    return SUCCESS;
}

const char *cublasGetStatusString(int status) {
    return status ? "CUBLAS_STATUS_ERROR" : "CUBLAS_STATUS_SUCCESS";
}

/* What all cuBLAS products are (see build.py): the sizes come first, whatever the types are. */
__attribute__((visibility("hidden"))) int emulated_product(Blas *handle, int transpose_a, int transpose_b, int m, int n, int k) {
    spend_flops(handle->stream, 2.0 * m * n * k);
    return SUCCESS;
}

/* Products of many matrices, whose count comes last. */

int cublasSgemmStridedBatched(Blas *handle, int transpose_a, int transpose_b, int m, int n, int k,
                              const void *alpha, const void *a, int lda, long long stride_a, const void *b,
                              int ldb, long long stride_b, const void *beta, void *c, int ldc,
                              long long stride_c, int count) {
    spend_flops(handle->stream, 2.0 * m * n * k * count);
    return SUCCESS;
}

int cublasGemmStridedBatchedEx(Blas *handle, int transpose_a, int transpose_b, int m, int n, int k,
                               const void *alpha, const void *a, int type_a, int lda, long long stride_a,
                               const void *b, int type_b, int ldb, long long stride_b, const void *beta,
                               void *c, int type_c, int ldc, long long stride_c, int count) {
    spend_flops(handle->stream, 2.0 * m * n * k * count);
    return SUCCESS;
}

/* cuBLASLt: any product has one algorithm, which needs no workspace. */

typedef struct {
    uint64_t rows, columns;
} Layout;

typedef struct {
    uint64_t algorithm[8];
    size_t workspace;
    int status;
    float waves;
    int reserved[4];
} Heuristic;

enum { DESCRIPTION_SIZE = 64 };

size_t cublasLtGetVersion(void) {
    return LIBRARY_VERSION;
}

int cublasLtMatmulDescCreate(void **to, int compute_type, int scale_type) {
    return new_object(to, DESCRIPTION_SIZE);
}

int cublasLtMatmulDescDestroy(void *description) {
    free(description);
    return SUCCESS;
}

int cublasLtMatmulPreferenceCreate(void **to) {
    return new_object(to, DESCRIPTION_SIZE);
}

int cublasLtMatmulPreferenceDestroy(void *preference) {
    free(preference);
    return SUCCESS;
}

int cublasLtMatrixLayoutCreate(Layout **to, int type, uint64_t rows, uint64_t columns, int64_t stride) {
    int error = new_object((void **)to, sizeof **to);
    if (error) return error;
    **to = (Layout){rows, columns};
    return SUCCESS;
}

int cublasLtMatrixLayoutDestroy(Layout *layout) {
    free(layout);
    return SUCCESS;
}

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *description, Layout *a, Layout *b, Layout *c, Layout *d,
                                   void *preference, int wanted, Heuristic *results, int *count) {
    memset(results, 0, sizeof *results);
    *count = wanted > 0;
    return SUCCESS;
}

int cublasLtMatmul(void *handle, void *description, const void *alpha, const void *a, Layout *layout_a,
                   const void *b, Layout *layout_b, const void *beta, const void *c, Layout *layout_c, void *d,
                   Layout *layout_d, void *algorithm, void *workspace, size_t workspace_size, void *stream) {
    spend_flops(stream, 2.0 * (double)(layout_a->rows * layout_a->columns) * (double)layout_d->columns);
    return SUCCESS;
}

/* cuFFT */

int cufftCreate(int *plan) {
    static int plans;
    *plan = ++plans;
    return SUCCESS;
}

int cufftXtMakePlanMany(int plan, int rank, long long *sizes, long long *in_embed, long long in_stride,
                        long long in_distance, int in_type, long long *out_embed, long long out_stride,
                        long long out_distance, int out_type, long long batch, size_t *workspace, int type) {
    *workspace = 0;
    return SUCCESS;
}

/* NVRTC */

int nvrtcVersion(int *major, int *minor) {
    *major = CUDA_VERSION / 1000;
    *minor = 0;
    return SUCCESS;
}

int nvrtcCreateProgram(void **program) {
    enum { INTERNAL_ERROR = 11 };
    return INTERNAL_ERROR;
}

const char *nvrtcGetErrorString(int error) {
    return "the emulated device compiles no kernels";
}
