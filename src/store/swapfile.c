/* swapfile.c - see swapfile.h.
 *
 *   file  | record | free | record | free | record |
 *         0                                        end
 *
 * An extent is a run of whole blocks: a record's, a free one, or one in transit between the two
 * while its I/O runs outside the lock. A record's payload is its parts one after the other, the
 * last block filled up with zeros. Invariants
 *   1. Extents are disjoint and cover [0, end) without a gap.
 *   2. Free extents are in order of offset; no two touch, none ends at end.
 *   3. live_bytes is the sum of the extents that are not free, and <= limit (when there is one).
 *   4. A range is punched and written only while its extent is in transit: before it becomes free,
 * a new record's blocks are never punched by its predecessor. A record is good if and only if its
 * put has returned 0; the bytes it gives back are those whose checksum was taken before they were
 * written. Threads   one lock over the tables; put and drop move data outside it, get takes no
 * lock. */
#include "swapfile.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bytes.h"
#include "err.h"

#define RANGES_ON_STACK 16

/* An extent: a record's until it is dropped, then, the same memory, a free one's. So a drop needs
 * no memory and cannot fail. */
struct neap_swap_record {
    neap_swap_record *prev, *next; /* free: next only */
    uint64_t offset, room;         /* multiples of NEAP_DIRECT_ALIGN */
    size_t len;
    uint64_t checksum;
};

struct neap_swapfile {
    char *dir;            /* constant, as the next */
    uint64_t limit_bytes; /* UINT64_MAX: none */
    pthread_mutex_t lock;
    neap_file *file; /* NULL before the first put; set once, under the lock */
    neap_swap_record *records, *free_extents; /* lock, as the rest */
    uint64_t end, live_bytes, transit_bytes, written_bytes;
    bool no_punch; /* the file system cannot: only the tail can be given back */
};

int neap_swapfile_create(const char *dir, uint64_t limit_bytes, neap_swapfile **ret_swapfile) {
    neap_swapfile *swapfile = calloc(1, sizeof *swapfile);
    char *copy = strdup(dir);
    if (!swapfile || !copy) {
        free(swapfile);
        free(copy);
        return -ENOMEM;
    }
    swapfile->dir = copy;
    swapfile->limit_bytes = limit_bytes ? limit_bytes : UINT64_MAX;
    pthread_mutex_init(&swapfile->lock, NULL);
    *ret_swapfile = swapfile;
    return 0;
}

static void free_list(neap_swap_record *list) {
    while (list) {
        neap_swap_record *next = list->next;
        free(list);
        list = next;
    }
}

void neap_swapfile_free(neap_swapfile *swapfile) {
    if (!swapfile) return;
    free_list(swapfile->records);
    free_list(swapfile->free_extents);
    neap_file_close(swapfile->file);
    pthread_mutex_destroy(&swapfile->lock);
    free(swapfile->dir);
    free(swapfile);
}

/* Gives the record room blocks: the first free extent that is large enough, else the end. */
static void extent_take(neap_swapfile *swapfile, neap_swap_record *record) {
    neap_swap_record **at = &swapfile->free_extents;
    while (*at && (*at)->room < record->room)
        at = &(*at)->next;
    neap_swap_record *found = *at;
    if (!found) {
        record->offset = swapfile->end;
        swapfile->end += record->room;
    } else {
        record->offset = found->offset;
        found->offset += record->room;
        found->room -= record->room;
        if (found->room == 0) {
            *at = found->next;
            free(found);
        }
    }
    swapfile->live_bytes += record->room;
    swapfile->transit_bytes += record->room;
}

/* Joins extent and the one after it if they touch; that one is gone then. */
static bool extent_merge(neap_swap_record *extent) {
    neap_swap_record *next = extent->next;
    if (!next || extent->offset + extent->room != next->offset) return false;
    extent->room += next->room;
    extent->next = next->next;
    free(next);
    return true;
}

/* The file ends in a free extent: the end moves down to it. */
static void extent_cut_tail(neap_swapfile *swapfile, neap_swap_record **at) {
    neap_swap_record *extent = *at;
    if (extent->next || extent->offset + extent->room != swapfile->end) return;
    swapfile->end = extent->offset;
    *at = NULL;
    free(extent);
    /* The blocks are punched already; the length matters only where punching does not work. No
     * transfer is beyond the new end, and none starts there while we hold the lock. */
    if (swapfile->end == 0 || swapfile->no_punch) neap_file_truncate(swapfile->file, swapfile->end);
}

/* The extent in transit becomes free; consumes the record. */
static void extent_give(neap_swapfile *swapfile, neap_swap_record *record) {
    swapfile->live_bytes -= record->room;
    swapfile->transit_bytes -= record->room;
    neap_swap_record **before = NULL, **at = &swapfile->free_extents;
    while (*at && (*at)->offset < record->offset) {
        before = at;
        at = &(*at)->next;
    }
    record->next = *at;
    *at = record;
    extent_merge(record);
    if (before && extent_merge(*before)) at = before;
    extent_cut_tail(swapfile, at);
}

/* Punches the blocks of an extent in transit, then frees it. */
static void extent_release(neap_swapfile *swapfile, neap_swap_record *record) {
    const int err = neap_file_punch(swapfile->file, record->offset, record->room);
    if (err) neap_log(NEAP_LOG_DEBUG, "swap file: hole not punched: %s", neap_strerror(err));
    pthread_mutex_lock(&swapfile->lock);
    if (err == -EOPNOTSUPP) swapfile->no_punch = true;
    extent_give(swapfile, record);
    pthread_mutex_unlock(&swapfile->lock);
}

static int parts_len(const struct iovec *parts, size_t n, size_t *ret_len) {
    size_t len = 0;
    for (size_t i = 0; i < n; i++)
        if (__builtin_add_overflow(len, parts[i].iov_len, &len)) return NEAP_E_BOUND;
    *ret_len = len;
    return 0;
}

static int parts_checksum(const struct iovec *parts, size_t n, uint64_t *ret_checksum) {
    if (n == 1) {
        *ret_checksum = neap_checksum(parts[0].iov_base, parts[0].iov_len);
        return 0;
    }
    neap_sum *sum = neap_sum_create();
    if (!sum) return -ENOMEM;
    for (size_t i = 0; i < n; i++)
        neap_sum_feed(sum, parts[i].iov_base, parts[i].iov_len);
    *ret_checksum = neap_sum_value(sum);
    neap_sum_free(sum);
    return 0;
}

static int reserve_room(neap_swapfile *swapfile, neap_swap_record *record) {
    int err = 0;
    pthread_mutex_lock(&swapfile->lock);
    if (record->room > swapfile->limit_bytes ||
        swapfile->live_bytes > swapfile->limit_bytes - record->room)
        err = NEAP_E_BUDGET;
    else if (!swapfile->file)
        err = neap_file_open_swap(swapfile->dir, &swapfile->file);
    if (!err) extent_take(swapfile, record);
    pthread_mutex_unlock(&swapfile->lock);
    return err;
}

int neap_swapfile_put(neap_swapfile *swapfile, const struct iovec *parts, size_t n,
                      neap_swap_record **ret_record) {
    size_t len;
    int err = parts_len(parts, n, &len);
    if (err) return err;
    if (len == 0 || len > SIZE_MAX / 2) return len ? NEAP_E_BOUND : -EINVAL;
    neap_swap_record *record = calloc(1, sizeof *record);
    if (!record) return -ENOMEM;
    record->len = len;
    record->room = NEAP_ROUND_UP((uint64_t)len, NEAP_DIRECT_ALIGN);
    err = parts_checksum(parts, n, &record->checksum);
    if (!err) err = reserve_room(swapfile, record);
    if (err) {
        free(record);
        return err;
    }
    err = neap_file_write(swapfile->file, parts, n, record->offset);
    if (err) {
        extent_release(swapfile, record);
        return err;
    }
    pthread_mutex_lock(&swapfile->lock);
    swapfile->transit_bytes -= record->room;
    swapfile->written_bytes += len;
    record->next = swapfile->records;
    if (record->next) record->next->prev = record;
    swapfile->records = record;
    pthread_mutex_unlock(&swapfile->lock);
    *ret_record = record;
    return 0;
}

size_t neap_swap_record_len(const neap_swap_record *record) {
    return record->len;
}

static int ranges_read(neap_reader *reader, const neap_read_range *ranges, size_t n) {
    if (reader) return neap_reader_read(reader, ranges, n);
    int err = 0;
    for (size_t i = 0; i < n && !err; i++)
        err = neap_file_read(ranges[i].file, ranges[i].addr, ranges[i].len, ranges[i].offset);
    return err;
}

int neap_swapfile_get(neap_swapfile *swapfile, const neap_swap_record *record,
                      const struct iovec *parts, size_t n, neap_reader *reader) {
    size_t len;
    int err = parts_len(parts, n, &len);
    if (err) return err;
    if (len != record->len) return NEAP_E_BOUND;

    neap_read_range on_stack[RANGES_ON_STACK], *ranges = on_stack;
    if (n > RANGES_ON_STACK) ranges = malloc(n * sizeof *ranges);
    if (!ranges) return -ENOMEM;
    uint64_t offset = record->offset, checksum;
    for (size_t i = 0; i < n; i++) {
        ranges[i] = (neap_read_range){.file = swapfile->file,
                                      .addr = parts[i].iov_base,
                                      .len = parts[i].iov_len,
                                      .offset = offset};
        offset += parts[i].iov_len;
    }
    err = ranges_read(reader, ranges, n);
    if (!err) err = parts_checksum(parts, n, &checksum);
    if (!err && checksum != record->checksum) err = NEAP_E_CORRUPT;
    if (ranges != on_stack) free(ranges);
    return err;
}

void neap_swapfile_drop(neap_swapfile *swapfile, neap_swap_record *record) {
    if (!record) return;
    pthread_mutex_lock(&swapfile->lock);
    if (record->prev)
        record->prev->next = record->next;
    else
        swapfile->records = record->next;
    if (record->next) record->next->prev = record->prev;
    swapfile->transit_bytes += record->room;
    pthread_mutex_unlock(&swapfile->lock);
    extent_release(swapfile, record);
}

void neap_swapfile_usage(neap_swapfile *swapfile, uint64_t *ret_live, uint64_t *ret_limit) {
    pthread_mutex_lock(&swapfile->lock);
    *ret_live = swapfile->live_bytes;
    *ret_limit = swapfile->limit_bytes == UINT64_MAX ? 0 : swapfile->limit_bytes;
    pthread_mutex_unlock(&swapfile->lock);
}

uint64_t neap_swapfile_written(neap_swapfile *swapfile) {
    pthread_mutex_lock(&swapfile->lock);
    const uint64_t written = swapfile->written_bytes;
    pthread_mutex_unlock(&swapfile->lock);
    return written;
}

static void require(bool holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "neap: swap file: broken: %s\n", what);
    abort();
}

typedef struct span {
    uint64_t offset, room;
} span;

static int by_offset(const void *a, const void *b) {
    const uint64_t x = ((const span *)a)->offset, y = ((const span *)b)->offset;
    return (x > y) - (x < y);
}

/* Every extent that is not in transit, in order of offset, overlaps none. */
static void check_disjoint(const neap_swapfile *swapfile) {
    size_t n = 0, i = 0;
    const neap_swap_record *const lists[] = {swapfile->records, swapfile->free_extents};
    for (size_t list = 0; list < 2; list++)
        for (const neap_swap_record *at = lists[list]; at; at = at->next)
            n++;
    span *all = calloc(n + 1, sizeof *all);
    require(all != NULL, "memory for the check");
    for (size_t list = 0; list < 2; list++)
        for (const neap_swap_record *at = lists[list]; at; at = at->next)
            all[i++] = (span){at->offset, at->room};
    qsort(all, n, sizeof *all, by_offset);
    uint64_t end = 0;
    for (i = 0; i < n; i++) {
        require(all[i].offset >= end && all[i].room > 0, "extents are disjoint");
        require(all[i].offset % NEAP_DIRECT_ALIGN == 0 && all[i].room % NEAP_DIRECT_ALIGN == 0,
                "extents are whole blocks");
        end = all[i].offset + all[i].room;
    }
    require(end <= swapfile->end, "extents are inside the file");
    free(all);
}

void neap_swapfile_check(neap_swapfile *swapfile) {
    pthread_mutex_lock(&swapfile->lock);
    uint64_t live = swapfile->transit_bytes, free_bytes = 0;
    for (const neap_swap_record *at = swapfile->records; at; at = at->next) {
        require(!at->next || at->next->prev == at, "records are linked both ways");
        require(at->len <= at->room, "a record fits its extent");
        live += at->room;
    }
    for (const neap_swap_record *at = swapfile->free_extents; at; at = at->next) {
        const uint64_t end = at->offset + at->room;
        require(at->next ? end < at->next->offset : end < swapfile->end,
                "free extents are in order, merged, and none is the tail");
        free_bytes += at->room;
    }
    require(live == swapfile->live_bytes, "live bytes are the extents'");
    require(live <= swapfile->limit_bytes, "the limit is kept");
    require(live + free_bytes == swapfile->end, "extents cover the file");
    check_disjoint(swapfile);
    pthread_mutex_unlock(&swapfile->lock);
}
