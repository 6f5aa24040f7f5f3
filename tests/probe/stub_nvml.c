/* A stub of NVML, NVIDIA's management library: it answers what the environment variable STUB_NVML says, as written by
   made_nvml.py, one fact a line: `driver TEXT`; `gpu` and `mig` begin a GPU and an instance of the GPU before; then its
   `uuid`, `pci`, `name`, `total`, `free`, `mode` (of MIG), `ecc`, `clock`, `reasons`, `compute PID BYTES` and
   `graphics PID BYTES`. `fail CALL CODE` makes a call fail, of the library before the first GPU, else of that one. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SUCCESS 0
#define NOT_SUPPORTED 3
#define NOT_FOUND 6
#define INSUFFICIENT_SIZE 7
#define DRIVER_NOT_LOADED 9
#define MOST 32

typedef unsigned long long u64;
typedef struct { unsigned pid; u64 bytes; unsigned instance, compute_instance; } Process;
typedef struct { char call[64]; int code; } Failure;
typedef struct Gpu {
  struct Gpu *whole; /* of an instance */
  char uuid[96], pci[32], name[96];
  u64 total, free, reasons;
  int mode, ecc, clock, computing, drawing, failing;
  Process compute[MOST], graphics[MOST];
  Failure failures[MOST];
} Gpu;

static Gpu all[MOST], library;
static int count;
static char driver[80];

static int load(void) {
  const char *next = getenv("STUB_NVML");
  char line[256], text[160];
  Gpu *gpu = &library;
  if (!next) return DRIVER_NOT_LOADED;
  memset(all, 0, sizeof all);
  memset(&library, 0, sizeof library);
  for (count = 0; *next; next += *next == '\n') {
    size_t size = strcspn(next, "\n");
    snprintf(line, sizeof line, "%.*s", (int)size, next);
    next += size;
    if (!strcmp(line, "gpu") || !strcmp(line, "mig")) {
      Gpu *before = gpu->whole ? gpu->whole : gpu;
      gpu = &all[count++];
      gpu->whole = line[0] == 'm' ? before : NULL;
    }
    Process process = {0};
    Failure failure = {0};
    if (sscanf(line, "driver %79[^\n]", text) == 1) strcpy(driver, text);
    if (sscanf(line, "uuid %95[^\n]", text) == 1) strcpy(gpu->uuid, text);
    if (sscanf(line, "pci %31[^\n]", text) == 1) strcpy(gpu->pci, text);
    if (sscanf(line, "name %95[^\n]", text) == 1) strcpy(gpu->name, text);
    sscanf(line, "total %llu", &gpu->total);
    sscanf(line, "free %llu", &gpu->free);
    sscanf(line, "reasons %llu", &gpu->reasons);
    sscanf(line, "mode %d", &gpu->mode);
    sscanf(line, "ecc %d", &gpu->ecc);
    sscanf(line, "clock %d", &gpu->clock);
    if (sscanf(line, "compute %u %llu", &process.pid, &process.bytes) == 2) gpu->compute[gpu->computing++] = process;
    if (sscanf(line, "graphics %u %llu", &process.pid, &process.bytes) == 2) gpu->graphics[gpu->drawing++] = process;
    if (sscanf(line, "fail %63s %d", failure.call, &failure.code) == 2) gpu->failures[gpu->failing++] = failure;
  }
  return SUCCESS;
}

static int failed(Gpu *gpu, const char *call) {
  int code = load();
  for (int i = 0; !code && i < gpu->failing; i++)
    if (!strcmp(gpu->failures[i].call, call)) code = gpu->failures[i].code;
  return code;
}

/* The beginning of every call: its own name is that of a failure. */
#define ENTER(gpu) do { int code = failed(gpu, __func__); if (code) return code; } while (0)

static int text(char *answer, unsigned size, const char *value) {
  snprintf(answer, size, "%s", value);
  return SUCCESS;
}

static int handle(Gpu *gpu, Gpu **answer) {
  if (!gpu) return NOT_FOUND;
  *answer = gpu;
  return failed(gpu, "handle");
}

static int processes(Process *known, int size, unsigned *room, Process *answer) {
  int enough = *room >= (unsigned)size;
  *room = size;
  if (!enough) return INSUFFICIENT_SIZE;
  if (size) memcpy(answer, known, size * sizeof *known);
  return SUCCESS;
}

int nvmlInitWithFlags(unsigned flags) { ENTER(&library); return SUCCESS; }
int nvmlSystemGetDriverVersion(char *answer, unsigned size) { ENTER(&library); return text(answer, size, driver); }

int nvmlDeviceGetCount_v2(unsigned *answer) {
  ENTER(&library);
  *answer = 0;
  for (int i = 0; i < count; i++) *answer += !all[i].whole;
  return SUCCESS;
}

static Gpu *nth(Gpu *whole, unsigned index) {
  for (int i = 0; i < count; i++)
    if (all[i].whole == whole && !index--) return &all[i];
  return NULL;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu **answer) { ENTER(&library); return handle(nth(NULL, index), answer); }

int nvmlDeviceGetHandleByUUID(const char *uuid, Gpu **answer) {
  ENTER(&library);
  for (int i = 0; i < count; i++)
    if (!strcmp(all[i].uuid, uuid)) return handle(&all[i], answer);
  return NOT_FOUND;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *pci, Gpu **answer) {
  ENTER(&library);
  for (int i = 0; i < count; i++)
    if (!strcmp(all[i].pci, pci)) return handle(&all[i], answer);
  return NOT_FOUND;
}

int nvmlDeviceGetName(Gpu *gpu, char *answer, unsigned size) { ENTER(gpu); return text(answer, size, gpu->name); }
int nvmlDeviceGetUUID(Gpu *gpu, char *answer, unsigned size) { ENTER(gpu); return text(answer, size, gpu->uuid); }

int nvmlDeviceGetMemoryInfo(Gpu *gpu, u64 answer[3]) {
  ENTER(gpu);
  answer[0] = gpu->total;
  answer[1] = gpu->free;
  answer[2] = gpu->total - gpu->free;
  return SUCCESS;
}

#define PROCESSES(call, known, size) \
  int call(Gpu *gpu, unsigned *room, Process *answer) { ENTER(gpu); return processes(gpu->known, gpu->size, room, answer); }
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, compute, computing)
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2, compute, computing)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, graphics, drawing)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2, graphics, drawing)

int nvmlDeviceGetMigMode(Gpu *gpu, unsigned *now, unsigned *pending) {
  ENTER(gpu);
  *now = gpu->mode;
  *pending = 0;
  return gpu->mode < 0 ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceIsMigDeviceHandle(Gpu *gpu, unsigned *answer) { ENTER(gpu); *answer = gpu->whole != NULL; return SUCCESS; }
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Gpu *gpu, Gpu **answer) { ENTER(gpu); return handle(gpu->whole, answer); }
int nvmlDeviceGetMaxMigDeviceCount(Gpu *gpu, unsigned *answer) { ENTER(gpu); *answer = 7; return SUCCESS; }

int nvmlDeviceGetMigDeviceHandleByIndex(Gpu *gpu, unsigned index, Gpu **answer) {
  ENTER(gpu);
  return handle(nth(gpu, index), answer);
}

int nvmlDeviceGetEccMode(Gpu *gpu, int *now, int *pending) { ENTER(gpu); *now = gpu->ecc; *pending = 1; return SUCCESS; }

int nvmlDeviceGetClockInfo(Gpu *gpu, int kind, unsigned *answer) {
  ENTER(gpu);
  *answer = gpu->clock;
  return gpu->whole || kind != 1 ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetMaxClockInfo(Gpu *gpu, int kind, unsigned *answer) { ENTER(gpu); *answer = 1980; return SUCCESS; }
int nvmlDeviceGetCurrentClocksEventReasons(Gpu *gpu, u64 *answer) { ENTER(gpu); *answer = gpu->reasons; return SUCCESS; }
int nvmlDeviceGetCurrentClocksThrottleReasons(Gpu *gpu, u64 *answer) { ENTER(gpu); *answer = gpu->reasons; return SUCCESS; }
