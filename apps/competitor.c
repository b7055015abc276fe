/* competitor.c - see competitor.h. */
#include "competitor.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "clock.h"

#define STEP ((uint64_t)1 << 20)
#define PAGE 4096u
#define PAUSE_NS 5000000l

typedef struct shared { /* between both processes */
    _Atomic uint64_t target_bytes, dirtied_bytes;
} shared;

struct neap_competitor {
    pid_t pid; /* 0: it has ended */
    shared *shared;
};

static void pause_ns(uint64_t ns) {
    nanosleep(
        &(struct timespec){.tv_sec = (time_t)(ns / 1000000000), .tv_nsec = (long)(ns % 1000000000)},
        NULL);
}

static void dirty(char *memory, uint64_t *random) {
    for (char *page = memory; page < memory + STEP; page += PAGE) {
        uint64_t words[PAGE / 3 / sizeof(uint64_t)];
        for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
            *random ^= *random << 13;
            *random ^= *random >> 7;
            *random ^= *random << 17;
            words[i] = *random;
        }
        memcpy(page, words, sizeof words);
    }
}

static void compete(shared *s, uint64_t max_bytes, uint64_t rate) {
    uint64_t random = 88172645463325252u;
    char *memory = mmap(NULL, max_bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) _exit(1);
    for (;;) {
        const uint64_t done = atomic_load(&s->dirtied_bytes);
        if (done + STEP > atomic_load(&s->target_bytes) || done + STEP > max_bytes) {
            pause_ns(PAUSE_NS);
            continue;
        }
        const uint64_t began_ns = neap_clock_ns();
        dirty(memory + done, &random);
        atomic_store(&s->dirtied_bytes, done + STEP);
        const uint64_t due_ns = began_ns + STEP * 1000000000 / rate, now_ns = neap_clock_ns();
        if (now_ns < due_ns) pause_ns(due_ns - now_ns);
    }
}

int neap_competitor_start(const neap_memory_group *group, uint64_t max_bytes, uint64_t rate,
                          neap_competitor **ret_competitor) {
    neap_competitor *c = calloc(1, sizeof *c);
    if (!c) return -ENOMEM;
    c->shared =
        mmap(NULL, sizeof *c->shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (c->shared == MAP_FAILED) {
        free(c);
        return -ENOMEM;
    }
    const pid_t parent = getpid();
    fflush(NULL);
    c->pid = fork();
    if (c->pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent || neap_memory_group_add(group, 0) != 0) _exit(1);
        compete(c->shared, max_bytes, rate);
    }
    if (c->pid < 0) {
        const int err = -errno;
        c->pid = 0;
        neap_competitor_stop(c);
        return err;
    }
    *ret_competitor = c;
    return 0;
}

bool neap_competitor_alive(neap_competitor *c) {
    if (c->pid > 0 && waitpid(c->pid, NULL, WNOHANG) == c->pid) c->pid = 0;
    return c->pid > 0;
}

void neap_competitor_stop(neap_competitor *c) {
    if (!c) return;
    if (neap_competitor_alive(c)) {
        kill(c->pid, SIGKILL);
        waitpid(c->pid, NULL, 0);
    }
    munmap(c->shared, sizeof *c->shared);
    free(c);
}

void neap_competitor_grow(neap_competitor *c, uint64_t bytes) {
    if (bytes > atomic_load(&c->shared->target_bytes))
        atomic_store(&c->shared->target_bytes, bytes);
}

uint64_t neap_competitor_bytes(const neap_competitor *c) {
    return atomic_load(&c->shared->dirtied_bytes);
}
