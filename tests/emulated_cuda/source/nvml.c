/* NVML (libnvidia-ml): the same cards, memory and processes as the runtime's. */
#define _GNU_SOURCE
#include "cuda_types.h"
#include "emulated.h"
#include "runtime.h"
#include <stdio.h>
#include <string.h>

typedef enum {
    OK = 0,
    INVALID_ARGUMENT = 2,
    UNSUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9,
} Status;

typedef struct {
    int number;
} Card;

/* The driver's own part of each card's memory: NVML's total counts it, CUDA's does not. */
static const uint64_t DRIVERS_BYTES = 256 * MIB;
static const char DRIVER_VERSION[] = "580.95.05";
static Card cards[MAX_DEVICES];

static Status put_text(char *to, unsigned size, const char *text) {
    if (strlen(text) >= size) return INSUFFICIENT_SIZE;
    strcpy(to, text);
    return OK;
}

static Status put_number(unsigned *to, unsigned number) {
    *to = number;
    return OK;
}

/* The library and the machine */

Status nvmlInitWithFlags(unsigned flags) {
    return settings()->nvml ? OK : DRIVER_NOT_LOADED;
}

Status nvmlInit_v2(void) {
    return nvmlInitWithFlags(0);
}

Status nvmlShutdown(void) {
    return OK;
}

const char *nvmlErrorString(Status status) {
    switch (status) {
        case OK: return "Success";
        case INVALID_ARGUMENT: return "Invalid Argument";
        case UNSUPPORTED: return "Not Supported";
        case NOT_FOUND: return "Not Found";
        case INSUFFICIENT_SIZE: return "Insufficient Size";
        case DRIVER_NOT_LOADED: return "Driver Not Loaded";
        default: return "Unknown Error";
    }
}

Status nvmlSystemGetDriverVersion(char *to, unsigned size) {
    return put_text(to, size, DRIVER_VERSION);
}

Status nvmlSystemGetNVMLVersion(char *to, unsigned size) {
    char version[32];
    snprintf(version, sizeof version, "%d.%s", CUDA_VERSION / 1000, DRIVER_VERSION);
    return put_text(to, size, version);
}

Status nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = CUDA_VERSION;
    return OK;
}

/* Cards */

Status nvmlDeviceGetCount_v2(unsigned *count) {
    return put_number(count, (unsigned)settings()->cards);
}

Status nvmlDeviceGetHandleByIndex_v2(unsigned index, Card **card) {
    if (index >= (unsigned)settings()->cards) return INVALID_ARGUMENT;
    *card = &cards[index];
    (*card)->number = (int)index;
    return OK;
}

Status nvmlDeviceGetHandleByUUID(const char *wanted, Card **card) {
    for (int number = 0; number < settings()->cards; number++) {
        char uuid[64];
        uuid_text(number, uuid, sizeof uuid);
        if (!strcmp(uuid, wanted)) return nvmlDeviceGetHandleByIndex_v2((unsigned)number, card);
    }
    return NOT_FOUND;
}

Status nvmlDeviceGetHandleByPciBusId_v2(const char *id, Card **card) {
    unsigned domain, bus;
    if (sscanf(id, "%x:%x", &domain, &bus) != 2) return INVALID_ARGUMENT;
    if (bus < FIRST_PCI_BUS || bus >= FIRST_PCI_BUS + (unsigned)settings()->cards) return NOT_FOUND;
    return nvmlDeviceGetHandleByIndex_v2(bus - FIRST_PCI_BUS, card);
}

Status nvmlDeviceGetIndex(Card *card, unsigned *index) {
    return put_number(index, (unsigned)card->number);
}

Status nvmlDeviceGetName(Card *card, char *to, unsigned size) {
    return put_text(to, size, DEVICE_NAME);
}

Status nvmlDeviceGetUUID(Card *card, char *to, unsigned size) {
    char uuid[64];
    uuid_text(card->number, uuid, sizeof uuid);
    return put_text(to, size, uuid);
}

Status nvmlDeviceGetCudaComputeCapability(Card *card, int *major, int *minor) {
    *major = settings()->capability_major;
    *minor = settings()->capability_minor;
    return OK;
}

Status nvmlDeviceIsMigDeviceHandle(Card *card, unsigned *is_instance) {
    return put_number(is_instance, 0);
}

Status nvmlDeviceGetMigMode(Card *card, unsigned *current, unsigned *pending) {
    put_number(pending, 0);
    return put_number(current, 0);
}

Status nvmlDeviceGetMaxMigDeviceCount(Card *card, unsigned *count) {
    return put_number(count, 0);
}

Status nvmlDeviceGetEccMode(Card *card, unsigned *current, unsigned *pending) {
    put_number(pending, 1);
    return put_number(current, 1);
}

Status nvmlDeviceGetClockInfo(Card *card, int clock, unsigned *mhz) {
    return put_number(mhz, CLOCK_MHZ);
}

Status nvmlDeviceGetMaxClockInfo(Card *card, int clock, unsigned *mhz) {
    return put_number(mhz, CLOCK_MHZ);
}

Status nvmlDeviceGetCurrentClocksEventReasons(Card *card, unsigned long long *reasons) {
    *reasons = 0;
    return OK;
}

Status nvmlDeviceGetCurrentClocksThrottleReasons(Card *card, unsigned long long *reasons) {
    *reasons = 0;
    return OK;
}

Status nvmlDeviceGetTemperature(Card *card, int sensor, unsigned *celsius) {
    return put_number(celsius, 40);
}

Status nvmlDeviceGetPowerUsage(Card *card, unsigned *milliwatts) {
    return put_number(milliwatts, 100000);
}

/* Memory */

typedef struct {
    uint64_t total, free, used;
} Memory;

Status nvmlDeviceGetMemoryInfo(Card *card, Memory *memory) {
    memory->total = (uint64_t)settings()->memory + DRIVERS_BYTES;
    memory->used = (uint64_t)memory_in_use(card->number) + DRIVERS_BYTES;
    memory->free = memory->total - memory->used;
    return OK;
}

typedef struct {
    unsigned version;
    uint64_t total, reserved, free, used;
} Memory_v2;

Status nvmlDeviceGetMemoryInfo_v2(Card *card, Memory_v2 *memory) {
    memory->total = (uint64_t)settings()->memory + DRIVERS_BYTES;
    memory->reserved = DRIVERS_BYTES;
    memory->used = (uint64_t)memory_in_use(card->number);
    memory->free = memory->total - memory->reserved - memory->used;
    return OK;
}

/* Processes: the count is how much room there is, and becomes how many there are. */

typedef struct {
    unsigned pid;
    uint64_t bytes;
} Process;

typedef struct {
    unsigned pid;
    uint64_t bytes;
    unsigned gpu_instance, compute_instance;
} Process_v3;

Status nvmlDeviceGetComputeRunningProcesses(Card *card, unsigned *count, Process *processes) {
    Holder holders[MAX_PROCESSES];
    unsigned room = *count;
    *count = (unsigned)memory_holders(card->number, holders, MAX_PROCESSES);
    if (room < *count) return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < *count; i++)
        processes[i] = (Process){(unsigned)holders[i].pid, (uint64_t)holders[i].bytes};
    return OK;
}

Status nvmlDeviceGetComputeRunningProcesses_v3(Card *card, unsigned *count, Process_v3 *processes) {
    static const unsigned NO_INSTANCE = ~0U;
    Holder holders[MAX_PROCESSES];
    unsigned room = *count;
    *count = (unsigned)memory_holders(card->number, holders, MAX_PROCESSES);
    if (room < *count) return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < *count; i++) {
        Holder holder = holders[i];
        processes[i] = (Process_v3){(unsigned)holder.pid, (uint64_t)holder.bytes, NO_INSTANCE, NO_INSTANCE};
    }
    return OK;
}

Status nvmlDeviceGetComputeRunningProcesses_v2(Card *card, unsigned *count, Process_v3 *processes) {
    return nvmlDeviceGetComputeRunningProcesses_v3(card, count, processes);
}

Status nvmlDeviceGetGraphicsRunningProcesses_v3(Card *card, unsigned *count, void *processes) {
    return put_number(count, 0);
}

Status nvmlDeviceGetGraphicsRunningProcesses_v2(Card *card, unsigned *count, void *processes) {
    return put_number(count, 0);
}

/* What torch asks of each card, and an emulated one has not. */

Status nvmlDeviceGetNvLinkRemoteDeviceType(Card *card, unsigned link, int *type) {
    return UNSUPPORTED;
}

Status nvmlDeviceGetNvLinkRemotePciInfo_v2(Card *card, unsigned link, void *place) {
    return UNSUPPORTED;
}

Status nvmlDeviceGetGpuFabricInfoV(Card *card, void *information) {
    return UNSUPPORTED;
}
