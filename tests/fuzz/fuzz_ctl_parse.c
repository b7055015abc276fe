/* Every line, however broken, is either refused or parsed to something that formats and parses to
 * itself again. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "ctl.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_request(const char *line) {
    neap_ctl_request request, again;
    if (neap_ctl_request_parse(line, &request) != 0) return;
    char *text = NULL;
    CHECK(neap_ctl_request_format(&request, &text) == 0);
    CHECK(strchr(text, '\n') == NULL);
    CHECK(neap_ctl_request_parse(text, &again) == 0);
    CHECK(again.command == request.command && again.evict.bytes == request.evict.bytes);
    CHECK(again.evict.permille == request.evict.permille);
    CHECK(again.evict.only == request.evict.only);
    if (request.command == NEAP_CTL_EVICT)
        CHECK((request.evict.bytes != 0) != (request.evict.permille != 0));
    free(text);
}

static void check_replies(const char *line) {
    char *message = NULL;
    neap_evict_result result;
    int err = neap_ctl_evict_parse(line, &result, &message);
    CHECK(err <= 0);
    if (err == 0) CHECK(message == NULL && result.storage_error <= 0);
    free(message);

    uint64_t bytes = 0, ns = 0;
    message = NULL;
    CHECK(neap_ctl_restore_parse(line, &bytes, &ns, &message) <= 0);
    CHECK(bytes <= INT64_MAX && ns <= INT64_MAX);
    free(message);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char *line = malloc(size + 1);
    if (!line) return 0;
    memcpy(line, data, size);
    line[size] = '\0';
    check_request(line);
    check_replies(line);
    free(line);
    return 0;
}

#ifndef NEAP_LIBFUZZER
/* As a regression test: a few lines of every kind, each also cut at every length. */
int main(void) {
    static const char *const lines[] = {
        "{\"neap\":1,\"command\":\"stat\"}",
        "{\"neap\":1,\"command\":\"evict\",\"bytes\":1048576,\"only\":\"kv\"}",
        "{\"neap\":1,\"command\":\"evict\",\"permille\":500}",
        "{\"neap\":1,\"command\":\"evict\",\"bytes\":-1}",
        "{\"neap\":2,\"command\":\"stat\"}",
        "{\"ok\":true,\"released_bytes\":18446744073709551615}",
        "{\"ok\":false,\"error\":-10002,\"message\":\"x\"}",
        "[[[[[[[[\"\\u0000\xff",
    };
    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++) {
        for (size_t len = 0; len <= strlen(lines[i]); len++) {
            LLVMFuzzerTestOneInput((const uint8_t *)lines[i], len);
        }
    }
    return 0;
}
#endif
