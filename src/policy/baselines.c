/* baselines.c - what hybrid is compared with.
 *   partial-offload   mzCache's baseline: whole layers, weights and chunks together, from the back,
 *                     to storage; a request waits for all of them
 *   memory-only, storage-only   hybrid's stages with all chunks on one path
 *   forward-out, random-out, lru   hybrid's placement in another order (section 4.4); the random
 *                               one is a fixed hash of the unit's id
 *   random-out-layers           random-out, and an attention waits for all chunks of its layer, as
 *                               in the paper: some chunks of every layer being away, what beginning
 *                               on those that are there gains
 *   mz-no, mz-ar, mz-rp         hybrid with less overlap of allocation, reload and prefill (section
 *                               6.3): none, the first two, the last two; hybrid itself is mz-arp */
#include <stdlib.h>

#include "policy_int.h"

static neap_action offload_action(const neap_policy_unit *unit) {
    if (unit->in_memory) return NEAP_ACTION_MEMORY_TO_STORAGE;
    return unit->is_clean ? NEAP_ACTION_DROP : NEAP_ACTION_TO_STORAGE;
}

static size_t plan_partial_offload(const neap_policy_input *input, neap_step *steps,
                                   neap_stage *ret_stage) {
    size_t n = 0, n_planned = 0, n_kv = 0;
    uint64_t released_bytes = 0;
    for (size_t i = 0; i < input->n; i++)
        if (input->units[i].release_bytes > 0) steps[n++] = (neap_step){.id = (neap_unit_id)i};
    neap_order_context context = {input, NEAP_ORDER_BACKWARD};
    if (n > 0) qsort_r(steps, n, sizeof *steps, neap_order_compare, &context);
    /* The candidates become the plan in place; a layer that was begun is finished. */
    int layer = 0;
    for (; n_planned < n; n_planned++) {
        const neap_policy_unit *unit = &input->units[steps[n_planned].id];
        bool begun = n_planned > 0 && unit->layer == layer;
        if (!begun && released_bytes >= input->target_bytes) break;
        layer = unit->layer;
        steps[n_planned] = (neap_step){.id = unit->id, .action = offload_action(unit)};
        released_bytes += unit->release_bytes;
        n_kv += unit->is_kv;
    }
    *ret_stage = n_planned == 0      ? NEAP_STAGE_NONE
                 : n_kv == 0         ? NEAP_STAGE_WONLY
                 : n_kv == n_planned ? NEAP_STAGE_KVONLY
                                     : NEAP_STAGE_KVANDW;
    return n_planned;
}

static size_t plan_forward_out(const neap_policy_input *input, neap_step *steps,
                               neap_stage *ret_stage) {
    return neap_plan_staged(input, steps, ret_stage, NEAP_ORDER_FORWARD, NEAP_PLACE_BALANCED);
}

static size_t plan_random_out(const neap_policy_input *input, neap_step *steps,
                              neap_stage *ret_stage) {
    return neap_plan_staged(input, steps, ret_stage, NEAP_ORDER_RANDOM, NEAP_PLACE_BALANCED);
}

static size_t plan_lru(const neap_policy_input *input, neap_step *steps, neap_stage *ret_stage) {
    return neap_plan_staged(input, steps, ret_stage, NEAP_ORDER_USE, NEAP_PLACE_BALANCED);
}

static size_t plan_memory_only(const neap_policy_input *input, neap_step *steps,
                               neap_stage *ret_stage) {
    return neap_plan_staged(input, steps, ret_stage, NEAP_ORDER_BACKWARD, NEAP_PLACE_MEMORY);
}

static size_t plan_storage_only(const neap_policy_input *input, neap_step *steps,
                                neap_stage *ret_stage) {
    return neap_plan_staged(input, steps, ret_stage, NEAP_ORDER_BACKWARD, NEAP_PLACE_STORAGE);
}

const neap_policy neap_policy_partial_offload = {
    .name = "partial-offload",
    .allocate_first = true,
    .sequential = true,
    .clean_storage = true,
    .plan = plan_partial_offload,
};

const neap_policy neap_policy_forward_out = {
    .name = "forward-out",
    .overlap = true,
    .plan = plan_forward_out,
};

const neap_policy neap_policy_random_out = {
    .name = "random-out",
    .overlap = true,
    .plan = plan_random_out,
};

const neap_policy neap_policy_random_out_layers = {
    .name = "random-out-layers",
    .overlap = true,
    .whole_layers = true,
    .plan = plan_random_out,
};

const neap_policy neap_policy_lru = {
    .name = "lru",
    .overlap = true,
    .by_use = true,
    .plan = plan_lru,
};

const neap_policy neap_policy_mz_no = {
    .name = "mz-no",
    .allocate_first = true,
    .plan = neap_plan_hybrid,
};

const neap_policy neap_policy_mz_ar = {
    .name = "mz-ar",
    .plan = neap_plan_hybrid,
};

const neap_policy neap_policy_mz_rp = {
    .name = "mz-rp",
    .overlap = true,
    .allocate_first = true,
    .plan = neap_plan_hybrid,
};

const neap_policy neap_policy_memory_only = {
    .name = "memory-only",
    .overlap = true,
    .plan = plan_memory_only,
};

const neap_policy neap_policy_storage_only = {
    .name = "storage-only",
    .overlap = true,
    .plan = plan_storage_only,
};
