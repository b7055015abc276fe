/* opencl_attn.c - lays an attention out for the kernels of attend.cl and runs them.
 *
 * What is small is staged in one block of SVM: queries (scaled, by KV head, rows filled up to
 * whole vectors), the two lists of chunk pointers, mask, slopes, sinks, partial sums, results.
 *
 * Invariants
 *  1. Splits and tiles follow from the shape alone, and splits are combined in the order of the
 *     context: the same input gives the same bits, however many compute units the device has.
 *  2. Only chunk pointers are staged of K and V, never cells. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attn_int.h"
#include "err.h"
#include "half.h"
#include "opencl_int.h"

_Static_assert(ATTEND_CHUNK == NEAP_ATTN_CHUNK_CELLS, "one size of chunks");

/* Work-items that an attention is cut into at least, where the context is long enough. */
#define ITEMS_WANTED 1024u
#define ALIGN 64u

static uint32_t ceil_div(uint32_t a, uint32_t b) {
    return a / b + (a % b != 0);
}

static uint32_t padded(uint32_t elems) {
    return ceil_div(elems, 8) * 8;
}

/* ---- variants ---- */

/* Rows share what is read of K and V; their sums must fit into registers or a near cache. */
static uint32_t rows_of(const neap_attn_shape *shape) {
    uint32_t rows = shape->n_tokens * (shape->n_heads / shape->n_kv_heads);
    uint32_t most = shape->v.head_elems > 256 || shape->k.head_elems > 256 ? 1 : 4;
    return rows >= most ? most : rows >= 2 ? 2 : 1;
}

static void log_build(const neap_opencl *cl, cl_program program) {
    char text[1024] = "";
    cl->api.GetProgramBuildInfo(program, cl->device, CL_PROGRAM_BUILD_LOG, sizeof text - 1, text,
                                NULL);
    neap_log(NEAP_LOG_WARN, "OpenCL: the attention kernel does not build: %s", text);
}

static void build(const neap_opencl *cl, neap_cl_variant *variant) {
    char options[160];
    const char *text = neap_attend_source;
    cl_int err = CL_SUCCESS;
    snprintf(options, sizeof options, "-cl-std=CL1.2 -DK_ELEMS=%u -DV_ELEMS=%u -DROWS=%u%s",
             variant->k_elems, variant->v_elems, variant->rows,
             cl->uses_half ? " -DHALF_MATH=1" : "");
    variant->program =
        cl->api.CreateProgramWithSource(cl->context, 1, &text, &neap_attend_source_len, &err);
    if (variant->program == NULL) {
        return;
    }
    if (cl->api.BuildProgram(variant->program, 1, &cl->device, options, NULL, NULL) != CL_SUCCESS) {
        log_build(cl, variant->program);
        return;
    }
    variant->attend = cl->api.CreateKernel(variant->program, "attend", &err);
    variant->finish = cl->api.CreateKernel(variant->program, "finish", &err);
}

/* NULL: it does not build. [lock] */
static const neap_cl_variant *variant_of(neap_opencl *cl, const neap_attn_shape *shape) {
    uint32_t rows = rows_of(shape);
    neap_cl_variant *variant = cl->variants;
    while (variant != NULL && (variant->k_elems != shape->k.head_elems ||
                               variant->v_elems != shape->v.head_elems || variant->rows != rows)) {
        variant = variant->next;
    }
    if (variant == NULL) {
        variant = calloc(1, sizeof *variant);
        if (variant == NULL) {
            return NULL;
        }
        variant->k_elems = shape->k.head_elems;
        variant->v_elems = shape->v.head_elems;
        variant->rows = rows;
        build(cl, variant);
        variant->next = cl->variants;
        cl->variants = variant;
    }
    return variant->attend != NULL && variant->finish != NULL ? variant : NULL;
}

/* ---- what the device takes ---- */

/* [lock] */
static bool is_shared(const neap_opencl *cl, const void *at, size_t len) {
    if (cl->system_svm) {
        return true;
    }
    for (const neap_cl_shared *shared = cl->shared; shared != NULL; shared = shared->next) {
        uintptr_t from = (uintptr_t)at - (uintptr_t)shared->base;
        if (from <= shared->len && len <= shared->len - from) {
            return true;
        }
    }
    return false;
}

/* [lock] */
static bool plane_shared(const neap_opencl *cl, const neap_attn_shape *shape,
                         const neap_attn_plane *plane) {
    uint32_t n_chunks = ceil_div(shape->n_cells, ATTEND_CHUNK);
    for (uint32_t i = 0; i < shape->n_streams * n_chunks; i++) {
        uint32_t first = i % n_chunks * ATTEND_CHUNK, rest = shape->n_cells - first;
        uint32_t n = rest < ATTEND_CHUNK ? rest : ATTEND_CHUNK;
        size_t len = (n - 1) * plane->cell_bytes + (shape->n_kv_heads - 1) * plane->head_bytes +
                     2 * (size_t)plane->head_elems;
        if (!is_shared(cl, plane->chunks[i], len)) {
            return false;
        }
    }
    return true;
}

static bool strides_fit(const neap_attn_plane *plane) {
    return plane->cell_bytes / 2 <= UINT32_MAX && plane->head_bytes / 2 <= UINT32_MAX / 1024;
}

const char *neap_opencl_refuses(neap_opencl *cl, const neap_attn_shape *shape) {
    if (!neap_attn_supported(shape)) {
        return "its shape";
    }
    if (shape->k.type != NEAP_ATTN_F16 || shape->v.type != NEAP_ATTN_F16) {
        return "K or V is not f16";
    }
    if (!strides_fit(&shape->k) || !strides_fit(&shape->v)) {
        return "its strides";
    }
    pthread_mutex_lock(&cl->lock);
    const char *why = cl->broken ? "the device failed"
                      : !plane_shared(cl, shape, &shape->k) || !plane_shared(cl, shape, &shape->v)
                          ? "K or V lies outside of the device's memory"
                      : variant_of(cl, shape) == NULL ? "the kernel does not build"
                                                      : NULL;
    pthread_mutex_unlock(&cl->lock);
    return why;
}

/* ---- staging ---- */

typedef struct staged {
    float *queries, *slopes, *sinks, *partials, *results;
    uint64_t *k_chunks, *v_chunks;
    uint16_t *mask;
} staged;

static attend_args args_of(const neap_attn_shape *shape, uint32_t rows) {
    attend_args a = {
        .n_streams = shape->n_streams,
        .n_kv_heads = shape->n_kv_heads,
        .n_heads = shape->n_heads,
        .group = shape->n_heads / shape->n_kv_heads,
        .n_cells = shape->n_cells,
        .n_chunks = ceil_div(shape->n_cells, ATTEND_CHUNK),
        .k_cell = (uint32_t)(shape->k.cell_bytes / 2),
        .k_head = (uint32_t)(shape->k.head_bytes / 2),
        .v_cell = (uint32_t)(shape->v.cell_bytes / 2),
        .v_head = (uint32_t)(shape->v.head_bytes / 2),
        .has_sinks = shape->sinks != NULL,
        .cap = shape->softcap * NEAP_ATTN_LOG2E,
    };
    a.n_rows = shape->n_tokens * a.group;
    a.n_tiles = ceil_div(a.n_rows, rows);
    uint32_t tiles = a.n_streams * a.n_kv_heads * a.n_tiles;
    uint32_t splits = ceil_div(ITEMS_WANTED, tiles);
    a.split_chunks = ceil_div(a.n_chunks, splits < a.n_chunks ? splits : a.n_chunks);
    a.n_splits = ceil_div(a.n_chunks, a.split_chunks);
    a.n_items = tiles * a.n_splits;
    if (shape->mask.base != NULL) {
        a.mask_cells = ceil_div(a.n_cells, ATTEND_BLOCK) * ATTEND_BLOCK;
        a.mask_tokens = shape->n_tokens;
        a.mask_heads = shape->mask.n_heads;
        a.mask_streams = shape->mask.n_streams;
    }
    return a;
}

static void *take(char *base, size_t *used, size_t bytes) {
    void *at = base != NULL ? base + *used : NULL;
    *used += (bytes + ALIGN - 1) / ALIGN * ALIGN;
    return at;
}

/* Returns the bytes of all; with base NULL nothing but those. */
static size_t lay_out(const neap_attn_shape *shape, const attend_args *a, uint32_t rows, char *base,
                      staged *ret_staged) {
    size_t used = 0, heads = (size_t)a->n_streams * a->n_kv_heads;
    size_t chunks = (size_t)a->n_streams * a->n_chunks * sizeof(uint64_t);
    size_t partial = (padded(shape->v.head_elems) + 8) * sizeof(float);
    ret_staged->queries =
        take(base, &used, heads * a->n_rows * padded(shape->k.head_elems) * sizeof(float));
    ret_staged->results =
        take(base, &used, heads * a->n_rows * padded(shape->v.head_elems) * sizeof(float));
    ret_staged->slopes = take(base, &used, a->n_heads * sizeof(float));
    ret_staged->sinks = take(base, &used, a->n_heads * sizeof(float));
    ret_staged->k_chunks = take(base, &used, chunks);
    ret_staged->v_chunks = take(base, &used, chunks);
    ret_staged->mask = take(base, &used,
                            (size_t)a->mask_streams * a->mask_heads * a->mask_tokens *
                                a->mask_cells * sizeof(uint16_t));
    ret_staged->partials = take(base, &used, (size_t)a->n_items * rows * partial);
    return used;
}

/* NULL: no memory. [lock] */
static char *reserve_scratch(neap_opencl *cl, size_t bytes) {
    if (bytes > cl->scratch_cap) {
        if (cl->scratch != NULL) {
            cl->api.SVMFree(cl->context, cl->scratch);
        }
        cl->scratch_cap = bytes + bytes / 4;
        cl->scratch = cl->api.SVMAlloc(
            cl->context, CL_MEM_READ_WRITE | CL_MEM_SVM_FINE_GRAIN_BUFFER, cl->scratch_cap, 0);
        cl->scratch_cap = cl->scratch != NULL ? cl->scratch_cap : 0;
    }
    return cl->scratch;
}

/* half: f16, scaled down, else f32. */
static void stage_queries(const neap_attn_shape *shape, const attend_args *a, bool half,
                          float *dst) {
    /* Capped scores get their factor of log2(e) after the cap. */
    float scale =
        shape->softcap != 0.0f ? shape->scale / shape->softcap : shape->scale * NEAP_ATTN_LOG2E;
    uint32_t n = shape->k.head_elems, stride = padded(n);
    uint16_t *halves = (uint16_t *)(void *)dst;
    scale = half ? scale / (float)ATTEND_HALF_QUERY : scale;
    for (uint32_t head = 0; head < a->n_streams * a->n_kv_heads; head++) {
        uint32_t stream = head / a->n_kv_heads, kv_head = head % a->n_kv_heads;
        for (uint32_t row = 0; row < a->n_rows; row++) {
            const float *q =
                (const float *)(const void *)(shape->q.base + stream * shape->q.stream_bytes +
                                              row / a->group * shape->q.token_bytes +
                                              (kv_head * a->group + row % a->group) *
                                                  shape->q.head_bytes);
            for (uint32_t i = 0; i < stride; i++) {
                float x = i < n ? q[i] * scale : 0.0f;
                if (half) {
                    *halves++ = neap_f16_of_f32(x);
                } else {
                    *dst++ = x;
                }
            }
        }
    }
}

static void stage_mask(const neap_attn_shape *shape, const attend_args *a, uint16_t *dst) {
    for (uint32_t stream = 0; stream < a->mask_streams; stream++) {
        for (uint32_t head = 0; head < a->mask_heads; head++) {
            for (uint32_t token = 0; token < a->mask_tokens; token++, dst += a->mask_cells) {
                memcpy(dst, neap_attn_mask_row(shape, stream, token, head),
                       a->n_cells * sizeof *dst);
                for (uint32_t cell = a->n_cells; cell < a->mask_cells; cell++) {
                    dst[cell] = NEAP_ATTN_HIDDEN;
                }
            }
        }
    }
}

static void stage(const neap_attn_shape *shape, const attend_args *a, bool half,
                  const staged *into) {
    stage_queries(shape, a, half, into->queries);
    for (size_t i = 0; i < (size_t)a->n_streams * a->n_chunks; i++) {
        into->k_chunks[i] = (uintptr_t)shape->k.chunks[i];
        into->v_chunks[i] = (uintptr_t)shape->v.chunks[i];
    }
    for (uint32_t head = 0; head < a->n_heads; head++) {
        into->slopes[head] = neap_attn_slope(shape, head) * NEAP_ATTN_LOG2E;
        into->sinks[head] = shape->sinks != NULL ? shape->sinks[head] * NEAP_ATTN_LOG2E : 0.0f;
    }
    stage_mask(shape, a, into->mask);
}

static void take_results(const neap_attn_shape *shape, const attend_args *a, const float *src) {
    uint32_t n = shape->v.head_elems;
    for (uint32_t head = 0; head < a->n_streams * a->n_kv_heads; head++) {
        uint32_t stream = head / a->n_kv_heads, kv_head = head % a->n_kv_heads;
        for (uint32_t row = 0; row < a->n_rows; row++, src += padded(n)) {
            char *out = shape->out.base + stream * shape->out.stream_bytes +
                        row / a->group * shape->out.token_bytes +
                        (kv_head * a->group + row % a->group) * shape->out.head_bytes;
            memcpy(out, src, n * sizeof *src);
        }
    }
}

/* ---- running ---- */

/* Tells the driver of every block that a kernel reaches through pointers. [lock] */
static cl_int name_shared(const neap_opencl *cl, cl_kernel kernel) {
    size_t n = 0;
    if (cl->system_svm) {
        cl_bool all = CL_TRUE;
        return cl->api.SetKernelExecInfo(kernel, CL_KERNEL_EXEC_INFO_SVM_FINE_GRAIN_SYSTEM,
                                         sizeof all, &all);
    }
    for (const neap_cl_shared *shared = cl->shared; shared != NULL; shared = shared->next) {
        n++;
    }
    void **pointers = malloc((n + 1) * sizeof *pointers);
    if (pointers == NULL) {
        return CL_OUT_OF_HOST_MEMORY;
    }
    n = 0;
    for (const neap_cl_shared *shared = cl->shared; shared != NULL; shared = shared->next) {
        pointers[n++] = shared->raw;
    }
    cl_int err = n == 0 ? CL_SUCCESS
                        : cl->api.SetKernelExecInfo(kernel, CL_KERNEL_EXEC_INFO_SVM_PTRS,
                                                    n * sizeof *pointers, pointers);
    free(pointers);
    return err;
}

static cl_int set_args(const neap_opencl *cl, cl_kernel kernel, const attend_args *a,
                       const void *const *pointers, cl_uint n) {
    cl_int err = cl->api.SetKernelArg(kernel, 0, sizeof *a, a);
    for (cl_uint i = 0; err == CL_SUCCESS && i < n; i++) {
        err = cl->api.SetKernelArgSVMPointer(kernel, i + 1, pointers[i]);
    }
    return err;
}

static cl_int enqueue(const neap_opencl *cl, cl_kernel kernel, size_t n_items) {
    size_t local = cl->group_items, global = (n_items + local - 1) / local * local;
    return cl->api.EnqueueNDRangeKernel(cl->queue, kernel, 1, NULL, &global, &local, 0, NULL, NULL);
}

/* [lock] */
static cl_int launch(const neap_opencl *cl, const neap_cl_variant *variant, const attend_args *a,
                     const staged *s) {
    const void *const attend[] = {s->queries, s->k_chunks, s->v_chunks,
                                  s->mask,    s->slopes,   s->partials};
    const void *const finish[] = {s->partials, s->sinks, s->results};
    cl_int err = name_shared(cl, variant->attend);
    err = err == CL_SUCCESS ? set_args(cl, variant->attend, a, attend, 6) : err;
    err = err == CL_SUCCESS ? set_args(cl, variant->finish, a, finish, 3) : err;
    err = err == CL_SUCCESS ? enqueue(cl, variant->attend, a->n_items) : err;
    err = err == CL_SUCCESS
              ? enqueue(cl, variant->finish, (size_t)a->n_streams * a->n_kv_heads * a->n_rows)
              : err;
    cl_int finished = cl->api.Finish(cl->queue);
    return err == CL_SUCCESS ? finished : err;
}

/* [lock] */
static int compute(neap_opencl *cl, const neap_cl_variant *variant, const neap_attn_shape *shape) {
    staged s = {0};
    const attend_args a = args_of(shape, variant->rows);
    char *scratch = reserve_scratch(cl, lay_out(shape, &a, variant->rows, NULL, &s));
    if (scratch == NULL) {
        return -ENOMEM;
    }
    lay_out(shape, &a, variant->rows, scratch, &s);
    stage(shape, &a, cl->uses_half, &s);
    cl_int failed = launch(cl, variant, &a, &s);
    if (failed != CL_SUCCESS) {
        neap_log(NEAP_LOG_WARN, "OpenCL: %s: error %d", cl->name, failed);
        cl->broken = true;
        return -EIO;
    }
    take_results(shape, &a, s.results);
    return 0;
}

int neap_opencl_attn(neap_opencl *cl, const neap_attn_shape *shape) {
    pthread_mutex_lock(&cl->lock);
    const neap_cl_variant *variant = variant_of(cl, shape);
    int err = variant != NULL && !cl->broken ? compute(cl, variant, shape) : -EIO;
    pthread_mutex_unlock(&cl->lock);
    return err;
}
