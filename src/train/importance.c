/* importance.c - the quadratic forms of the errors of keys and values (train.h), from one context.
 *
 * For a query i of head h, with weights p over the cells j before it, o = sum p v, G = W_O' W_O:
 * cell j's key error e adds p_j s (q_j.e) W_O (v_j - o), where q_j is the query turned to before
 * RoPE at j and s the scale of the scores; its value error adds p_j W_O e. So
 *     M_K += sum_j p_j^2 s^2 d_j q_j q_j'      d_j = (v_j - o)' G (v_j - o)
 *     M_V += sum_j p_j^2 G
 * both over |residual|^2. That is the first order. Large errors of keys that a query does not read
 * matter by the exponential of their variance; so to this *peaked* form of M_K comes a *plain* one,
 * of all queries and cells alike.
 *
 * The sum over j of M_K, each with another turn of q, is estimated by a few cells drawn with
 * probability p_j^2 d_j. The first cells, kept exactly, and the query's own are left out. */
#include <cblas.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "half.h"
#include "train_int.h"

enum { N_DRAWN = 4 };
/* Trace of the plain form over that of the peaked one. Mean KL of SmolLM2 with its weights in f32,
 * a head at 4 times, at 0.3 and 1: 0.0015 and 0.0021 (four texts of 1k tokens; learned from 9k). */
#define PLAIN_SHARE 0.3

typedef struct work {
    float *k, *v, *vg;      /* [n][head] of a KV head; v G */
    float *q, *p, *o, *vo;  /* [n_queries] times head_k, n, head_v, n: vo = o G v' */
    float *vv, *summed;     /* [n]: v G v'; p^2 d up to a cell */
    uint32_t *n_seen;       /* [n_queries] cells up to the query's own */
    double *shares;         /* [n_queries] 1 / |residual|^2 */
    float *identity;        /* [head_v][head_v] */
    double *peaked, *plain; /* [head_k][head_k] of a head: see above */
    float table[NEAP_KLT_HEAD_DIM], turned[NEAP_KLT_HEAD_DIM];
    uint64_t random;
} work;

static float draw(work *w) {
    w->random = w->random * 6364136223846793005u + 1442695040888963407u;
    return (float)(w->random >> 40) * 0x1p-24f;
}

/* out[m][n] = a[m][k] b, b [k][n] or, transposed, [n][k]. */
static void product(bool transposed, uint32_t m, uint32_t n, uint32_t k, const float *a,
                    const float *b, float *out) {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, transposed ? CblasTrans : CblasNoTrans, (int)m, (int)n,
                (int)k, 1, a, (int)k, b, transposed ? (int)k : (int)n, 0, out, (int)n);
}

static void load(const uint16_t *rows, uint32_t n, uint32_t n_heads, uint32_t head, uint32_t width,
                 float *out) {
    for (uint32_t r = 0; r < n; r++)
        for (uint32_t c = 0; c < width; c++)
            out[(size_t)r * width + c] =
                neap_f32_of_f16(rows[((size_t)r * n_heads + head) * width + c]);
}

/* Scores to weights of the cells seen, 0 after them. */
static void soften(const neap_train_layer *l, uint32_t n_seen, float *p) {
    float most = -INFINITY, sum = 0;
    for (uint32_t j = 0; j < n_seen; j++)
        most = fmaxf(most, p[j] *= l->shape.scale);
    for (uint32_t j = 0; j < n_seen; j++)
        sum += p[j] = expf(p[j] - most);
    for (uint32_t j = 0; j < n_seen; j++)
        p[j] /= sum;
    memset(p + n_seen, 0, (l->n - n_seen) * sizeof *p);
}

/* weight q q', q turned to before RoPE at a cell. */
static void add_turned(const neap_train_layer *l, work *w, uint32_t query, uint32_t cell,
                       double weight, double *form) {
    const uint32_t n = l->shape.head_k;
    memcpy(w->turned, w->q + (size_t)query * n, n * sizeof *w->turned);
    neap_rope_table(&l->rope, l->positions[cell], w->table);
    neap_rope_transpose(&l->rope, w->table, w->turned);
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t j = 0; j < n; j++)
            form[(size_t)i * n + j] += weight * (double)(w->turned[i] * w->turned[j]);
}

/* A query's part of both forms of M_K; returns the sum of p^2. */
static double add_query(const neap_train_layer *l, work *w, uint32_t query) {
    const float *p = w->p + (size_t)query * l->n, *vo = w->vo + (size_t)query * l->n;
    const uint32_t n_before = w->n_seen[query] - 1;
    double squares = 0;
    float total = 0, oo = 0;
    for (uint32_t j = 0; j <= n_before; j++)
        oo += p[j] * vo[j]; /* o G o', for o is the sum of p v */
    for (uint32_t j = 0; j < n_before; j++) {
        const float square = l->positions[j] < NEAP_KLT_FIRST_EXACT ? 0 : p[j] * p[j];
        squares += (double)square;
        total += square * fmaxf(w->vv[j] - 2 * vo[j] + oo, 0);
        w->summed[j] = total;
    }
    const double weight =
        w->shares[query] * (double)(total * l->shape.scale * l->shape.scale) / N_DRAWN;
    uint32_t at = 0;
    for (uint32_t d = 0; d < N_DRAWN && total > 0; d++) {
        const float wanted = ((float)d + draw(w)) / N_DRAWN * total;
        while (at + 1 < n_before && w->summed[at] < wanted)
            at++;
        add_turned(l, w, query, at, weight, w->peaked);
        const float anywhere = ((float)d + draw(w)) / N_DRAWN * (float)n_before;
        add_turned(l, w, query, (uint32_t)anywhere, 1, w->plain);
    }
    return squares;
}

/* form += peaked + plain, the latter brought to its share. */
static void add_forms(const double *peaked, const double *plain, uint32_t n, double *form) {
    double peaked_trace = 0, plain_trace = 0;
    for (size_t i = 0; i < n; i++) {
        peaked_trace += peaked[i * n + i];
        plain_trace += plain[i * n + i];
    }
    const double share = plain_trace > 0 ? PLAIN_SHARE * peaked_trace / plain_trace : 0;
    for (size_t i = 0; i < (size_t)n * n; i++)
        form[i] += peaked[i] + share * plain[i];
}

static void add_head(neap_train_layer *l, work *w, uint32_t head, uint32_t kv_head) {
    const neap_capture_layer *s = &l->shape;
    const size_t k_size = (size_t)s->head_k * s->head_k, v_size = (size_t)s->head_v * s->head_v;
    const float *gram = l->grams ? l->grams + head * v_size : w->identity;
    double squares = 0;
    memset(w->peaked, 0, k_size * sizeof *w->peaked);
    memset(w->plain, 0, k_size * sizeof *w->plain);
    for (uint32_t i = 0; i < l->n_queries; i++)
        memcpy(w->q + (size_t)i * s->head_k, l->q + ((size_t)i * s->n_heads + head) * s->head_k,
               s->head_k * sizeof *w->q);
    product(false, l->n, s->head_v, s->head_v, w->v, gram, w->vg);
    for (uint32_t j = 0; j < l->n; j++)
        w->vv[j] = cblas_sdot((int)s->head_v, w->vg + (size_t)j * s->head_v, 1,
                              w->v + (size_t)j * s->head_v, 1);
    product(true, l->n_queries, l->n, s->head_k, w->q, w->k, w->p);
    for (uint32_t i = 0; i < l->n_queries; i++)
        soften(l, w->n_seen[i], w->p + (size_t)i * l->n);
    product(false, l->n_queries, s->head_v, l->n, w->p, w->v, w->o);
    product(true, l->n_queries, l->n, s->head_v, w->o, w->vg, w->vo);
    for (uint32_t i = 0; i < l->n_queries; i++)
        if (w->n_seen[i] > 1) squares += w->shares[i] * add_query(l, w, i);
    add_forms(w->peaked, w->plain, s->head_k, l->k_form + kv_head * k_size);
    for (size_t i = 0; i < v_size; i++)
        l->v_form[kv_head * v_size + i] += squares * (double)gram[i];
}

static int make_work(const neap_train_layer *l, work *w) {
    const neap_capture_layer *s = &l->shape;
    const size_t n = l->n, m = l->n_queries;
    *w = (work){.random = l->layer};
    w->k = malloc(n * s->head_k * sizeof(float));
    w->v = malloc(n * s->head_v * sizeof(float));
    w->vg = malloc(n * s->head_v * sizeof(float));
    w->q = malloc(m * s->head_k * sizeof(float));
    w->p = malloc(m * n * sizeof(float));
    w->o = malloc(m * s->head_v * sizeof(float));
    w->vo = malloc(m * n * sizeof(float));
    w->vv = malloc(n * sizeof(float));
    w->summed = malloc(n * sizeof(float));
    w->n_seen = malloc(m * sizeof *w->n_seen);
    w->shares = malloc(m * sizeof *w->shares);
    w->identity = calloc((size_t)s->head_v * s->head_v, sizeof *w->identity);
    w->peaked = malloc((size_t)s->head_k * s->head_k * sizeof *w->peaked);
    w->plain = malloc((size_t)s->head_k * s->head_k * sizeof *w->plain);
    if (!w->peaked || !w->plain || !w->k || !w->v || !w->vg || !w->q || !w->p || !w->o || !w->vo ||
        !w->vv || !w->summed || !w->n_seen || !w->shares || !w->identity)
        return -ENOMEM;
    for (uint32_t i = 0; i < s->head_v; i++)
        w->identity[(size_t)i * s->head_v + i] = 1;
    for (uint32_t i = 0, seen = 0; i < m; i++) {
        while (seen < n && l->positions[seen] <= l->query_positions[i])
            seen++;
        w->n_seen[i] = seen;
        w->shares[i] = l->residual[i] > 0 ? 1 / (double)l->residual[i] : 0;
    }
    return 0;
}

static void free_work(work *w) {
    free(w->k);
    free(w->v);
    free(w->vg);
    free(w->q);
    free(w->p);
    free(w->o);
    free(w->vo);
    free(w->vv);
    free(w->summed);
    free(w->n_seen);
    free(w->shares);
    free(w->identity);
    free(w->peaked);
    free(w->plain);
}

int neap_train_weigh(neap_train_layer *l) {
    const neap_capture_layer *s = &l->shape;
    const uint32_t group = s->n_heads / s->n_kv_heads;
    work w;
    if (l->n == 0 || l->n_queries == 0) return 0;
    const int err = make_work(l, &w);
    for (uint32_t kv = 0; kv < s->n_kv_heads && !err; kv++) {
        load(l->k, l->n, s->n_kv_heads, kv, s->head_k, w.k);
        load(l->v, l->n, s->n_kv_heads, kv, s->head_v, w.v);
        for (uint32_t h = 0; h < group; h++)
            add_head(l, &w, kv * group + h, kv);
    }
    if (!err) l->n_seen += l->n_queries;
    free_work(&w);
    return err;
}
