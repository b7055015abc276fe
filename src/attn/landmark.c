/* landmark.c - see landmark.h. */
#include "landmark.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { LANES = NEAP_LANDMARK_LANES, ROWS = NEAP_LANDMARK_ROWS, LARGEST = 127 };

static uint32_t quads_of(uint32_t n_elems) {
    return (n_elems + 3) / 4;
}

size_t neap_landmark_panel_bytes(uint32_t n_elems) {
    return LANES * (sizeof(float) + 4 * (size_t)quads_of(n_elems));
}

static const int8_t *codes_of(const void *panel) {
    return (const int8_t *)panel + LANES * sizeof(float);
}

/* The scale, NaN if an element is not finite; every stride-th group of four codes. */
static float encode(const float *vector, uint32_t n_elems, size_t stride, int8_t *codes) {
    float largest = 0.0f, sum = 0.0f;
    for (uint32_t i = 0; i < n_elems; i++) {
        largest = fabsf(vector[i]) > largest ? fabsf(vector[i]) : largest;
        sum += vector[i] * 0.0f;
    }
    const float inverse = largest > 0.0f ? LARGEST / largest : 0.0f;
    if (!(sum == 0.0f) || !isfinite(inverse)) {
        return NAN;
    }
    for (uint32_t i = 0; i < n_elems; i++) {
        codes[i / 4 * stride + i % 4] = (int8_t)lrintf(vector[i] * inverse);
    }
    return largest / LARGEST;
}

void neap_landmark_put(void *panel, uint32_t lane, const float *vector, uint32_t n_elems) {
    int8_t *codes = (int8_t *)panel + LANES * sizeof(float) + 4 * (size_t)lane;
    const float scale = encode(vector, n_elems, 4 * LANES, codes);
    ((float *)panel)[lane] = scale;
}

void neap_landmark_query_of(const float *const rows[ROWS], uint32_t n_rows, uint32_t n_elems,
                            neap_landmark_query *ret_query) {
    ret_query->n_elems = n_elems;
    ret_query->n_rows = n_rows;
    for (uint32_t r = 0; r < n_rows; r++) {
        int8_t *codes = ret_query->codes[r];
        memset(codes, 0, 4 * (size_t)quads_of(n_elems));
        ret_query->scales[r] = encode(rows[r], n_elems, 4, codes);
        ret_query->sums[r] = 0;
        for (uint32_t i = 0; i < n_elems; i++) {
            ret_query->sums[r] += codes[i];
        }
    }
}

/* ---- kernels: sums[row][lane] of products of codes ---- */

static void sum_generic(const int8_t *codes, const neap_landmark_query *query,
                        int32_t sums[ROWS][LANES]) {
    for (uint32_t r = 0; r < query->n_rows; r++) {
        memset(sums[r], 0, sizeof sums[r]);
        for (uint32_t q = 0; q < quads_of(query->n_elems); q++) {
            for (uint32_t i = 0; i < 4 * LANES; i++) {
                sums[r][i / 4] += codes[q * 4 * LANES + i] * query->codes[r][4 * q + i % 4];
            }
        }
    }
}

#if defined(__x86_64__)
static inline int32_t four(const int8_t *codes) {
    int32_t value;
    memcpy(&value, codes, sizeof value);
    return value;
}

/* Bytes multiply as unsigned by signed: |c| by q with the sign of c. No pair of products, of codes
 * up to 127, is beyond 16 bits. */
__attribute__((target("avx2"))) static void
sum_avx2(const int8_t *codes, const neap_landmark_query *query, int32_t sums[ROWS][LANES]) {
    enum { N = LANES / 8 };
    const __m256i ones = _mm256_set1_epi16(1);
    for (uint32_t r = 0; r < query->n_rows; r++) {
        __m256i sum[N] = {0};
        for (uint32_t q = 0; q < quads_of(query->n_elems); q++) {
            const __m256i of_query = _mm256_set1_epi32(four(query->codes[r] + 4 * q));
            const __m256i *at = (const __m256i *)(const void *)(codes + (size_t)q * 4 * LANES);
            for (int i = 0; i < N; i++) {
                const __m256i c = _mm256_loadu_si256(at + i);
                const __m256i pairs =
                    _mm256_maddubs_epi16(_mm256_abs_epi8(c), _mm256_sign_epi8(of_query, c));
                sum[i] = _mm256_add_epi32(sum[i], _mm256_madd_epi16(pairs, ones));
            }
        }
        memcpy(sums[r], sum, sizeof sum);
    }
}

/* Codes plus 128 are unsigned; what that adds is taken off at the end. */
__attribute__((target("avx512f,avx512bw,avx512vnni"))) static void
sum_vnni(const int8_t *codes, const neap_landmark_query *query, int32_t sums[ROWS][LANES]) {
    enum { N = LANES / 16 };
    const __m512i sign = _mm512_set1_epi8(-128);
    __m512i sum[ROWS][N];
    for (uint32_t r = 0; r < ROWS; r++) {
        for (int i = 0; i < N; i++) {
            sum[r][i] = _mm512_set1_epi32(r < query->n_rows ? -128 * query->sums[r] : 0);
        }
    }
    for (uint32_t q = 0; q < quads_of(query->n_elems); q++) {
        const int8_t *at = codes + (size_t)q * 4 * LANES;
        __m512i c[N];
        for (int i = 0; i < N; i++) {
            c[i] = _mm512_xor_si512(_mm512_loadu_si512(at + 64 * i), sign);
        }
        for (uint32_t r = 0; r < ROWS; r++) { /* rows past the last: whatever lies there */
            const __m512i of_query = _mm512_set1_epi32(four(query->codes[r] + 4 * q));
            for (int i = 0; i < N; i++) {
                sum[r][i] = _mm512_dpbusd_epi32(sum[r][i], c[i], of_query);
            }
        }
    }
    memcpy(sums, sum, query->n_rows * sizeof sum[0]);
}
#endif

neap_landmark_kernel neap_landmark_kernel_at(uint32_t i) {
    neap_landmark_kernel kernels[3];
    uint32_t n = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vnni")) {
        kernels[n++] = sum_vnni;
    }
    if (__builtin_cpu_supports("avx2")) {
        kernels[n++] = sum_avx2;
    }
#endif
    kernels[n++] = sum_generic;
    return i < n ? kernels[i] : NULL;
}

/* The fastest one, looked up once. */
static neap_landmark_kernel best_kernel(void) {
    static _Atomic(neap_landmark_kernel) best;
    neap_landmark_kernel kernel = atomic_load_explicit(&best, memory_order_relaxed);
    if (kernel == NULL) {
        kernel = neap_landmark_kernel_at(0);
        atomic_store_explicit(&best, kernel, memory_order_relaxed);
    }
    return kernel;
}

void neap_landmark_score(const void *panel, const neap_landmark_query *query, float best[LANES]) {
    const float *scales = panel;
    int32_t sums[ROWS][LANES];
    best_kernel()(codes_of(panel), query, sums);
    for (uint32_t r = 0; r < query->n_rows; r++) {
        for (uint32_t lane = 0; lane < LANES; lane++) {
            const float y = (float)sums[r][lane] * query->scales[r] * scales[lane];
            best[lane] = y > best[lane] ? y : best[lane];
        }
    }
}
