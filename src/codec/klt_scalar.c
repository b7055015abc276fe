/* klt_scalar.c - the reference kernel of klt, in the words of docs/formats/klt.md; and which
 * kernels there are. */
#include <math.h>

#include "klt_int.h"

static bool always(void) {
    return true;
}

static void angles(const neap_klt_turns *turns, float scale, const int32_t *positions,
                   uint32_t n_rows, float *cos, float *sin) {
    for (uint32_t r = 0; r < n_rows; r++)
        for (uint32_t i = 0; i < turns->n_pairs; i++, cos++, sin++) {
            neap_klt_cos_sin(positions[r] * turns->turns[i], cos, sin);
            *cos *= scale;
            *sin *= scale;
        }
}

static void unpack(const neap_klt_model *model, const neap_klt_basis *basis, const uint8_t *codes,
                   neap_klt_row_blocks blocks, float *y, uint8_t *y8) {
    memset(y8, 128, (size_t)basis->n_quads * NEAP_KLT_PITCH * 4);
    for (uint32_t c = 0; c < basis->n_components; c++) {
        const uint32_t bits = basis->bits[c], low = c - basis->n_exact;
        for (uint32_t b = blocks.first; b < blocks.end; b++) {
            uint8_t code[NEAP_KLT_TILE];
            neap_klt_unpack(codes + (size_t)b * bits * NEAP_KLT_TILE / 8, bits, code);
            for (uint32_t i = 0; i < NEAP_KLT_TILE; i++) {
                const uint32_t r = b * NEAP_KLT_TILE + i;
                if (c < basis->n_exact)
                    y[(size_t)c * NEAP_KLT_PITCH + r] = basis->sd[c] * model->tables[bits][code[i]];
                else
                    y8[((size_t)(low / 4) * NEAP_KLT_PITCH + r) * 4 + low % 4] =
                        (uint8_t)(model->table8[bits][code[i]] + 128);
            }
        }
        codes += (size_t)blocks.n * bits * NEAP_KLT_TILE / 8;
    }
}

static void unpack_8(const neap_klt_model *model, const neap_klt_basis *basis, const uint8_t *codes,
                     uint32_t n_blocks, uint32_t first, float *y, uint8_t *y8) {
    const uint32_t block = first / NEAP_KLT_TILE;
    const neap_klt_row_blocks blocks = {.n = n_blocks, .first = block, .end = block + 1};
    unpack(model, basis, codes, blocks, y, y8);
}

static void product(const neap_klt_basis *basis, uint32_t tile, const float *mu, const float *y,
                    const uint8_t *y8, uint32_t n_rows, float *out, size_t pitch) {
    const size_t at = (size_t)tile * NEAP_KLT_TILE;
    const int8_t *g8 = basis->g8 + at * basis->n_quads * 4;
    const uint16_t *g = basis->g + at * basis->n_exact;
    for (uint32_t r = 0; r < n_rows; r++)
        for (uint32_t j = 0; j < NEAP_KLT_TILE; j++) {
            int32_t sum = 0;
            for (uint32_t q = 0; q < basis->n_quads; q++)
                for (uint32_t i = 0; i < 4; i++)
                    sum += (y8[((size_t)q * NEAP_KLT_PITCH + r) * 4 + i] - 128) *
                           g8[((size_t)q * NEAP_KLT_TILE + j) * 4 + i];
            float x = fmaf((float)sum, basis->step[at + j], mu[j]);
            for (uint32_t c = 0; c < basis->n_exact; c++)
                x = fmaf(y[(size_t)c * NEAP_KLT_PITCH + r],
                         neap_f32_of_f16(g[(size_t)c * NEAP_KLT_TILE + j]), x);
            out[r * pitch + j] = x;
        }
}

static void product_mean(const neap_klt_basis *basis, uint32_t tile, const float *y, float *out) {
    const size_t at = (size_t)tile * NEAP_KLT_TILE;
    const int8_t *g8 = basis->g8 + at * basis->n_quads * 4;
    const uint16_t *g = basis->g + at * basis->n_exact;
    for (uint32_t j = 0; j < NEAP_KLT_TILE; j++) {
        float x = 0;
        for (uint32_t i = 0; i < 4 * basis->n_quads; i++)
            x = fmaf(y[basis->n_exact + i], g8[((size_t)(i / 4) * NEAP_KLT_TILE + j) * 4 + i % 4],
                     x);
        x *= basis->step[at + j];
        for (uint32_t c = 0; c < basis->n_exact; c++)
            x = fmaf(y[c], neap_f32_of_f16(g[(size_t)c * NEAP_KLT_TILE + j]), x);
        out[j] = x;
    }
}

/* The elements of the i-th pair. */
static void pair_of(const neap_klt_rows *rows, uint32_t i, uint32_t *ret_a, uint32_t *ret_b) {
    *ret_a = rows->mode == NEAP_KLT_ROPE_NEOX ? i : 2 * i;
    *ret_b = rows->mode == NEAP_KLT_ROPE_NEOX ? i + rows->n_pairs : 2 * i + 1;
}

static void put_f16(uint8_t *dst, float x) {
    const uint16_t half = neap_f16_of_f32(fminf(fmaxf(x, -65504), 65504));
    memcpy(dst, &half, sizeof half);
}

static void store(const float *x, size_t pitch, const neap_klt_rows *rows) {
    for (uint32_t r = 0; r < rows->n; r++, x += pitch) {
        uint8_t *row = rows->data + r * rows->stride;
        for (uint32_t i = 0; i < rows->n_pairs; i++) {
            const float c = rows->cos[r * rows->n_pairs + i], s = rows->sin[r * rows->n_pairs + i];
            uint32_t a, b;
            pair_of(rows, i, &a, &b);
            put_f16(row + 2 * (size_t)a, fmaf(x[a], c, -(x[b] * s)));
            put_f16(row + 2 * (size_t)b, fmaf(x[b], c, x[a] * s));
        }
        for (uint32_t i = 2 * rows->n_pairs; i < rows->dim; i++)
            put_f16(row + 2 * (size_t)i, x[i]);
    }
}

static void load(const neap_klt_rows *rows, float *x, size_t pitch) {
    for (uint32_t r = 0; r < rows->n; r++, x += pitch) {
        for (uint32_t i = 0; i < rows->dim; i++) {
            uint16_t half;
            memcpy(&half, rows->data + r * rows->stride + 2 * (size_t)i, sizeof half);
            x[i] = neap_f32_of_f16(half);
        }
        for (uint32_t i = 0; i < rows->n_pairs; i++) {
            const float c = rows->cos[r * rows->n_pairs + i], s = rows->sin[r * rows->n_pairs + i];
            uint32_t a, b;
            pair_of(rows, i, &a, &b);
            const float xa = x[a], xb = x[b];
            x[a] = fmaf(xa, c, xb * s);
            x[b] = fmaf(xb, c, -(xa * s));
        }
    }
}

static void transpose(const float *x, size_t pitch, uint32_t dim, float *panel) {
    for (uint32_t j = 0; j < dim; j++)
        for (uint32_t r = 0; r < NEAP_KLT_TILE; r++)
            panel[(size_t)j * NEAP_KLT_TILE + r] = x[r * pitch + j];
}

static void widen(const uint16_t *rows, size_t pitch, uint32_t n_rows, uint32_t n, float *a) {
    for (uint32_t r = 0; r < n_rows; r++)
        for (uint32_t i = 0; i < n; i++)
            a[r * NEAP_KLT_TILE + i] = neap_f32_of_f16(rows[r * pitch + i]);
}

static void widen_quad(const neap_klt_basis *basis, uint32_t tile, uint32_t quad, float *a) {
    const size_t at = ((size_t)tile * basis->n_quads + quad) * NEAP_KLT_TILE * 4;
    const float *step = basis->step + (size_t)tile * NEAP_KLT_TILE,
                *rest_step = basis->rest_step + (size_t)tile * NEAP_KLT_TILE;
    for (uint32_t j = 0; j < NEAP_KLT_TILE; j++)
        for (uint32_t i = 0; i < 4; i++)
            a[i * NEAP_KLT_TILE + j] = fmaf(basis->rest8[at + 4 * (size_t)j + i], rest_step[j],
                                            basis->g8[at + 4 * (size_t)j + i] * step[j]);
}

static void project(const float *a, const float *x, uint32_t n, float *y) {
    for (uint32_t k = 0; k < NEAP_KLT_STRIP; k++)
        for (uint32_t r = 0; r < NEAP_KLT_TILE; r++)
            for (uint32_t j = 0; j < n; j++)
                y[k * NEAP_KLT_TILE + r] = fmaf(x[(size_t)j * NEAP_KLT_TILE + r],
                                                a[k * NEAP_KLT_TILE + j], y[k * NEAP_KLT_TILE + r]);
}

static bool is_finite(const uint16_t *row, size_t n) {
    return neap_klt_is_finite(row, n);
}

static void add(const float *x, float lanes[16]) {
    for (uint32_t i = 0; i < NEAP_KLT_TILE; i++)
        lanes[i % 16] += x[i];
}

static void centre(float *panels, uint32_t n_columns, uint32_t n_blocks, const float *coded,
                   float n_coded, float *sum) {
    const size_t panel = (size_t)n_columns * NEAP_KLT_TILE;
    for (uint32_t j = 0; j < n_columns; j++, panels += NEAP_KLT_TILE) {
        float lanes[16] = {0};
        for (uint32_t b = 0; b < n_blocks; b++)
            add(panels + b * panel, lanes);
        sum[j] = neap_klt_fold(lanes);
        const float mean = n_coded > 0 ? sum[j] / n_coded : 0;
        for (uint32_t b = 0; b < n_blocks; b++)
            for (uint32_t i = 0; i < NEAP_KLT_TILE; i++)
                panels[b * panel + i] -= mean * coded[b * NEAP_KLT_TILE + i];
    }
}

static void means(const neap_klt_basis *basis, const float *y, const uint8_t *y8, uint32_t n_blocks,
                  float count, float *y_mean) {
    for (uint32_t c = 0; c < basis->n_exact; c++, y += NEAP_KLT_PITCH) {
        float lanes[16] = {0};
        for (uint32_t b = 0; b < n_blocks; b++)
            add(y + b * NEAP_KLT_TILE, lanes);
        *y_mean++ = neap_klt_fold(lanes) / count;
    }
    for (uint32_t q = 0; q < basis->n_quads; q++, y8 += 4 * NEAP_KLT_PITCH)
        for (uint32_t i = 0; i < 4; i++) {
            int32_t sum = 0;
            for (uint32_t r = 0; r < n_blocks * NEAP_KLT_TILE; r++)
                sum += y8[4 * r + i] - 128;
            *y_mean++ = (float)sum / count;
        }
}

static void quantise(const neap_klt_model *model, uint32_t bits, float sd, float inverse_sd,
                     const float *y, uint8_t *codes, float *error, float *power) {
    uint8_t code[NEAP_KLT_TILE];
    for (uint32_t r = 0; r < NEAP_KLT_TILE; r++) {
        const float unit = y[r] * inverse_sd;
        uint32_t k = 0;
        for (uint32_t d = 0; d < bits; d++)
            k = 2 * k + (unit > model->thresholds[bits][(1u << d) + k]);
        code[r] = (uint8_t)k;
        const float off = y[r] - sd * model->tables[bits][k];
        error[r] = fmaf(off, off, error[r]);
        power[r] = fmaf(y[r], y[r], power[r]);
    }
    neap_klt_pack(code, bits, codes);
}

static const neap_klt_kernel scalar_kernel = {
    .name = "scalar",
    .supported = always,
    .is_finite = is_finite,
    .angles = angles,
    .unpack = unpack,
    .unpack_8 = unpack_8,
    .product = product,
    .product_mean = product_mean,
    .store = store,
    .load = load,
    .transpose = transpose,
    .centre = centre,
    .means = means,
    .widen = widen,
    .widen_quad = widen_quad,
    .project = project,
    .quantise = quantise,
};

static const neap_klt_kernel *const kernels[] = {
#if defined(__x86_64__)
    &neap_klt_avx512,
    &neap_klt_avx2,
#elif defined(__aarch64__)
    &neap_klt_i8mm,
    &neap_klt_dotprod,
    &neap_klt_neon,
#endif
    &scalar_kernel,
};

const neap_klt_kernel *neap_klt_kernel_at(size_t i) {
    for (size_t k = 0; k < sizeof kernels / sizeof kernels[0]; k++)
        if (kernels[k]->supported() && i-- == 0) return kernels[k];
    return NULL;
}
