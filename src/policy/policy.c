/* policy.c - the registry of policies. */
#include "policy.h"

#include <string.h>

#include "policy_int.h"

static const neap_policy *const policies[] = {
    &neap_policy_hybrid,
    &neap_policy_partial_offload,
    &neap_policy_memory_only,
    &neap_policy_storage_only,
    &neap_policy_forward_out,
    &neap_policy_random_out,
    &neap_policy_lru,
    &neap_policy_mz_no,
    &neap_policy_mz_ar,
    &neap_policy_mz_rp,
    &neap_policy_random_out_layers,
};

const neap_policy *neap_policy_at(size_t i) {
    return i < sizeof policies / sizeof policies[0] ? policies[i] : NULL;
}

const neap_policy *neap_policy_find(const char *name) {
    for (size_t i = 0; name && neap_policy_at(i); i++)
        if (strcmp(policies[i]->name, name) == 0) return policies[i];
    return NULL;
}
