/* stack.c - see stack.h.
 *
 *   segment  | live | hole | live | hole ...... | live |  room  |
 *            0      (dropped out of order)             top      size
 *
 * Pushes go on top of the newest segment. A record's bytes become a hole when it is dropped out of
 * order; the pages that lie wholly in a hole go back to the kernel at once, its address range when
 * the records above it are gone too.
 * Invariants
 *   1. Records of a segment are in order of offset, disjoint, and end at or below top; top is the
 *      end of the last one.
 *   2. No segment is empty: the one that loses its last record is unmapped.
 *   3. committed_pages counts the pages that a live record overlaps; every other page of a segment
 *      is dropped (or was never written), but for those above the top of the newest segment while
 *      it is open: huge pages, that pushes to come are expected to fill.
 *   4. live_bytes is the sum of the records' lengths.
 * Threads   one lock over everything but the bytes. */
#include "stack.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include "bytes.h"
#include "err.h"
#include "vm.h"

#define SEGMENT_BYTES ((size_t)4 << 20)
#define SEGMENT_MAX_BYTES ((size_t)64 << 20) /* where so much is expected: fewer ends to cut */
#define HUGE_BYTES ((size_t)2 << 20)
#define RECORD_ALIGN ((size_t)64) /* a cache line; codecs use vector loads */

typedef struct segment segment;

struct neap_stack_record {
    segment *home;
    neap_stack_record *below, *above; /* neighbours in the segment */
    size_t begin, end;                /* bytes of the segment, multiples of RECORD_ALIGN */
    size_t len;                       /* what the caller asked for */
};

struct segment {
    segment *below, *above; /* older, newer */
    char *base;
    size_t size;
    bool is_huge; /* has, or had, huge pages */
    bool is_open; /* new pages are huge ones */
    neap_stack_record *first, *last;
};

struct neap_stack {
    pthread_mutex_t lock;
    segment *top;            /* the newest; no other is open */
    uint64_t expected_bytes; /* still to be pushed */
    uint64_t live_bytes, committed_pages;
};

int neap_stack_create(neap_stack **ret_stack) {
    neap_stack *stack = calloc(1, sizeof *stack);
    if (!stack) return -ENOMEM;
    pthread_mutex_init(&stack->lock, NULL);
    *ret_stack = stack;
    return 0;
}

static size_t page_floor(size_t offset) {
    return NEAP_ROUND_DOWN(offset, neap_vm_page());
}

static size_t page_ceil(size_t offset) {
    return NEAP_ROUND_UP(offset, neap_vm_page());
}

static size_t segment_top(const segment *home) {
    return home->last ? home->last->end : 0;
}

/* Gives back pages of a segment. Of a huge page of which a part is kept nothing would come back. */
static void pages_drop(const segment *home, size_t first, size_t end) {
    if (first >= end) return;
    if (home->is_huge && first % HUGE_BYTES) neap_vm_split(home->base + first);
    if (home->is_huge && end % HUGE_BYTES) neap_vm_split(home->base + end - 1);
    const int err = neap_vm_drop(home->base + first, end - first);
    if (err) neap_log(NEAP_LOG_WARN, "memory of the stack not released: %s", neap_strerror(err));
}

/* From now on the segment commits by small pages, and the kernel does not join them. */
static void segment_close(segment *home) {
    if (!home || !home->is_open) return;
    home->is_open = false;
    neap_vm_huge(home->base, home->size, false);
    pages_drop(home, page_ceil(segment_top(home)), home->size);
}

static int segment_push(neap_stack *stack, size_t room) {
    size_t size = SEGMENT_BYTES;
    while (size < SEGMENT_MAX_BYTES && 2 * size <= stack->expected_bytes)
        size *= 2;
    if (size < room) size = page_ceil(room);
    segment_close(stack->top);
    segment *home = calloc(1, sizeof *home);
    if (!home) return -ENOMEM;
    void *base;
    const int err = neap_vm_reserve(size, HUGE_BYTES, &base);
    if (err) {
        free(home);
        return err;
    }
    /* A huge page commits 2 MiB, however small the record. */
    home->is_huge = home->is_open = stack->expected_bytes >= size;
    neap_vm_huge(base, size, home->is_huge);
    home->base = base;
    home->size = size;
    home->below = stack->top;
    if (stack->top) stack->top->above = home;
    stack->top = home;
    return 0;
}

static void segment_remove(neap_stack *stack, segment *home) {
    if (home->below) home->below->above = home->above;
    if (home->above)
        home->above->below = home->below;
    else
        stack->top = home->below;
    neap_vm_unmap(home->base, home->size);
    free(home);
}

/* Pages of [begin, end) that no byte before below_end and no byte from above_begin on shares. */
static size_t pages_alone(size_t begin, size_t end, size_t below_end, size_t above_begin,
                          size_t *ret_first) {
    const size_t lowest = page_ceil(below_end), highest = page_floor(above_begin);
    size_t first = page_floor(begin), last = page_ceil(end);
    if (first < lowest) first = lowest;
    if (last > highest) last = highest;
    *ret_first = first;
    return last > first ? (last - first) / neap_vm_page() : 0;
}

/* [begin, end), no live record's any more, lies between the bytes of two: gives back the pages. */
static void release(neap_stack *stack, segment *home, size_t begin, size_t end, size_t below_end,
                    size_t above_begin) {
    size_t first;
    const size_t n = pages_alone(begin, end, below_end, above_begin, &first);
    stack->committed_pages -= n;
    pages_drop(home, first, first + n * neap_vm_page());
}

static size_t above_begin_of(const neap_stack_record *record) {
    return record->above ? record->above->begin : record->home->size;
}

int neap_stack_push(neap_stack *stack, size_t len, neap_stack_record **ret_record,
                    void **ret_bytes) {
    if (len > SIZE_MAX / 2) return -ENOMEM;
    const size_t room = len ? NEAP_ROUND_UP(len, RECORD_ALIGN) : RECORD_ALIGN;
    neap_stack_record *record = calloc(1, sizeof *record);
    if (!record) return -ENOMEM;

    pthread_mutex_lock(&stack->lock);
    int err = 0;
    if (!stack->top || stack->top->size - segment_top(stack->top) < room)
        err = segment_push(stack, room);
    if (err) {
        pthread_mutex_unlock(&stack->lock);
        free(record);
        return -ENOMEM;
    }
    segment *home = stack->top;
    record->home = home;
    record->begin = segment_top(home);
    record->end = record->begin + room;
    record->len = len;
    record->below = home->last;
    if (home->last)
        home->last->above = record;
    else
        home->first = record;
    home->last = record;
    stack->live_bytes += len;
    stack->expected_bytes -= stack->expected_bytes < room ? stack->expected_bytes : room;
    /* The page that the record below ends in is counted already. */
    stack->committed_pages += (page_ceil(record->end) - page_ceil(record->begin)) / neap_vm_page();
    pthread_mutex_unlock(&stack->lock);

    *ret_record = record;
    *ret_bytes = home->base + record->begin;
    return 0;
}

void neap_stack_expect(neap_stack *stack, uint64_t bytes) {
    pthread_mutex_lock(&stack->lock);
    stack->expected_bytes = bytes;
    if (bytes == 0) segment_close(stack->top);
    pthread_mutex_unlock(&stack->lock);
}

const void *neap_stack_bytes(const neap_stack_record *record, size_t *ret_len) {
    *ret_len = record->len;
    return record->home->base + record->begin;
}

void neap_stack_drop(neap_stack *stack, neap_stack_record *record) {
    if (!record) return;
    pthread_mutex_lock(&stack->lock);
    segment *home = record->home;
    neap_stack_record *below = record->below, *above = record->above;
    if (below)
        below->above = above;
    else
        home->first = above;
    if (above)
        above->below = below;
    else
        home->last = below;
    stack->live_bytes -= record->len;
    if (home->last) {
        release(stack, home, record->begin, record->end, below ? below->end : 0,
                above_begin_of(record));
    } else {
        size_t first;
        stack->committed_pages -= pages_alone(record->begin, record->end, 0, home->size, &first);
        segment_remove(stack, home);
    }
    pthread_mutex_unlock(&stack->lock);
    free(record);
}

void neap_stack_free(neap_stack *stack) {
    if (!stack) return;
    while (stack->top) {
        segment *home = stack->top;
        stack->top = home->below;
        for (neap_stack_record *record = home->first, *above; record; record = above) {
            above = record->above;
            free(record);
        }
        neap_vm_unmap(home->base, home->size);
        free(home);
    }
    pthread_mutex_destroy(&stack->lock);
    free(stack);
}

void neap_stack_usage(neap_stack *stack, uint64_t *ret_live, uint64_t *ret_committed) {
    pthread_mutex_lock(&stack->lock);
    *ret_live = stack->live_bytes;
    *ret_committed = stack->committed_pages * neap_vm_page();
    pthread_mutex_unlock(&stack->lock);
}

static void require(bool holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "neap: stack: broken: %s\n", what);
    abort();
}

static void segment_check(const segment *home, uint64_t *live, uint64_t *pages) {
    require(home->first && home->last, "a segment has records");
    require(!home->above || home->above->below == home, "segments are linked both ways");
    require(!home->is_open || (home->is_huge && !home->above), "only the newest is open");
    const neap_stack_record *below = NULL;
    for (const neap_stack_record *record = home->first; record; record = record->above) {
        const size_t below_end = below ? below->end : 0;
        require(record->home == home && record->below == below, "records are linked both ways");
        require(record->begin >= below_end && record->begin < record->end, "records are in order");
        require(record->len <= record->end - record->begin, "a record's length fits its room");
        size_t first = page_floor(record->begin);
        if (first < page_ceil(below_end)) first = page_ceil(below_end);
        const size_t last = page_ceil(record->end);
        *pages += last > first ? (last - first) / neap_vm_page() : 0;
        *live += record->len;
        below = record;
    }
    require(home->last == below && below->end <= home->size, "the last record is inside");
}

void neap_stack_check(neap_stack *stack) {
    uint64_t live = 0, pages = 0;
    pthread_mutex_lock(&stack->lock);
    require(!stack->top || !stack->top->above, "nothing is above the top segment");
    for (const segment *home = stack->top; home; home = home->below)
        segment_check(home, &live, &pages);
    require(live == stack->live_bytes, "live bytes are the records'");
    require(pages == stack->committed_pages, "committed pages are the records'");
    pthread_mutex_unlock(&stack->lock);
}
