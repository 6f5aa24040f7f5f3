/* The interface between the parts of the emulated CUDA device.
 *
 * A *card* is a device's number on the machine, which NVML and the account use. A *device* is its
 * number within a process, after CUDA_VISIBLE_DEVICES. */
#ifndef EMULATED_H
#define EMULATED_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KIB (1LL << 10)
#define MIB (1LL << 20)
#define ROUND_UP(number, multiple) (((number) + (multiple) - 1) / (multiple) * (multiple))

enum { MAX_DEVICES = 8, MAX_PROCESSES = 256 };
enum { GRANULARITY = 2 * MIB }; /* the driver's physical memory comes in pieces of this size */

/* None of it may take the place of other libraries' functions. */
#pragma GCC visibility push(hidden)

/* settings.c */
typedef struct {
    int cards;
    int devices;                  /* the cards that this process may use ... */
    int card_of[MAX_DEVICES];     /* ... and which ones they are */
    int64_t memory;               /* of each card */
    int64_t context;              /* what a process takes outside torch on its first use of a card, */
    int64_t cublas, cudnn, nccl;  /* of each of these libraries, */
    int64_t kernel;               /* and of each kernel */
    int64_t cudnn_workspace;      /* of each convolution */
    int capability_major, capability_minor;
    int processors;
    double flops_per_microsecond;
    bool nvml;
    bool maps_memory;             /* or the driver refuses expandable segments */
    bool trace;
} Settings;

const Settings *settings(void);
void uuid_bytes(int card, unsigned char *uuid);
void uuid_text(int card, char *text, size_t size);
void trace(const char *what, const char *name);

/* account.c */
typedef struct {
    int pid;
    int64_t bytes;
} Holder;

bool take_memory(int card, int64_t bytes); /* false if the card has not that much left */
void give_memory(int card, int64_t bytes);
int64_t memory_in_use(int card);
int memory_holders(int card, Holder *holders, int room); /* returns how many there are */

/* devices.c */
enum { CUBLAS, CUDNN, NCCL, LIBRARIES };

int current_device(void);
bool device_exists(int device);
int card_of_device(int device);
int enter_context(int device);                    /* create the context; returns a cudaError_t */
void take_library_memory(int library, int64_t bytes); /* once a library and device */

/* streams.c */
void spend(void *stream, double microseconds);
void spend_flops(void *stream, double flops);
void spend_launch(void *stream, double threads);
void wait_for_device(int device);
void wait_for_stream(void *stream);

/* memory.c */
typedef enum { DEVICE_MEMORY, RESERVED_ADDRESSES, HOST_MEMORY } Kind;

typedef struct Block {
    char *start;
    size_t size;
    int device;
    Kind kind;
    struct Block *next;
} Block;

void *map_addresses(size_t size, int protection);
void add_block(void *start, size_t size, int device, Kind kind);
bool find_block(const void *address, Block *found); /* the block that the address lies in */
bool remove_block(const void *start, Block *removed);
void forget_values(const void *start, size_t size);

/* kernels.c */
bool last_kernel_was(const char *part_of_name);

#pragma GCC visibility pop
#endif
