/* test_stack_random.c - random pushes and drops against a list, with the kernel's account.
 */
#include "stack.h"

#include <time.h>

#include "check.h"
#include "temp.h"
#include "vm.h"

enum { SLOTS = 64 };

typedef struct entry {
    neap_stack_record *record;
    size_t len;
    uint64_t seed;
} entry;

static void verify(const entry *e) {
    size_t len;
    const void *bytes = neap_stack_bytes(e->record, &len);
    unsigned char *want = malloc(e->len + 1);
    fill_random(want, e->len, e->seed);
    CHECK(len == e->len && memcmp(bytes, want, len) == 0);
    free(want);
}

static void push(neap_stack *stack, entry *e, uint64_t *random) {
    static const size_t lens[] = {100, 5000, 60000, 300000, 6000000};
    void *bytes;
    e->len =
        next_random(random) % lens[next_random(random) % 10 == 0 ? 4 : next_random(random) % 4];
    CHECK(neap_stack_push(stack, e->len, &e->record, &bytes) == 0);
    e->seed = next_random(random);
    fill_random(bytes, e->len, e->seed);
}

static void run(uint64_t seed, int steps) {
    entry entries[SLOTS] = {0};
    uint64_t random = seed | 1, live, committed;
    neap_stack *stack;
    CHECK(neap_stack_create(&stack) == 0);
    for (int step = 0; step < steps; step++) {
        if (next_random(&random) % 16 == 0)
            neap_stack_expect(stack, next_random(&random) % 3 * (next_random(&random) % 30000000));
        entry *e = &entries[next_random(&random) % SLOTS];
        if (!e->record) {
            push(stack, e, &random);
        } else {
            verify(e);
            neap_stack_drop(stack, e->record);
            e->record = NULL;
        }
        neap_stack_check(stack);
        uint64_t want = 0, pages = 0;
        for (int i = 0; i < SLOTS; i++) {
            if (!entries[i].record) continue;
            want += entries[i].len;
            pages += entries[i].len / neap_vm_page() + 2;
        }
        neap_stack_usage(stack, &live, &committed);
        CHECK(live == want && committed >= live && committed <= pages * neap_vm_page());
    }
    for (int i = 0; i < SLOTS; i++)
        if (entries[i].record) {
            verify(&entries[i]);
            neap_stack_drop(stack, entries[i].record);
        }
    neap_stack_usage(stack, &live, &committed);
    CHECK(live == 0 && committed == 0);
    neap_stack_free(stack);
}

int main(int argc, char **argv) {
    const uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 0) : (uint64_t)time(NULL);
    printf("seed %llu\n", (unsigned long long)seed);
    fflush(stdout);
    for (uint64_t i = 0; i < 4; i++)
        run(seed + i * 1000003, 400);
    return 0;
}
