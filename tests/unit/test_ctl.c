/* The control protocol: what is formatted is parsed to the same, and bad lines get their error. */
#include <errno.h>
#include <stdint.h>
#include <string.h>

#include <jansson.h>

#include "check.h"
#include "ctl.h"

static int parse_error(const char *line) {
    neap_ctl_request request, before;
    memset(&request, 0x5a, sizeof request);
    before = request;
    int err = neap_ctl_request_parse(line, &request);
    CHECK(err == 0 || memcmp(&request, &before, sizeof request) == 0);
    return err;
}

static void requests_round_trip(void) {
    const neap_ctl_request requests[] = {
        {.command = NEAP_CTL_STAT},
        {.command = NEAP_CTL_RESTORE},
        {.command = NEAP_CTL_EVICT, .evict = {.bytes = 1}},
        {.command = NEAP_CTL_EVICT, .evict = {.bytes = 1ull << 40, .only = NEAP_ONLY_KV}},
        {.command = NEAP_CTL_EVICT, .evict = {.bytes = UINT64_MAX, .only = NEAP_ONLY_WEIGHTS}},
        {.command = NEAP_CTL_EVICT, .evict = {.permille = 1000}},
        {.command = NEAP_CTL_EVICT, .evict = {.permille = 505, .by_pressure = true}},
    };
    for (size_t i = 0; i < sizeof requests / sizeof *requests; i++) {
        char *line = NULL;
        neap_ctl_request got = {0};
        CHECK(neap_ctl_request_format(&requests[i], &line) == 0);
        CHECK(strchr(line, '\n') == NULL);
        CHECK(neap_ctl_request_parse(line, &got) == 0);
        CHECK(got.command == requests[i].command);
        CHECK(got.evict.bytes == requests[i].evict.bytes);
        CHECK(got.evict.permille == requests[i].evict.permille);
        CHECK(got.evict.only == requests[i].evict.only);
        CHECK(got.evict.by_pressure == requests[i].evict.by_pressure);
        free(line);
    }
}

static void bad_requests(void) {
    static const struct {
        int err;
        const char *line;
    } cases[] = {
        {NEAP_E_SYNTAX, ""},
        {NEAP_E_SYNTAX, "\x01\x02\xff garbage"},
        {NEAP_E_SYNTAX, "{"},
        {NEAP_E_SYNTAX, "[1,2]"},
        {NEAP_E_SYNTAX, "\"stat\""},
        {NEAP_E_SYNTAX, "{}"},
        {NEAP_E_SYNTAX, "{\"neap\":1}"},
        {NEAP_E_SYNTAX, "{\"neap\":\"1\",\"command\":\"stat\"}"},
        {NEAP_E_SYNTAX, "{\"neap\":1,\"command\":7}"},
        {NEAP_E_SYNTAX, "{\"neap\":1,\"command\":\"format-disk\"}"},
        {NEAP_E_SYNTAX, "{\"neap\":1,\"command\":\"stat\"} x"},
        {NEAP_E_SYNTAX, "{\"neap\":1,\"neap\":1,\"command\":\"stat\"}"},
        {NEAP_E_VERSION, "{\"neap\":2,\"command\":\"stat\"}"},
        {-EINVAL, "{\"neap\":1,\"command\":\"evict\"}"},
        {-EINVAL, "{\"neap\":1,\"command\":\"evict\",\"bytes\":0}"},
        {-EINVAL, "{\"neap\":1,\"command\":\"evict\",\"permille\":0}"},
        {-ERANGE, "{\"neap\":1,\"command\":\"evict\",\"bytes\":-1}"},
        {-ERANGE, "{\"neap\":1,\"command\":\"evict\",\"permille\":1001}"},
        {-ERANGE, "{\"neap\":1,\"command\":\"evict\",\"permille\":-5}"},
        {-ERANGE, "{\"neap\":1,\"command\":\"evict\",\"bytes\":99999999999999999999999}"},
        {NEAP_E_SYNTAX, "{\"neap\":1,\"command\":\"evict\",\"bytes\":1.5}"},
        {NEAP_E_SYNTAX, "{\"neap\":1,\"command\":\"evict\",\"bytes\":\"1M\"}"},
        {NEAP_E_SYNTAX, "{\"neap\":1,\"command\":\"evict\",\"bytes\":1,\"permille\":1}"},
        {NEAP_E_SYNTAX, "{\"neap\":1,\"command\":\"evict\",\"bytes\":1,\"only\":\"disk\"}"},
        {NEAP_E_SYNTAX, "{\"neap\":1,\"command\":\"evict\",\"bytes\":1,\"only\":1}"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int err = parse_error(cases[i].line);
        if (err != cases[i].err) fprintf(stderr, "%s: %d\n", cases[i].line, err);
        CHECK(err == cases[i].err);
    }
    CHECK(parse_error("{\"neap\":1,\"command\":\"stat\",\"later\":[1]}") == 0);
    CHECK(parse_error("{\"neap\":1,\"command\":\"evict\",\"bytes\":1,\"only\":\"kv\"}") == 0);

    /* Deep nesting is refused, not recursed into. */
    char *deep = malloc(60001);
    CHECK(deep);
    memset(deep, '[', 60000);
    deep[60000] = '\0';
    CHECK(parse_error(deep) == NEAP_E_SYNTAX);
    free(deep);
}

static void evict_replies(void) {
    const neap_evict_result result = {.asked_bytes = UINT64_MAX,
                                      .released_bytes = 2,
                                      .weights_bytes = 3,
                                      .kv_memory_bytes = 4,
                                      .kv_storage_bytes = 5,
                                      .scratch_bytes = 6,
                                      .duration_ns = 7,
                                      .exhausted = true,
                                      .storage_error = -ENOSPC};
    char *line = NULL, *message = NULL;
    neap_evict_result got;
    memset(&got, 0, sizeof got);
    CHECK(neap_ctl_evict_format(&result, &line) == 0);
    CHECK(strchr(line, '\n') == NULL);
    CHECK(neap_ctl_evict_parse(line, &got, &message) == 0 && message == NULL);
    CHECK(got.asked_bytes == INT64_MAX && got.released_bytes == 2 && got.weights_bytes == 3);
    CHECK(got.kv_memory_bytes == 4 && got.kv_storage_bytes == 5 && got.scratch_bytes == 6);
    CHECK(got.duration_ns == 7 && got.exhausted && got.storage_error == -ENOSPC);
    free(line);

    CHECK(neap_ctl_evict_parse("{\"ok\":true,\"released_bytes\":\"x\"}", &got, NULL) ==
          NEAP_E_SYNTAX);
    CHECK(neap_ctl_evict_parse("{\"ok\":true,\"released_bytes\":-2}", &got, NULL) == -ERANGE);
    CHECK(neap_ctl_evict_parse("{\"ok\":true,\"storage_error\":1}", &got, NULL) == NEAP_E_SYNTAX);
    CHECK(neap_ctl_evict_parse("{\"ok\":true,\"exhausted\":1}", &got, NULL) == NEAP_E_SYNTAX);
    CHECK(neap_ctl_evict_parse("{\"ok\":1}", &got, NULL) == NEAP_E_SYNTAX);
    CHECK(neap_ctl_evict_parse("", &got, NULL) == NEAP_E_SYNTAX);
    CHECK(got.released_bytes == 2); /* untouched on failure */
}

static void restore_replies(void) {
    char *line = NULL, *message = NULL;
    uint64_t bytes = 0, ns = 0;
    CHECK(neap_ctl_restore_format(123, 456, &line) == 0);
    CHECK(neap_ctl_restore_parse(line, &bytes, &ns, &message) == 0);
    CHECK(bytes == 123 && ns == 456 && message == NULL);
    free(line);

    CHECK(neap_ctl_error_format(NEAP_E_CHANGED, "the file \"a\"\nchanged", &line) == 0);
    CHECK(strchr(line, '\n') == NULL);
    CHECK(neap_ctl_restore_parse(line, &bytes, &ns, &message) == NEAP_E_CHANGED);
    CHECK(strcmp(message, "the file \"a\"\nchanged") == 0);
    CHECK(bytes == 123 && ns == 456);
    free(message);
    free(line);

    /* Without words of its own an error gets those of neap_strerror. */
    message = NULL;
    CHECK(neap_ctl_error_format(-ENOSPC, NULL, &line) == 0);
    CHECK(neap_ctl_restore_parse(line, &bytes, &ns, &message) == -ENOSPC);
    CHECK(strcmp(message, neap_strerror(-ENOSPC)) == 0);
    free(message);
    free(line);

    /* An error that is none is not taken for success. */
    CHECK(neap_ctl_restore_parse("{\"ok\":false,\"error\":0}", &bytes, &ns, NULL) < 0);
    CHECK(neap_ctl_restore_parse("{\"ok\":false,\"error\":5}", &bytes, &ns, NULL) < 0);
}

static void stat_reply(void) {
    neap_stat stat = {.state = NEAP_STATE_RESTORING,
                      .stage = NEAP_STAGE_COMPKV,
                      .n_ctx = 8192,
                      .tokens = 77,
                      .weights_total = 1000,
                      .kv_storage = 11,
                      .released = UINT64_MAX,
                      .units_kv_evicted = 3,
                      .wait_ns = 9,
                      .attentions = 5,
                      .attentions_host = 4,
                      .ttft_ns = 1500000,
                      .allocate_ns = 500000,
                      .storage_ns = 2000000,
                      .memory_ns = 250000,
                      .overlap = 0.25,
                      .read_bps = 1500000000,
                      .decode_bps = 250000000,
                      .rate_source = NEAP_RATES_DRIFTED,
                      .klt_left = 6,
                      .klt_refused = 5,
                      .fit_bytes = 12,
                      .n_context_stats = 1,
                      .contexts = {{.klt_refused = 4, .fit_bytes = 13}}};
    strcpy(stat.model, "caf\xe9.gguf"); /* Latin-1: not UTF-8 */
    strcpy(stat.codec, "q8");
    char *line = NULL;
    CHECK(neap_ctl_stat_format(42, "llama-server", &stat, &line) == 0);
    CHECK(strchr(line, '\n') == NULL);
    json_t *reply = json_loads(line, 0, NULL);
    CHECK(reply && json_is_true(json_object_get(reply, "ok")));
    const json_t *instance = json_object_get(reply, "instance");
    CHECK(json_integer_value(json_object_get(instance, "pid")) == 42);
    CHECK(strcmp(json_string_value(json_object_get(instance, "model")), "caf?.gguf") == 0);
    CHECK(strcmp(json_string_value(json_object_get(instance, "state")), "restoring") == 0);
    CHECK(strcmp(json_string_value(json_object_get(instance, "stage")), "CompKV") == 0);
    CHECK(json_integer_value(json_object_get(instance, "n_ctx")) == 8192);
    CHECK(json_integer_value(json_object_get(instance, "tokens")) == 77);
    const json_t *bytes = json_object_get(instance, "bytes");
    CHECK(json_integer_value(json_object_get(bytes, "weights_total")) == 1000);
    CHECK(json_integer_value(json_object_get(bytes, "kv_storage")) == 11);
    CHECK(json_integer_value(json_object_get(bytes, "released")) == INT64_MAX);
    const json_t *units = json_object_get(instance, "units");
    CHECK(json_integer_value(json_object_get(units, "kv_evicted")) == 3);
    CHECK(json_integer_value(json_object_get(units, "klt_left")) == 6);
    CHECK(json_integer_value(json_object_get(units, "klt_refused")) == 5);
    CHECK(json_integer_value(json_object_get(bytes, "fits")) == 12);
    const json_t *context = json_array_get(json_object_get(instance, "contexts"), 0);
    CHECK(json_integer_value(json_object_get(context, "klt_refused")) == 4);
    CHECK(json_integer_value(json_object_get(context, "fit")) == 13);
    const json_t *counters = json_object_get(instance, "counters");
    CHECK(json_integer_value(json_object_get(counters, "wait_ns")) == 9);
    const json_t *attention = json_object_get(instance, "attention");
    CHECK(json_integer_value(json_object_get(attention, "nodes")) == 5);
    CHECK(json_integer_value(json_object_get(attention, "nodes_host")) == 4);
    const json_t *request = json_object_get(instance, "last_request");
    CHECK(json_real_value(json_object_get(request, "ttft_ms")) == 1.5);
    CHECK(json_real_value(json_object_get(request, "alloc_ms")) == 0.5);
    CHECK(json_real_value(json_object_get(request, "storage_ms")) == 2);
    CHECK(json_real_value(json_object_get(request, "memory_ms")) == 0.25);
    CHECK(json_real_value(json_object_get(request, "overlap")) == 0.25);
    const json_t *profile = json_object_get(instance, "profile");
    CHECK(json_real_value(json_object_get(profile, "read_gbps")) == 1.5);
    CHECK(json_real_value(json_object_get(profile, "decode_gbps")) == 0.25);
    CHECK(strcmp(json_string_value(json_object_get(profile, "source")), "drifted") == 0);
    json_decref(reply);
    free(line);
}

int main(void) {
    requests_round_trip();
    bad_requests();
    evict_replies();
    restore_replies();
    stat_reply();
    return 0;
}
