/* The types and constants of CUDA 13's runtime and driver that the emulation needs.
 *
 * Layouts and numbers are those that NVIDIA documents in the CUDA runtime and driver API references;
 * so no header of NVIDIA's is needed to build it. */
#ifndef CUDA_TYPES_H
#define CUDA_TYPES_H
#include <stddef.h>
#include <stdint.h>

/* Errors: the runtime's cudaError_t and the driver's CUresult share these numbers. */
typedef enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_HANDLE = 400,
    NOT_READY = 600,
    HOST_MEMORY_NOT_REGISTERED = 713,
    NOT_PERMITTED = 800,
    NOT_SUPPORTED = 801,
} Error;

enum { CUDA_VERSION = 13000 };

typedef struct {
    unsigned x, y, z;
} dim3;

/* cudaDeviceProp: reserved_* stand for members that torch does not read, or that are 0 here. */
typedef struct {
    char name[256];
    unsigned char uuid[16];
    char luid[8];
    unsigned luid_device_node_mask;
    size_t total_memory;
    size_t shared_memory_per_block;
    int registers_per_block;
    int warp_size;
    size_t memory_pitch;
    int max_threads_per_block;
    int max_block_size[3];
    int max_grid_size[3];
    size_t constant_memory;
    int major;
    int minor;
    size_t texture_alignment;
    size_t texture_pitch_alignment;
    int processors;
    int integrated;
    int can_map_host_memory;
    int reserved_textures[39];
    size_t surface_alignment;
    int concurrent_kernels;
    int ecc;
    int pci_bus;
    int pci_device;
    int pci_domain;
    int tcc_driver;
    int async_engines;
    int unified_addressing;
    int memory_bus_width;
    int l2_cache_size;
    int persisting_l2_cache_size;
    int max_threads_per_processor;
    int stream_priorities;
    int global_l1_cache;
    int local_l1_cache;
    size_t shared_memory_per_processor;
    int registers_per_processor;
    int managed_memory;
    int reserved_managed[7];
    int cooperative_launch;
    size_t shared_memory_per_block_optin;
    int reserved_page_tables[2];
    int max_blocks_per_processor;
    int access_policy_window;
    size_t reserved_shared_memory_per_block;
    int reserved_host_register[4];
    int memory_pools;
    int reserved_end[71];
} DeviceProperties;

/* cudaPointerAttributes */
enum { UNREGISTERED_MEMORY = 0, REGISTERED_HOST_MEMORY = 1, REGISTERED_DEVICE_MEMORY = 2 };
typedef struct {
    int type;
    int device;
    void *device_pointer;
    void *host_pointer;
    long reserved[8];
} PointerAttributes;

/* cudaFuncAttributes */
typedef struct {
    size_t shared_size, constant_size, local_size;
    int max_threads_per_block;
    int registers;
    int ptx_version;
    int binary_version;
    int cache_mode;
    int max_dynamic_shared_size;
    int reserved[23];
} FunctionAttributes;

/* cudaLaunchConfig_t */
typedef struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
    void *attributes;
    unsigned attribute_count;
} LaunchConfig;

/* cudaMemPoolAttr */
enum {
    POOL_RESERVED_NOW = 5,
    POOL_RESERVED_HIGH = 6,
    POOL_USED_NOW = 7,
    POOL_USED_HIGH = 8,
};

/* cudaDeviceAttr, and the driver's CUdevice_attribute with the same numbers */
enum {
    MAX_THREADS_PER_BLOCK = 1,
    MAX_BLOCK_X = 2,
    MAX_BLOCK_Y = 3,
    MAX_BLOCK_Z = 4,
    MAX_GRID_X = 5,
    MAX_GRID_Y = 6,
    MAX_GRID_Z = 7,
    SHARED_MEMORY_PER_BLOCK = 8,
    WARP_SIZE = 10,
    REGISTERS_PER_BLOCK = 12,
    CLOCK_KHZ = 13,
    PROCESSORS = 16,
    CONCURRENT_KERNELS = 31,
    ECC_ENABLED = 32,
    PCI_BUS = 33,
    L2_CACHE_SIZE = 38,
    MAX_THREADS_PER_PROCESSOR = 39,
    UNIFIED_ADDRESSING = 41,
    CAPABILITY_MAJOR = 75,
    CAPABILITY_MINOR = 76,
    STREAM_PRIORITIES = 78,
    SHARED_MEMORY_PER_PROCESSOR = 81,
    REGISTERS_PER_PROCESSOR = 82,
    COOPERATIVE_LAUNCH = 95,
    SHARED_MEMORY_PER_BLOCK_OPTIN = 97,
    VIRTUAL_MEMORY_MANAGEMENT = 102,
    POSIX_FILE_HANDLES = 103,
    MEMORY_POOLS = 115,
};

/* CUpointer_attribute and CUmemorytype */
enum { POINTER_CONTEXT = 1, POINTER_MEMORY_TYPE = 2, POINTER_DEVICE_POINTER = 3, POINTER_DEVICE_ORDINAL = 9 };
enum { MEMORY_TYPE_HOST = 1, MEMORY_TYPE_DEVICE = 2 };

/* The first members of CUmemAllocationProp */
enum { FABRIC_HANDLE = 8 };
typedef struct {
    int type;
    int requested_handle_types;
    struct {
        int type;
        int device;
    } location;
} AllocationProperties;
#endif
