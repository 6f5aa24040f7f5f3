/* Memory of the runtime, and copies.
 *
 * Device memory is taken from the account, and stands at addresses of the host that nothing backs
 * until something is written there. Kernels compute nothing, so most of it never is. */
#define _GNU_SOURCE
#include "cuda_types.h"
#include "emulated.h"
#include "runtime.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { PAGE = 4096 };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static Block *blocks;

/* Addresses in whole pieces of the granularity, and aligned to it. */
void *map_addresses(size_t size, int protection) {
    size_t mapped = size + GRANULARITY;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char *start = mmap(NULL, mapped, protection, flags, -1, 0);
    if (start == MAP_FAILED) return NULL;
    char *aligned = (char *)ROUND_UP((uintptr_t)start, (uintptr_t)GRANULARITY);
    size_t before = (size_t)(aligned - start);
    if (before) munmap(start, before);
    munmap(aligned + size, mapped - before - size);
    return aligned;
}

void add_block(void *start, size_t size, int device, Kind kind) {
    Block *block = malloc(sizeof *block);
    pthread_mutex_lock(&mutex);
    *block = (Block){start, size, device, kind, blocks};
    blocks = block;
    pthread_mutex_unlock(&mutex);
}

bool find_block(const void *address, Block *found) {
    const char *at = address;
    pthread_mutex_lock(&mutex);
    Block *block = blocks;
    while (block && (at < block->start || at >= block->start + block->size)) block = block->next;
    if (block) *found = *block;
    pthread_mutex_unlock(&mutex);
    return block != NULL;
}

bool remove_block(const void *start, Block *removed) {
    pthread_mutex_lock(&mutex);
    Block **link = &blocks;
    while (*link && (*link)->start != start) link = &(*link)->next;
    Block *block = *link;
    if (block) {
        *removed = *block;
        *link = block->next;
        free(block);
    }
    pthread_mutex_unlock(&mutex);
    return block != NULL;
}

static bool is_on_device(const void *address) {
    Block block;
    return find_block(address, &block) && block.kind != HOST_MEMORY;
}

/* Device memory */

Error cudaMalloc(void **to, size_t size) {
    *to = NULL;
    int device = current_device();
    TRY(enter_context(device));
    if (!size) return SUCCESS;
    size = ROUND_UP(size, (size_t)GRANULARITY);
    int card = card_of_device(device);
    if (!take_memory(card, (int64_t)size)) return fail(OUT_OF_MEMORY);
    *to = map_addresses(size, PROT_READ | PROT_WRITE);
    if (!*to) {
        give_memory(card, (int64_t)size);
        return fail(OUT_OF_MEMORY);
    }
    add_block(*to, size, device, DEVICE_MEMORY);
    return SUCCESS;
}

Error cudaFree(void *start) {
    Block block;
    TRY(enter_context(current_device()));
    if (!start) return SUCCESS;
    if (!remove_block(start, &block)) return fail(INVALID_VALUE);
    wait_for_device(block.device);
    forget_values(block.start, block.size);
    munmap(block.start, block.size);
    give_memory(card_of_device(block.device), (int64_t)block.size);
    return SUCCESS;
}

Error cudaMemGetInfo(size_t *available, size_t *total) {
    TRY(enter_context(current_device()));
    int64_t used = memory_in_use(card_of_device(current_device()));
    *total = (size_t)settings()->memory;
    *available = (size_t)(settings()->memory - used);
    return SUCCESS;
}

Error cudaGetSymbolAddress(void **to, const void *symbol) {
    return cudaMalloc(to, 1);
}

/* The stream-ordered allocator (backend:cudaMallocAsync): each device's pool keeps no memory. */

static int64_t pool_used[MAX_DEVICES];
static int64_t pool_peak[MAX_DEVICES];

Error cudaMallocAsync(void **to, size_t size, void *stream) {
    int device = current_device();
    TRY(cudaMalloc(to, size));
    pool_used[device] += (int64_t)ROUND_UP(size, (size_t)GRANULARITY);
    if (pool_used[device] > pool_peak[device]) pool_peak[device] = pool_used[device];
    return SUCCESS;
}

Error cudaFreeAsync(void *start, void *stream) {
    Block block;
    if (find_block(start, &block)) pool_used[block.device] -= (int64_t)block.size;
    return cudaFree(start);
}

/* A pool's handle is its device's number and one. */
Error cudaDeviceGetDefaultMemPool(void **pool, int device) {
    *pool = (void *)(intptr_t)(device + 1);
    return SUCCESS;
}

Error cudaMemPoolGetAttribute(void *pool, int attribute, uint64_t *value) {
    int device = (int)(intptr_t)pool - 1;
    bool is_peak = attribute == POOL_RESERVED_HIGH || attribute == POOL_USED_HIGH;
    *value = (uint64_t)(is_peak ? pool_peak[device] : pool_used[device]);
    return SUCCESS;
}

Error cudaMemPoolSetAttribute(void *pool, int attribute, void *value) {
    int device = (int)(intptr_t)pool - 1;
    if (attribute == POOL_RESERVED_HIGH || attribute == POOL_USED_HIGH) pool_peak[device] = pool_used[device];
    return SUCCESS;
}

/* Pinned memory of the host */

Error cudaHostAlloc(void **to, size_t size, unsigned flags) {
    TRY(enter_context(current_device()));
    size = ROUND_UP(size ? size : 1, (size_t)PAGE);
    if (posix_memalign(to, PAGE, size)) return fail(OUT_OF_MEMORY);
    add_block(*to, size, current_device(), HOST_MEMORY);
    return SUCCESS;
}

Error cudaFreeHost(void *start) {
    Block block;
    if (start && remove_block(start, &block)) free(start);
    return SUCCESS;
}

Error cudaHostRegister(void *start, size_t size, unsigned flags) {
    TRY(enter_context(current_device()));
    add_block(start, size, current_device(), HOST_MEMORY);
    return SUCCESS;
}

Error cudaHostUnregister(void *start) {
    Block block;
    return remove_block(start, &block) ? SUCCESS : fail(HOST_MEMORY_NOT_REGISTERED);
}

Error cudaPointerGetAttributes(PointerAttributes *to, const void *address) {
    enum { NO_DEVICE_OF_A_POINTER = -2 };
    Block block;
    void *pointer = (void *)address;
    if (!find_block(address, &block)) {
        *to = (PointerAttributes){UNREGISTERED_MEMORY, NO_DEVICE_OF_A_POINTER, NULL, pointer};
    } else if (block.kind == HOST_MEMORY) {
        *to = (PointerAttributes){REGISTERED_HOST_MEMORY, block.device, pointer, pointer};
    } else {
        *to = (PointerAttributes){REGISTERED_DEVICE_MEMORY, block.device, pointer, NULL};
    }
    return SUCCESS;
}

/* Values.
 *
 * What the host copied to the device it can read back, until a kernel that is known to write there
 * is launched, or many other copies were made: torch hands out the same addresses again, and what a
 * kernel would have written over old values must not read as these. All else reads as 0. */

enum { REMEMBERED = 128, LARGEST_VALUE = 64 * MIB /* the host needs memory of its own for values */ };

static struct {
    const char *start;
    size_t size;
} ranges[REMEMBERED];
static unsigned range_count;

static bool has_values(const char *start, size_t size) {
    for (int i = 0; i < REMEMBERED; i++)
        if (ranges[i].start && start >= ranges[i].start && start + size <= ranges[i].start + ranges[i].size)
            return true;
    return false;
}

static void forget(const char *start, size_t size) {
    for (int i = 0; i < REMEMBERED; i++)
        if (start < ranges[i].start + ranges[i].size && ranges[i].start < start + size) ranges[i].start = NULL;
}

void forget_values(const void *start, size_t size) {
    pthread_mutex_lock(&mutex);
    forget(start, size);
    pthread_mutex_unlock(&mutex);
}

/* Note that a range of device memory is written with values, or with unknown ones. */
static void note_written(const char *start, size_t size, bool with_values) {
    pthread_mutex_lock(&mutex);
    if (!with_values) {
        forget(start, size);
    } else if (!has_values(start, size)) {
        forget(start, size);
        ranges[range_count % REMEMBERED].start = start;
        ranges[range_count % REMEMBERED].size = size;
        range_count++;
    }
    pthread_mutex_unlock(&mutex);
}

static bool values_are_known(const char *start, size_t size) {
    pthread_mutex_lock(&mutex);
    bool known = has_values(start, size);
    pthread_mutex_unlock(&mutex);
    return known;
}

/* The host reads what a kernel computed: 0. But `isfinite(...).all()` is true. */
static void read_unknown(void *to, size_t size) {
    bool is_all = size == 1 && last_kernel_was("and_kernel");
    memset(to, is_all, size);
}

static Error copy(void *to, const void *from, size_t size, void *stream) {
    static const double HOST_BYTES_PER_MICROSECOND = 2e4;
    static const double DEVICE_BYTES_PER_MICROSECOND = 5e5;
    TRY(enter_context(current_device()));
    if (!size) return SUCCESS;
    bool to_device = is_on_device(to);
    bool from_device = is_on_device(from);
    bool within_device = to_device && from_device;
    spend(stream, (double)size / (within_device ? DEVICE_BYTES_PER_MICROSECOND : HOST_BYTES_PER_MICROSECOND));
    bool is_known = !from_device || values_are_known(from, size);
    if (to_device) {
        is_known = is_known && size <= LARGEST_VALUE;
        note_written(to, size, is_known);
        if (is_known) memmove(to, from, size);
    } else if (is_known) {
        memmove(to, from, size);
    } else {
        read_unknown(to, size);
    }
    return SUCCESS;
}

Error cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
    return copy(to, from, size, stream);
}

Error cudaMemcpy(void *to, const void *from, size_t size, int kind) {
    TRY(copy(to, from, size, NULL));
    wait_for_stream(NULL);
    return SUCCESS;
}

Error cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                        size_t height, int kind, void *stream) {
    for (size_t row = 0; row < height; row++)
        TRY(copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width, stream));
    return SUCCESS;
}

Error cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size,
                          void *stream) {
    return copy(to, from, size, stream);
}

Error cudaMemcpyToSymbol(const void *symbol, const void *from, size_t size, size_t offset, int kind) {
    return SUCCESS;
}

Error cudaMemsetAsync(void *to, int value, size_t size, void *stream) {
    static const double BYTES_PER_MICROSECOND = 1e6;
    TRY(enter_context(current_device()));
    spend(stream, (double)size / BYTES_PER_MICROSECOND);
    /* Unknown values read as 0, so zeros need to be written only among known ones. */
    bool is_written = values_are_known(to, size) || (value && size <= LARGEST_VALUE) || !is_on_device(to);
    if (is_on_device(to)) note_written(to, size, is_written);
    if (is_written) memset(to, value, size);
    return SUCCESS;
}

Error cudaMemset(void *to, int value, size_t size) {
    return cudaMemsetAsync(to, value, size, NULL);
}
