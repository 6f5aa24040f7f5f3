/* Streams and events. A stream is busy until its work is done by the clock, and waiting for it takes
 * that long; so times are plausible, and no more. */
#define _GNU_SOURCE
#include "cuda_types.h"
#include "emulated.h"
#include "runtime.h"
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

typedef struct Stream {
    int device;
    int priority;
    int64_t busy_until_ns;
    struct Stream *next;
} Stream;

typedef struct {
    bool recorded;
    int64_t at_ns;
} Event;

static const double LAUNCH_MICROSECONDS = 2;
static const double THREADS_PER_MICROSECOND = 30000;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static Stream default_streams[MAX_DEVICES];
static Stream *streams; /* all others; none is ever freed, since events may still wait for it */

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static int64_t later(int64_t one, int64_t other) {
    return one > other ? one : other;
}

static void wait_until(int64_t at_ns) {
    struct timespec at = {at_ns / 1000000000LL, at_ns % 1000000000LL};
    while (at_ns > now_ns()) clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL);
}

/* NULL, and 1 and 2, stand for the current device's default streams: one here. */
static Stream *stream_of(void *handle) {
    if ((uintptr_t)handle > 2) return handle;
    return &default_streams[current_device()];
}

void spend(void *handle, double microseconds) {
    Stream *stream = stream_of(handle);
    stream->busy_until_ns = later(stream->busy_until_ns, now_ns()) + (int64_t)(microseconds * 1000);
}

void spend_flops(void *handle, double flops) {
    spend(handle, LAUNCH_MICROSECONDS + flops / settings()->flops_per_microsecond);
}

void spend_launch(void *handle, double threads) {
    spend(handle, LAUNCH_MICROSECONDS + threads / THREADS_PER_MICROSECOND);
}

void wait_for_stream(void *handle) {
    wait_until(stream_of(handle)->busy_until_ns);
}

void wait_for_device(int device) {
    int64_t until_ns = default_streams[device].busy_until_ns;
    pthread_mutex_lock(&mutex);
    for (Stream *stream = streams; stream; stream = stream->next)
        if (stream->device == device) until_ns = later(until_ns, stream->busy_until_ns);
    pthread_mutex_unlock(&mutex);
    wait_until(until_ns);
}

/* Streams */

Error cudaStreamCreateWithPriority(void **handle, unsigned flags, int priority) {
    TRY(enter_context(current_device()));
    Stream *stream = calloc(1, sizeof *stream);
    stream->device = current_device();
    stream->priority = priority;
    pthread_mutex_lock(&mutex);
    stream->next = streams;
    streams = stream;
    pthread_mutex_unlock(&mutex);
    *handle = stream;
    return SUCCESS;
}

Error cudaStreamCreateWithFlags(void **handle, unsigned flags) {
    return cudaStreamCreateWithPriority(handle, flags, 0);
}

Error cudaStreamCreate(void **handle) {
    return cudaStreamCreateWithPriority(handle, 0, 0);
}

Error cudaStreamDestroy(void *handle) {
    return SUCCESS;
}

Error cudaStreamSynchronize(void *handle) {
    TRY(enter_context(current_device()));
    wait_for_stream(handle);
    return SUCCESS;
}

Error cudaStreamQuery(void *handle) {
    return stream_of(handle)->busy_until_ns <= now_ns() ? SUCCESS : NOT_READY;
}

Error cudaStreamGetPriority(void *handle, int *priority) {
    *priority = stream_of(handle)->priority;
    return SUCCESS;
}

Error cudaStreamWaitEvent(void *handle, Event *event, unsigned flags) {
    Stream *stream = stream_of(handle);
    stream->busy_until_ns = later(stream->busy_until_ns, event->at_ns);
    return SUCCESS;
}

/* A callback runs at once: what it waits for has no values anyway. */
Error cudaLaunchHostFunc(void *handle, void (*function)(void *), void *data) {
    function(data);
    return SUCCESS;
}

Error cudaStreamAddCallback(void *handle, void (*function)(void *, Error, void *), void *data, unsigned flags) {
    function(handle, SUCCESS, data);
    return SUCCESS;
}

/* Graphs can't be captured. */

Error cudaStreamBeginCapture(void *handle, int mode) {
    return fail(NOT_SUPPORTED);
}

Error cudaStreamIsCapturing(void *handle, int *status) {
    *status = 0;
    return SUCCESS;
}

Error cudaStreamGetCaptureInfo(void *handle, int *status, unsigned long long *id, void *graph, void *nodes,
                               void *edges, size_t *count) {
    *status = 0;
    if (id) *id = 0;
    if (count) *count = 0;
    return SUCCESS;
}

/* Events */

Error cudaEventCreateWithFlags(Event **event, unsigned flags) {
    TRY(enter_context(current_device()));
    *event = calloc(1, sizeof **event);
    return SUCCESS;
}

Error cudaEventCreate(Event **event) {
    return cudaEventCreateWithFlags(event, 0);
}

Error cudaEventDestroy(Event *event) {
    free(event);
    return SUCCESS;
}

Error cudaEventRecordWithFlags(Event *event, void *handle, unsigned flags) {
    event->at_ns = later(stream_of(handle)->busy_until_ns, now_ns());
    event->recorded = true;
    return SUCCESS;
}

Error cudaEventRecord(Event *event, void *handle) {
    return cudaEventRecordWithFlags(event, handle, 0);
}

Error cudaEventQuery(Event *event) {
    return event->at_ns <= now_ns() ? SUCCESS : NOT_READY;
}

Error cudaEventSynchronize(Event *event) {
    wait_until(event->at_ns);
    return SUCCESS;
}

Error cudaEventElapsedTime(float *milliseconds, Event *first, Event *second) {
    if (!first->recorded || !second->recorded) return fail(INVALID_HANDLE);
    if (later(first->at_ns, second->at_ns) > now_ns()) return NOT_READY;
    *milliseconds = (float)((double)(second->at_ns - first->at_ns) / 1e6);
    return SUCCESS;
}
