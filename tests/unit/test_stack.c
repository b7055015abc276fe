/* test_stack.c - the in-memory swap: what is committed is what live records hold. */
#include "stack.h"

#include <errno.h>

#include "check.h"
#include "fault.h"
#include "temp.h"
#include "vm.h"

static neap_stack *stack;

static neap_stack_record *push(size_t cap, unsigned char fill) {
    neap_stack_record *record;
    void *bytes;
    CHECK(neap_stack_push(stack, cap, &record, &bytes) == 0);
    CHECK((uintptr_t)bytes % 64 == 0);
    memset(bytes, fill, cap);
    neap_stack_check(stack);
    return record;
}

static void drop(neap_stack_record *record) {
    neap_stack_drop(stack, record);
    neap_stack_check(stack);
}

static void holds(const neap_stack_record *record, size_t len, unsigned char fill) {
    size_t got;
    const unsigned char *bytes = neap_stack_bytes(record, &got);
    CHECK(got == len);
    for (size_t i = 0; i < len; i++)
        CHECK(bytes[i] == fill);
}

static uint64_t committed(void) {
    uint64_t live, bytes;
    neap_stack_usage(stack, &live, &bytes);
    return bytes;
}

static uint64_t live(void) {
    uint64_t bytes, unused;
    neap_stack_usage(stack, &bytes, &unused);
    return bytes;
}

static void test_lifo(void) {
    const size_t page = neap_vm_page();
    neap_stack_record *a = push(100, 1), *b = push(3 * page, 2), *c = push(0, 3);
    CHECK(live() == 100 + 3 * page && committed() == 4 * page);
    holds(a, 100, 1);
    holds(b, 3 * page, 2);
    holds(c, 0, 3);
    drop(c);
    drop(b);
    CHECK(live() == 100 && committed() == page);
    drop(a);
    CHECK(live() == 0 && committed() == 0);
    neap_stack_drop(stack, NULL);
}

/* Records dropped out of order give back the pages that they alone held. */
static void test_holes(void) {
    const size_t page = neap_vm_page();
    enum { N = 200 };
    neap_stack_record *records[N];
    size_t len;
    for (unsigned i = 0; i < N; i++)
        records[i] = push(1000, (unsigned char)i);
    const char *base = neap_stack_bytes(records[0], &len);
    uint64_t held;
    CHECK(neap_vm_held(base, 4u << 20, &held) == 0 && held == committed());
    for (unsigned i = 0; i < N; i += 2)
        drop(records[i]);
    CHECK(committed() > 40 * page); /* a record is alive in every page */
    for (unsigned i = 21; i < N; i += 2)
        drop(records[i]);
    for (unsigned i = 1; i < 21; i += 2)
        holds(records[i], 1000, (unsigned char)i);
    CHECK(neap_vm_held(base, 4u << 20, &held) == 0 && held == committed());
    CHECK(committed() < 7 * page);
    for (unsigned i = 1; i < 21; i += 2)
        drop(records[i]);
    CHECK(committed() == 0);
}

static bool mapped(const void *addr) {
    uint64_t held = 0;
    CHECK(neap_vm_held((const void *)((uintptr_t)addr / 4096 * 4096), 4096, &held) == 0);
    return held != 0;
}

static void test_segments(void) {
    const size_t mib = 1u << 20;
    neap_stack_record *a = push(3 * mib, 1), *b = push(3 * mib, 2), *big = push(20 * mib, 3);
    neap_stack_record *c = push(mib, 4);
    size_t len;
    const void *in_b = neap_stack_bytes(b, &len), *in_big = neap_stack_bytes(big, &len);
    CHECK(committed() >= 27 * mib && committed() < 27 * mib + 16384);
    drop(b); /* the segment in the middle goes */
    CHECK(!mapped(in_b) && mapped(in_big));
    drop(big);
    CHECK(!mapped(in_big) && committed() == 4 * mib);
    holds(a, 3 * mib, 1);
    holds(c, mib, 4);
    drop(c);
    /* The room that is left in the older segment is used again. */
    neap_stack_record *d = push(mib, 5);
    size_t unused;
    CHECK((const char *)neap_stack_bytes(d, &unused) - (const char *)neap_stack_bytes(a, &unused) ==
          (ptrdiff_t)(3 * mib));
    drop(a);
    holds(d, mib, 5);
    drop(d);
    CHECK(committed() == 0);
}

/* Pushes that are announced go to huge pages; when they are over, only what records hold is
 * committed, and it goes back by parts. */
static void test_expected(void) {
    const size_t mib = 1u << 20;
    enum { N = 10 };
    neap_stack_record *records[N];
    size_t len;
    uint64_t held;
    neap_stack_expect(stack, 16 * mib);
    for (unsigned i = 0; i < N; i++)
        records[i] = push(mib + 1000 * i, (unsigned char)i);
    const char *base = neap_stack_bytes(records[0], &len);
    CHECK(committed() < (N + 1) * mib);
    neap_stack_expect(stack, 0);
    neap_stack_check(stack);
    CHECK(neap_vm_held(base, 16 * mib, &held) == 0 && held == committed());
    drop(records[N - 1]);
    drop(records[4]); /* amid a huge page */
    CHECK(neap_vm_held(base, 16 * mib, &held) == 0 && held == committed());
    for (unsigned i = 0; i < N - 1; i++)
        if (i != 4) holds(records[i], mib + 1000 * i, (unsigned char)i);
    neap_stack_record *after = push(100, 77); /* small pages again */
    CHECK(neap_vm_held(base, 16 * mib, &held) == 0 && held == committed());
    drop(after);
    for (unsigned i = 0; i < N - 1; i++)
        if (i != 4) drop(records[i]);
    CHECK(committed() == 0);

    /* Announced, and then other than said. */
    neap_stack_expect(stack, 8 * mib);
    neap_stack_record *a = push(mib, 1), *b = push(40 * mib, 2), *c = push(10, 3);
    neap_stack_expect(stack, 0);
    holds(a, mib, 1);
    holds(b, 40 * mib, 2);
    holds(c, 10, 3);
    CHECK(committed() == 42 * mib - mib + neap_vm_page());
    drop(a);
    drop(b);
    drop(c);
    neap_stack_expect(stack, 8 * mib);
    neap_stack_expect(stack, 0);
    CHECK(committed() == 0);
}

static void test_no_memory(void) {
    neap_stack_record *a = push(100, 1), *none = NULL;
    void *bytes = NULL;
    neap_fault_arm("vm.reserve", 1, -ENOMEM, 0);
    CHECK(neap_stack_push(stack, 8u << 20, &none, &bytes) == -ENOMEM);
    neap_fault_disarm();
    CHECK(neap_stack_push(stack, SIZE_MAX, &none, &bytes) == -ENOMEM);
    CHECK(neap_stack_push(stack, SIZE_MAX / 2, &none, &bytes) == -ENOMEM);
    CHECK(!none && !bytes);
    neap_stack_check(stack);
    holds(a, 100, 1);
    drop(a);
}

int main(void) {
    CHECK(neap_stack_create(&stack) == 0);
    test_lifo();
    test_holes();
    test_segments();
    test_expected();
    test_no_memory();
    push(10, 1);
    push(5u << 20, 2);
    neap_stack_free(stack); /* with what is in it */
    neap_stack_free(NULL);
    return 0;
}
