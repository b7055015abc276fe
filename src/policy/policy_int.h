/* policy_int.h - the staged planner behind hybrid and its ablations, and the policies themselves.
 */
#ifndef NEAP_POLICY_INT_H
#define NEAP_POLICY_INT_H

#include "policy.h"

typedef enum neap_order {
    NEAP_ORDER_BACKWARD,
    NEAP_ORDER_FORWARD,
    NEAP_ORDER_RANDOM,
    NEAP_ORDER_USE, /* least recently used first; what one graph needed, in the order of need */
} neap_order;
typedef enum neap_placement {
    NEAP_PLACE_BALANCED, /* Algorithm 1 */
    NEAP_PLACE_MEMORY,   /* every chunk that the codec makes smaller goes to memory */
    NEAP_PLACE_STORAGE,
} neap_placement;

/* Algorithm 1 with this order and placement; otherwise as neap_policy.plan. */
size_t neap_plan_staged(const neap_policy_input *input, neap_step *steps, neap_stage *ret_stage,
                        neap_order order, neap_placement placement);

/* The order of units as qsort_r wants it: a and b are neap_steps whose id is an index into
 * context's input. Weights come before the chunks of their layer. */
typedef struct neap_order_context {
    const neap_policy_input *input;
    neap_order order;
} neap_order_context;
int neap_order_compare(const void *a, const void *b, void *context);

/* As neap_policy.plan: the whole of Algorithm 1, backward-out. */
size_t neap_plan_hybrid(const neap_policy_input *input, neap_step *steps, neap_stage *ret_stage);

extern const neap_policy neap_policy_hybrid, neap_policy_partial_offload, neap_policy_forward_out,
    neap_policy_random_out, neap_policy_lru, neap_policy_memory_only, neap_policy_storage_only,
    neap_policy_mz_no, neap_policy_mz_ar, neap_policy_mz_rp, neap_policy_random_out_layers;
#endif
