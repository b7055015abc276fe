/* device_rate.c - see device_rate.h. */
#include "device_rate.h"

#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "clock.h"
#include "codec.h"
#include "crew.h"
#include "file.h"
#include "measure.h"
#include "neap.h"
#include "proc.h"
#include "vm.h"

#define READ_MAX (256u << 20)
#define PIECE (1u << 20)
#define DEPTH 16u
#define DECODE_NS 300000000ull
#define COMMIT_BYTES (512u << 20)
#define COMMIT_REST_S 3 /* a virtual machine may give free memory back within seconds */

static double per_second(uint64_t bytes, uint64_t ns) {
    return ns ? (double)bytes * 1e9 / (double)ns : 0;
}

static double read_rate(const char *path) {
    neap_file *file = NULL;
    neap_reader *reader = NULL;
    neap_file_id id;
    double rate = 0;
    neap_read_range ranges[DEPTH];
    const size_t size = (size_t)PIECE * DEPTH;
    void *memory = NULL;
    if (neap_vm_reserve(size, NEAP_HUGE_PAGE, &memory) != 0) goto out;
    neap_vm_huge(memory, size, true);
    char *buffer = memory;
    if (neap_file_open_read(path, &file) != 0) goto out;
    if (neap_file_identity(file, &id) != 0 || neap_reader_create(DEPTH, &reader) != 0) goto out;
    memset(buffer, 0, size);
    uint64_t done = 0;
    const uint64_t end = id.size_bytes < READ_MAX ? id.size_bytes : READ_MAX;
    const uint64_t began = neap_clock_ns();
    while (end - done >= PIECE) {
        size_t n = 0;
        for (; n < DEPTH && end - done >= PIECE; n++, done += PIECE)
            ranges[n] = (neap_read_range){file, buffer + n * PIECE, PIECE, done};
        if (neap_reader_read(reader, ranges, n) != 0) goto out;
    }
    rate = per_second(done, neap_clock_ns() - began);
out:
    neap_reader_free(reader);
    neap_file_close(file);
    if (memory) neap_vm_unmap(memory, size);
    return rate;
}

typedef struct committing {
    char *memory;
    atomic_size_t next;
    atomic_int err;
} committing;

static void commit_pieces(void *ctx) {
    committing *c = ctx;
    for (size_t at; (at = atomic_fetch_add(&c->next, PIECE)) < COMMIT_BYTES;)
        if (neap_vm_populate(c->memory + at, PIECE) != 0) atomic_store(&c->err, 1);
}

/* Small pages, as KV chunks have; committed once before, as an evicted unit was. */
static double commit_rate(void) {
    neap_crew *crew = NULL;
    void *memory = NULL;
    double rate = 0;
    if (neap_crew_create(neap_cores(), &crew) != 0) return 0;
    if (neap_vm_reserve(COMMIT_BYTES, PIECE, &memory) != 0) goto out;
    neap_vm_huge(memory, COMMIT_BYTES, false);
    neap_crew_start(crew);
    committing c = {.memory = memory};
    neap_crew_run(crew, neap_crew_size(crew), commit_pieces, &c);
    if (neap_vm_drop(memory, COMMIT_BYTES) != 0) goto out;
    sleep(COMMIT_REST_S);
    atomic_store(&c.next, 0);
    const uint64_t began = neap_clock_ns();
    neap_crew_run(crew, neap_crew_size(crew), commit_pieces, &c);
    if (atomic_load(&c.err) == 0) rate = per_second(COMMIT_BYTES, neap_clock_ns() - began);
out:
    if (memory) neap_vm_unmap(memory, COMMIT_BYTES);
    neap_crew_free(crew);
    return rate;
}

/* One core's rate times the cores: what restoring in parallel could reach. */
static double decode_rate(const char *name) {
    const neap_codec *codec = neap_codec_find(name);
    const size_t n = (size_t)NEAP_CHUNK_CELLS * NEAP_MEASURE_ROW_ELEMS;
    uint16_t *values = malloc(n * sizeof *values);
    void *bytes = NULL;
    double rate = 0;
    size_t len = 0;
    const neap_codec_chunk chunk = neap_measure_chunk(values);
    if (!codec || !values) goto out;
    neap_measure_fill(values, n);
    bytes = malloc(codec->bound(&chunk));
    if (!bytes || codec->encode(&chunk, bytes, codec->bound(&chunk), &len) != 0) goto out;
    const uint64_t began = neap_clock_ns();
    uint64_t done = 0, now = began;
    for (; now - began < DECODE_NS; now = neap_clock_ns(), done += n * sizeof *values)
        if (codec->decode(bytes, len, &chunk) != 0) goto out;
    rate = per_second(done, now - began) * neap_cores();
out:
    free(bytes);
    free(values);
    return rate;
}

void neap_device_rate_measure(const char *file, const char *codec, neap_device_rate *ret_rate) {
    ret_rate->read_bps = read_rate(file);
    ret_rate->commit_bps = commit_rate();
    ret_rate->decode_bps = decode_rate(codec);
}
