/* test_swapfile_random.c - random puts, gets and drops against a list; then from several threads.
 */
#include "swapfile.h"

#include <pthread.h>
#include <time.h>

#include "check.h"
#include "temp.h"
#include "neap.h"

enum { SLOTS = 24, PARTS_MAX = 5, THREADS = 3 };
#define LIMIT ((uint64_t)16 << 20)
#define PART_MAX ((size_t)1400000)

typedef struct entry {
    neap_swap_record *record;
    size_t len;
    uint64_t seed;
} entry;

typedef struct worker {
    neap_swapfile *swapfile;
    uint64_t seed;
    int steps;
    bool alone;          /* nobody else uses the swap file: usage can be foretold */
    unsigned char *room; /* PARTS_MAX parts on block boundaries */
    uint64_t live;
} worker;

#define ROOM_EACH (PART_MAX / 4096 * 4096 + 3 * 4096)

/* Cuts len bytes into parts at random places, each somewhere in its own room. */
static size_t cut(worker *w, size_t len, uint64_t *random, struct iovec *parts) {
    const size_t n = 1 + next_random(random) % PARTS_MAX;
    size_t left = len;
    for (size_t i = 0; i < n; i++) {
        size_t take = i + 1 == n ? left : next_random(random) % (left + 1);
        if (next_random(random) % 2 && i + 1 < n) take = take / 4096 * 4096;
        const size_t skew = next_random(random) % 3 ? 0 : next_random(random) % 4096;
        parts[i] = (struct iovec){w->room + i * ROOM_EACH + skew, take};
        left -= take;
    }
    return n;
}

static void scatter(const struct iovec *parts, size_t n, const unsigned char *bytes) {
    for (size_t i = 0; i < n; i++) {
        memcpy(parts[i].iov_base, bytes, parts[i].iov_len);
        bytes += parts[i].iov_len;
    }
}

static void put(worker *w, entry *e, uint64_t *random) {
    static const size_t caps[] = {4096, 70000, PART_MAX};
    e->len = 1 + next_random(random) % caps[next_random(random) % 3];
    if (next_random(random) % 2) e->len = (e->len + 4095) / 4096 * 4096;
    if (e->len > PART_MAX) e->len = PART_MAX;
    e->seed = next_random(random);
    struct iovec parts[PARTS_MAX];
    const size_t n = cut(w, e->len, random, parts);
    unsigned char *bytes = malloc(e->len);
    fill_random(bytes, e->len, e->seed);
    scatter(parts, n, bytes);
    const int err = neap_swapfile_put(w->swapfile, parts, n, &e->record);
    const uint64_t room = (e->len + 4095) / 4096 * 4096;
    if (w->alone) CHECK(err == (w->live + room > LIMIT ? NEAP_E_BUDGET : 0));
    CHECK(err == 0 || err == NEAP_E_BUDGET);
    if (err)
        e->record = NULL;
    else
        w->live += room;
    free(bytes);
}

static void get(worker *w, const entry *e, neap_reader *reader, uint64_t *random) {
    struct iovec parts[PARTS_MAX];
    const size_t n = cut(w, e->len, random, parts);
    for (size_t i = 0; i < n; i++)
        memset(parts[i].iov_base, 0x5A, parts[i].iov_len);
    CHECK(neap_swap_record_len(e->record) == e->len);
    CHECK(neap_swapfile_get(w->swapfile, e->record, parts, n,
                            next_random(random) % 3 ? reader : NULL) == 0);
    unsigned char *bytes = malloc(e->len);
    fill_random(bytes, e->len, e->seed);
    for (size_t i = 0, done = 0; i < n; done += parts[i].iov_len, i++)
        CHECK(memcmp(parts[i].iov_base, bytes + done, parts[i].iov_len) == 0);
    free(bytes);
}

static void drop(worker *w, entry *e) {
    neap_swapfile_drop(w->swapfile, e->record);
    w->live -= (e->len + 4095) / 4096 * 4096;
    e->record = NULL;
}

static void *work(void *arg) {
    worker *w = arg;
    entry entries[SLOTS] = {0};
    uint64_t random = w->seed | 1;
    neap_reader *reader;
    CHECK(neap_reader_create(4, &reader) == 0);
    w->room = aligned_alloc(4096, PARTS_MAX * ROOM_EACH);
    CHECK(w->room);
    for (int step = 0; step < w->steps; step++) {
        entry *e = &entries[next_random(&random) % SLOTS];
        if (!e->record)
            put(w, e, &random);
        else if (next_random(&random) % 2)
            get(w, e, reader, &random);
        else
            drop(w, e);
        neap_swapfile_check(w->swapfile);
        uint64_t live, limit;
        neap_swapfile_usage(w->swapfile, &live, &limit);
        CHECK(limit == LIMIT && live <= LIMIT && (!w->alone || live == w->live));
    }
    for (int i = 0; i < SLOTS; i++)
        if (entries[i].record) {
            get(w, &entries[i], reader, &random);
            drop(w, &entries[i]);
        }
    neap_reader_free(reader);
    free(w->room);
    return NULL;
}

static void run(const char *dir, uint64_t seed, int n_threads, int steps) {
    neap_swapfile *swapfile;
    CHECK(neap_swapfile_create(dir, LIMIT, &swapfile) == 0);
    worker workers[THREADS];
    pthread_t threads[THREADS];
    for (int i = 0; i < n_threads; i++) {
        workers[i] = (worker){.swapfile = swapfile,
                              .seed = seed + (uint64_t)i * 7919,
                              .steps = steps,
                              .alone = n_threads == 1};
        CHECK(pthread_create(&threads[i], NULL, work, &workers[i]) == 0);
    }
    for (int i = 0; i < n_threads; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    uint64_t live, limit;
    neap_swapfile_usage(swapfile, &live, &limit);
    CHECK(live == 0);
    neap_swapfile_check(swapfile);
    neap_swapfile_free(swapfile);
}

int main(int argc, char **argv) {
    const uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 0) : (uint64_t)time(NULL);
    printf("seed %llu\n", (unsigned long long)seed);
    fflush(stdout);
    char *dir = temp_dir();
    run(dir, seed, 1, 600);
    run(dir, seed + 1, THREADS, 200);
    temp_remove(dir);
    return 0;
}
