/* select.c - see select.h.
 *
 * The buffer, [cell][KV head][element] for K and for V, has three parts: slots of the spans that
 * were chosen, slots of outliers, and a ring of the window's spans. A KV head's column of a slot is
 * its own: heads choose different spans.
 *
 *   append -> window -> outlier        of each head the least similar so far; exact
 *                    -> pool           all others: what a step chooses from
 *
 * Invariants
 *  1. All heads have the same number of outliers, and so of spans to choose from: each span that
 *     leaves the window is offered to all of them, and truncating evens them out. What of the
 *     buffer is visible is one mask for all heads.
 *  2. slots[head][s] names the span that is whole in slot s, or NONE.
 *  3. A span in a slot is in the pool: a span leaves the pool only when it is truncated. */
#include "select.h"

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "attn_int.h"
#include "err.h"
#include "half.h"
#include "landmark.h"
#include "neap.h"
#include "thread.h"

#define NONE UINT32_MAX
#define ALIGN 64u
#define LANES (uint32_t) NEAP_LANDMARK_LANES
#define QUERIES 4u   /* of a pass over the landmarks */
#define FILLS 4u     /* spans that a thread takes at once: neighbours, which a decoder may share */
#define UNLIKE -2.0f /* below any cosine */

typedef struct outlier {
    uint32_t span;
    float similarity; /* least cosine of a key with the landmark */
} outlier;

struct neap_select {
    neap_select_config config;
    uint32_t max_slots, max_outliers, max_window; /* spans */
    uint32_t n_spans, n_window, n_outliers;
    uint32_t n_panels;
    char **panels;     /* [max_panels] each [n_kv_heads] of landmark.h */
    uint32_t *slots;   /* [n_kv_heads][max_slots] */
    outlier *outliers; /* [n_kv_heads][max_outliers] */
    uint16_t *k, *v;
    size_t bytes;
    atomic_ullong n_kept, n_new;
};

/* What choosing for one head leaves; in the step's scratch. */
typedef struct missing {
    uint32_t span, slot;
} missing;

static size_t aligned(size_t bytes) {
    return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

static uint32_t ceil_div(uint32_t a, uint32_t b) {
    return a / b + (a % b != 0);
}

/* ---- sizes ---- */

static uint32_t spans_of(const neap_select_config *config, uint32_t n_cells) {
    return ceil_div(n_cells < config->max_cells ? n_cells : config->max_cells, config->span_cells);
}

static uint32_t buffer_cells(const neap_select_config *config) {
    uint32_t spans = spans_of(config, config->budget_cells) +
                     spans_of(config, config->outlier_cells) +
                     spans_of(config, config->window_cells);
    return ceil_div(spans * config->span_cells, NEAP_ATTN_CHUNK_CELLS) * NEAP_ATTN_CHUNK_CELLS;
}

static size_t k_bytes(const neap_select_config *config) {
    return 2 * (size_t)buffer_cells(config) * config->n_kv_heads * config->k_elems;
}

static size_t v_bytes(const neap_select_config *config) {
    return 2 * (size_t)buffer_cells(config) * config->n_kv_heads * config->v_elems;
}

static uint32_t panels_for(const neap_select_config *config, uint32_t n_cells) {
    return ceil_div(n_cells / config->span_cells, LANES);
}

static size_t panel_head_bytes(const neap_select_config *config) {
    return neap_landmark_panel_bytes(config->k_elems);
}

static size_t panel_bytes(const neap_select_config *config) {
    return aligned(config->n_kv_heads * panel_head_bytes(config));
}

static size_t lists_bytes(const neap_select_config *config) {
    return config->n_kv_heads * (spans_of(config, config->budget_cells) * sizeof(uint32_t) +
                                 spans_of(config, config->outlier_cells) * sizeof(outlier)) +
           panels_for(config, config->max_cells) * sizeof(char *);
}

size_t neap_select_expected_bytes(const neap_select_config *config, uint32_t n_cells) {
    return sizeof(neap_select) + lists_bytes(config) + k_bytes(config) + v_bytes(config) +
           panels_for(config, n_cells) * panel_bytes(config);
}

static bool is_valid(const neap_select_config *c) {
    const uint32_t span = c->span_cells;
    return c->n_heads > 0 && c->n_kv_heads > 0 && c->n_heads % c->n_kv_heads == 0 &&
           c->k_elems > 0 && c->k_elems <= 1024 && c->v_elems > 0 && c->v_elems <= 1024 &&
           span >= 4 && span <= 64 && (span & (span - 1)) == 0 && c->budget_cells > 0 &&
           c->max_cells > 0 && c->max_cells < 1u << 28 && c->max_cells % NEAP_ATTN_CHUNK_CELLS == 0;
}

int neap_select_create(const neap_select_config *config, neap_select **ret_select) {
    if (!is_valid(config)) {
        return NEAP_E_BOUND;
    }
    neap_select *s = calloc(1, sizeof *s);
    if (s == NULL) {
        return -ENOMEM;
    }
    s->config = *config;
    s->max_slots = spans_of(config, config->budget_cells);
    s->max_outliers = spans_of(config, config->outlier_cells);
    s->max_window = spans_of(config, config->window_cells);
    const size_t heads = config->n_kv_heads;
    s->panels = calloc(panels_for(config, config->max_cells), sizeof *s->panels);
    s->slots = malloc(heads * s->max_slots * sizeof *s->slots);
    s->outliers = calloc(heads * s->max_outliers + 1, sizeof *s->outliers);
    s->k = aligned_alloc(ALIGN, k_bytes(config));
    s->v = aligned_alloc(ALIGN, v_bytes(config));
    if (s->panels == NULL || s->slots == NULL || s->outliers == NULL || s->k == NULL ||
        s->v == NULL) {
        neap_select_free(s);
        return -ENOMEM;
    }
    memset(s->slots, 0xff, heads * s->max_slots * sizeof *s->slots);
    s->bytes = neap_select_expected_bytes(config, 0);
    *ret_select = s;
    return 0;
}

void neap_select_free(neap_select *s) {
    if (s == NULL) {
        return;
    }
    for (uint32_t i = 0; i < s->n_panels; i++) {
        free(s->panels[i]);
    }
    free(s->panels);
    free(s->slots);
    free(s->outliers);
    free(s->k);
    free(s->v);
    free(s);
}

size_t neap_select_bytes(const neap_select *s) {
    return s->bytes;
}

uint32_t neap_select_cells(const neap_select *s) {
    return s->n_spans * s->config.span_cells;
}

void neap_select_counts(const neap_select *s, uint64_t *ret_kept, uint64_t *ret_new) {
    *ret_kept = atomic_load(&s->n_kept);
    *ret_new = atomic_load(&s->n_new);
}

/* ---- places ---- */

/* Slots of the whole buffer: chosen ones, then outliers, then the window. */
static uint32_t outlier_slot(const neap_select *s, uint32_t i) {
    return s->max_slots + i;
}

static uint32_t window_slot(const neap_select *s, uint32_t span) {
    return s->max_slots + s->max_outliers + span % s->max_window;
}

static uint16_t *k_of(const neap_select *s, uint32_t slot, uint32_t head) {
    return s->k +
           ((size_t)slot * s->config.span_cells * s->config.n_kv_heads + head) * s->config.k_elems;
}

static uint16_t *v_of(const neap_select *s, uint32_t slot, uint32_t head) {
    return s->v +
           ((size_t)slot * s->config.span_cells * s->config.n_kv_heads + head) * s->config.v_elems;
}

static uint32_t n_pool(const neap_select *s) {
    return s->n_spans - s->n_window - s->n_outliers;
}

static uint32_t n_chosen(const neap_select *s) {
    return n_pool(s) < s->max_slots ? n_pool(s) : s->max_slots;
}

/* ---- the prefix grows ---- */

/* Rows of one span as they lie somewhere. */
typedef struct span_rows {
    const char *k, *v; /* head 0 */
    size_t k_stride, v_stride;
} span_rows;

static const uint16_t *key_of(const neap_select *s, const span_rows *rows, uint32_t row,
                              uint32_t head) {
    return (const uint16_t *)(const void *)(rows->k + row * rows->k_stride) +
           (size_t)head * s->config.k_elems;
}

/* Elements that are not finite count as zero. */
static void mean_of(const neap_select *s, const span_rows *rows, uint32_t head, float *mean) {
    const uint32_t n = s->config.span_cells;
    memset(mean, 0, s->config.k_elems * sizeof *mean);
    for (uint32_t r = 0; r < n; r++) {
        const uint16_t *key = key_of(s, rows, r, head);
        for (uint32_t i = 0; i < s->config.k_elems; i++) {
            mean[i] += (key[i] & 0x7fffu) < NEAP_F16_INF ? neap_f32_of_f16(key[i]) : 0.0f;
        }
    }
    for (uint32_t i = 0; i < s->config.k_elems; i++) {
        mean[i] /= (float)n;
    }
}

static float similarity_of(const neap_select *s, const span_rows *rows, uint32_t head) {
    float mean[1024], least = 1.0f;
    mean_of(s, rows, head, mean);
    for (uint32_t r = 0; r < s->config.span_cells; r++) {
        const uint16_t *key = key_of(s, rows, r, head);
        float dot = 0.0f, key2 = 0.0f, mean2 = 0.0f;
        for (uint32_t i = 0; i < s->config.k_elems; i++) {
            const float x = neap_f32_of_f16(key[i]);
            dot += x * mean[i];
            key2 += x * x;
            mean2 += mean[i] * mean[i];
        }
        const float norms = sqrtf(key2) * sqrtf(mean2);
        const float cosine = norms == 0.0f ? 1.0f : dot / norms;
        if (!isfinite(cosine)) {
            return UNLIKE;
        }
        least = cosine < least ? cosine : least;
    }
    return least;
}

static void keep_exact(const neap_select *s, const span_rows *rows, uint32_t head, uint32_t slot) {
    const size_t k_elems = s->config.k_elems, v_elems = s->config.v_elems;
    uint16_t *k = k_of(s, slot, head), *v = v_of(s, slot, head);
    for (uint32_t r = 0; r < s->config.span_cells; r++) {
        memcpy(k, rows->k + r * rows->k_stride + 2 * head * k_elems, 2 * k_elems);
        memcpy(v, rows->v + r * rows->v_stride + 2 * head * v_elems, 2 * v_elems);
        k += s->config.n_kv_heads * k_elems;
        v += s->config.n_kv_heads * v_elems;
    }
}

/* Of n outliers the one to give up first. */
static uint32_t most_similar(const outlier *outliers, uint32_t n) {
    uint32_t at = 0;
    for (uint32_t i = 1; i < n; i++) {
        const float x = outliers[i].similarity, top = outliers[at].similarity;
        at = x > top || (x == top && outliers[i].span > outliers[at].span) ? i : at;
    }
    return at;
}

/* A span that is in the window no more, or never was. */
static void settle(neap_select *s, uint32_t span, const span_rows *rows) {
    const bool more = s->n_outliers < s->max_outliers;
    for (uint32_t head = 0; head < s->config.n_kv_heads && s->max_outliers > 0; head++) {
        outlier *list = s->outliers + (size_t)head * s->max_outliers;
        const outlier next = {span, similarity_of(s, rows, head)};
        const uint32_t at = more ? s->n_outliers : most_similar(list, s->n_outliers);
        if (more || next.similarity < list[at].similarity) {
            list[at] = next;
            keep_exact(s, rows, head, outlier_slot(s, at));
        }
    }
    s->n_outliers += more;
}

static span_rows window_rows(const neap_select *s, uint32_t span) {
    const uint32_t slot = window_slot(s, span);
    const size_t heads = s->config.n_kv_heads;
    return (span_rows){(const char *)k_of(s, slot, 0), (const char *)v_of(s, slot, 0),
                       2 * heads * s->config.k_elems, 2 * heads * s->config.v_elems};
}

static void put_landmark(const neap_select *s, uint32_t span, const span_rows *rows,
                         uint32_t head) {
    float mean[NEAP_LANDMARK_ELEMS];
    mean_of(s, rows, head, mean);
    neap_landmark_put(s->panels[span / LANES] + head * panel_head_bytes(&s->config), span % LANES,
                      mean, s->config.k_elems);
}

static void enter(neap_select *s, const span_rows *rows) {
    const uint32_t span = s->n_spans++;
    for (uint32_t head = 0; head < s->config.n_kv_heads; head++) {
        put_landmark(s, span, rows, head);
    }
    if (s->max_window == 0) {
        settle(s, span, rows);
        return;
    }
    if (s->n_window == s->max_window) {
        const span_rows oldest = window_rows(s, span);
        settle(s, span - s->max_window, &oldest);
        s->n_window--;
    }
    for (uint32_t head = 0; head < s->config.n_kv_heads; head++) {
        keep_exact(s, rows, head, window_slot(s, span));
    }
    s->n_window++;
}

int neap_select_append(neap_select *s, const neap_select_rows *rows) {
    const uint32_t n_cells = neap_select_cells(s) + NEAP_ATTN_CHUNK_CELLS;
    if (n_cells > s->config.max_cells) {
        return NEAP_E_BOUND;
    }
    for (; s->n_panels < panels_for(&s->config, n_cells); s->n_panels++) {
        s->panels[s->n_panels] = aligned_alloc(ALIGN, panel_bytes(&s->config));
        if (s->panels[s->n_panels] == NULL) {
            return -ENOMEM;
        }
        memset(s->panels[s->n_panels], 0, panel_bytes(&s->config));
        s->bytes += panel_bytes(&s->config);
    }
    for (uint32_t r = 0; r < NEAP_ATTN_CHUNK_CELLS; r += s->config.span_cells) {
        const span_rows span = {(const char *)rows->k + r * rows->k_stride,
                                (const char *)rows->v + r * rows->v_stride, rows->k_stride,
                                rows->v_stride};
        enter(s, &span);
    }
    return 0;
}

/* ---- the prefix shrinks ---- */

static void remove_outlier(const neap_select *s, uint32_t head, uint32_t at, uint32_t last) {
    outlier *list = s->outliers + (size_t)head * s->max_outliers;
    const uint32_t slot = outlier_slot(s, last);
    const size_t heads = s->config.n_kv_heads;
    const span_rows rows = {(const char *)k_of(s, slot, 0), (const char *)v_of(s, slot, 0),
                            2 * heads * s->config.k_elems, 2 * heads * s->config.v_elems};
    if (at != last) {
        list[at] = list[last];
        keep_exact(s, &rows, head, outlier_slot(s, at));
    }
    list[last].span = NONE;
}

/* How many of the head's outliers are before n_spans: those come first then. */
static uint32_t drop_outliers(const neap_select *s, uint32_t head) {
    uint32_t n = s->n_outliers;
    const outlier *list = s->outliers + (size_t)head * s->max_outliers;
    for (uint32_t i = n; i-- > 0;) {
        if (list[i].span >= s->n_spans) {
            remove_outlier(s, head, i, --n);
        }
    }
    return n;
}

void neap_select_truncate(neap_select *s, uint32_t n_cells) {
    const uint32_t n_spans = n_cells / s->config.span_cells;
    assert(n_cells % NEAP_ATTN_CHUNK_CELLS == 0);
    if (n_spans >= s->n_spans) {
        return;
    }
    const uint32_t window_first = s->n_spans - s->n_window;
    s->n_window = n_spans > window_first ? n_spans - window_first : 0;
    s->n_spans = n_spans;
    uint32_t least = s->n_outliers;
    for (int pass = 0; pass < 2; pass++) {
        for (uint32_t head = 0; head < s->config.n_kv_heads; head++) {
            uint32_t n = drop_outliers(s, head);
            for (; pass > 0 && n > least; n--) {
                remove_outlier(
                    s, head, most_similar(s->outliers + (size_t)head * s->max_outliers, n), n - 1);
            }
            least = n < least ? n : least;
        }
    }
    s->n_outliers = least;
    for (size_t i = 0; i < (size_t)s->config.n_kv_heads * s->max_slots; i++) {
        s->slots[i] = s->slots[i] < n_spans ? s->slots[i] : NONE;
    }
    while (s->n_panels > panels_for(&s->config, n_cells)) {
        free(s->panels[--s->n_panels]);
        s->bytes -= panel_bytes(&s->config);
    }
}

/* ---- scores ---- */

static const float *query_row(const neap_select_step *step, uint32_t head, uint32_t row) {
    const uint32_t group = step->select->config.n_heads / step->select->config.n_kv_heads;
    return (const float *)(const void *)(step->q.base + row / group * step->q.token_bytes +
                                         (head * group + row % group) * step->q.head_bytes);
}

/* Scores as integers of the same order, from 1 on; of a NaN the least. */
static uint32_t ordered(float x) {
    const uint32_t bits = neap_f32_bits(x);
    return x != x ? 1 : bits ^ (bits >> 31 != 0 ? UINT32_MAX : 0x80000000u);
}

/* Rows from first on, as many as QUERIES hold; how many queries those are. */
static uint32_t make_queries(const neap_select_step *step, uint32_t head, uint32_t first,
                             uint32_t n_rows, neap_landmark_query queries[QUERIES]) {
    uint32_t n = 0;
    for (uint32_t row = first; row < n_rows && n < QUERIES; row += NEAP_LANDMARK_ROWS, n++) {
        const uint32_t left = n_rows - row, most = NEAP_LANDMARK_ROWS;
        const uint32_t taken = left < most ? left : most;
        const float *rows[NEAP_LANDMARK_ROWS];
        for (uint32_t r = 0; r < taken; r++) {
            rows[r] = query_row(step, head, row + r);
        }
        neap_landmark_query_of(rows, taken, step->select->config.k_elems, &queries[n]);
    }
    return n;
}

/* Panels lie apart, where no prefetcher looks. */
static void fetch_ahead(const char *panel, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) {
        __builtin_prefetch(panel + i);
    }
}

/* keys[span] of the first n spans, to whole panels. */
static void score_spans(const neap_select_step *step, uint32_t head, uint32_t n, float *best,
                        uint32_t *keys) {
    const neap_select *s = step->select;
    const uint32_t n_rows = step->n_tokens * (s->config.n_heads / s->config.n_kv_heads);
    const size_t at = head * panel_head_bytes(&s->config);
    for (uint32_t i = 0; i < ceil_div(n, LANES) * LANES; i++) {
        best[i] = -INFINITY;
    }
    for (uint32_t row = 0; row < n_rows; row += QUERIES * NEAP_LANDMARK_ROWS) {
        neap_landmark_query queries[QUERIES];
        const uint32_t n_queries = make_queries(step, head, row, n_rows, queries);
        for (uint32_t first = 0; first < n; first += LANES) {
            const char *panel = s->panels[first / LANES] + at;
            if (first + LANES < n) {
                fetch_ahead(s->panels[first / LANES + 1] + at, panel_head_bytes(&s->config));
            }
            for (uint32_t i = 0; i < n_queries; i++) {
                neap_landmark_score(panel, &queries[i], best + first);
            }
        }
    }
    const uint32_t *slots = s->slots + (size_t)head * s->max_slots;
    for (uint32_t slot = 0; slot < s->max_slots; slot++) {
        if (slots[slot] != NONE) {
            best[slots[slot]] += NEAP_SELECT_HEAD_START / step->scale;
        }
    }
    for (uint32_t i = 0; i < ceil_div(n, LANES) * LANES; i++) {
        keys[i] = ordered(best[i]);
    }
}

/* ---- choosing ---- */

/* The count-th largest of the keys, and how many of its equals are among the count largest. */
static uint32_t threshold_of(const uint32_t *keys, uint32_t n, uint32_t count,
                             uint32_t *ret_equals) {
    uint32_t found = 0, mask = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        uint32_t histogram[256] = {0}, digit = 255;
        for (uint32_t i = 0; i < n; i++) {
            histogram[keys[i] >> shift & 255] += (keys[i] & mask) == found;
        }
        while (histogram[digit] < count) {
            count -= histogram[digit--];
        }
        found |= digit << shift;
        mask |= 255u << shift;
    }
    *ret_equals = count;
    return found;
}

/* Scratch of a head: how many are missing, the missing ones; scores, keys and chosen of
 * all spans. */
typedef struct head_scratch {
    uint32_t *n_missing;
    missing *missing;
    float *best;
    uint32_t *keys;
    uint8_t *chosen;
} head_scratch;

typedef struct head_layout {
    size_t missing, best, keys, chosen, bytes;
} head_layout;

static head_layout layout_of(const neap_select *s) {
    const size_t most = (size_t)panels_for(&s->config, s->config.max_cells) * LANES;
    head_layout at = {.missing = aligned(sizeof(uint32_t))};
    at.best = at.missing + aligned(s->max_slots * sizeof(missing));
    at.keys = at.best + aligned(most * sizeof(float));
    at.chosen = at.keys + aligned(most * sizeof(uint32_t));
    at.bytes = at.chosen + aligned(most);
    return at;
}

static head_scratch scratch_of(const neap_select_step *step, uint32_t head) {
    const head_layout at = layout_of(step->select);
    char *base = step->scratch + head * at.bytes;
    return (head_scratch){
        .n_missing = (uint32_t *)(void *)base,
        .missing = (missing *)(void *)(base + at.missing),
        .best = (float *)(void *)(base + at.best),
        .keys = (uint32_t *)(void *)(base + at.keys),
        .chosen = (uint8_t *)base + at.chosen,
    };
}

size_t neap_select_scratch_bytes(const neap_select *s) {
    return s->config.n_kv_heads * layout_of(s).bytes;
}

/* Spans that are chosen again stay where they are; the others take the slots that are left, both
 * from the first on. */
static void diff(neap_select *s, uint32_t head, const head_scratch *scratch) {
    uint32_t *slots = s->slots + (size_t)head * s->max_slots, n_missing = 0, span = 0;
    const uint32_t count = n_chosen(s);
    for (uint32_t slot = 0; slot < s->max_slots; slot++) {
        const bool stays = slot < count && slots[slot] != NONE && scratch->chosen[slots[slot]];
        if (stays) {
            scratch->chosen[slots[slot]] = 0;
        } else {
            slots[slot] = NONE;
        }
    }
    for (uint32_t slot = 0; slot < count; slot++) {
        if (slots[slot] != NONE) {
            continue;
        }
        while (!scratch->chosen[span]) {
            span++;
        }
        scratch->missing[n_missing++] = (missing){span++, slot};
    }
    *scratch->n_missing = n_missing;
    atomic_fetch_add_explicit(&s->n_kept, count - n_missing, memory_order_relaxed);
    atomic_fetch_add_explicit(&s->n_new, n_missing, memory_order_relaxed);
}

static void choose(const neap_select_step *step, uint32_t head) {
    neap_select *s = step->select;
    const uint32_t n = s->n_spans - s->n_window, count = n_chosen(s);
    const head_scratch scratch = scratch_of(step, head);
    *scratch.n_missing = 0;
    if (count == 0) {
        return;
    }
    score_spans(step, head, n, scratch.best, scratch.keys);
    for (uint32_t i = 0; i < s->n_outliers; i++) {
        scratch.keys[s->outliers[(size_t)head * s->max_outliers + i].span] = 0;
    }
    uint32_t equals, least = threshold_of(scratch.keys, n, count, &equals);
    for (uint32_t span = 0; span < n; span++) {
        const bool equal = scratch.keys[span] == least && equals > 0;
        scratch.chosen[span] = scratch.keys[span] > least || equal;
        equals -= equal;
    }
    diff(s, head, &scratch);
}

/* ---- a step ---- */

void neap_select_begin(neap_select_step *step, neap_select *select, const neap_attn_rows *q,
                       uint32_t n_tokens, float scale, neap_select_reconstruct reconstruct,
                       void *ctx, void *scratch) {
    step->select = select;
    step->q = *q;
    step->scale = scale;
    step->n_tokens = n_tokens;
    step->reconstruct = reconstruct;
    step->ctx = ctx;
    step->scratch = scratch;
    atomic_init(&step->next_head, 0);
    atomic_init(&step->heads_done, 0);
    atomic_init(&step->next_fill, 0);
    atomic_init(&step->fills_done, 0);
    atomic_init(&step->err, 0);
}

static void wait_for(atomic_uint *done, uint32_t n) {
    while (atomic_load_explicit(done, memory_order_acquire) < n) {
        neap_thread_yield();
    }
}

/* The i-th missing span of all heads. */
static void fill(neap_select_step *step, uint32_t thread, uint32_t i) {
    neap_select *s = step->select;
    uint32_t head = 0;
    head_scratch scratch = scratch_of(step, head);
    while (i >= *scratch.n_missing) {
        i -= *scratch.n_missing;
        scratch = scratch_of(step, ++head);
    }
    const missing *m = &scratch.missing[i];
    const int err =
        step->reconstruct(step->ctx, thread, head, m->span * s->config.span_cells,
                          s->config.span_cells, k_of(s, m->slot, head), v_of(s, m->slot, head));
    if (err == 0) {
        s->slots[(size_t)head * s->max_slots + m->slot] = m->span;
    } else {
        int none = 0;
        atomic_compare_exchange_strong(&step->err, &none, err);
    }
}

int neap_select_run(neap_select_step *step, uint32_t thread) {
    const neap_select *s = step->select;
    uint32_t at, n = 0;
    while ((at = atomic_fetch_add_explicit(&step->next_head, 1, memory_order_relaxed)) <
           s->config.n_kv_heads) {
        choose(step, at);
        atomic_fetch_add_explicit(&step->heads_done, 1, memory_order_release);
    }
    wait_for(&step->heads_done, s->config.n_kv_heads);
    for (uint32_t head = 0; head < s->config.n_kv_heads; head++) {
        n += *scratch_of(step, head).n_missing;
    }
    while ((at = atomic_fetch_add_explicit(&step->next_fill, FILLS, memory_order_relaxed)) < n) {
        const uint32_t end = n - at < FILLS ? n : at + FILLS;
        for (uint32_t i = at; i < end; i++) {
            fill(step, thread, i);
        }
        atomic_fetch_add_explicit(&step->fills_done, end - at, memory_order_release);
    }
    wait_for(&step->fills_done, n);
    return atomic_load(&step->err);
}

/* ---- attention over what was chosen ---- */

uint32_t neap_select_kept_chunks(const neap_select *s) {
    return buffer_cells(&s->config) / NEAP_ATTN_CHUNK_CELLS;
}

static bool plane_fits(const neap_attn_plane *plane, uint32_t n_kv_heads, uint32_t n_elems) {
    return plane->type == NEAP_ATTN_F16 && plane->head_elems == n_elems &&
           plane->head_bytes == 2 * (size_t)n_elems &&
           plane->cell_bytes == n_kv_heads * plane->head_bytes;
}

bool neap_select_applies(const neap_select *s, const neap_attn_shape *whole) {
    const neap_select_config *c = &s->config;
    const uint32_t n_cells = neap_select_cells(s);
    if (n_cells == 0 || whole->n_cells < n_cells || whole->n_streams != 1 ||
        whole->n_heads != c->n_heads || whole->n_kv_heads != c->n_kv_heads ||
        whole->max_bias != 0.0f || !plane_fits(&whole->k, c->n_kv_heads, c->k_elems) ||
        !plane_fits(&whole->v, c->n_kv_heads, c->v_elems)) {
        return false;
    }
    if (whole->mask.base != NULL && whole->mask.n_heads != 1) {
        return false;
    }
    for (uint32_t t = 0; t < whole->n_tokens && whole->mask.base != NULL; t++) {
        const uint16_t *mask = neap_attn_mask_row(whole, 0, t, 0);
        uint16_t any = 0;
        for (uint32_t cell = 0; cell < n_cells; cell++) {
            any |= mask[cell];
        }
        if (any != 0) {
            return false;
        }
    }
    return true;
}

uint32_t neap_select_shape_cells(const neap_select *s, const neap_attn_shape *whole) {
    return buffer_cells(&s->config) + whole->n_cells - neap_select_cells(s);
}

size_t neap_select_shape_bytes(const neap_select *s, const neap_attn_shape *whole) {
    const size_t n_cells = neap_select_shape_cells(s, whole);
    const size_t n_chunks = (n_cells + NEAP_ATTN_CHUNK_CELLS - 1) / NEAP_ATTN_CHUNK_CELLS;
    return 2 * aligned(n_chunks * sizeof(void *)) + whole->n_tokens * aligned(2 * n_cells);
}

static void show_slots(const neap_select *s, uint32_t first, uint32_t n, uint16_t *mask) {
    memset(mask + (size_t)first * s->config.span_cells, 0, 2 * (size_t)n * s->config.span_cells);
}

/* What the buffer holds for every head; then what follows the prefix, as the token sees it. */
static void make_mask_row(const neap_select *s, const neap_attn_shape *whole, uint32_t token,
                          uint16_t *mask) {
    const uint32_t kept = buffer_cells(&s->config), first = neap_select_cells(s);
    for (uint32_t i = 0; i < kept; i++) {
        mask[i] = NEAP_ATTN_HIDDEN;
    }
    show_slots(s, 0, n_chosen(s), mask);
    show_slots(s, outlier_slot(s, 0), s->n_outliers, mask);
    for (uint32_t i = 0; i < s->n_window; i++) {
        show_slots(s, window_slot(s, s->n_spans - 1 - i), 1, mask);
    }
    if (whole->mask.base == NULL) {
        memset(mask + kept, 0, 2 * (size_t)(whole->n_cells - first));
    } else {
        memcpy(mask + kept, neap_attn_mask_row(whole, 0, token, 0) + first,
               2 * (size_t)(whole->n_cells - first));
    }
}

static const void **list_chunks(const neap_select *s, const uint16_t *kept,
                                const neap_attn_plane *plane, uint32_t n_cells, char *memory) {
    const void **list = (const void **)(void *)memory;
    const uint32_t n_kept = neap_select_kept_chunks(s),
                   n = ceil_div(n_cells, NEAP_ATTN_CHUNK_CELLS);
    for (uint32_t i = 0; i < n_kept; i++) {
        list[i] = (const char *)kept + i * NEAP_ATTN_CHUNK_CELLS * plane->cell_bytes;
    }
    for (uint32_t i = n_kept; i < n; i++) {
        list[i] = plane->chunks[i - n_kept + neap_select_cells(s) / NEAP_ATTN_CHUNK_CELLS];
    }
    return list;
}

void neap_select_shape(const neap_select *s, const neap_attn_shape *whole, void *memory,
                       neap_attn_shape *ret_shape) {
    const uint32_t n_cells = neap_select_shape_cells(s, whole);
    const size_t list_bytes = aligned(ceil_div(n_cells, NEAP_ATTN_CHUNK_CELLS) * sizeof(void *));
    const size_t row_bytes = aligned(2 * (size_t)n_cells);
    char *masks = (char *)memory + 2 * list_bytes;
    *ret_shape = *whole;
    ret_shape->n_cells = n_cells;
    ret_shape->k.chunks = list_chunks(s, s->k, &whole->k, n_cells, memory);
    ret_shape->v.chunks = list_chunks(s, s->v, &whole->v, n_cells, (char *)memory + list_bytes);
    ret_shape->mask =
        (neap_attn_mask){.base = masks, .token_bytes = row_bytes, .n_heads = 1, .n_streams = 1};
    ret_shape->ready = NULL;
    ret_shape->wait = NULL;
    ret_shape->ctx = NULL;
    for (uint32_t t = 0; t < whole->n_tokens; t++) {
        make_mask_row(s, whole, t, (uint16_t *)(void *)(masks + t * row_bytes));
    }
}
