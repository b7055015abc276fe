/* device_rate.c - see device_rate.h. */
#include "device_rate.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "clock.h"
#include "codec.h"
#include "file.h"
#include "measure.h"
#include "neap.h"

#define READ_MAX (256u << 20)
#define PIECE (1u << 20)
#define DEPTH 16u
#define DECODE_NS 300000000ull

static double per_second(uint64_t bytes, uint64_t ns) {
    return ns ? (double)bytes * 1e9 / (double)ns : 0;
}

static double read_rate(const char *path) {
    neap_file *file = NULL;
    neap_reader *reader = NULL;
    neap_file_id id;
    double rate = 0;
    neap_read_range ranges[DEPTH];
    char *buffer = aligned_alloc(NEAP_DIRECT_ALIGN, (size_t)PIECE * DEPTH);
    if (!buffer || neap_file_open_read(path, &file) != 0) goto out;
    if (neap_file_identity(file, &id) != 0 || neap_reader_create(DEPTH, &reader) != 0) goto out;
    memset(buffer, 0, (size_t)PIECE * DEPTH);
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
    free(buffer);
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
    const long cores = sysconf(_SC_NPROCESSORS_ONLN);
    rate = per_second(done, now - began) * (double)(cores > 0 ? cores : 1);
out:
    free(bytes);
    free(values);
    return rate;
}

void neap_device_rate_measure(const char *file, const char *codec, neap_device_rate *ret_rate) {
    ret_rate->read_bps = read_rate(file);
    ret_rate->decode_bps = decode_rate(codec);
}
