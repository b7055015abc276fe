/* ring.c - the reader of file.h over io_uring. Ranges are cut into requests, kept
 * in flight up to the depth. What the ring cannot take (unaligned edges, files without direct I/O,
 * kernels without a ring) goes through neap_file_read.
 * Invariants
 *   1. read returns only when no request is in flight: the kernel writes into the caller's memory.
 *   2. n_flying + n_free == depth; a slot is in the ring or on the free list. */
#include "file.h"

#include <errno.h>
#include <liburing.h>
#include <stdlib.h>
#include <time.h>

#include "bytes.h"
#include "err.h"
#include "fault.h"
#include "file_int.h"

typedef struct slot {
    neap_read_range left; /* what this request has still to read */
} slot;

struct neap_reader {
    bool has_ring;
    struct io_uring ring;
    unsigned depth, n_free, n_flying;
    size_t request_bytes;
    slot *slots;
    unsigned *free_slots;
};

/* The aligned middle of the ranges, handed out block by block. */
typedef struct cursor {
    const neap_read_range *ranges;
    size_t n, at;
    size_t request_bytes;
    size_t done; /* bytes of ranges[at] handed out or read */
} cursor;

int neap_reader_create(unsigned depth, neap_reader **ret_reader) {
    neap_reader *reader = calloc(1, sizeof *reader);
    if (!reader) return -ENOMEM;
    reader->depth = depth > 0 ? depth : 1;
    reader->request_bytes = NEAP_IO_BLOCK;
    reader->slots = calloc(reader->depth, sizeof *reader->slots);
    reader->free_slots = calloc(reader->depth, sizeof *reader->free_slots);
    if (!reader->slots || !reader->free_slots) {
        neap_reader_free(reader);
        return -ENOMEM;
    }
    for (unsigned i = 0; i < reader->depth; i++)
        reader->free_slots[reader->n_free++] = i;

    int err = NEAP_FAULT("ring.init");
    if (!err) err = io_uring_queue_init(reader->depth, &reader->ring, 0);
    reader->has_ring = err == 0;
    if (err) neap_log(NEAP_LOG_DEBUG, "no io_uring (%s): plain reads", neap_strerror(err));
    *ret_reader = reader;
    return 0;
}

void neap_reader_set_request(neap_reader *reader, size_t bytes) {
    reader->request_bytes = bytes;
}

void neap_reader_free(neap_reader *reader) {
    if (!reader) return;
    if (reader->has_ring) io_uring_queue_exit(&reader->ring);
    free(reader->slots);
    free(reader->free_slots);
    free(reader);
}

static bool rings_well(const neap_read_range *range) {
    return atomic_load_explicit(&range->file->use_direct, memory_order_relaxed) &&
           ((uintptr_t)range->addr - range->offset) % NEAP_DIRECT_ALIGN == 0;
}

/* The next block for the ring; 0: none left. Reads on the way what does not go there. */
static int cursor_next(cursor *c, neap_read_range *ret_block, int *ret_err) {
    while (c->at < c->n) {
        const neap_read_range *range = &c->ranges[c->at];
        neap_read_range rest = *range;
        rest.addr = (char *)range->addr + c->done;
        rest.offset += c->done;
        rest.len -= c->done;
        const size_t edge = NEAP_ROUND_UP(rest.offset, NEAP_DIRECT_ALIGN) - rest.offset;
        size_t take = rest.len;
        if (rings_well(range) && edge == 0 && rest.len >= NEAP_DIRECT_ALIGN) {
            take = NEAP_ROUND_DOWN(rest.len, (size_t)NEAP_DIRECT_ALIGN);
            rest.len = take < c->request_bytes ? take : c->request_bytes;
            c->done += rest.len;
            *ret_block = rest;
            return 1;
        }
        if (rings_well(range) && edge != 0 && edge < take) take = edge;
        *ret_err = neap_file_read(rest.file, rest.addr, take, rest.offset);
        if (*ret_err) return 0;
        c->done += take;
        if (c->done == range->len) {
            c->at++;
            c->done = 0;
        }
    }
    return 0;
}

static void slot_submit(neap_reader *reader, unsigned index) {
    slot *s = &reader->slots[index];
    struct io_uring_sqe *sqe = io_uring_get_sqe(&reader->ring);
    /* The queue has depth entries and at most depth requests exist. */
    io_uring_prep_read(sqe, s->left.file->direct_fd, s->left.addr, (unsigned)s->left.len,
                       s->left.offset);
    io_uring_sqe_set_data64(sqe, index);
}

static void slot_release(neap_reader *reader, unsigned index) {
    reader->free_slots[reader->n_free++] = index;
    reader->n_flying--;
}

/* Takes one completion; the request may go on flying for its rest. */
static int slot_complete(neap_reader *reader, unsigned index, int res, bool may_resubmit) {
    slot *s = &reader->slots[index];
    int err = NEAP_FAULT("ring.read");
    if (err) res = err;
    const bool again = res == -EINTR || res == -EAGAIN;
    if (res > 0) {
        s->left.addr = (char *)s->left.addr + res;
        s->left.offset += (uint64_t)res;
        s->left.len -= (size_t)res;
    }
    if (s->left.len > 0 && may_resubmit &&
        (again || (res > 0 && (unsigned)res % NEAP_DIRECT_ALIGN == 0))) {
        slot_submit(reader, index);
        return 0;
    }
    const neap_read_range left = s->left;
    slot_release(reader, index);
    if (left.len == 0) return 0;
    /* Direct I/O refused after all: neap_file_read knows what to do. */
    if (res == -EINVAL) return neap_file_read(left.file, left.addr, left.len, left.offset);
    return res < 0 ? res : -EIO;
}

static void pause_briefly(void) {
    nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

/* Waits for the requests that the kernel has, whatever it takes. */
static void ring_drain(neap_reader *reader, unsigned n_submitted) {
    while (n_submitted > 0) {
        struct io_uring_cqe *cqe = NULL;
        if (io_uring_peek_cqe(&reader->ring, &cqe) != 0 &&
            io_uring_wait_cqe(&reader->ring, &cqe) != 0) {
            pause_briefly();
            continue;
        }
        io_uring_cqe_seen(&reader->ring, cqe);
        n_submitted--;
    }
}

/* The ring failed: gives it up for good, with nothing left in flight. */
static void ring_abandon(neap_reader *reader, int err) {
    ring_drain(reader, reader->n_flying - io_uring_sq_ready(&reader->ring));
    io_uring_queue_exit(&reader->ring);
    reader->has_ring = false;
    reader->n_free = reader->n_flying = 0;
    for (unsigned i = 0; i < reader->depth; i++)
        reader->free_slots[reader->n_free++] = i;
    neap_log(NEAP_LOG_WARN, "io_uring failed (%s): plain reads from now on", neap_strerror(err));
}

static int ring_submit_and_wait(neap_reader *reader) {
    int err = NEAP_FAULT("ring.submit");
    if (!err) err = io_uring_submit_and_wait(&reader->ring, 1);
    if (err == -EINTR) return 0;
    if (err == -EAGAIN || err == -EBUSY) { /* short of memory, or of room for completions */
        pause_briefly();
        return 0;
    }
    return err < 0 ? err : 0;
}

/* *ret_broken: the ring is gone and the ranges must be read without it. */
static int ring_read(neap_reader *reader, const neap_read_range *ranges, size_t n,
                     bool *ret_broken) {
    cursor c = {.ranges = ranges, .n = n, .request_bytes = reader->request_bytes};
    int err = 0;
    for (;;) {
        neap_read_range block;
        int edge_err = 0;
        while (!err && reader->n_free > 0 && cursor_next(&c, &block, &edge_err)) {
            const unsigned index = reader->free_slots[--reader->n_free];
            reader->n_flying++;
            reader->slots[index].left = block;
            slot_submit(reader, index);
        }
        if (!err) err = edge_err;
        if (reader->n_flying == 0) return err;

        const int ring_err = ring_submit_and_wait(reader);
        if (ring_err) {
            ring_abandon(reader, ring_err);
            *ret_broken = true;
            return 0;
        }
        struct io_uring_cqe *cqe = NULL;
        while (io_uring_peek_cqe(&reader->ring, &cqe) == 0) {
            const unsigned index = (unsigned)io_uring_cqe_get_data64(cqe);
            const int res = cqe->res;
            io_uring_cqe_seen(&reader->ring, cqe);
            const int slot_err = slot_complete(reader, index, res, err == 0);
            if (!err) err = slot_err;
        }
    }
}

int neap_reader_read(neap_reader *reader, const neap_read_range *ranges, size_t n) {
    if (reader->has_ring) {
        bool broken = false;
        const int err = ring_read(reader, ranges, n, &broken);
        if (!broken) return err;
    }
    for (size_t i = 0; i < n; i++) {
        const int err =
            neap_file_read(ranges[i].file, ranges[i].addr, ranges[i].len, ranges[i].offset);
        if (err) return err;
    }
    return 0;
}
