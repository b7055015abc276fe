/* measure.c - see measure.h. */
#include "measure.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>

#include "clock.h"
#include "codec.h"
#include "file.h"
#include "proc.h"
#include "vm.h"

enum { MAX_ROUNDS = 5 };
#define MIB ((uint64_t)1 << 20)
#define HUGE ((size_t)2 << 20)

neap_measure_plan neap_measure_plan_make(const char *folder, bool quick, uint32_t n_threads) {
    neap_measure_plan plan = {
        .folder = folder,
        .file_bytes = quick ? 64 * MIB : 256 * MIB,
        .touch_bytes = quick ? 64 * MIB : 256 * MIB,
        .decode_ns = quick ? 30000000 : 200000000,
        .n_rounds = quick ? 3 : MAX_ROUNDS,
        .n_threads = n_threads < NEAP_PROFILE_THREADS ? n_threads : NEAP_PROFILE_THREADS,
    };
    uint64_t available = 0, total = 0;
    if (neap_mem_available(&available, &total) == 0 && plan.touch_bytes > available / 8)
        plan.touch_bytes = available / 8 / HUGE * HUGE;
    return plan;
}

static uint64_t bps(uint64_t bytes, uint64_t ns) {
    const double rate = ns ? (double)bytes * 1e9 / (double)ns : 0;
    return rate < (double)NEAP_BPS_MAX ? (uint64_t)rate : NEAP_BPS_MAX;
}

static uint64_t median(const uint64_t *values, size_t n) {
    double numbers[MAX_ROUNDS];
    for (size_t i = 0; i < n; i++)
        numbers[i] = (double)values[i];
    return (uint64_t)neap_summarise(numbers, n).median;
}

/* ---- storage ---- */

typedef struct read_rig {
    const neap_measure_plan *plan;
    neap_file *file;
    char *buffer; /* as large as the file */
} read_rig;

/* Bytes that no file system stores in less room. */
static int fill_file(const read_rig *rig) {
    uint64_t state = 88172645463325252u;
    for (uint64_t i = 0; i < rig->plan->file_bytes; i += sizeof state) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        memcpy(rig->buffer + i, &state, sizeof state);
    }
    const struct iovec all = {rig->buffer, rig->plan->file_bytes};
    const int err = neap_file_write(rig->file, &all, 1, 0);
    return err ? err : neap_file_sync(rig->file);
}

static int time_read(const read_rig *rig, uint32_t request, uint32_t depth, uint64_t *ret_bps) {
    neap_reader *reader;
    int err = neap_reader_create(depth, &reader);
    if (err) return err;
    neap_reader_set_request(reader, request);
    const neap_read_range all = {rig->file, rig->buffer, rig->plan->file_bytes, 0};
    const uint64_t began_ns = neap_clock_ns();
    err = neap_reader_read(reader, &all, 1);
    *ret_bps = bps(all.len, neap_clock_ns() - began_ns);
    neap_reader_free(reader);
    return err;
}

static int read_rounds(const read_rig *rig, neap_profile *profile) {
    uint64_t seen[NEAP_PROFILE_SIZES][NEAP_PROFILE_DEPTHS][MAX_ROUNDS];
    const uint32_t n_rounds = rig->plan->n_rounds;
    for (uint32_t round = 0; round < n_rounds; round++)
        for (size_t s = 0; s < NEAP_PROFILE_SIZES; s++)
            for (size_t d = 0; d < NEAP_PROFILE_DEPTHS; d++) {
                const int err = time_read(rig, neap_profile_sizes[s], neap_profile_depths[d],
                                          &seen[s][d][round]);
                if (err) return err;
            }
    for (size_t s = 0; s < NEAP_PROFILE_SIZES; s++)
        for (size_t d = 0; d < NEAP_PROFILE_DEPTHS; d++)
            profile->read_bps[s][d] = median(seen[s][d], n_rounds);
    return 0;
}

int neap_measure_reads(const neap_measure_plan *plan, neap_profile *profile) {
    read_rig rig = {.plan = plan};
    void *buffer = NULL;
    int err = neap_vm_reserve(plan->file_bytes, HUGE, &buffer);
    if (err) return err;
    neap_vm_huge(buffer, plan->file_bytes, true); /* what restores read into (pool/pool.c) */
    rig.buffer = buffer;
    err = neap_file_open_swap(plan->folder, &rig.file);
    if (!err) err = fill_file(&rig);
    if (!err) err = read_rounds(&rig, profile);
    if (!err) profile->is_direct = neap_file_is_direct(rig.file);
    neap_file_close(rig.file);
    neap_vm_unmap(buffer, plan->file_bytes);
    return err;
}

/* ---- decoding ---- */

/* One thread's chunks: more bytes than its caches hold, as in a restore. */
enum { CHUNK_ELEMS = NEAP_CHUNK_CELLS * NEAP_MEASURE_ROW_ELEMS, N_CHUNKS = 64 };

typedef struct gate {
    pthread_mutex_t lock;
    pthread_cond_t opened;
    bool is_open;
    atomic_bool stop;
} gate;

typedef struct decoder {
    pthread_t thread;
    gate *gate;
    const neap_codec *codec;
    uint16_t *values; /* N_CHUNKS chunks, one plane each */
    char *bytes;      /* N_CHUNKS encoded ones, bound apart */
    size_t bound, lens[N_CHUNKS];
    uint64_t decoded_bytes, ns;
    int err;
} decoder;

neap_codec_chunk neap_measure_chunk(uint16_t *values) {
    return (neap_codec_chunk){.n_planes = 1,
                              .planes = {{.data = values,
                                          .n_rows = NEAP_CHUNK_CELLS,
                                          .row_elems = NEAP_MEASURE_ROW_ELEMS,
                                          .row_bytes = NEAP_MEASURE_ROW_ELEMS * 2,
                                          .row_stride = NEAP_MEASURE_ROW_ELEMS * 2,
                                          .type = NEAP_KV_F16}}};
}

void neap_measure_fill(uint16_t *values, size_t n) {
    uint32_t state = 1;
    for (size_t i = 0; i < n; i++) {
        state = state * 1664525u + 1013904223u;
        values[i] = (uint16_t)((state >> 16 & 0x83ff) | ((11 + (state >> 10 & 3)) << 10));
    }
}

static int decoder_init(decoder *d, const neap_codec *codec) {
    d->codec = codec;
    d->values = malloc((size_t)N_CHUNKS * CHUNK_ELEMS * sizeof *d->values);
    if (!d->values) return -ENOMEM;
    neap_measure_fill(d->values, (size_t)N_CHUNKS * CHUNK_ELEMS);
    const neap_codec_chunk first = neap_measure_chunk(d->values);
    d->bound = codec->bound(&first);
    d->bytes = malloc(N_CHUNKS * d->bound);
    if (!d->bytes) return -ENOMEM;
    int err = 0;
    for (size_t i = 0; i < N_CHUNKS && !err; i++) {
        const neap_codec_chunk chunk = neap_measure_chunk(d->values + i * CHUNK_ELEMS);
        err = codec->encode(&chunk, d->bytes + i * d->bound, d->bound, &d->lens[i]);
    }
    return err;
}

static void decoder_fini(decoder *d) {
    free(d->values);
    free(d->bytes);
}

static void *decode_main(void *ctx) {
    decoder *d = ctx;
    pthread_mutex_lock(&d->gate->lock);
    while (!d->gate->is_open)
        pthread_cond_wait(&d->gate->opened, &d->gate->lock);
    pthread_mutex_unlock(&d->gate->lock);
    const uint64_t began_ns = neap_clock_ns();
    d->decoded_bytes = 0;
    for (size_t i = 0; !d->err && !atomic_load(&d->gate->stop); i++) {
        const size_t at = i % N_CHUNKS;
        const neap_codec_chunk chunk = neap_measure_chunk(d->values + at * CHUNK_ELEMS);
        d->err = d->codec->decode(d->bytes + at * d->bound, d->lens[at], &chunk);
        d->decoded_bytes += CHUNK_ELEMS * sizeof *d->values;
    }
    d->ns = neap_clock_ns() - began_ns;
    return NULL;
}

static void gate_open(gate *g) {
    pthread_mutex_lock(&g->lock);
    g->is_open = true;
    pthread_cond_broadcast(&g->opened);
    pthread_mutex_unlock(&g->lock);
}

/* n decoders at once for so long. */
static int time_decoding(decoder *decoders, uint32_t n, uint64_t for_ns, uint64_t *ret_bps) {
    gate g = {.lock = PTHREAD_MUTEX_INITIALIZER, .opened = PTHREAD_COND_INITIALIZER};
    uint32_t n_started = 0;
    int err = 0;
    atomic_init(&g.stop, false);
    for (; n_started < n && !err; n_started += !err) {
        decoders[n_started].gate = &g;
        err = -pthread_create(&decoders[n_started].thread, NULL, decode_main, &decoders[n_started]);
    }
    if (err) atomic_store(&g.stop, true);
    gate_open(&g);
    const struct timespec pause = {.tv_sec = (time_t)(for_ns / 1000000000),
                                   .tv_nsec = (long)(for_ns % 1000000000)};
    if (!err) nanosleep(&pause, NULL);
    atomic_store(&g.stop, true);
    uint64_t rate = 0;
    for (uint32_t i = 0; i < n_started; i++) {
        pthread_join(decoders[i].thread, NULL);
        if (!err) err = decoders[i].err;
        rate += bps(decoders[i].decoded_bytes, decoders[i].ns);
    }
    if (!err) *ret_bps = rate;
    return err;
}

static int measure_codec(const neap_measure_plan *plan, const neap_codec *codec,
                         neap_profile_codec *entry) {
    uint64_t seen[NEAP_PROFILE_THREADS][MAX_ROUNDS];
    decoder *decoders = calloc(plan->n_threads, sizeof *decoders);
    int err = decoders ? 0 : -ENOMEM;
    for (uint32_t i = 0; i < plan->n_threads && !err; i++)
        err = decoder_init(&decoders[i], codec);
    for (uint32_t round = 0; round < plan->n_rounds && !err; round++)
        for (uint32_t n = 1; n <= plan->n_threads && !err; n++)
            err = time_decoding(decoders, n, plan->decode_ns, &seen[n - 1][round]);
    for (uint32_t i = 0; i < plan->n_threads && !err; i++)
        entry->decode_bps[i] = median(seen[i], plan->n_rounds);
    for (uint32_t i = 0; decoders && i < plan->n_threads; i++)
        decoder_fini(&decoders[i]);
    free(decoders);
    return err;
}

int neap_measure_decoding(const neap_measure_plan *plan, neap_profile *profile) {
    int err = 0;
    for (size_t i = 0; neap_codec_at(i) && !err; i++) {
        neap_profile_codec *entry = neap_profile_codec_add(profile, neap_codec_at(i)->name);
        err = entry ? measure_codec(plan, neap_codec_at(i), entry) : NEAP_E_BOUND;
    }
    return err;
}

/* ---- first touch ---- */

static int time_touch(const neap_measure_plan *plan, bool huge, uint64_t *ret_bps) {
    void *memory;
    int err = neap_vm_reserve(plan->touch_bytes, HUGE, &memory);
    if (err) return err;
    neap_vm_huge(memory, plan->touch_bytes, huge);
    const uint64_t began_ns = neap_clock_ns();
    err = neap_vm_populate(memory, plan->touch_bytes);
    *ret_bps = bps(plan->touch_bytes, neap_clock_ns() - began_ns);
    neap_vm_unmap(memory, plan->touch_bytes);
    return err;
}

int neap_measure_touching(const neap_measure_plan *plan, neap_profile *profile) {
    uint64_t small[MAX_ROUNDS], huge[MAX_ROUNDS];
    if (plan->touch_bytes == 0) return -ENOMEM;
    for (uint32_t round = 0; round < plan->n_rounds; round++) {
        int err = time_touch(plan, false, &small[round]);
        if (!err) err = time_touch(plan, true, &huge[round]);
        if (err) return err;
    }
    profile->populate_small_bps = median(small, plan->n_rounds);
    profile->populate_huge_bps = median(huge, plan->n_rounds);
    return 0;
}
