/* bench_codec.c - speed of the codecs on one core, in GB/s of uncompressed bytes, beside memcpy.
 * Data: gaussian f16 with a few channels 20 times larger, as keys have. Chunks of 256 rows lie in a
 * buffer of MIB (default 64) so that nothing stays in the cache, then in one of a single chunk.
 * Usage: bench_codec [REPS [MIB [ROW_ELEMS]]]. Every rep runs all of the methods in turn. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "codec.h"
#include "neap.h"
#include "q8_int.h"

enum { ROWS = NEAP_CHUNK_CELLS, MAX_METHODS = 8, MAX_REPS = 101 };

typedef struct method {
    char name[32];
    const neap_q8_kernel *kernel; /* NULL: the codec, or memcpy when that is NULL too */
    const neap_codec *codec;
    double encode_gbps[MAX_REPS], decode_gbps[MAX_REPS];
} method;

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double gauss(uint64_t *state) {
    double sum = 0;
    for (int i = 0; i < 12; i++) {
        *state = *state * 6364136223846793005u + 1442695040888963407u;
        sum += (double)(*state >> 40) / (double)(1 << 24);
    }
    return sum - 6;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print_line(const char *name, const char *what, double *gbps, size_t n) {
    qsort(gbps, n, sizeof *gbps, by_value);
    printf("  %-12s %-7s %7.2f %7.2f %7.2f\n", name, what, gbps[0], gbps[n / 2], gbps[n - 1]);
}

static neap_codec_chunk chunk_at(uint16_t *data, uint32_t row_elems) {
    size_t row_bytes = 2 * (size_t)row_elems;
    return (neap_codec_chunk){.n_planes = 1,
                              .planes = {{.data = data,
                                          .n_rows = ROWS,
                                          .row_elems = row_elems,
                                          .row_bytes = row_bytes,
                                          .row_stride = row_bytes,
                                          .type = NEAP_KV_F16}}};
}

static void must(bool ok, const char *what) {
    if (ok) return;
    fprintf(stderr, "bench_codec: %s failed\n", what);
    exit(1);
}

/* One pass over all of the chunks in each direction, repeats times. */
static void measure(method *m, size_t rep, uint16_t *data, uint8_t *coded, size_t n_chunks,
                    size_t cap, uint32_t row_elems, size_t repeats) {
    size_t chunk_elems = (size_t)ROWS * row_elems, len = 0;
    double bytes = (double)(2 * chunk_elems * n_chunks * repeats), times[3];
    size_t *lens = calloc(n_chunks, sizeof *lens);
    must(lens != NULL, "allocation");
    for (int decode = 0; decode < 2; decode++) {
        times[decode] = now_s();
        for (size_t i = 0; i < n_chunks * repeats; i++) {
            size_t c = i % n_chunks;
            uint16_t *raw = data + c * chunk_elems;
            uint8_t *out = coded + c * cap;
            neap_codec_chunk chunk = chunk_at(raw, row_elems);
            if (!m->codec)
                memcpy(decode ? (void *)raw : out, decode ? out : (void *)raw, 2 * chunk_elems);
            else if (decode)
                must((m->kernel ? neap_q8_decode_with(m->kernel, out, lens[c], &chunk)
                                : m->codec->decode(out, lens[c], &chunk)) == 0,
                     "decode");
            else {
                must((m->kernel ? neap_q8_encode_with(m->kernel, &chunk, out, cap, &len)
                                : m->codec->encode(&chunk, out, cap, &len)) == 0,
                     "encode");
                lens[c] = len;
            }
        }
        times[decode] = now_s() - times[decode];
    }
    free(lens);
    m->encode_gbps[rep] = bytes / times[0] * 1e-9;
    m->decode_gbps[rep] = bytes / times[1] * 1e-9;
}

static size_t list_methods(method *methods) {
    size_t n = 0;
    snprintf(methods[n++].name, sizeof methods->name, "memcpy");
    methods[n] = (method){.codec = neap_codec_find("none")};
    snprintf(methods[n++].name, sizeof methods->name, "none");
    for (size_t k = 0; neap_q8_kernel_at(k); k++) {
        methods[n] = (method){.codec = neap_codec_find("q8"), .kernel = neap_q8_kernel_at(k)};
        snprintf(methods[n++].name, sizeof methods->name, "q8 %s", neap_q8_kernel_at(k)->name);
    }
    return n;
}

int main(int argc, char **argv) {
    size_t reps = argc > 1 ? strtoul(argv[1], NULL, 10) : 7;
    size_t mib = argc > 2 ? strtoul(argv[2], NULL, 10) : 64;
    uint32_t row_elems = argc > 3 ? (uint32_t)strtoul(argv[3], NULL, 10) : 512;
    if (reps < 1 || reps > MAX_REPS || mib < 1 || row_elems < 8) {
        fprintf(stderr, "usage: bench_codec [REPS [MIB [ROW_ELEMS]]]\n");
        return 2;
    }
    static method methods[MAX_METHODS];
    size_t n_methods = list_methods(methods), chunk_bytes = 2 * (size_t)ROWS * row_elems;
    size_t n_chunks = (mib << 20) / chunk_bytes + 1;
    neap_codec_chunk chunk = chunk_at(NULL, row_elems);
    size_t cap = neap_codec_find("q8")->bound(&chunk);
    uint16_t *data = malloc(n_chunks * chunk_bytes);
    uint8_t *coded = malloc(n_chunks * cap);
    must(data && coded, "allocation");
    memset(coded, 0, n_chunks * cap);
    uint64_t state = 1;
    for (size_t i = 0; i < n_chunks * chunk_bytes / 2; i++)
        data[i] = neap_f16_of_f32((float)(gauss(&state) * (i % row_elems % 61 == 7 ? 20 : 1)));

    for (int cached = 0; cached < 2; cached++) {
        size_t chunks = cached ? 1 : n_chunks, repeats = cached ? n_chunks : 1;
        for (size_t rep = 0; rep < reps; rep++)
            for (size_t i = 0; i < n_methods; i++)
                measure(&methods[i], rep, data, coded, chunks, cap, row_elems, repeats);
        printf("%s, %zu chunks of %u x %u f16, %zu interleaved reps\n",
               cached ? "one chunk again and again" : "buffer larger than the cache", chunks,
               (unsigned)ROWS, row_elems, reps);
        printf("  %-12s %-7s %7s %7s %7s GB/s\n", "", "", "min", "median", "max");
        for (size_t i = 0; i < n_methods; i++) {
            print_line(methods[i].name, "encode", methods[i].encode_gbps, reps);
            print_line(methods[i].name, "decode", methods[i].decode_gbps, reps);
        }
    }
    free(coded);
    free(data);
    return 0;
}
