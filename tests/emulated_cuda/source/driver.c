/* The part of the driver (libcuda) that torch asks for, above all virtual memory: of it, torch makes
 * its expandable segments. Device addresses are pointers of the host. */
#define _GNU_SOURCE
#include "cuda_types.h"
#include "emulated.h"
#include "runtime.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Devices and contexts: a context's handle is its device's number and one. */

Error cuInit(unsigned flags) {
    return settings()->devices ? SUCCESS : NO_DEVICE;
}

Error cuDriverGetVersion(int *version) {
    *version = CUDA_VERSION;
    return SUCCESS;
}

Error cuDeviceGetCount(int *count) {
    *count = settings()->devices;
    return SUCCESS;
}

Error cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return device_exists(ordinal) ? SUCCESS : INVALID_DEVICE;
}

Error cuDeviceGetName(char *name, int size, int device) {
    snprintf(name, (size_t)size, "%s", DEVICE_NAME);
    return SUCCESS;
}

Error cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    uuid_bytes(card_of_device(device), uuid);
    return SUCCESS;
}

Error cuDeviceTotalMem_v2(size_t *bytes, int device) {
    *bytes = (size_t)settings()->memory;
    return SUCCESS;
}

Error cuDeviceGetAttribute(int *value, int attribute, int device) {
    return cudaDeviceGetAttribute(value, attribute, device);
}

Error cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) {
    if (!device_exists(device)) return INVALID_DEVICE;
    *flags = 0;
    *is_active = device_has_context(device);
    return SUCCESS;
}

Error cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = (void *)(intptr_t)(device + 1);
    return (Error)enter_context(device);
}

Error cuDevicePrimaryCtxRelease_v2(int device) {
    return SUCCESS;
}

Error cuCtxGetCurrent(void **context) {
    int device = current_device();
    *context = device_has_context(device) ? (void *)(intptr_t)(device + 1) : NULL;
    return SUCCESS;
}

Error cuCtxSetCurrent(void *context) {
    if (context) set_current_device((int)(intptr_t)context - 1);
    return SUCCESS;
}

Error cuCtxGetDevice(int *device) {
    *device = current_device();
    return SUCCESS;
}

Error cuGetErrorString(Error error, const char **text) {
    *text = cudaGetErrorString(error);
    return SUCCESS;
}

Error cuGetErrorName(Error error, const char **name) {
    *name = error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_UNKNOWN";
    return SUCCESS;
}

/* Pointers */

Error cuPointerGetAttribute(void *to, int attribute, uintptr_t pointer) {
    Block block;
    if (!find_block((void *)pointer, &block)) return INVALID_VALUE;
    switch (attribute) {
        case POINTER_CONTEXT: *(intptr_t *)to = block.device + 1; return SUCCESS;
        case POINTER_DEVICE_POINTER: *(uintptr_t *)to = pointer; return SUCCESS;
        case POINTER_DEVICE_ORDINAL: *(int *)to = block.device; return SUCCESS;
        case POINTER_MEMORY_TYPE:
            *(int *)to = block.kind == HOST_MEMORY ? MEMORY_TYPE_HOST : MEMORY_TYPE_DEVICE;
            return SUCCESS;
        default: return NOT_SUPPORTED;
    }
}

Error cuMemGetAddressRange_v2(uintptr_t *start, size_t *size, uintptr_t pointer) {
    Block block;
    if (!find_block((void *)pointer, &block)) return INVALID_VALUE;
    if (start) *start = (uintptr_t)block.start;
    if (size) *size = block.size;
    return SUCCESS;
}

/* Virtual memory: addresses are reserved, physical memory is created, and mapped to them. */

typedef struct {
    size_t size;
    int card;
} Physical;

Error cuMemGetAllocationGranularity(size_t *granularity, const AllocationProperties *properties, int option) {
    *granularity = GRANULARITY;
    return SUCCESS;
}

Error cuMemAddressReserve(uintptr_t *to, size_t size, size_t alignment, uintptr_t hint, uint64_t flags) {
    void *start = map_addresses(size, PROT_NONE);
    if (!start) return OUT_OF_MEMORY;
    add_block(start, size, current_device(), RESERVED_ADDRESSES);
    *to = (uintptr_t)start;
    return SUCCESS;
}

Error cuMemAddressFree(uintptr_t start, size_t size) {
    Block block;
    if (!remove_block((void *)start, &block)) return INVALID_VALUE;
    forget_values((void *)start, size);
    munmap((void *)start, size);
    return SUCCESS;
}

Error cuMemCreate(Physical **handle, size_t size, const AllocationProperties *properties, uint64_t flags) {
    if (!settings()->maps_memory) return NOT_SUPPORTED;
    if (properties->requested_handle_types == FABRIC_HANDLE) return NOT_PERMITTED;
    int device = properties->location.device;
    Error error = (Error)enter_context(device);
    if (error) return error;
    int card = card_of_device(device);
    if (!take_memory(card, (int64_t)size)) return OUT_OF_MEMORY;
    *handle = malloc(sizeof **handle);
    **handle = (Physical){size, card};
    return SUCCESS;
}

/* Torch releases a handle after it has unmapped it, and retains none twice. */
Error cuMemRelease(Physical *handle) {
    give_memory(handle->card, (int64_t)handle->size);
    free(handle);
    return SUCCESS;
}

Error cuMemMap(uintptr_t at, size_t size, size_t offset, Physical *handle, uint64_t flags) {
    return SUCCESS;
}

Error cuMemSetAccess(uintptr_t at, size_t size, const void *access, size_t count) {
    return mprotect((void *)at, size, PROT_READ | PROT_WRITE) ? INVALID_VALUE : SUCCESS;
}

Error cuMemUnmap(uintptr_t at, size_t size) {
    wait_for_device(current_device());
    forget_values((void *)at, size);
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    return mmap((void *)at, size, PROT_NONE, flags, -1, 0) == MAP_FAILED ? INVALID_VALUE : SUCCESS;
}

/* The driver's functions by their names: those that are not here refuse. */

static Error refuse(void) {
    return NOT_SUPPORTED;
}

static void *find_function(const char *name) {
    char newer[128];
    snprintf(newer, sizeof newer, "%s_v2", name);
    void *function = dlsym(RTLD_DEFAULT, newer);
    if (!function) function = dlsym(RTLD_DEFAULT, name);
    if (function) return function;
    trace("lacks", name);
    return (void *)refuse;
}

Error cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, uint64_t flags,
                                       int *status) {
    *function = find_function(name);
    if (status) *status = SUCCESS;
    return SUCCESS;
}

Error cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    return cudaGetDriverEntryPointByVersion(name, function, (unsigned)version, flags, status);
}
