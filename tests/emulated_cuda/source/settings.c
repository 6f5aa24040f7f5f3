/* The settings, from environment variables (see README.md), and the cards' names. */
#define _GNU_SOURCE
#include "emulated.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static Settings values;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static const char *variable(const char *name) {
    char full[64];
    snprintf(full, sizeof full, "EMULATED_CUDA_%s", name);
    const char *text = getenv(full);
    return text && *text ? text : NULL;
}

static double number_of(const char *name, double otherwise) {
    const char *text = variable(name);
    return text ? atof(text) : otherwise;
}

/* A size with a unit, such as 24G, 300M or 0.5GiB. */
static int64_t size_of(const char *name, int64_t otherwise) {
    const char *text = variable(name);
    if (!text) return otherwise;
    char *unit;
    double number = strtod(text, &unit);
    switch (*unit) {
        case 'G': return (int64_t)(number * 1024 * MIB);
        case 'M': return (int64_t)(number * MIB);
        case 'K': return (int64_t)(number * KIB);
        default: return (int64_t)number;
    }
}

void uuid_bytes(int card, unsigned char *uuid) {
    static const unsigned char first[16] = {0xe3, 0x01, 0xa7, 0xed, 0, 0, 0x40, 0, 0x80};
    memcpy(uuid, first, sizeof first);
    uuid[15] = (unsigned char)(card + 1);
}

void uuid_text(int card, char *text, size_t size) {
    unsigned char uuid[16];
    uuid_bytes(card, uuid);
    size_t used = (size_t)snprintf(text, size, "GPU");
    for (int i = 0; i < 16; i++) {
        bool starts_group = i == 0 || i == 4 || i == 6 || i == 8 || i == 10;
        used += (size_t)snprintf(text + used, size - used, starts_group ? "-%02x" : "%02x", uuid[i]);
    }
}

/* The card that an entry of CUDA_VISIBLE_DEVICES names, by its number or by its UUID; -1 if none. */
static int card_named(const char *entry) {
    for (int card = 0; card < values.cards; card++) {
        char number[16];
        char uuid[64];
        snprintf(number, sizeof number, "%d", card);
        uuid_text(card, uuid, sizeof uuid);
        if (!strcmp(entry, number)) return card;
        if (!strncmp(entry, "GPU-", 4) && !strncmp(entry, uuid, strlen(entry))) return card;
    }
    return -1;
}

static void choose_devices(void) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (!visible) {
        for (int card = 0; card < values.cards; card++) values.card_of[values.devices++] = card;
        return;
    }
    char list[512];
    char *rest;
    snprintf(list, sizeof list, "%s", visible);
    for (char *entry = strtok_r(list, ", ", &rest); entry; entry = strtok_r(NULL, ", ", &rest)) {
        int card = card_named(entry);
        if (card < 0 || values.devices == MAX_DEVICES) return; /* CUDA ignores what follows a wrong one */
        values.card_of[values.devices++] = card;
    }
}

static void read_settings(void) {
    values.cards = (int)number_of("DEVICES", 1);
    if (values.cards > MAX_DEVICES) values.cards = MAX_DEVICES;
    values.memory = size_of("MEMORY", 24 * 1024 * MIB);
    values.context = size_of("CONTEXT", 300 * MIB);
    values.cublas = size_of("CUBLAS", 20 * MIB);
    values.cudnn = size_of("CUDNN", 20 * MIB);
    values.nccl = size_of("NCCL", 100 * MIB);
    values.kernel = size_of("KERNEL", 0);
    values.cudnn_workspace = size_of("CUDNN_WORKSPACE", 0);
    int capability = (int)(number_of("CAPABILITY", 8.0) * 10 + 0.5);
    values.capability_major = capability / 10;
    values.capability_minor = capability % 10;
    values.processors = (int)number_of("PROCESSORS", 108);
    values.flops_per_microsecond = number_of("TFLOPS", 20) * 1e6;
    values.nvml = number_of("NVML", 1) != 0;
    values.maps_memory = number_of("MAPS_MEMORY", 1) != 0;
    values.trace = variable("TRACE") != NULL;
    choose_devices();
}

const Settings *settings(void) {
    pthread_once(&once, read_settings);
    return &values;
}

void trace(const char *what, const char *name) {
    if (settings()->trace) fprintf(stderr, "emulated CUDA [%d]: %s %s\n", (int)getpid(), what, name);
}
