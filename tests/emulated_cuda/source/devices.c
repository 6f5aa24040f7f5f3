/* The runtime's devices, contexts and errors. */
#define _GNU_SOURCE
#include "cuda_types.h"
#include "emulated.h"
#include "runtime.h"
#include <pthread.h>
#include <stdio.h>
#include <string.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static bool has_context[MAX_DEVICES];
static bool has_library[MAX_DEVICES][LIBRARIES];
static bool inherits_context; /* a forked child can't use its parent's */
static __thread int current;
static __thread Error last_error;

static void after_fork(void) {
    for (int device = 0; device < MAX_DEVICES; device++) inherits_context |= has_context[device];
}

__attribute__((constructor)) static void watch_forks(void) {
    pthread_atfork(NULL, NULL, after_fork);
}

int current_device(void) {
    return current;
}

bool device_exists(int device) {
    return device >= 0 && device < settings()->devices;
}

int card_of_device(int device) {
    return settings()->card_of[device];
}

bool device_has_context(int device) {
    return has_context[device];
}

void set_current_device(int device) {
    current = device;
}

Error fail(Error error) {
    last_error = error;
    return error;
}

int enter_context(int device) {
    if (inherits_context) return NOT_INITIALIZED;
    if (!settings()->devices) return NO_DEVICE;
    if (!device_exists(device)) return INVALID_DEVICE;
    pthread_mutex_lock(&mutex);
    if (!has_context[device]) has_context[device] = take_memory(card_of_device(device), settings()->context);
    bool entered = has_context[device];
    pthread_mutex_unlock(&mutex);
    return entered ? SUCCESS : OUT_OF_MEMORY;
}

void take_library_memory(int library, int64_t bytes) {
    pthread_mutex_lock(&mutex);
    bool *taken = &has_library[current][library];
    if (!*taken) *taken = take_memory(card_of_device(current), bytes);
    pthread_mutex_unlock(&mutex);
}

/* Errors */

Error cudaGetLastError(void) {
    Error error = last_error;
    last_error = SUCCESS;
    return error;
}

Error cudaPeekAtLastError(void) {
    return last_error;
}

const char *cudaGetErrorName(Error error) {
    switch (error) {
        case SUCCESS: return "cudaSuccess";
        case OUT_OF_MEMORY: return "cudaErrorMemoryAllocation";
        case NOT_INITIALIZED: return "cudaErrorInitializationError";
        case NO_DEVICE: return "cudaErrorNoDevice";
        case INVALID_DEVICE: return "cudaErrorInvalidDevice";
        case INVALID_HANDLE: return "cudaErrorInvalidResourceHandle";
        case NOT_READY: return "cudaErrorNotReady";
        case HOST_MEMORY_NOT_REGISTERED: return "cudaErrorHostMemoryNotRegistered";
        case NOT_PERMITTED: return "cudaErrorNotPermitted";
        case NOT_SUPPORTED: return "cudaErrorNotSupported";
        default: return "cudaErrorInvalidValue";
    }
}

const char *cudaGetErrorString(Error error) {
    switch (error) {
        case SUCCESS: return "no error";
        case OUT_OF_MEMORY: return "out of memory";
        case NOT_INITIALIZED: return "initialization error";
        case NO_DEVICE: return "no CUDA-capable device is detected";
        case INVALID_DEVICE: return "invalid device ordinal";
        case INVALID_HANDLE: return "invalid resource handle";
        case NOT_READY: return "device not ready";
        case HOST_MEMORY_NOT_REGISTERED: return "pointer does not correspond to a registered memory region";
        case NOT_PERMITTED: return "operation not permitted";
        case NOT_SUPPORTED: return "operation not supported (by the emulated device)";
        default: return "invalid argument";
    }
}

/* Devices */

Error cudaGetDeviceCount(int *count) {
    if (inherits_context) return fail(NOT_INITIALIZED);
    *count = settings()->devices;
    return *count ? SUCCESS : fail(NO_DEVICE);
}

Error cudaGetDevice(int *device) {
    *device = current;
    return inherits_context ? fail(NOT_INITIALIZED) : SUCCESS;
}

Error cudaSetDevice(int device) {
    TRY(enter_context(device));
    current = device;
    return SUCCESS;
}

/* Those of an A100, but for what the settings say. */
Error cudaGetDeviceProperties(DeviceProperties *to, int device) {
    if (!device_exists(device)) return fail(INVALID_DEVICE);
    const Settings *set = settings();
    *to = (DeviceProperties){
        .name = DEVICE_NAME,
        .total_memory = (size_t)set->memory,
        .shared_memory_per_block = 48 * KIB,
        .registers_per_block = 65536,
        .warp_size = 32,
        .memory_pitch = 0x7fffffff,
        .max_threads_per_block = 1024,
        .max_block_size = {1024, 1024, 64},
        .max_grid_size = {0x7fffffff, 65535, 65535},
        .constant_memory = 64 * KIB,
        .major = set->capability_major,
        .minor = set->capability_minor,
        .texture_alignment = 512,
        .processors = set->processors,
        .can_map_host_memory = 1,
        .concurrent_kernels = 1,
        .ecc = 1,
        .pci_bus = FIRST_PCI_BUS + card_of_device(device),
        .async_engines = 3,
        .unified_addressing = 1,
        .memory_bus_width = 5120,
        .l2_cache_size = 40 * MIB,
        .max_threads_per_processor = 2048,
        .stream_priorities = 1,
        .shared_memory_per_processor = 164 * KIB,
        .registers_per_processor = 65536,
        .managed_memory = 1,
        .cooperative_launch = 1,
        .shared_memory_per_block_optin = 163 * KIB,
        .max_blocks_per_processor = 32,
        .reserved_shared_memory_per_block = 1 * KIB,
        .memory_pools = 1,
    };
    uuid_bytes(card_of_device(device), to->uuid);
    return SUCCESS;
}

static int attribute_of(const DeviceProperties *of, int attribute) {
    switch (attribute) {
        case MAX_THREADS_PER_BLOCK: return of->max_threads_per_block;
        case MAX_BLOCK_X: return of->max_block_size[0];
        case MAX_BLOCK_Y: return of->max_block_size[1];
        case MAX_BLOCK_Z: return of->max_block_size[2];
        case MAX_GRID_X: return of->max_grid_size[0];
        case MAX_GRID_Y: return of->max_grid_size[1];
        case MAX_GRID_Z: return of->max_grid_size[2];
        case SHARED_MEMORY_PER_BLOCK: return (int)of->shared_memory_per_block;
        case SHARED_MEMORY_PER_BLOCK_OPTIN: return (int)of->shared_memory_per_block_optin;
        case SHARED_MEMORY_PER_PROCESSOR: return (int)of->shared_memory_per_processor;
        case WARP_SIZE: return of->warp_size;
        case REGISTERS_PER_BLOCK: return of->registers_per_block;
        case REGISTERS_PER_PROCESSOR: return of->registers_per_processor;
        case CLOCK_KHZ: return CLOCK_MHZ * 1000;
        case PROCESSORS: return of->processors;
        case PCI_BUS: return of->pci_bus;
        case L2_CACHE_SIZE: return of->l2_cache_size;
        case MAX_THREADS_PER_PROCESSOR: return of->max_threads_per_processor;
        case CAPABILITY_MAJOR: return of->major;
        case CAPABILITY_MINOR: return of->minor;
        case CONCURRENT_KERNELS:
        case ECC_ENABLED:
        case UNIFIED_ADDRESSING:
        case STREAM_PRIORITIES:
        case COOPERATIVE_LAUNCH:
        case POSIX_FILE_HANDLES:
        case MEMORY_POOLS: return 1;
        case VIRTUAL_MEMORY_MANAGEMENT: return settings()->maps_memory;
        default: return 0;
    }
}

Error cudaDeviceGetAttribute(int *value, int attribute, int device) {
    DeviceProperties properties;
    TRY(cudaGetDeviceProperties(&properties, device));
    *value = attribute_of(&properties, attribute);
    return SUCCESS;
}

Error cudaDeviceGetPCIBusId(char *id, int size, int device) {
    if (!device_exists(device)) return fail(INVALID_DEVICE);
    snprintf(id, (size_t)size, "0000:%02x:00.0", FIRST_PCI_BUS + card_of_device(device));
    return SUCCESS;
}

Error cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return SUCCESS;
}

Error cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = 0;
    return SUCCESS;
}

Error cudaDeviceSynchronize(void) {
    TRY(enter_context(current));
    wait_for_device(current);
    return SUCCESS;
}

Error cudaDriverGetVersion(int *version) {
    *version = CUDA_VERSION;
    return SUCCESS;
}

Error cudaRuntimeGetVersion(int *version) {
    *version = CUDA_VERSION;
    return SUCCESS;
}
