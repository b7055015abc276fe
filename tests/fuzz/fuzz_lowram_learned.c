/* fuzz_lowram_learned.c - the reader of learned starts on arbitrary bytes.
 *
 * Input: 1 byte (bit 0: whether header and checksum are repaired, so that the layers are reached),
 * then the file. Of whatever is accepted every start is a predictor without NaN. Without libFuzzer:
 * a built-in corpus of good and damaged files, after the files named. */
#include <math.h>
#include <string.h>
#include <unistd.h>

#include "bytes.h"
#include "check.h"
#include "learned.h"
#include "neap.h"
#include "textfile.h"
#ifndef NEAP_LIBFUZZER
#include "fuzz_files.h"
#endif

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { DIGEST = 7, HEADER = 128 };

static void no_log(int level, const char *line, void *ctx) {
    (void)level, (void)line, (void)ctx;
}

static void repair(uint8_t *bytes, size_t len) {
    const uint64_t file_bytes = len, digest = DIGEST, none = 0;
    memcpy(bytes, "NEAPLRM\0\1\0\0\0", 12);
    memcpy(bytes + 16, &file_bytes, sizeof file_bytes);
    memcpy(bytes + 24, &digest, sizeof digest);
    memcpy(bytes + 32, &none, sizeof none);
    const uint64_t sum = neap_checksum(bytes, len);
    memcpy(bytes + 32, &sum, sizeof sum);
}

static void use(const neap_learned *learned) {
    for (uint32_t i = 0; i < neap_learned_n_layers(learned); i++) {
        const neap_learned_layer *l = neap_learned_layer_at(learned, i);
        const neap_value_shape shape = neap_value_shape_of(l->dk, l->dv, l->hidden);
        neap_value value;
        CHECK(neap_learned_find(learned, l->layer) == l && neap_value_create(&shape, &value) == 0);
        for (int which = NEAP_LEARNED_SLIM; which <= NEAP_LEARNED_META; which++) {
            CHECK(neap_learned_start(learned, l->layer, l->n_kv_heads - 1, which, &value, NULL) ==
                  0);
            for (size_t p = 0; p < neap_value_n_params(&shape); p++)
                CHECK(!isnan(value.w1[p]));
        }
        neap_value_free(&value);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    neap_learned *learned = NULL;
    if (size == 0) return 0;
    neap_set_log(no_log, NULL);
    uint8_t *copy = malloc(size);
    CHECK(copy);
    memcpy(copy, data + 1, size - 1);
    if ((data[0] & 1) && size > HEADER) repair(copy, size - 1);
    if (neap_learned_parse(copy, size - 1, "fuzz", DIGEST, &learned) == 0) use(learned);
    neap_learned_free(learned);
    free(copy);
    return 0;
}

#ifndef NEAP_LIBFUZZER

/* Two layers, with a flag byte before them. */
static uint8_t *make(size_t *ret_len) {
    static const neap_learned_layer layers[] = {
        {.layer = 0, .n_kv_heads = 1, .dk = 3, .dv = 2, .hidden = 4, .is_slim = true},
        {.layer = 5, .n_kv_heads = 2, .dk = 2, .dv = 3, .has_key_norm = true}};
    static neap_token_net net;
    neap_learned_head heads[3];
    float linear[6] = {1, 2, 3, 4, 5, 6};
    for (size_t i = 0; i < 3; i++) {
        const neap_learned_layer *l = &layers[i > 0];
        const neap_value_shape shape = neap_value_shape_of(l->dk, l->dv, l->hidden);
        heads[i].linear = linear;
        CHECK(neap_value_norm_create(&shape, &heads[i].norm) == 0);
        CHECK(neap_value_create(&shape, &heads[i].warm) == 0);
        CHECK(neap_value_create(&shape, &heads[i].meta) == 0);
    }
    const neap_learned_spec spec = {.digest = DIGEST,
                                    .name = "fuzz",
                                    .n_layers = 2,
                                    .layers = layers,
                                    .heads = heads,
                                    .net = &net};
    char path[] = "/tmp/neap-fuzz-XXXXXX", *text;
    const int fd = mkstemp(path);
    CHECK(fd >= 0 && neap_learned_write(path, &spec) == 0);
    CHECK(neap_textfile_read(path, 1 << 20, &text, ret_len) == 0);
    close(fd);
    unlink(path);
    uint8_t *bytes = malloc(*ret_len + 1);
    CHECK(bytes);
    bytes[0] = 1;
    memcpy(bytes + 1, text, (*ret_len)++);
    free(text);
    for (size_t i = 0; i < 3; i++) {
        neap_value_norm_free(&heads[i].norm);
        neap_value_free(&heads[i].warm);
        neap_value_free(&heads[i].meta);
    }
    return bytes;
}

int main(int argc, char **argv) {
    size_t len;
    uint32_t state = 1;
    fuzz_files(argc, argv);
    uint8_t *bytes = make(&len), *damaged = malloc(len);
    CHECK(damaged);
    LLVMFuzzerTestOneInput(bytes, len);
    for (int i = 0; i < 4000; i++) {
        memcpy(damaged, bytes, len);
        for (int flips = 0; flips < 1 + i % 3; flips++) {
            state = state * 1664525u + 1013904223u;
            /* mostly where the counts and shapes are */
            const size_t bit = state >> 8, most = i % 4 ? 8 * 200 : 8 * len;
            damaged[1 + bit % most / 8 % (len - 1)] ^= (uint8_t)(1u << bit % 8);
        }
        LLVMFuzzerTestOneInput(damaged, i % 5 ? len : len - (size_t)(i % 100));
    }
    free(bytes);
    free(damaged);
    return 0;
}
#endif
