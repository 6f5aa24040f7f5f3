/* The account of the cards' memory: which process holds how much.
 *
 * It lies in a file that all processes map, so that they share the cards. A process that has ended,
 * however it ended, holds nothing. */
#define _GNU_SOURCE
#include "emulated.h"
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct {
    int pid;              /* 0: an empty entry */
    uint64_t start_ticks; /* tells a process from a later one with its id */
    int64_t bytes[MAX_DEVICES];
} Entry;

static int file;
static Entry *entries;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static void give_up(const char *what) {
    perror(what);
    abort();
}

static void map_entries(void) {
    char path[256];
    const char *chosen = getenv("EMULATED_CUDA_STATE");
    if (chosen && *chosen) snprintf(path, sizeof path, "%s", chosen);
    else snprintf(path, sizeof path, "/dev/shm/emulated-cuda-%d", (int)getuid());
    size_t size = MAX_PROCESSES * sizeof(Entry);
    file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0) give_up(path);
    if (ftruncate(file, (off_t)size)) give_up(path);
    entries = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (entries == MAP_FAILED) give_up(path);
}

/* The mutex keeps this process's threads apart, the file's lock the processes; a kill releases it. */
static void lock(void) {
    pthread_once(&once, map_entries);
    pthread_mutex_lock(&mutex);
    struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    while (fcntl(file, F_SETLKW, &whole)) {
    }
}

static void unlock(void) {
    struct flock whole = {.l_type = F_UNLCK, .l_whence = SEEK_SET};
    fcntl(file, F_SETLK, &whole);
    pthread_mutex_unlock(&mutex);
}

/* When a process started; 0 if it has ended, as a zombie has. */
static uint64_t start_ticks(int pid) {
    char path[64];
    char text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int stat = open(path, O_RDONLY | O_CLOEXEC);
    if (stat < 0) return 0;
    ssize_t size = read(stat, text, sizeof text - 1);
    close(stat);
    if (size <= 0) return 0;
    text[size] = 0;
    char *field = strrchr(text, ')'); /* the name before it may hold spaces */
    if (!field) return 0;
    field += 2;
    if (*field == 'Z' || *field == 'X') return 0;
    for (int number = 3; number < 22 && field; number++) field = strchr(field + 1, ' ');
    return field ? strtoull(field, NULL, 10) : 0;
}

static void strike_the_ended(void) {
    for (int i = 0; i < MAX_PROCESSES; i++) {
        Entry *entry = &entries[i];
        if (entry->pid && start_ticks(entry->pid) != entry->start_ticks) memset(entry, 0, sizeof *entry);
    }
}

static Entry *find_entry(int pid) {
    for (int i = 0; i < MAX_PROCESSES; i++)
        if (entries[i].pid == pid) return &entries[i];
    return NULL;
}

static Entry *own_entry(void) {
    static Entry *own;
    static int owner; /* a forked child inherits both */
    int pid = (int)getpid();
    if (own && owner == pid && own->pid == pid) return own;
    strike_the_ended();
    own = find_entry(pid);
    if (!own) own = find_entry(0);
    if (!own) {
        fprintf(stderr, "emulated CUDA: more than %d processes\n", MAX_PROCESSES);
        abort();
    }
    own->pid = pid;
    own->start_ticks = start_ticks(pid);
    owner = pid;
    return own;
}

static int64_t sum(int card) {
    int64_t total = 0;
    for (int i = 0; i < MAX_PROCESSES; i++) total += entries[i].bytes[card];
    return total;
}

bool take_memory(int card, int64_t bytes) {
    int64_t memory = settings()->memory;
    lock();
    Entry *own = own_entry();
    bool fits = sum(card) + bytes <= memory;
    if (!fits) {
        strike_the_ended();
        fits = sum(card) + bytes <= memory;
    }
    if (fits) own->bytes[card] += bytes;
    unlock();
    return fits;
}

void give_memory(int card, int64_t bytes) {
    lock();
    own_entry()->bytes[card] -= bytes;
    unlock();
}

int64_t memory_in_use(int card) {
    lock();
    strike_the_ended();
    int64_t total = sum(card);
    unlock();
    return total;
}

int memory_holders(int card, Holder *holders, int room) {
    int count = 0;
    lock();
    strike_the_ended();
    for (int i = 0; i < MAX_PROCESSES; i++) {
        if (!entries[i].pid || entries[i].bytes[card] <= 0) continue;
        if (count < room) holders[count] = (Holder){entries[i].pid, entries[i].bytes[card]};
        count++;
    }
    unlock();
    return count;
}
