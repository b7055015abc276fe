/* test_lowram_tokens.c - scores of tokens: the attention that they rest on, the network's gradient,
 * what it learns that mass does not know, the choice, and
 * what is left to compress. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "neap.h"
#include "token_int.h"
#include "value_int.h"

enum { GROUPS = NEAP_TOKEN_GROUPS };

/* Against attention worked out head by head in f64. */
static void history(void) {
    enum { N = 40, QUERIES = 19, HEADS = 6, KV = 2, D = 5 };
    static float q[QUERIES * HEADS * D], k[N * KV * D], found[GROUPS * N];
    static double wanted[GROUPS * N];
    uint32_t n_seen[QUERIES];
    neap_value_normal(1, 1, sizeof q / sizeof *q, q);
    neap_value_normal(2, 1, sizeof k / sizeof *k, k);
    for (uint32_t i = 0; i < QUERIES; i++)
        n_seen[i] = N - QUERIES + 1 + i;
    const neap_token_attention a = {.n = N,
                                    .n_queries = QUERIES,
                                    .n_heads = HEADS,
                                    .n_kv_heads = KV,
                                    .head_dim = D,
                                    .scale = 0.7f,
                                    .q = q,
                                    .k = k,
                                    .n_seen = n_seen};
    CHECK(neap_token_history(&a, found) == 0);
    for (size_t g = 0; g < GROUPS; g++) {
        const size_t first = g * QUERIES / GROUPS, end = (g + 1) * QUERIES / GROUPS;
        for (size_t i = first; i < end; i++)
            for (size_t h = 0; h < HEADS; h++) {
                double weight[N], sum = 0;
                for (size_t j = 0; j < n_seen[i]; j++) {
                    double score = 0;
                    for (size_t c = 0; c < D; c++)
                        score += (double)q[(i * HEADS + h) * D + c] *
                                 (double)k[(j * KV + h / (HEADS / KV)) * D + c];
                    sum += weight[j] = exp(0.7 * score);
                }
                for (size_t j = 0; j < n_seen[i]; j++)
                    wanted[g * N + j] += weight[j] / sum / (double)((end - first) * HEADS);
            }
    }
    for (size_t i = 0; i < GROUPS * N; i++)
        CHECK(fabs(wanted[i] - (double)found[i]) < 1e-5);
    neap_token_attention bad = a;
    n_seen[3] = N + 1;
    CHECK(neap_token_history(&bad, found) == NEAP_E_BOUND);
    bad.n_queries = 0;
    CHECK(neap_token_history(&bad, found) == NEAP_E_BOUND);
    n_seen[3] = 1; /* fewer queries than groups */
    bad.n_queries = 4;
    CHECK(neap_token_history(&bad, found) == 0);
    for (size_t g = 0; g < GROUPS; g++) {
        double sum = 0;
        for (size_t i = 0; i < N; i++)
            sum += (double)found[g * N + i];
        CHECK(fabs(sum - 1) < 1e-4);
    }
}

static double loss(const neap_token_net *net, const float *seen, const float *wanted,
                   neap_token_pass *pass, float *error) {
    double sum = 0;
    neap_token_forward(net, seen, pass);
    for (size_t i = 0; i < pass->n; i++) {
        error[i] = pass->score[i] - wanted[i];
        sum += (double)error[i] * (double)error[i] / (double)pass->n;
    }
    return sum;
}

static void gradient(void) {
    enum { N = 30 };
    float seen[GROUPS * N], wanted[N], error[N], by_formula[NEAP_TOKEN_PARAMS] = {0};
    neap_token_net net;
    neap_token_pass pass;
    neap_value_normal(3, 0.2f, NEAP_TOKEN_PARAMS, net.params);
    neap_value_normal(4, 0.1f, GROUPS * N, seen);
    neap_value_normal(5, 1, N, wanted);
    for (size_t i = 0; i < GROUPS * N; i++)
        seen[i] = fabsf(seen[i]);
    CHECK(neap_token_pass_create(N, &pass) == 0);
    loss(&net, seen, wanted, &pass, error);
    neap_token_backward(&net, error, &pass, by_formula);
    for (size_t i = 0; i < NEAP_TOKEN_PARAMS; i++) {
        const float held = net.params[i], h = 1e-3f;
        net.params[i] = held + h;
        const double above = loss(&net, seen, wanted, &pass, error);
        net.params[i] = held - h;
        const double below = loss(&net, seen, wanted, &pass, error);
        net.params[i] = held;
        const double difference = (above - below) / (2 * (double)h);
        CHECK(fabs(difference - (double)by_formula[i]) < 2e-2 * (0.1 + fabs(difference)));
    }
    neap_token_pass_free(&pass);
}

/* Later queries look two tokens further than the latest ones did, and no more at the rest. */
static void learns(void) {
    enum { N = 400, SAMPLES = 24 };
    static float seen[SAMPLES + 1][GROUPS * N], future[SAMPLES + 1][N];
    static neap_token_sample samples[SAMPLES];
    for (size_t s = 0; s <= SAMPLES; s++) {
        neap_value_normal(10 + s, 1, GROUPS * N, seen[s]);
        for (size_t i = 0; i < GROUPS * N; i++)
            seen[s][i] = expf(seen[s][i]) / N;
        for (size_t i = 0; i < N; i++)
            future[s][i] = i < 2 ? 1.0f / N : seen[s][(GROUPS - 1) * N + i - 2];
        if (s < SAMPLES) samples[s] = (neap_token_sample){seen[s], future[s], N};
    }
    neap_token_training training = neap_token_training_defaults();
    training.passes = 30;
    neap_token_net net, again;
    double error, untrained;
    CHECK(neap_token_train(samples, SAMPLES, &training, &net, &error, &untrained) == 0);
    CHECK(error < untrained / 4);
    CHECK(neap_token_train(samples, SAMPLES, &training, &again, &error, &untrained) == 0);
    CHECK(memcmp(&net, &again, sizeof net) == 0);
    /* A sample that it has not seen: which hundred tokens get most. */
    float scores[N], mass[N];
    uint32_t best[N], by_net[N], by_mass[N];
    size_t hits = 0, mass_hits = 0;
    CHECK(neap_token_predict(&net, seen[SAMPLES], N, scores) == 0);
    neap_token_mass(seen[SAMPLES], N, mass);
    for (size_t i = 0; i < N; i++)
        scores[i] += 10;
    neap_value_worst(future[SAMPLES], N, 100, best);
    neap_value_worst(scores, N, 100, by_net);
    neap_value_worst(mass, N, 100, by_mass);
    for (size_t i = 0; i < 100; i++)
        for (size_t j = 0; j < 100; j++) {
            hits += best[i] == by_net[j];
            mass_hits += best[i] == by_mass[j];
        }
    CHECK(hits > 80 && mass_hits < 60);
    CHECK(neap_token_train(samples, 0, &training, &net, &error, &untrained) == NEAP_E_BOUND);
}

static void choice(void) {
    enum { N = 300 };
    float scores[N];
    uint32_t tokens[N];
    size_t n;
    for (size_t i = 0; i < N; i++)
        scores[i] = -(float)(i * 37 % 101);
    CHECK(neap_tokens_keep(scores, N, 100, tokens, &n) == 0 && n == 100);
    float least = 0, most = -1000;
    for (size_t i = 0, at = 0; i < N; i++) {
        const int is_kept = at < n && tokens[at] == i;
        at += is_kept ? 1 : 0;
        if (i < NEAP_TOKEN_FIRST || i >= N - NEAP_TOKEN_LAST)
            CHECK(is_kept);
        else if (is_kept)
            least = fminf(least, scores[i]);
        else
            most = fmaxf(most, scores[i]);
        if (i == N - 1) CHECK(at == n);
    }
    CHECK(least >= most);
    CHECK(neap_tokens_keep(scores, N, 3, tokens, &n) == 0 &&
          n == NEAP_TOKEN_FIRST + NEAP_TOKEN_LAST);
    CHECK(neap_tokens_keep(scores, N, 2 * N, tokens, &n) == 0 && n == N);
    for (uint32_t few = 0; few < 80; few += 5) {
        CHECK(neap_tokens_keep(scores, few, few, tokens, &n) == 0 && n == few);
        for (uint32_t i = 0; i < few; i++)
            CHECK(tokens[i] == i);
    }
}

/* The paper's Tables 10 and 11: eviction halves until the rest is at its most. */
static void split(void) {
    static const struct {
        double ratio, most_rest;
        size_t n, n_kept;
    } cases[] = {{4, 4, 4096, 2048},  {6, 4, 4096, 2048},      {8, 4, 4096, 2048},
                 {16, 4, 4096, 1024}, {10.7, 6.4, 4096, 2048}, {25.6, 6.4, 4096, 1024},
                 {3, 1, 3000, 1000},  {1.5, 1, 3000, 2000},    {1, 1, 3000, 3000},
                 {8, 4, 100, 72},     {8, 4, 50, 50}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const double n = (double)cases[i].n;
        const neap_token_split s =
            neap_tokens_split(cases[i].ratio, cases[i].most_rest, cases[i].n);
        CHECK(s.n_kept == cases[i].n_kept);
        CHECK(fabs(s.rest * n / (double)s.n_kept - cases[i].ratio) < 1e-9);
        CHECK(s.rest < cases[i].most_rest + 1e-9 || s.n_kept == 72 || s.n_kept == 50);
    }
}

int main(void) {
    history();
    gradient();
    learns();
    choice();
    split();
    return 0;
}
