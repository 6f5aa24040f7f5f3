/* Kernels: the linker registers each with its name and host function, by which it is launched. None
 * computes; a launch takes time and, the first time, the memory of the loaded code. */
#define _GNU_SOURCE
#include "cuda_types.h"
#include "emulated.h"
#include "runtime.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    const void *function; /* NULL: an empty slot */
    const char *name;
    bool is_elementwise;
    bool is_loaded[MAX_DEVICES];
} Kernel;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static Kernel *table; /* a hash table with open addressing, at most half full */
static size_t table_size;
static size_t kernel_count;
static const char *volatile last_name;

static Kernel *slot_of(const void *function) {
    size_t hash = ((uintptr_t)function >> 4) * 0x9E3779B97F4A7C15ULL >> 20;
    for (;; hash++) {
        Kernel *slot = &table[hash % table_size];
        if (!slot->function || slot->function == function) return slot;
    }
}

static void grow_table(void) {
    Kernel *old = table;
    size_t old_size = table_size;
    table_size = old_size ? 2 * old_size : 1 << 16;
    table = calloc(table_size, sizeof *table);
    for (size_t i = 0; i < old_size; i++)
        if (old[i].function) *slot_of(old[i].function) = old[i];
    free(old);
}

bool last_kernel_was(const char *part_of_name) {
    return last_name && strstr(last_name, part_of_name);
}

static bool is_elementwise(const char *name) {
    return strstr(name, "vectorized_elementwise_kernel") || strstr(name, "unrolled_elementwise_kernel");
}

void **__cudaRegisterFatBinary(void *binary) {
    return calloc(1, sizeof(void *));
}

void __cudaRegisterFatBinaryEnd(void **handle) {
}

void __cudaUnregisterFatBinary(void **handle) {
    free(handle);
}

void __cudaRegisterFunction(void **handle, const char *function, char *device_function, const char *name) {
    pthread_mutex_lock(&mutex);
    if (2 * kernel_count >= table_size) grow_table();
    Kernel *slot = slot_of(function);
    if (!slot->function) kernel_count++;
    *slot = (Kernel){.function = function, .name = name, .is_elementwise = is_elementwise(name)};
    pthread_mutex_unlock(&mutex);
}

void __cudaRegisterVar(void **handle) {
}

char __cudaInitModule(void **handle) {
    return 1;
}

/* What stands between <<< and >>>: pushed by the caller, popped by the kernel's host function. */
static __thread struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} configuration;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    configuration.grid = grid;
    configuration.block = block;
    configuration.shared = shared;
    configuration.stream = stream;
    return 0;
}

Error __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void **stream) {
    *grid = configuration.grid;
    *block = configuration.block;
    *shared = configuration.shared;
    *stream = configuration.stream;
    return SUCCESS;
}

Error __cudaGetKernel(const void **kernel, const void *function) {
    *kernel = function;
    return SUCCESS;
}

/* Load a kernel on the current device; false if it does not fit. */
static bool load(Kernel *kernel) {
    int device = current_device();
    if (kernel->is_loaded[device]) return true;
    if (settings()->kernel && !take_memory(card_of_device(device), settings()->kernel)) return false;
    kernel->is_loaded[device] = true;
    return true;
}

static Error launch(const void *function, dim3 grid, dim3 block, void **arguments, void *stream) {
    TRY(enter_context(current_device()));
    pthread_mutex_lock(&mutex);
    Kernel *kernel = table ? slot_of(function) : NULL;
    bool is_known = kernel && kernel->function;
    bool is_loaded = !is_known || load(kernel);
    /* Their third argument is an array of pointers, of which the first is the result's. */
    bool has_output = is_known && kernel->is_elementwise;
    const char *name = is_known ? kernel->name : "?";
    pthread_mutex_unlock(&mutex);
    if (!is_loaded) return fail(OUT_OF_MEMORY);
    if (has_output) forget_values(*(char **)arguments[2], 1);
    trace("launches", name);
    last_name = name;
    double threads = (double)grid.x * grid.y * grid.z * block.x * block.y * block.z;
    spend_launch(stream, threads);
    return SUCCESS;
}

Error cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                       void *stream) {
    return launch(function, grid, block, arguments, stream);
}

Error __cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                         void *stream) {
    return launch(kernel, grid, block, arguments, stream);
}

Error cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **arguments,
                                  size_t shared, void *stream) {
    return launch(function, grid, block, arguments, stream);
}

Error cudaLaunchKernelExC(const LaunchConfig *config, const void *function, void **arguments) {
    return launch(function, config->grid, config->block, arguments, config->stream);
}

Error cudaFuncGetAttributes(FunctionAttributes *to, const void *function) {
    TRY(enter_context(current_device()));
    int version = settings()->capability_major * 10 + settings()->capability_minor;
    *to = (FunctionAttributes){
        .max_threads_per_block = 1024,
        .registers = 32,
        .ptx_version = version,
        .binary_version = version,
        .max_dynamic_shared_size = 163 * KIB,
    };
    return SUCCESS;
}

Error cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int block_size,
                                                    size_t shared) {
    *blocks = block_size > 0 ? 2048 / block_size : 1;
    if (*blocks > 32) *blocks = 32;
    if (*blocks < 1) *blocks = 1;
    return SUCCESS;
}

Error cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function,
                                                             int block_size, size_t shared, unsigned flags) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, block_size, shared);
}
