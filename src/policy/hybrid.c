/* hybrid.c - Algorithm 1 of mzCache (section 4.3): which units go, and chunks to which path.
 *
 * A restore runs over two paths at once: storage reads and in-memory decoding. With the mean sizes
 * of the units and the two rates, t_dkv and t_rkv are the times to bring a chunk back by decoding
 * and by reading what lies on storage, t_rw the time to read a weight unit. per_layer = floor(t_rw
 * / t_dkv) chunks keep the decoder busy while one weight unit is read; T = weight units *
 * per_layer.
 *
 *   KVonly   more than T chunks left: each goes to the path that would be done with it first, which
 *            splits them in inverse proportion to t_dkv : t_rkv, evenly at every step
 *   KVandW   per_layer chunks to memory, then a weight unit, and so on; to a weight unit that is
 *            larger or smaller than the mean belong more or fewer
 *   Wonly    no chunk left: weight units
 *   CompKV   nothing else left: encoded chunks leave memory for storage
 *
 * The totals of the algorithm (T, the chunks and weight units there were) are the units given plus
 * those that earlier calls evicted, so that many small evictions place what one large one would.
 * In KVandW chunks go before their weight unit: a small request then takes a chunk, not a layer.
 *
 * What releases nothing is left alone. A chunk that is clean, or that the codec does not make
 * smaller, takes the storage path whatever the stage says.
 *
 * Memory: steps has room for 2 n. The first part holds the plan, as indices of units until the end;
 * the last n entries hold the sorted candidates: [chunks][weights] ... [chunks in memory]. The plan
 * of the first three stages has at most (chunks + weights) steps and stays below them. CompKV
 * writes over the first two lists and never over an entry of the third that it has not read. */
#include <stdlib.h>

#include "policy_int.h"
#include "profile.h"

typedef struct plan {
    const neap_policy_input *input;
    neap_step *steps;
    size_t n_steps;
    neap_placement placement;
    uint64_t released_bytes;
    const neap_step *kv, *weights, *in_memory; /* what is left of the sorted candidates */
    size_t n_kv, n_weights, n_in_memory;
    size_t kv_total, weights_total, threshold, per_layer;
    size_t kv_memory, kv_storage; /* evicted chunks on either path, earlier ones included */
    double weights_dropped;       /* earlier ones included, in weight units of mean size */
    double mean_weight_bytes;
    double decode_kv_s, read_kv_s, read_weight_s;
} plan;

static uint32_t hash(uint32_t x) {
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

int neap_order_compare(const void *a, const void *b, void *context) {
    const neap_order_context *c = context;
    const neap_policy_unit *x = &c->input->units[((const neap_step *)a)->id];
    const neap_policy_unit *y = &c->input->units[((const neap_step *)b)->id];
    if (c->order == NEAP_ORDER_RANDOM && hash(x->id) != hash(y->id))
        return hash(x->id) < hash(y->id) ? -1 : 1;
    if (c->order == NEAP_ORDER_USE && x->last_use != y->last_use)
        return x->last_use < y->last_use ? -1 : 1;
    const bool foremost = c->order == NEAP_ORDER_FORWARD || c->order == NEAP_ORDER_USE;
    int sign = foremost ? -1 : 1; /* of "the rearmost first" */
    if (x->layer != y->layer) return x->layer > y->layer ? -sign : sign;
    if (x->is_kv != y->is_kv) return x->is_kv ? 1 : -1;
    if (x->stream != y->stream) return x->stream > y->stream ? -sign : sign;
    if (x->chunk != y->chunk) return x->chunk > y->chunk ? -sign : sign;
    return x->id == y->id ? 0 : x->id > y->id ? -sign : sign;
}

/* Sorts the units that release anything into the three lists; returns the mean times. */
static void plan_init(plan *p, neap_order order) {
    const neap_policy_input *in = p->input;
    size_t n_kv = 0, n_weights = 0, n_in_memory = 0;
    double kv_bytes = 0, kv_stored_bytes = 0, weight_bytes = (double)in->weight_bytes_evicted;
    for (size_t i = 0; i < in->n; i++) {
        const neap_policy_unit *unit = &in->units[i];
        if (unit->release_bytes == 0) continue;
        n_in_memory += unit->in_memory;
        n_kv += !unit->in_memory && unit->is_kv;
        n_weights += !unit->in_memory && !unit->is_kv;
        *(unit->is_kv ? &kv_bytes : &weight_bytes) += (double)unit->raw_bytes;
        if (unit->is_kv)
            kv_stored_bytes += (double)(unit->stored_bytes ? unit->stored_bytes : unit->raw_bytes);
    }
    neap_step *kv = p->steps + in->n, *weights = kv + n_kv, *in_memory = kv + in->n - n_in_memory;
    p->kv = kv, p->weights = weights, p->in_memory = in_memory;
    for (size_t i = 0; i < in->n; i++) {
        const neap_policy_unit *unit = &in->units[i];
        if (unit->release_bytes == 0) continue;
        neap_step **list = unit->in_memory ? &in_memory : unit->is_kv ? &kv : &weights;
        *(*list)++ = (neap_step){.id = (neap_unit_id)i};
    }
    neap_order_context context = {in, order};
    qsort_r(kv - n_kv, n_kv, sizeof *kv, neap_order_compare, &context);
    qsort_r(weights - n_weights, n_weights, sizeof *kv, neap_order_compare, &context);
    qsort_r(in_memory - n_in_memory, n_in_memory, sizeof *kv, neap_order_compare, &context);
    p->n_kv = n_kv, p->n_weights = n_weights, p->n_in_memory = n_in_memory;

    double read_rate = in->read_rate ? (double)in->read_rate : NEAP_DEFAULT_READ_BPS;
    double decode_rate = in->decode_rate ? (double)in->decode_rate : NEAP_DEFAULT_DECODE_BPS;
    const double n_chunks = n_kv + n_in_memory ? (double)(n_kv + n_in_memory) : 1;
    const size_t weights_total = n_weights + in->n_weights_evicted;
    p->mean_weight_bytes = weights_total ? weight_bytes / (double)weights_total : 0;
    if (p->mean_weight_bytes > 0)
        p->weights_dropped = (double)in->weight_bytes_evicted / p->mean_weight_bytes;
    p->read_weight_s = p->mean_weight_bytes / read_rate;
    p->decode_kv_s = kv_bytes / n_chunks / decode_rate;
    p->read_kv_s = kv_stored_bytes / n_chunks / read_rate;
}

/* Totals and the threshold, from what is left and what earlier calls evicted. */
static void plan_totals(plan *p) {
    p->kv_memory = p->n_in_memory;
    p->kv_storage = p->input->n_kv_on_storage;
    p->kv_total = p->n_kv + p->kv_memory + p->kv_storage;
    p->weights_total = p->n_weights + p->input->n_weights_evicted;
    /* No weights to drop: nothing to set chunks aside for. */
    bool pairs = p->n_weights > 0 && p->decode_kv_s > 0;
    double per_layer = pairs ? p->read_weight_s / p->decode_kv_s : 0;
    per_layer *= 1 + 1e-9; /* a quotient that is whole in decimals may come out just below */
    p->per_layer = per_layer < 1e9 ? (size_t)per_layer : (size_t)1e9;
    p->threshold = p->weights_total * p->per_layer;
}

static void add_step(plan *p, neap_unit_id index, neap_action action, uint64_t release_bytes) {
    p->steps[p->n_steps++] = (neap_step){.id = index, .action = action};
    p->released_bytes += release_bytes;
}

static void evict_weights(plan *p) {
    const neap_policy_unit *unit = &p->input->units[p->weights->id];
    neap_unit_id index = p->weights->id;
    p->weights++, p->n_weights--;
    p->weights_dropped += (double)unit->raw_bytes / p->mean_weight_bytes;
    add_step(p, index, unit->is_clean ? NEAP_ACTION_DROP : NEAP_ACTION_TO_STORAGE,
             unit->release_bytes);
}

static void evict_chunk(plan *p, bool to_memory) {
    const neap_policy_unit *unit = &p->input->units[p->kv->id];
    neap_unit_id index = p->kv->id;
    p->kv++, p->n_kv--;
    bool fits = p->input->memory_useful && unit->encoded_bytes < unit->release_bytes;
    if (p->placement == NEAP_PLACE_MEMORY) to_memory = true;
    if (p->placement == NEAP_PLACE_STORAGE) to_memory = false;
    if (unit->is_clean || !to_memory || !fits) {
        p->kv_storage++;
        add_step(p, index, unit->is_clean ? NEAP_ACTION_DROP : NEAP_ACTION_TO_STORAGE,
                 unit->release_bytes);
    } else {
        p->kv_memory++;
        add_step(p, index, NEAP_ACTION_TO_MEMORY, unit->release_bytes - unit->encoded_bytes);
    }
}

/* Whether decoding one chunk more would end no later than reading one more. */
static bool memory_ends_first(const plan *p) {
    double decode_s = (double)(p->kv_memory + 1) * p->decode_kv_s;
    double read_s =
        (double)(p->kv_storage + 1) * p->read_kv_s + p->weights_dropped * p->read_weight_s;
    return decode_s <= read_s;
}

/* Whether the next weight unit still lacks chunks evicted in KVandW to be paired with. */
static bool lacks_chunks(const plan *p) {
    size_t first = p->kv_total < p->threshold ? p->kv_total : p->threshold;
    const neap_policy_unit *next = &p->input->units[p->weights->id];
    double dropped = p->weights_dropped + (double)next->raw_bytes / p->mean_weight_bytes;
    /* Sums of shares may come out just above a whole. */
    return (double)(first - p->n_kv) < (double)p->per_layer * dropped * (1 - 1e-9);
}

/* Moves encoded chunks to storage: those of this plan and those of earlier ones, merged in order.
 */
static void plan_compkv(plan *p, neap_order order) {
    neap_order_context context = {p->input, order};
    size_t planned = p->n_steps, next = 0;
    while (p->released_bytes < p->input->target_bytes) {
        while (next < planned && p->steps[next].action != NEAP_ACTION_TO_MEMORY)
            next++;
        if (next == planned && p->n_in_memory == 0) break;
        bool ours =
            p->n_in_memory == 0 ||
            (next < planned && neap_order_compare(&p->steps[next], p->in_memory, &context) < 0);
        neap_unit_id index = ours ? p->steps[next++].id : p->in_memory->id;
        if (!ours) p->in_memory++, p->n_in_memory--;
        const neap_policy_unit *unit = &p->input->units[index];
        add_step(p, index, NEAP_ACTION_MEMORY_TO_STORAGE,
                 ours ? unit->encoded_bytes : unit->release_bytes);
    }
}

size_t neap_plan_staged(const neap_policy_input *input, neap_step *steps, neap_stage *ret_stage,
                        neap_order order, neap_placement placement) {
    plan p = {.input = input, .steps = steps, .placement = placement};
    neap_stage stage = NEAP_STAGE_NONE;
    if (input->n > 0) plan_init(&p, order);
    plan_totals(&p);
    while (p.released_bytes < input->target_bytes && p.n_kv + p.n_weights > 0) {
        if (p.n_kv > p.threshold || p.n_weights == 0) {
            stage = NEAP_STAGE_KVONLY;
            evict_chunk(&p, memory_ends_first(&p));
        } else if (p.n_kv > 0) {
            stage = NEAP_STAGE_KVANDW;
            if (lacks_chunks(&p))
                evict_chunk(&p, true);
            else
                evict_weights(&p);
        } else {
            bool paired = p.per_layer > 0 && !lacks_chunks(&p); /* the last one of KVandW */
            stage = paired ? NEAP_STAGE_KVANDW : NEAP_STAGE_WONLY;
            evict_weights(&p);
        }
    }
    size_t before = p.n_steps;
    plan_compkv(&p, order);
    if (p.n_steps > before) stage = NEAP_STAGE_COMPKV;
    for (size_t i = 0; i < p.n_steps; i++)
        steps[i].id = input->units[steps[i].id].id;
    *ret_stage = stage;
    return p.n_steps;
}

size_t neap_plan_hybrid(const neap_policy_input *input, neap_step *steps, neap_stage *ret_stage) {
    return neap_plan_staged(input, steps, ret_stage, NEAP_ORDER_BACKWARD, NEAP_PLACE_BALANCED);
}

const neap_policy neap_policy_hybrid = {
    .name = "hybrid",
    .overlap = true,
    .plan = neap_plan_hybrid,
};
