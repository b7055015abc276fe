/* test_bytes.c - sizes as text, checksums, names of errors, log lines, fault points. */
#include "bytes.h"

#include <errno.h>
#include <string.h>

#include "check.h"
#include "err.h"
#include "fault.h"

static void parses(const char *text, uint64_t bytes, uint32_t permille) {
    uint64_t got_bytes = 1;
    uint32_t got_permille = 1;
    CHECK(neap_size_parse(text, &got_bytes, &got_permille) == 0);
    CHECK(got_bytes == bytes && got_permille == permille);
}

static void refuses(const char *text, int err) {
    uint64_t bytes = 77;
    uint32_t permille = 78;
    CHECK(neap_size_parse(text, &bytes, &permille) == err);
    CHECK(bytes == 77 && permille == 78);
}

static void test_size_parse(void) {
    parses("123", 123, 0);
    parses("0", 0, 0);
    parses("512M", 512ull << 20, 0);
    parses("1.5G", 3ull << 29, 0);
    parses("64 KiB", 65536, 0);
    parses("\t2kb", 2048, 0);
    parses("7B", 7, 0);
    parses("1.000000001K", 1024, 0);
    parses("0.999999999999999G", 1073741822, 0);
    parses("16383P", 16383ull << 50, 0);
    parses("50%", 0, 500);
    parses("12.5 %", 0, 125);
    parses("250%", 0, 2500);
    parses("18446744073709551615", UINT64_MAX, 0);
}

static void test_size_refused(void) {
    refuses("", NEAP_E_SYNTAX);
    refuses("M", NEAP_E_SYNTAX);
    refuses(".", NEAP_E_SYNTAX);
    refuses("1.", NEAP_E_SYNTAX);
    refuses("12Q", NEAP_E_SYNTAX);
    refuses("12Mx", NEAP_E_SYNTAX);
    refuses("0x10", NEAP_E_SYNTAX);
    refuses("1e3", NEAP_E_SYNTAX);
    refuses("nan", NEAP_E_SYNTAX);
    refuses("1.5", NEAP_E_SYNTAX);
    refuses("50%%", NEAP_E_SYNTAX);
    refuses("-1", -ERANGE);
    refuses("-5%", -ERANGE);
    refuses("16E", -ERANGE);
    refuses("18446744073709551616", -ERANGE);
    refuses("99999999999999999999999", -ERANGE);
    refuses("429496729.6%", -ERANGE);
    uint64_t bytes = 77;
    CHECK(neap_size_parse("50%", &bytes, NULL) == NEAP_E_SYNTAX && bytes == 77);
    CHECK(neap_size_parse("1K", &bytes, NULL) == 0 && bytes == 1024);
}

static void formats(uint64_t bytes, const char *text) {
    char buf[32];
    CHECK(neap_size_format(bytes, buf, sizeof buf) == buf);
    CHECK(strcmp(buf, text) == 0);
}

static void test_size_format(void) {
    formats(0, "0 B");
    formats(512, "512 B");
    formats(1023, "1023 B");
    formats(1024, "1.0 KiB");
    formats(3ull << 29, "1.5 GiB");
    formats((1ull << 20) - 1, "1.0 MiB");
    formats(UINT64_MAX, "16.0 EiB");
    char small[4];
    CHECK(strcmp(neap_size_format(12345, small, sizeof small), "12.") == 0);
}

static void test_checksum(void) {
    /* XXH3_64bits of no bytes, from the reference implementation. */
    CHECK(neap_checksum("", 0) == 0x2D06800538D394C2ull);
    unsigned char bytes[10000];
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (unsigned char)(i * 7 + i / 251);
    const uint64_t whole = neap_checksum(bytes, sizeof bytes);
    neap_sum *sum = neap_sum_create();
    CHECK(sum);
    for (int round = 0; round < 2; round++) {
        neap_sum_reset(sum);
        neap_sum_feed(sum, bytes, 1);
        neap_sum_feed(sum, bytes + 1, 0);
        neap_sum_feed(sum, bytes + 1, 4096);
        neap_sum_feed(sum, bytes + 4097, sizeof bytes - 4097);
        CHECK(neap_sum_value(sum) == whole);
    }
    neap_sum_free(sum);
    neap_sum_free(NULL);
    bytes[9999] ^= 1;
    CHECK(neap_checksum(bytes, sizeof bytes) != whole);
}

static void test_head(void) {
    struct {
        char magic[8];
        uint32_t version, own;
        uint64_t len, sum;
        char rest[40];
    } file = {.magic = "NEAPTST", .version = 3, .own = 9, .len = sizeof file, .rest = "something"};
    enum { SUM_AT = 24, HEADER = 32 };
    const size_t len = sizeof file;
    file.sum = neap_checksum(&file, len);
    CHECK(neap_head_check(&file, len, HEADER, "NEAPTST", 3) == NEAP_HEAD_GOOD);
    CHECK(neap_checksum_verify(&file, len, SUM_AT) == 0);
    CHECK(neap_checksum_verify(&file, len - 1, SUM_AT) == NEAP_E_CORRUPT);
    for (size_t at = 0; at < len; at++) {
        ((char *)&file)[at] ^= 4;
        CHECK(neap_checksum_verify(&file, len, SUM_AT) == NEAP_E_CORRUPT);
        CHECK(neap_head_check(&file, len, HEADER, "NEAPTST", 3) == (at < 8    ? NEAP_HEAD_MAGIC
                                                                    : at < 12 ? NEAP_HEAD_VERSION
                                                                    : at < 16 || at >= 24
                                                                        ? NEAP_HEAD_GOOD
                                                                        : NEAP_HEAD_LENGTH));
        ((char *)&file)[at] ^= 4;
    }
    CHECK(neap_head_check(&file, len - 1, HEADER, "NEAPTST", 3) == NEAP_HEAD_LENGTH);
    CHECK(neap_head_check(&file, HEADER - 1, HEADER, "NEAPTST", 3) == NEAP_HEAD_MAGIC);
    CHECK(neap_head_check(&file, 0, HEADER, "NEAPTST", 3) == NEAP_HEAD_MAGIC);
}

static void test_strerror(void) {
    for (int err = NEAP_E_CORRUPT; err >= NEAP_E_UNKNOWN; err--) {
        CHECK(strcmp(neap_strerror(err), "unknown error") != 0);
        for (int other = NEAP_E_CORRUPT; other > err; other--)
            CHECK(strcmp(neap_strerror(err), neap_strerror(other)) != 0);
    }
    CHECK(strcmp(neap_strerror(-ENOSPC), "No space left on device") == 0);
    CHECK(strcmp(neap_strerror(NEAP_E_UNKNOWN - 1), "unknown error") == 0);
    CHECK(strcmp(neap_strerror(-4095), "unknown error") == 0);
    CHECK(neap_strerror(0) && neap_strerror(INT32_MIN) && neap_strerror(5));
}

typedef struct seen {
    int level, n;
    char line[128];
} seen;

static void sink(int level, const char *line, void *ctx) {
    seen *s = ctx;
    s->level = level;
    s->n++;
    snprintf(s->line, sizeof s->line, "%s", line);
}

static void test_log(void) {
    seen s = {0};
    neap_set_log(sink, &s);
    errno = EXDEV;
    neap_log(NEAP_LOG_DEBUG, "%d of %s", 3, "four");
    CHECK(errno == EXDEV);
    CHECK(s.n == 1 && s.level == NEAP_LOG_DEBUG && strcmp(s.line, "neap: 3 of four") == 0);
    neap_set_log(NULL, NULL);
    neap_log(NEAP_LOG_DEBUG, "not shown");
    CHECK(s.n == 1);
}

static void test_fault(void) {
    CHECK(NEAP_FAULT("a.b") == 0);
    neap_fault_arm("a.", 2, -EIO, 0);
    CHECK(NEAP_FAULT("a.b") == 0 && NEAP_FAULT("b.a") == 0 && neap_fault_fired() == 0);
    CHECK(NEAP_FAULT("a.c") == -EIO && NEAP_FAULT("a.c") == 0 && neap_fault_fired() == 1);
    neap_fault_arm("", 2, -EIO, 1);
    CHECK(NEAP_FAULT("x") == 0 && NEAP_FAULT("y") == -EIO && NEAP_FAULT("z") == -EIO);
    CHECK(neap_fault_fired() == 2);
    neap_fault_disarm();
    CHECK(NEAP_FAULT("x") == 0);
}

int main(void) {
    test_size_parse();
    test_size_refused();
    test_size_format();
    test_checksum();
    test_head();
    test_strerror();
    test_log();
    test_fault();
    return 0;
}
