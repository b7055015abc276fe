/* profile_file.c - see profile_file.h. Nothing of a file is believed before its type and range are
 * checked: a damaged one gives an error, never a wild rate. Unknown keys are ignored. */
#include "profile_file.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bytes.h"
#include "proc.h"
#include "textfile.h"

#define FORMAT_VERSION 1
#define FILE_MAX ((size_t)256 << 10)
#define NS_MAX ((uint64_t)1 << 50)

/* ---- places ---- */

static int append(char *path, size_t cap, const char *text) {
    const size_t len = strlen(path), more = strlen(text);
    if (len + more >= cap) return -ENAMETOOLONG;
    memcpy(path + len, text, more + 1);
    return 0;
}

int neap_swap_folder(const char *wanted, char *ret_path, size_t cap) {
    char path[PATH_MAX] = "";
    int err = 0;
    if (wanted && wanted[0]) {
        err = append(path, sizeof path, wanted);
    } else {
        err = neap_cache_dir(path, sizeof path);
        if (!err) err = append(path, sizeof path, "/swap");
    }
    if (err) return err;
    if (strlen(path) >= cap) return -ENAMETOOLONG;
    memcpy(ret_path, path, strlen(path) + 1);
    return 0;
}

static uint64_t device_key(const neap_device *device) {
    char text[sizeof *device + 8];
    const int len = snprintf(text, sizeof text, "%s\n%s\n%s\n%s\n%s", device->source,
                             device->fstype, device->number, device->kernel, device->cpu);
    return neap_checksum(text, (size_t)len);
}

int neap_profile_locate(const char *swap_folder, neap_device *ret_device, char *ret_path,
                        size_t cap) {
    char path[PATH_MAX], name[48];
    neap_device device;
    int err = neap_device_identify(swap_folder, &device);
    if (!err) err = neap_cache_dir(path, sizeof path);
    if (err) return err;
    snprintf(name, sizeof name, "/profile/%016" PRIx64 ".json", device_key(&device));
    err = append(path, sizeof path, name);
    if (!err && strlen(path) >= cap) err = -ENAMETOOLONG;
    if (err) return err;
    memcpy(ret_path, path, strlen(path) + 1);
    *ret_device = device;
    return 0;
}

/* ---- out ---- */

static json_t *number(uint64_t value) {
    return json_integer((json_int_t)value);
}

static json_t *device_json(const neap_device *device) {
    return json_pack("{s:s, s:s, s:s, s:s, s:s}", "source", device->source, "fstype",
                     device->fstype, "number", device->number, "kernel", device->kernel, "cpu",
                     device->cpu);
}

static json_t *read_json(const neap_profile *profile) {
    json_t *list = json_array();
    for (size_t s = 0; s < NEAP_PROFILE_SIZES; s++)
        for (size_t d = 0; d < NEAP_PROFILE_DEPTHS; d++)
            if (profile->read_bps[s][d])
                json_array_append_new(list, json_pack("{s:o, s:o, s:o}", "request_bytes",
                                                      number(neap_profile_sizes[s]), "depth",
                                                      number(neap_profile_depths[d]), "bps",
                                                      number(profile->read_bps[s][d])));
    return list;
}

static json_t *codecs_json(const neap_profile *profile) {
    json_t *list = json_array();
    for (size_t i = 0; i < profile->n_codecs; i++) {
        const neap_profile_codec *codec = &profile->codecs[i];
        json_t *rates = json_array();
        size_t n = NEAP_PROFILE_THREADS;
        while (n > 0 && codec->decode_bps[n - 1] == 0)
            n--;
        for (size_t t = 0; t < n; t++)
            json_array_append_new(rates, number(codec->decode_bps[t]));
        json_array_append_new(list, json_pack("{s:s, s:o, s:o}", "name", codec->name, "decode_bps",
                                              rates, "restored_bps", number(codec->restored_bps)));
    }
    return list;
}

static json_t *models_json(const neap_profile *profile) {
    json_t *list = json_array();
    for (size_t i = 0; i < profile->n_models; i++) {
        const neap_profile_model *model = &profile->models[i];
        char digest[32];
        snprintf(digest, sizeof digest, "%016" PRIx64, model->digest);
        json_array_append_new(
            list,
            json_pack("{s:s, s:s, s:o, s:o, s:o, s:o, s:o}", "digest", digest, "name", model->name,
                      "n_layers", number(model->n_layers), "n_threads", number(model->n_threads),
                      "kv_chunk_bytes", number(model->kv_chunk_bytes), "prefill_ns",
                      number(model->prefill_ns), "decode_ns", number(model->decode_ns)));
    }
    return list;
}

static json_t *attentions_json(const neap_profile *profile) {
    json_t *list = json_array();
    for (size_t i = 0; i < profile->n_attentions; i++) {
        const neap_profile_attention *entry = &profile->attentions[i];
        json_array_append_new(list, json_pack("{s:s, s:o, s:o}", "kind", entry->kind, "host_ns",
                                              number(entry->times.host_ns), "our_ns",
                                              number(entry->times.our_ns)));
    }
    return list;
}

int neap_profile_save(const char *path, const neap_device *device, const neap_profile *profile) {
    json_t *root = json_pack("{s:i, s:o, s:b, s:o, s:{s:o, s:o}, s:o, s:o, s:o, s:o}",
                             "neap_profile", FORMAT_VERSION, "device", device_json(device),
                             "direct", profile->is_direct ? 1 : 0, "read", read_json(profile),
                             "populate", "small_bps", number(profile->populate_small_bps),
                             "huge_bps", number(profile->populate_huge_bps), "restored_read_bps",
                             number(profile->restored_read_bps), "codecs", codecs_json(profile),
                             "models", models_json(profile), "attention", attentions_json(profile));
    char *text = root ? json_dumps(root, JSON_INDENT(1)) : NULL;
    json_decref(root);
    if (!text) return -ENOMEM;
    const int err = neap_textfile_replace(path, text, strlen(text));
    free(text);
    return err;
}

/* ---- in ---- */

/* A missing key leaves the value; false: not a number in [0, max]. */
static bool get(const json_t *object, const char *key, uint64_t max, uint64_t *inout_value) {
    const json_t *value = json_object_get(object, key);
    if (!value) return true;
    const json_int_t got = json_integer_value(value);
    if (!json_is_integer(value) || got < 0 || (uint64_t)got > max) return false;
    *inout_value = (uint64_t)got;
    return true;
}

static bool get_text(const json_t *object, const char *key, char *ret_text, size_t cap) {
    const char *value = json_string_value(json_object_get(object, key));
    if (!value || strlen(value) >= cap) return false;
    memcpy(ret_text, value, strlen(value) + 1);
    return true;
}

static bool parse_device(const json_t *object, neap_device *device) {
    return get_text(object, "source", device->source, sizeof device->source) &&
           get_text(object, "fstype", device->fstype, sizeof device->fstype) &&
           get_text(object, "number", device->number, sizeof device->number) &&
           get_text(object, "kernel", device->kernel, sizeof device->kernel) &&
           get_text(object, "cpu", device->cpu, sizeof device->cpu);
}

static bool is_same_device(const neap_device *a, const neap_device *b) {
    return strcmp(a->source, b->source) == 0 && strcmp(a->fstype, b->fstype) == 0 &&
           strcmp(a->number, b->number) == 0 && strcmp(a->kernel, b->kernel) == 0 &&
           strcmp(a->cpu, b->cpu) == 0;
}

static size_t index_of(const uint32_t *values, size_t n, uint64_t value) {
    size_t i = 0;
    while (i < n && values[i] != value)
        i++;
    return i;
}

static bool parse_read(const json_t *list, neap_profile *profile) {
    size_t i;
    json_t *row;
    json_array_foreach(list, i, row) {
        uint64_t request = 0, depth = 0, bps = 0;
        if (!json_is_object(row) || !get(row, "request_bytes", UINT32_MAX, &request) ||
            !get(row, "depth", UINT32_MAX, &depth) || !get(row, "bps", NEAP_BPS_MAX, &bps))
            return false;
        const size_t s = index_of(neap_profile_sizes, NEAP_PROFILE_SIZES, request);
        const size_t d = index_of(neap_profile_depths, NEAP_PROFILE_DEPTHS, depth);
        if (s < NEAP_PROFILE_SIZES && d < NEAP_PROFILE_DEPTHS) profile->read_bps[s][d] = bps;
    }
    return json_is_array(list);
}

static bool parse_codecs(const json_t *list, neap_profile *profile) {
    size_t i, t;
    json_t *row, *value;
    json_array_foreach(list, i, row) {
        char name[sizeof profile->codecs[0].name];
        if (!get_text(row, "name", name, sizeof name)) return false;
        neap_profile_codec *codec = neap_profile_codec_add(profile, name);
        const json_t *rates = json_object_get(row, "decode_bps");
        if (!codec || !json_is_array(rates) ||
            !get(row, "restored_bps", NEAP_BPS_MAX, &codec->restored_bps))
            return false;
        json_array_foreach(rates, t, value) {
            const json_int_t bps = json_integer_value(value);
            if (!json_is_integer(value) || bps < 0 || (uint64_t)bps > NEAP_BPS_MAX) return false;
            if (t < NEAP_PROFILE_THREADS) codec->decode_bps[t] = (uint64_t)bps;
        }
    }
    return json_is_array(list);
}

static bool parse_models(const json_t *list, neap_profile *profile) {
    size_t i;
    json_t *row;
    json_array_foreach(list, i, row) {
        neap_profile_model model = {0};
        char digest[32], *end;
        uint64_t n_layers = 0, n_threads = 0;
        if (!get_text(row, "digest", digest, sizeof digest) ||
            !get_text(row, "name", model.name, sizeof model.name) ||
            !get(row, "n_layers", UINT32_MAX, &n_layers) ||
            !get(row, "n_threads", UINT32_MAX, &n_threads) ||
            !get(row, "kv_chunk_bytes", NS_MAX, &model.kv_chunk_bytes) ||
            !get(row, "prefill_ns", NS_MAX, &model.prefill_ns) ||
            !get(row, "decode_ns", NS_MAX, &model.decode_ns))
            return false;
        model.digest = strtoull(digest, &end, 16);
        if (*digest == '\0' || *end != '\0') return false;
        model.n_layers = (uint32_t)n_layers;
        model.n_threads = (uint32_t)n_threads;
        neap_profile_model_put(profile, &model);
    }
    return json_is_array(list);
}

/* Files written before attention was timed have no such list. */
static bool parse_attentions(const json_t *list, neap_profile *profile) {
    size_t i;
    json_t *row;
    json_array_foreach(list, i, row) {
        char kind[sizeof profile->attentions[0].kind];
        neap_attention_times times = {0};
        if (!get_text(row, "kind", kind, sizeof kind) ||
            !get(row, "host_ns", NS_MAX, &times.host_ns) ||
            !get(row, "our_ns", NS_MAX, &times.our_ns) ||
            neap_profile_attention_put(profile, kind, times) != 0)
            return false;
    }
    return !list || json_is_array(list);
}

static int parse(const json_t *root, const neap_device *device, neap_profile *profile) {
    const json_t *version = json_object_get(root, "neap_profile");
    if (!json_is_integer(version)) return NEAP_E_CORRUPT;
    if (json_integer_value(version) != FORMAT_VERSION) return NEAP_E_VERSION;
    neap_device measured;
    if (!parse_device(json_object_get(root, "device"), &measured)) return NEAP_E_CORRUPT;
    if (!is_same_device(&measured, device)) return NEAP_E_CHANGED;
    const json_t *populate = json_object_get(root, "populate");
    const bool good = json_is_object(populate) &&
                      get(populate, "small_bps", NEAP_BPS_MAX, &profile->populate_small_bps) &&
                      get(populate, "huge_bps", NEAP_BPS_MAX, &profile->populate_huge_bps) &&
                      get(root, "restored_read_bps", NEAP_BPS_MAX, &profile->restored_read_bps) &&
                      parse_read(json_object_get(root, "read"), profile) &&
                      parse_codecs(json_object_get(root, "codecs"), profile) &&
                      parse_models(json_object_get(root, "models"), profile) &&
                      parse_attentions(json_object_get(root, "attention"), profile);
    profile->is_direct = json_is_true(json_object_get(root, "direct"));
    return good ? 0 : NEAP_E_CORRUPT;
}

int neap_profile_load(const char *path, const neap_device *device, neap_profile *ret_profile) {
    char *text;
    size_t len;
    int err = neap_textfile_read(path, FILE_MAX, &text, &len);
    if (err) return err == -EFBIG ? NEAP_E_CORRUPT : err;
    neap_profile profile = {0};
    json_t *root = json_loadb(text, len, JSON_REJECT_DUPLICATES, NULL);
    free(text);
    err = root ? parse(root, device, &profile) : NEAP_E_CORRUPT;
    json_decref(root);
    if (!err) *ret_profile = profile;
    return err;
}

int neap_profile_save_attention(const char *path, const neap_device *device, const char *kind,
                                neap_attention_times times) {
    neap_profile profile = {0};
    int err = neap_profile_load(path, device, &profile);
    if (!err) err = neap_profile_attention_put(&profile, kind, times);
    return err ? err : neap_profile_save(path, device, &profile);
}

int neap_profile_save_restored(const char *path, const neap_device *device, const char *codec,
                               uint64_t read_bps, uint64_t decode_bps) {
    neap_profile profile = {0};
    const int err = neap_profile_load(path, device, &profile);
    if (err && err != -ENOENT && err != NEAP_E_CORRUPT && err != NEAP_E_CHANGED) return err;
    if (read_bps) profile.restored_read_bps = read_bps;
    neap_profile_codec *entry = decode_bps ? neap_profile_codec_add(&profile, codec) : NULL;
    if (entry) entry->restored_bps = decode_bps;
    return neap_profile_save(path, device, &profile);
}
