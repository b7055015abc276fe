/* region.c - reserved address ranges, and scratch memory that need not outlive a use. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "bytes.h"
#include "core_int.h"
#include "vm.h"

static void advise(const neap_region *region) {
    if (region->kind == NEAP_REGION_WEIGHTS) neap_vm_huge(region->base, region->size, true);
    if (region->kind == NEAP_REGION_KV) neap_vm_huge(region->base, region->size, false);
}

int neap_region_create(neap_engine *engine, size_t size, int kind, neap_region **ret_region) {
    const size_t page = neap_vm_page();
    if (size == 0 || kind < NEAP_REGION_WEIGHTS || kind > NEAP_REGION_SCRATCH) return -EINVAL;
    if (size > SIZE_MAX - page) return -ENOMEM;
    neap_region *region = calloc(1, sizeof *region);
    if (!region) return -ENOMEM;
    region->engine = engine;
    region->kind = kind;
    region->size = NEAP_ROUND_UP(size, page);
    void *base;
    region->is_given =
        engine->region_alloc &&
        engine->region_alloc(engine->region_ctx, region->size, NEAP_HUGE_PAGE, &base) == 0;
    const int err = region->is_given ? 0 : neap_vm_reserve(region->size, NEAP_HUGE_PAGE, &base);
    if (err) {
        free(region);
        return err;
    }
    region->base = base;
    advise(region);
    pthread_mutex_lock(&engine->pool->lock);
    region->next = engine->regions;
    engine->regions = region;
    pthread_mutex_unlock(&engine->pool->lock);
    *ret_region = region;
    return 0;
}

void *neap_region_base(const neap_region *region) {
    return region->base;
}

size_t neap_region_size(const neap_region *region) {
    return region->size;
}

void neap_region_set_kind(neap_region *region, int kind) {
    pthread_mutex_lock(&region->engine->pool->lock);
    region->kind = kind;
    advise(region);
    pthread_mutex_unlock(&region->engine->pool->lock);
}

void neap_region_free(neap_region *region) {
    if (!region) return;
    neap_engine *engine = region->engine;
    neap_alone_begin(engine, false);
    pthread_mutex_lock(&engine->pool->lock);
    neap_pipeline_quiesce(engine->pipeline);
    for (neap_region **at = &engine->regions; *at; at = &(*at)->next) {
        if (*at == region) {
            *at = region->next;
            break;
        }
    }
    pthread_mutex_unlock(&engine->pool->lock);
    neap_pool_remove_region(engine->pool, region, (neap_span){region->base, region->size});
    neap_alone_end(engine);
    if (region->is_given) {
        /* Evicted parts may be poisoned; what stays so is lost, not handed on. */
        if (neap_vm_protect(region->base, region->size, true) == 0)
            engine->region_free(engine->region_ctx, region->base);
    } else {
        neap_vm_unmap(region->base, region->size);
    }
    free(region->held);
    free(region);
}

neap_region *neap_region_of(const neap_engine *engine, const void *addr, size_t len) {
    for (neap_region *region = engine->regions; region; region = region->next) {
        const uintptr_t base = (uintptr_t)region->base, at = (uintptr_t)addr;
        if (at >= base && at - base <= region->size && len <= region->size - (at - base))
            return region;
    }
    return NULL;
}

/* ---- scratch ---- */

static int by_offset(const void *a, const void *b) {
    const uint64_t *x = a, *y = b;
    return x[0] < y[0] ? -1 : x[0] > y[0];
}

int neap_scratch_hold(neap_region *region, const uint64_t (*offsets_lens)[2], size_t n) {
    uint64_t(*held)[2] = malloc((n + 1) * sizeof *held);
    if (!held) return -ENOMEM;
    for (size_t i = 0; i < n; i++) {
        held[i][0] = offsets_lens[i][0];
        held[i][1] = offsets_lens[i][1];
        if (held[i][0] > region->size || held[i][1] > region->size - held[i][0]) {
            free(held);
            return NEAP_E_BOUND;
        }
    }
    qsort(held, n, sizeof *held, by_offset);
    pthread_mutex_lock(&region->engine->pool->lock);
    const int err = region->kind == NEAP_REGION_SCRATCH ? 0 : -EINVAL;
    if (!err) {
        uint64_t(*before)[2] = region->held;
        region->held = held;
        region->n_held = n;
        region->may_release = true;
        held = before;
    }
    pthread_mutex_unlock(&region->engine->pool->lock);
    free(held);
    return err;
}

/* Releases the whole pages of [begin, end). */
static uint64_t drop_between(const neap_region *region, uint64_t begin, uint64_t end) {
    const size_t page = neap_vm_page();
    begin = NEAP_ROUND_UP(begin, page);
    end = NEAP_ROUND_DOWN(end, page);
    uint64_t held = 0;
    if (begin >= end || neap_vm_held(region->base + begin, end - begin, &held) != 0 || held == 0)
        return 0;
    return neap_vm_drop(region->base + begin, end - begin) == 0 ? held : 0;
}

uint64_t neap_scratch_release(neap_engine *engine) {
    uint64_t released = 0;
    for (const neap_region *region = engine->regions; region; region = region->next) {
        if (region->kind != NEAP_REGION_SCRATCH || !region->may_release) continue;
        uint64_t from = 0;
        for (size_t i = 0; i < region->n_held; i++) {
            released += drop_between(region, from, region->held[i][0]);
            const uint64_t end = region->held[i][0] + region->held[i][1];
            if (end > from) from = end;
        }
        released += drop_between(region, from, region->size);
    }
    return released;
}

uint64_t neap_scratch_held_bytes(neap_engine *engine) {
    uint64_t total = 0;
    for (const neap_region *region = engine->regions; region; region = region->next) {
        uint64_t held = 0;
        if (region->kind == NEAP_REGION_SCRATCH &&
            neap_vm_held(region->base, region->size, &held) == 0)
            total += held;
    }
    return total;
}
