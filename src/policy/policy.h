/* policy.h - which units to evict, where to, and in which order. Pure: plain structs in and out.
 * Source    mzCache (arXiv 2609.01338) section 4.3, Algorithm 1; section 4.4. */
#ifndef NEAP_POLICY_H
#define NEAP_POLICY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "neap.h"

typedef enum neap_action {
    NEAP_ACTION_DROP,              /* clean: a copy exists on storage; only release */
    NEAP_ACTION_TO_MEMORY,         /* encode, the copy stays in memory */
    NEAP_ACTION_TO_STORAGE,        /* write to the swap file */
    NEAP_ACTION_MEMORY_TO_STORAGE, /* CompKV: move the encoded chunk from memory to the swap file */
} neap_action;

typedef struct neap_policy_unit {
    neap_unit_id id;
    bool is_kv, is_clean, in_memory; /* in_memory: evicted, encoded in memory */
    int layer;
    uint32_t stream, chunk;
    uint64_t release_bytes; /* what releasing its pages gives back (for in_memory: encoded bytes) */
    uint64_t raw_bytes;     /* bytes to restore */
    uint64_t encoded_bytes; /* expected size of a copy in memory; 0 for weights */
    uint64_t stored_bytes;  /* expected size on storage; 0: raw_bytes */
    uint64_t last_use;      /* number of the last graph that needed it; 0: none, or not counted */
} neap_policy_unit;

typedef struct neap_policy_input {
    const neap_policy_unit *units; /* resident or in_memory, any order */
    size_t n;
    uint64_t target_bytes;
    /* profile.h, bytes per second: reading storage, decoding (of raw bytes). 0: defaults. */
    uint64_t read_rate, decode_rate;
    bool memory_useful; /* the codec makes chunks smaller; false for none: all KV goes to storage */
    /* Evicted by earlier calls and so not among the units: weight units, and KV units whose restore
     * reads storage. With them Algorithm 1 goes on where the earlier call stopped; 0 starts anew.
     */
    size_t n_weights_evicted, n_kv_on_storage;
    uint64_t weight_bytes_evicted;
} neap_policy_input;

typedef struct neap_step {
    neap_unit_id id;
    neap_action action;
    bool together; /* for whoever carries it out: stands for several units; plans leave it false */
} neap_step;

typedef struct neap_policy {
    const char *name;
    bool overlap;        /* compute starts while units are still on their way */
    bool allocate_first; /* the pages of all are committed before any is filled */
    bool sequential;     /* one thread fills them, one after the other */
    bool clean_storage;  /* KV goes to storage uncompressed */
    bool whole_layers;   /* an attention begins when all chunks of its layer are back */
    bool by_use;         /* plan wants last_use */
    /* Fills steps (room for 2 * n) in the order of execution until their expected release reaches
     * the target or nothing is left; returns their number and the stage reached. */
    size_t (*plan)(const neap_policy_input *input, neap_step *steps, neap_stage *ret_stage);
} neap_policy;

const neap_policy *neap_policy_find(const char *name); /* NULL when unknown */
const neap_policy *neap_policy_at(size_t i);           /* NULL past the end */
#endif
