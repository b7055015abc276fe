/* memory_copy.c - coded copies of KV chunks that stay in the chunks' own pages.
 *
 *   pages in use of a chunk   | K K K K K K K K | V V V V V V V V |
 *   evicted, coded by q8      | coded ........  | .- - - - - - - -|     -: given back
 *                              kept              kept  spare
 *
 * Committing pages is what costs most of a copy on the stack: its own pages at the eviction, and
 * all of the chunk's at the restoration. A copy in place commits none, then only those that it did
 * not take. Its bytes lie in the first pages that hold cells in use, plane after plane; they come
 * there and leave through a buffer that lies in a cache, since what is coded from or decoded to is
 * the same memory.
 *
 * The stack is for chunks that have none or too few pages of their own, and for machines that
 * prefer huge pages: of one of which a part is kept nothing would come back. */
#include <string.h>

#include "pool_int.h"

/* From here on a copy's last page, which it may fill to a little only, does not matter. */
enum { MIN_PAGES = 16 };

bool neap_kv_fits_in_place(const neap_unit *unit) {
    return !unit->kv->whole_streams && !neap_vm_prefers_huge() &&
           neap_kv_unit_size(unit).evictable >= MIN_PAGES * neap_vm_page();
}

uint64_t neap_unit_memory_bytes(const neap_unit *unit) {
    const size_t len = unit->memory.len;
    return unit->memory.stack ? len : NEAP_ROUND_UP(len, neap_vm_page());
}

neap_span neap_kv_unit_kept(const neap_unit *unit, size_t plane) {
    size_t left = neap_unit_in_place(unit) ? neap_unit_memory_bytes(unit) : 0;
    for (size_t i = 0;; i++) {
        neap_span span = neap_kv_unit_in_use(unit, i);
        if (span.len > left) span.len = left;
        if (i == plane) return span;
        left -= span.len;
    }
}

neap_span neap_kv_unit_spare(const neap_unit *unit, size_t plane) {
    const neap_span inner = neap_kv_unit_inner(unit, plane);
    const size_t kept = neap_kv_unit_kept(unit, plane).len;
    return (neap_span){inner.addr + kept, inner.len - kept};
}

size_t neap_kv_copy_parts(const neap_unit *unit, struct iovec parts[2]) {
    size_t n = 0, left = unit->memory.len;
    for (size_t i = 0; i < unit->kv->layout.n_planes && left > 0; i++) {
        const neap_span kept = neap_kv_unit_kept(unit, i);
        const size_t len = kept.len < left ? kept.len : left;
        if (len > 0) parts[n++] = (struct iovec){kept.addr, len};
        left -= len;
    }
    return n;
}

void neap_kv_copy_write(const neap_unit *unit, const void *coded) {
    struct iovec parts[2];
    const size_t n = neap_kv_copy_parts(unit, parts);
    for (size_t i = 0, at = 0; i < n; at += parts[i++].iov_len)
        memcpy(parts[i].iov_base, (const char *)coded + at, parts[i].iov_len);
}

void neap_kv_copy_read(const neap_unit *unit, void *coded) {
    struct iovec parts[2];
    const size_t n = neap_kv_copy_parts(unit, parts);
    for (size_t i = 0, at = 0; i < n; at += parts[i++].iov_len)
        memcpy((char *)coded + at, parts[i].iov_base, parts[i].iov_len);
}

void neap_kv_copy_drop(const neap_unit *unit, uint64_t *inout_dropped) {
    for (size_t i = 0; i < unit->kv->layout.n_planes; i++) {
        const neap_span kept = neap_kv_unit_kept(unit, i);
        if (kept.len == 0) continue;
        const int err = neap_vm_drop(kept.addr, kept.len);
        if (!err) {
            *inout_dropped += kept.len;
        } else {
            neap_log(NEAP_LOG_WARN, "memory of a chunk not released: %s", neap_strerror(err));
            memset(kept.addr, 0, kept.len);
        }
    }
}
