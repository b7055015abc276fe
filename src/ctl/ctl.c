/* ctl.c - the control protocol in jansson.
 *
 * Invariants
 *   1. Nothing of a message is believed before its type and range are checked; unknown keys are
 *      ignored, so that a newer peer may say more.
 *   2. A formatted line holds no newline (JSON_COMPACT) and is valid UTF-8, whatever the names
 * were.
 *   3. JSON integers are signed: counts above INT64_MAX are sent as INT64_MAX, and that value of
 *      "bytes" in a request means "all there is" (UINT64_MAX).
 *
 * Threads: no state. */
#include "ctl.h"

#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#define PROTOCOL_VERSION 1

static const char *const command_names[] = {
    [NEAP_CTL_STAT] = "stat", [NEAP_CTL_EVICT] = "evict", [NEAP_CTL_RESTORE] = "restore"};
static const char *const only_names[] = {
    [NEAP_ONLY_ALL] = "all", [NEAP_ONLY_WEIGHTS] = "weights", [NEAP_ONLY_KV] = "kv"};
static const char *const state_names[] = {[NEAP_STATE_IDLE] = "idle",
                                          [NEAP_STATE_INFERENCE] = "inference",
                                          [NEAP_STATE_EVICTING] = "evicting",
                                          [NEAP_STATE_RESTORING] = "restoring"};
static const char *const stage_names[] = {[NEAP_STAGE_NONE] = "none",
                                          [NEAP_STAGE_KVONLY] = "KVonly",
                                          [NEAP_STAGE_KVANDW] = "KVandW",
                                          [NEAP_STAGE_WONLY] = "Wonly",
                                          [NEAP_STAGE_COMPKV] = "CompKV"};

static const char *const rate_source_names[] = {[NEAP_RATES_DEFAULT] = "default",
                                                [NEAP_RATES_MEASURED] = "measured",
                                                [NEAP_RATES_DRIFTED] = "drifted"};
static const char *const pressure_names[] = {[NEAP_PRESSURE_OFF] = "off",
                                             [NEAP_PRESSURE_CALM] = "calm",
                                             [NEAP_PRESSURE_SHORT] = "short",
                                             [NEAP_PRESSURE_CRITICAL] = "critical"};
static const char *const write_behind_names[] = {
    [NEAP_WRITE_BEHIND_OFF] = "off",         [NEAP_WRITE_BEHIND_WAITING] = "waiting",
    [NEAP_WRITE_BEHIND_WRITING] = "writing", [NEAP_WRITE_BEHIND_BATTERY] = "battery",
    [NEAP_WRITE_BEHIND_NO_ROOM] = "no room", [NEAP_WRITE_BEHIND_SPENT] = "spent",
    [NEAP_WRITE_BEHIND_FAILED] = "failed"};

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

static int name_index(const char *const *names, size_t n, const char *name) {
    for (size_t i = 0; i < n; i++)
        if (strcmp(names[i], name) == 0) return (int)i;
    return -1;
}

static json_t *count(uint64_t value) {
    return json_integer(value > INT64_MAX ? INT64_MAX : (json_int_t)value);
}

/* File names need not be UTF-8; what is not becomes '?'. */
static json_t *text(const char *string) {
    json_t *value = json_string(string);
    if (value) return value;
    char *copy = strdup(string);
    if (!copy) return NULL;
    for (char *c = copy; *c; c++)
        if ((unsigned char)*c >= 0x80) *c = '?';
    value = json_string(copy);
    free(copy);
    return value;
}

/* Takes the object; NULL, or a part that could not be made, gives -ENOMEM. */
static int dump(json_t *object, char **ret_line) {
    if (!object) return -ENOMEM;
    char *line = json_dumps(object, JSON_COMPACT);
    json_decref(object);
    if (!line) return -ENOMEM;
    *ret_line = line;
    return 0;
}

static int load_object(const char *line, json_t **ret_object) {
    json_error_t error;
    json_t *object = json_loads(line, JSON_REJECT_DUPLICATES, &error);
    if (!object) {
        enum json_error_code code = json_error_code(&error);
        if (code == json_error_numeric_overflow) return -ERANGE;
        return code == json_error_out_of_memory ? -ENOMEM : NEAP_E_SYNTAX;
    }
    if (!json_is_object(object)) {
        json_decref(object);
        return NEAP_E_SYNTAX;
    }
    *ret_object = object;
    return 0;
}

/* An absent key leaves *ret_value as it is. */
static int get_count(const json_t *object, const char *key, uint64_t *ret_value) {
    const json_t *value = json_object_get(object, key);
    if (!value) return 0;
    if (!json_is_integer(value)) return NEAP_E_SYNTAX;
    if (json_integer_value(value) < 0) return -ERANGE;
    *ret_value = (uint64_t)json_integer_value(value);
    return 0;
}

static int get_bool(const json_t *object, const char *key, bool *ret_value) {
    const json_t *value = json_object_get(object, key);
    if (!value) return 0;
    if (!json_is_boolean(value)) return NEAP_E_SYNTAX;
    *ret_value = json_is_true(value);
    return 0;
}

static int evict_args(const json_t *object, neap_evict_request *ret_evict) {
    uint64_t bytes = 0, permille = 0;
    bool has_bytes = json_object_get(object, "bytes") != NULL;
    bool has_permille = json_object_get(object, "permille") != NULL;
    if (has_bytes && has_permille) return NEAP_E_SYNTAX;
    int err = get_count(object, "bytes", &bytes);
    if (!err) err = get_count(object, "permille", &permille);
    if (err) return err;
    if (bytes == 0 && permille == 0) return -EINVAL;
    if (permille > 1000) return -ERANGE;

    int only = NEAP_ONLY_ALL;
    const json_t *name = json_object_get(object, "only");
    if (name) {
        if (!json_is_string(name)) return NEAP_E_SYNTAX;
        only = name_index(only_names, COUNT(only_names), json_string_value(name));
        if (only < 0) return NEAP_E_SYNTAX;
    }
    ret_evict->bytes = bytes == INT64_MAX ? UINT64_MAX : bytes;
    ret_evict->permille = (uint32_t)permille;
    ret_evict->only = only;
    return get_bool(object, "by_pressure", &ret_evict->by_pressure);
}

int neap_ctl_request_parse(const char *line, neap_ctl_request *ret_request) {
    json_t *object;
    int err = load_object(line, &object);
    if (err) return err;

    neap_ctl_request request = {0};
    const json_t *version = json_object_get(object, "neap");
    const char *command = json_string_value(json_object_get(object, "command"));
    int index = command ? name_index(command_names, COUNT(command_names), command) : -1;
    if (!json_is_integer(version))
        err = NEAP_E_SYNTAX;
    else if (json_integer_value(version) != PROTOCOL_VERSION)
        err = NEAP_E_VERSION;
    else if (index < 0)
        err = NEAP_E_SYNTAX;
    else
        request.command = (neap_ctl_command)index;
    if (!err && request.command == NEAP_CTL_EVICT) err = evict_args(object, &request.evict);
    json_decref(object);
    if (!err) *ret_request = request;
    return err;
}

int neap_ctl_request_format(const neap_ctl_request *request, char **ret_line) {
    const neap_evict_request *evict = &request->evict;
    json_t *object = json_pack("{s:i, s:s}", "neap", PROTOCOL_VERSION, "command",
                               command_names[request->command]);
    if (!object) return -ENOMEM;
    if (request->command != NEAP_CTL_EVICT) return dump(object, ret_line);
    int failed = evict->permille ? json_object_set_new(object, "permille", count(evict->permille))
                                 : json_object_set_new(object, "bytes", count(evict->bytes));
    failed |= json_object_set_new(object, "only", json_string(only_names[evict->only]));
    if (evict->by_pressure) failed |= json_object_set_new(object, "by_pressure", json_true());
    if (failed) {
        json_decref(object);
        return -ENOMEM;
    }
    return dump(object, ret_line);
}

static json_t *stat_bytes(const neap_stat *stat) {
    return json_pack("{s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "weights_total",
                     count(stat->weights_total), "weights_resident", count(stat->weights_resident),
                     "kv_total", count(stat->kv_total), "kv_resident", count(stat->kv_resident),
                     "kv_compressed_memory", count(stat->kv_compressed_memory), "kv_storage",
                     count(stat->kv_storage), "scratch_resident", count(stat->scratch_resident),
                     "released", count(stat->released), "fits", count(stat->fit_bytes));
}

static json_t *stat_units(const neap_stat *stat) {
    return json_pack("{s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "weights",
                     count(stat->units_weights), "weights_evicted",
                     count(stat->units_weights_evicted), "kv", count(stat->units_kv), "kv_evicted",
                     count(stat->units_kv_evicted), "lost", count(stat->lost), "klt",
                     count(stat->klt_chunks), "klt_left", count(stat->klt_left), "klt_refused",
                     count(stat->klt_refused));
}

static json_t *stat_counters(const neap_stat *stat) {
    return json_pack(
        "{s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "evictions", count(stat->evictions),
        "restores", count(stat->restores), "bytes_evicted", count(stat->bytes_evicted),
        "bytes_restored_storage", count(stat->bytes_restored_storage), "bytes_restored_memory",
        count(stat->bytes_restored_memory), "bytes_read_storage", count(stat->bytes_read_storage),
        "bytes_committed", count(stat->bytes_committed), "bytes_written_storage",
        count(stat->bytes_written_storage), "wait_ns", count(stat->wait_ns), "errors",
        count(stat->errors));
}

static json_t *stat_request(const neap_stat *stat) {
    return json_pack("{s:f, s:f, s:f, s:f, s:f, s:f}", "ttft_ms", (double)stat->ttft_ns / 1e6,
                     "restore_ms", (double)stat->restore_ns / 1e6, "alloc_ms",
                     (double)stat->allocate_ns / 1e6, "storage_ms", (double)stat->storage_ns / 1e6,
                     "memory_ms", (double)stat->memory_ns / 1e6, "overlap", stat->overlap);
}

static json_t *stat_profile(const neap_stat *stat) {
    return json_pack("{s:f, s:f, s:s}", "read_gbps", (double)stat->read_bps / 1e9, "decode_gbps",
                     (double)stat->decode_bps / 1e9, "source",
                     rate_source_names[stat->rate_source]);
}

static json_t *stat_attention(const neap_stat *stat) {
    return json_pack("{s:o, s:o, s:o}", "kernel", text(stat->attention), "nodes",
                     count(stat->attentions), "nodes_host", count(stat->attentions_host));
}

static json_t *stat_pressure(const neap_stat *stat) {
    return json_pack("{s:s, s:o, s:o, s:o, s:o, s:o, s:o}", "level", pressure_names[stat->pressure],
                     "sources", text(stat->pressure_sources), "looks", count(stat->pressure_looks),
                     "releases", count(stat->pressure_releases), "released_bytes",
                     count(stat->pressure_released_bytes), "restored_bytes",
                     count(stat->pressure_restored_bytes), "owed_bytes",
                     count(stat->pressure_owed_bytes));
}

static json_t *stat_write_behind(const neap_stat *stat) {
    return json_pack("{s:s, s:o, s:o}", "state", write_behind_names[stat->write_behind],
                     "bytes_today", count(stat->write_behind_bytes_today), "clean_chunks",
                     count(stat->clean_chunks));
}

static json_t *stat_contexts(const neap_stat *stat) {
    json_t *list = json_array();
    for (uint32_t i = 0; list && i < stat->n_context_stats; i++) {
        const neap_context_stat *c = &stat->contexts[i];
        json_t *context =
            json_pack("{s:o, s:o, s:o, s:f, s:f, s:o, s:o, s:o, s:o}", "n_ctx", count(c->n_ctx),
                      "tokens", count(c->tokens), "kv", text(c->kv), "ratio", c->kv_ratio, "error",
                      c->klt_error, "klt", count(c->klt_chunks), "klt_left", count(c->klt_left),
                      "klt_refused", count(c->klt_refused), "fit", count(c->fit_bytes));
        if (json_array_append_new(list, context) != 0) {
            json_decref(list);
            return NULL;
        }
    }
    return list;
}

int neap_ctl_stat_format(int pid, const char *program, const neap_stat *stat, char **ret_line) {
    json_t *instance = json_pack(
        "{s:i, s:o, s:o, s:s, s:s, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, "
        "s:o, s:o, s:o, s:o, s:f, s:f, s:o}",
        "pid", pid, "program", text(program ? program : "?"), "model", text(stat->model), "state",
        state_names[stat->state], "stage", stage_names[stat->stage], "n_ctx", count(stat->n_ctx),
        "n_contexts", count(stat->n_contexts), "tokens", count(stat->tokens), "codec",
        text(stat->codec), "kv", text(stat->kv), "policy", text(stat->policy), "bytes",
        stat_bytes(stat), "units", stat_units(stat), "counters", stat_counters(stat),
        "last_request", stat_request(stat), "profile", stat_profile(stat), "attention",
        stat_attention(stat), "pressure", stat_pressure(stat), "write_behind",
        stat_write_behind(stat), "last_error", text(stat->last_error), "codec_note",
        text(stat->codec_note), "ratio", stat->kv_ratio, "error", stat->klt_error, "contexts",
        stat_contexts(stat));
    return dump(json_pack("{s:b, s:o}", "ok", 1, "instance", instance), ret_line);
}

int neap_ctl_evict_format(const neap_evict_result *result, char **ret_line) {
    return dump(
        json_pack("{s:b, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:b, s:i}", "ok", 1, "asked_bytes",
                  count(result->asked_bytes), "released_bytes", count(result->released_bytes),
                  "weights_bytes", count(result->weights_bytes), "kv_memory_bytes",
                  count(result->kv_memory_bytes), "kv_storage_bytes",
                  count(result->kv_storage_bytes), "scratch_bytes", count(result->scratch_bytes),
                  "duration_ns", count(result->duration_ns), "exhausted", result->exhausted ? 1 : 0,
                  "storage_error", result->storage_error),
        ret_line);
}

int neap_ctl_restore_format(uint64_t bytes, uint64_t duration_ns, char **ret_line) {
    return dump(json_pack("{s:b, s:o, s:o}", "ok", 1, "bytes", count(bytes), "duration_ns",
                          count(duration_ns)),
                ret_line);
}

int neap_ctl_error_format(int err, const char *message, char **ret_line) {
    const char *words = message && *message ? message : neap_strerror(err);
    return dump(json_pack("{s:b, s:i, s:o}", "ok", 0, "error", err, "message", text(words)),
                ret_line);
}

/* Loads a reply; {"ok":false} becomes its error number and text. */
static int load_reply(const char *line, json_t **ret_object, char **ret_message) {
    json_t *object;
    int err = load_object(line, &object);
    if (err) return err;
    const json_t *ok = json_object_get(object, "ok");
    if (json_is_true(ok)) {
        *ret_object = object;
        return 0;
    }
    err = NEAP_E_SYNTAX;
    if (json_is_false(ok)) {
        json_int_t number = json_integer_value(json_object_get(object, "error"));
        const char *message = json_string_value(json_object_get(object, "message"));
        if (number < 0 && number >= INT32_MIN) err = (int)number;
        if (ret_message && message) *ret_message = strdup(message);
    }
    json_decref(object);
    return err;
}

int neap_ctl_evict_parse(const char *line, neap_evict_result *ret_result, char **ret_message) {
    json_t *object;
    int err = load_reply(line, &object, ret_message);
    if (err) return err;

    neap_evict_result result = {0};
    const struct {
        const char *key;
        uint64_t *value;
    } counts[] = {
        {"asked_bytes", &result.asked_bytes},
        {"released_bytes", &result.released_bytes},
        {"weights_bytes", &result.weights_bytes},
        {"kv_memory_bytes", &result.kv_memory_bytes},
        {"kv_storage_bytes", &result.kv_storage_bytes},
        {"scratch_bytes", &result.scratch_bytes},
        {"duration_ns", &result.duration_ns},
    };
    for (size_t i = 0; !err && i < COUNT(counts); i++)
        err = get_count(object, counts[i].key, counts[i].value);
    if (!err) err = get_bool(object, "exhausted", &result.exhausted);
    const json_t *storage = json_object_get(object, "storage_error");
    if (!err && storage) {
        json_int_t number = json_integer_value(storage);
        if (!json_is_integer(storage) || number > 0 || number < INT32_MIN)
            err = NEAP_E_SYNTAX;
        else
            result.storage_error = (int)number;
    }
    json_decref(object);
    if (!err) *ret_result = result;
    return err;
}

int neap_ctl_restore_parse(const char *line, uint64_t *ret_bytes, uint64_t *ret_ns,
                           char **ret_message) {
    json_t *object;
    int err = load_reply(line, &object, ret_message);
    if (err) return err;
    uint64_t bytes = 0, duration_ns = 0;
    err = get_count(object, "bytes", &bytes);
    if (!err) err = get_count(object, "duration_ns", &duration_ns);
    json_decref(object);
    if (err) return err;
    *ret_bytes = bytes;
    *ret_ns = duration_ns;
    return 0;
}
