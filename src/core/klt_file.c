/* klt_file.c - see klt_file.h. */
#include "klt_file.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bytes.h"
#include "file.h"
#include "proc.h"

/* Up to here single heads lose little, and decode several times as fast as layers together; beyond
 * it they lose several times as much. */
#define PER_HEAD_RATIO 4.0

#define DIGEST_BYTES ((size_t)1 << 20)

bool neap_ratio_parse(const char *text, double *ret_ratio) {
    char *end;
    const double ratio = strtod(text, &end);
    if (end == text || *end || strspn(text, "0123456789.") < strlen(text)) return false;
    if (ratio < NEAP_RATIO_MIN || ratio > NEAP_RATIO_MAX) return false;
    *ret_ratio = ratio;
    return true;
}

bool neap_klt_option_parse(const char *text, double *ret_ratio) {
    if (strncmp(text, "klt", 3) != 0) return false;
    if (text[3] == '\0') {
        *ret_ratio = 0;
        return true;
    }
    return text[3] == ':' && neap_ratio_parse(text + 4, ret_ratio);
}

int neap_model_digest(const char *gguf, uint64_t *ret_digest) {
    neap_file *file = NULL;
    neap_file_id id;
    neap_sum *sum = neap_sum_create();
    uint8_t *head = aligned_alloc(NEAP_DIRECT_ALIGN, DIGEST_BYTES);
    int err = sum && head ? neap_file_open_read(gguf, &file) : -ENOMEM;
    if (!err) err = neap_file_identity(file, &id);
    const size_t len = err ? 0 : id.size_bytes < DIGEST_BYTES ? id.size_bytes : DIGEST_BYTES;
    if (len > 0) err = neap_file_read(file, head, len, 0);
    if (!err) {
        uint8_t size[8];
        for (size_t i = 0; i < sizeof size; i++)
            size[i] = (uint8_t)(id.size_bytes >> 8 * i);
        neap_sum_feed(sum, size, sizeof size);
        neap_sum_feed(sum, head, len);
        *ret_digest = neap_sum_value(sum);
    }
    neap_file_close(file);
    neap_sum_free(sum);
    free(head);
    return err;
}

int neap_klt_folder(uint64_t digest, char *ret_path, size_t cap) {
    char cache[PATH_MAX];
    const int err = neap_cache_dir(cache, sizeof cache);
    if (err) return err;
    const int len = snprintf(ret_path, cap, "%s/trained/%016" PRIx64, cache, digest);
    return len < 0 || (size_t)len >= cap ? -ENAMETOOLONG : 0;
}

int neap_klt_path(const char *folder, const char *profile, double ratio, char *ret_path,
                  size_t cap) {
    const int len = snprintf(ret_path, cap, "%s/klt-%s-%g.bin", folder, profile, ratio);
    return len < 0 || (size_t)len >= cap ? -ENAMETOOLONG : 0;
}

/* path: of the last file tried. */
static int profile_open(const char *folder, const char *profile, uint64_t digest, double ratio,
                        neap_klt_model **ret_model, char path[PATH_MAX]) {
    int err = -ENOENT;
    for (double of = ratio; err == -ENOENT && of >= 1; of = ceil(of) - 1) {
        err = neap_klt_path(folder, profile, of, path, PATH_MAX);
        if (!err) err = neap_klt_model_open_at(path, digest, ratio, ret_model);
    }
    return err;
}

int neap_klt_profile_open(const char *folder, const char *profile, uint64_t digest, double ratio,
                          neap_klt_model **ret_model) {
    char path[PATH_MAX];
    return profile_open(folder, profile, digest, ratio, ret_model, path);
}

int neap_klt_file_open(uint64_t digest, double ratio, bool heads_first, neap_klt_model **ret_model,
                       neap_klt_found *ret_found) {
    static const char *const profiles[2][3] = {{"head", "layer", "joint"},
                                               {"joint", "layer", "head"}};
    const char *const *order = profiles[ratio > PER_HEAD_RATIO && !heads_first];
    const struct {
        const char *profile;
        double ratio;
    } wanted[] = {{order[0], ratio}, {order[1], ratio}, {order[2], ratio}},
      usual[] = {{"head", 4},  {"head", 6},  {"head", 8},   {"joint", 8}, {"joint", 6},
                 {"layer", 8}, {"layer", 6}, {"head", 4},   {"layer", 4}, {"joint", 4},
                 {"head", 6},  {"head", 8},  {"joint", 12}, {"joint", 16}};
    const size_t first = ratio > 0 || heads_first ? 0 : 3;
    const size_t n = ratio > 0 ? sizeof wanted / sizeof *wanted : sizeof usual / sizeof *usual;
    char folder[PATH_MAX], *path = ret_found->path;
    int err = neap_klt_folder(digest, folder, sizeof folder);
    snprintf(path, PATH_MAX, "%s", err ? "" : folder);
    if (err) return err;
    err = -ENOENT;
    for (size_t i = first; i < n && err == -ENOENT; i++) {
        const char *profile = ratio > 0 ? wanted[i].profile : usual[i].profile;
        const double of = ratio > 0 ? ratio : usual[i].ratio;
        err = ratio > 0 ? profile_open(folder, profile, digest, ratio, ret_model, path)
                        : neap_klt_path(folder, profile, of, path, PATH_MAX);
        if (!err && ratio == 0) err = neap_klt_model_open(path, digest, ret_model);
        snprintf(ret_found->name, sizeof ret_found->name, "klt-%s-%g", profile, of);
    }
    return err;
}
