/* attend.cl - attention over an array of chunk pointers, 8 elements at a time.
 *
 * attend: a work-item takes ROWS query rows of one KV head against one split of the context. It
 * reads K and V where they lie, follows the chunk pointers and keeps an online softmax, so that the
 * context is streamed once and never gathered (mzCache section 4.2). Nothing goes through local
 * memory. finish: combines the splits of a row in the order of the context.
 *
 * A block of cells that the mask hides from all rows of the work-item is not read: its chunk may be
 * away. Scores are kept in units of log2. K, V: f16; sums: f32.
 *
 * Built with K_ELEMS, V_ELEMS (elements of a head), ROWS, and attend_args.h before this text.
 * HALF_MATH (the device has cl_khr_fp16): products in f16, 8 wide, as the paper's. Only short runs
 * of them are added up in f16, everything else is f32; and they are scaled so that no run of four
 * overflows with K or V up to the largest f16 (queries by 1 / ATTEND_HALF_QUERY). */
#define BLOCK ((int)ATTEND_BLOCK)
#define VECS(elems) (((elems) + 7) / 8)
#define K_VECS VECS(K_ELEMS)
#define V_VECS VECS(V_ELEMS)
#define HIDDEN 0xfc00 /* -infinity in f16 */

#ifdef FP_FAST_FMAF
#define MULTIPLY_ADD fma
#else
#define MULTIPLY_ADD mad
#endif

#ifdef HALF_MATH
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
typedef half8 row_vec;
typedef half row_elem;
#ifdef FP_FAST_FMA_HALF
#define ROW_MULTIPLY_ADD fma
#else
#define ROW_MULTIPLY_ADD mad
#endif
#define WIDEN convert_float8
#define NARROW convert_half8
#define K_RUN 4 /* vectors of a row */
#define V_RUN 4 /* cells */
#define QUERY_SCALE ((float)ATTEND_HALF_QUERY)
#define WEIGHT_SCALE 4.0f
#else
typedef float8 row_vec;
typedef float row_elem;
#define ROW_MULTIPLY_ADD MULTIPLY_ADD
#define WIDEN(x) (x)
#define NARROW(x) (x)
#define K_RUN K_VECS
#define V_RUN BLOCK
#define QUERY_SCALE 1.0f
#define WEIGHT_SCALE 1.0f
#endif

/* Vector v of a row of elems f16; what lies past its end is zero. */
row_vec load_row(__global const half *row, int v, int elems) {
    if (8 * v + 8 <= elems) {
#ifdef HALF_MATH
        return vload8(v, row);
#else
        return vload_half8(v, row);
#endif
    }
    float tail[8];
    for (int i = 0; i < 8; i++) {
        tail[i] = 8 * v + i < elems ? vload_half(8 * v + i, row) : 0.0f;
    }
    return NARROW(vload8(0, tail));
}

float sum8(float8 x) {
    float4 y = x.lo + x.hi;
    float2 z = y.lo + y.hi;
    return z.x + z.y;
}

float max8(float8 x) {
    float4 y = fmax(x.lo, x.hi);
    float2 z = fmax(y.lo, y.hi);
    return fmax(z.x, z.y);
}

/* Bit 0: some of the block's cells are seen; bit 1: some are hidden or get a bias. */
int look(__global const ushort *mask) {
    ushort8 hidden = (ushort8)(ushort)0xffff, bits = (ushort8)(ushort)0;
    for (int j = 0; j < BLOCK / 8; j++) {
        ushort8 cells = vload8(j, mask);
        hidden &= convert_ushort8(cells == (ushort8)(ushort)HIDDEN);
        bits |= cells;
    }
    ushort4 h = hidden.lo & hidden.hi, b = bits.lo | bits.hi;
    return ((h.x & h.y & h.z & h.w) == 0 ? 1 : 0) | ((b.x | b.y | b.z | b.w) != 0 ? 2 : 0);
}

/* score[r][c] = q[r] . k[c] */
void score_block(__private float score[ROWS][ATTEND_BLOCK], __global const row_elem *const q[ROWS],
                 __global const half *k, uint k_cell, int n) {
    for (int c = 0; c < n; c++) {
        float8 sum[ROWS];
        for (int r = 0; r < ROWS; r++) {
            sum[r] = (float8)0.0f;
        }
        __global const half *row = k + c * (size_t)k_cell;
        for (int run = 0; run < K_VECS; run += K_RUN) {
            row_vec part[ROWS];
            for (int r = 0; r < ROWS; r++) {
                part[r] = (row_vec)(row_elem)0.0f;
            }
#pragma unroll
            for (int v = run; v < run + K_RUN && v < K_VECS; v++) {
                row_vec key = load_row(row, v, K_ELEMS);
                for (int r = 0; r < ROWS; r++) {
                    part[r] = ROW_MULTIPLY_ADD(vload8(v, q[r]), key, part[r]);
                }
            }
            for (int r = 0; r < ROWS; r++) {
                sum[r] += WIDEN(part[r]);
            }
        }
        for (int r = 0; r < ROWS; r++) {
            score[r][c] = sum8(sum[r]) * QUERY_SCALE;
        }
    }
    for (int r = 0; r < ROWS; r++) {
        for (int c = n; c < BLOCK; c++) {
            score[r][c] = -INFINITY;
        }
    }
}

/* Scores of a row to weights exp2(s - top); returns the factor that its sums are to get. */
float soften(__private float *score, __global const ushort *mask, float slope, float cap,
             __private float *top, __private float *sum) {
    float8 x[BLOCK / 8], most = (float8)(-INFINITY);
    for (int j = 0; j < BLOCK / 8; j++) {
        x[j] = vload8(j, score);
        if (cap != 0.0f) {
            /* The missing cells of a short block stay hidden. */
            x[j] = select(cap * tanh(x[j]), x[j], x[j] == (float8)(-INFINITY));
        }
        if (mask != 0) {
            float8 bias = vload_half8(j, (__global const half *)mask);
            x[j] = select(MULTIPLY_ADD(bias, (float8)slope, x[j]), (float8)(-INFINITY),
                          bias == (float8)(-INFINITY));
        }
        most = fmax(most, x[j]);
    }
    float old = *top, now = fmax(old, max8(most));
    if (now == -INFINITY) {
        bool broken = false; /* by a NaN that is seen */
        for (int j = 0; j < BLOCK / 8; j++) {
            broken = broken || any(isnan(x[j]));
        }
        now = broken ? 0.0f : now;
    }
    float factor = now == old ? 1.0f : exp2(old - now);
    float8 total = (float8)0.0f;
    for (int j = 0; j < BLOCK / 8; j++) {
        float8 weight = now == -INFINITY ? (float8)0.0f : exp2(x[j] - now);
        total += weight;
        vstore8(weight, j, score);
    }
    *top = now;
    *sum = *sum * factor + sum8(total);
    return factor;
}

/* out[r] = out[r] * factor[r] + weight[r] . v */
void add_values(__private float8 out[ROWS][V_VECS], __private float weight[ROWS][ATTEND_BLOCK],
                __private const float *factor, __global const half *v, uint v_cell, int n) {
    for (int at = 0; at < V_VECS; at++) {
        float8 sum[ROWS];
        for (int r = 0; r < ROWS; r++) {
            sum[r] = out[r][at] * factor[r];
        }
        for (int run = 0; run < n; run += V_RUN) {
            row_vec part[ROWS];
            for (int r = 0; r < ROWS; r++) {
                part[r] = (row_vec)(row_elem)0.0f;
            }
            int end = min(n, run + V_RUN);
            for (int c = run; c < end; c++) {
                row_vec value = load_row(v + c * (size_t)v_cell, at, V_ELEMS);
                for (int r = 0; r < ROWS; r++) {
                    row_elem w = (row_elem)(weight[r][c] * (1.0f / WEIGHT_SCALE));
                    part[r] = ROW_MULTIPLY_ADD((row_vec)w, value, part[r]);
                }
            }
            for (int r = 0; r < ROWS; r++) {
                sum[r] = MULTIPLY_ADD(WIDEN(part[r]), (float8)WEIGHT_SCALE, sum[r]);
            }
        }
        for (int r = 0; r < ROWS; r++) {
            out[r][at] = sum[r];
        }
    }
}

/* The same where the mask hides some cell from some row: it may hold anything, NaN too. */
void add_values_seen(__private float8 out[ROWS][V_VECS],
                     __private float weight[ROWS][ATTEND_BLOCK], __private const float *factor,
                     __global const half *v, uint v_cell, int n) {
    for (int at = 0; at < V_VECS; at++) {
        float8 sum[ROWS];
        for (int r = 0; r < ROWS; r++) {
            sum[r] = out[r][at] * factor[r];
        }
        for (int c = 0; c < n; c++) {
            float8 value = WIDEN(load_row(v + c * (size_t)v_cell, at, V_ELEMS));
            for (int r = 0; r < ROWS; r++) {
                float8 more = MULTIPLY_ADD((float8)weight[r][c], value, sum[r]);
                sum[r] = weight[r][c] == 0.0f ? sum[r] : more;
            }
        }
        for (int r = 0; r < ROWS; r++) {
            out[r][at] = sum[r];
        }
    }
}

/* partials: [split][stream][kv_head][tile * ROWS + row][8 * V_VECS + 8]: sums, then top and sum. */
__kernel void attend(const attend_args a, __global const row_elem *queries,
                     __global const ulong *k_chunks, __global const ulong *v_chunks,
                     __global const ushort *masks, __global const float *slopes,
                     __global float *partials) {
    uint item = (uint)get_global_id(0);
    if (item >= a.n_items) {
        return;
    }
    uint tile = item % a.n_tiles, head_item = item / a.n_tiles;
    uint kv_head = head_item % a.n_kv_heads;
    uint stream = head_item / a.n_kv_heads % a.n_streams;
    uint split = head_item / a.n_kv_heads / a.n_streams;
    __global const row_elem *q[ROWS];
    __global const ushort *mask[ROWS];
    float slope[ROWS], top[ROWS], sum[ROWS], factor[ROWS];
    float8 out[ROWS][V_VECS];
    for (int r = 0; r < ROWS; r++) {
        /* Rows past the last repeat it; nobody reads what they give. */
        uint row = min(tile * ROWS + r, a.n_rows - 1);
        uint head = kv_head * a.group + row % a.group;
        q[r] = queries +
               (((size_t)stream * a.n_kv_heads + kv_head) * a.n_rows + row) * (8 * K_VECS);
        mask[r] = a.mask_heads == 0
                      ? 0
                      : masks + (((size_t)(stream % a.mask_streams) * a.mask_heads +
                                  head % a.mask_heads) * a.mask_tokens + row / a.group) *
                                    a.mask_cells;
        slope[r] = slopes[head];
        top[r] = -INFINITY;
        sum[r] = 0.0f;
        for (int v = 0; v < V_VECS; v++) {
            out[r][v] = (float8)0.0f;
        }
    }
    uint end = min(a.n_chunks, (split + 1) * a.split_chunks);
    for (uint chunk = split * a.split_chunks; chunk < end; chunk++) {
        uint first = chunk * ATTEND_CHUNK, last = min(a.n_cells, first + ATTEND_CHUNK);
        size_t at = (size_t)stream * a.n_chunks + chunk;
        __global const half *k = (__global const half *)(size_t)k_chunks[at] + kv_head * a.k_head;
        __global const half *v = (__global const half *)(size_t)v_chunks[at] + kv_head * a.v_head;
        for (uint cell = first; cell < last; cell += ATTEND_BLOCK) {
            int seen = 1, n = (int)min(ATTEND_BLOCK, last - cell);
            if (a.mask_heads != 0) {
                seen = 0;
                for (int r = 0; r < ROWS; r++) {
                    seen |= look(mask[r] + cell);
                }
            }
            if ((seen & 1) == 0) {
                continue;
            }
            size_t inside = cell - first;
            float score[ROWS][ATTEND_BLOCK];
            score_block(score, q, k + inside * a.k_cell, a.k_cell, n);
            for (int r = 0; r < ROWS; r++) {
                factor[r] = soften(score[r], (seen & 2) != 0 ? mask[r] + cell : 0, slope[r], a.cap,
                                   &top[r], &sum[r]);
            }
            if ((seen & 2) != 0) {
                add_values_seen(out, score, factor, v + inside * a.v_cell, a.v_cell, n);
            } else {
                add_values(out, score, factor, v + inside * a.v_cell, a.v_cell, n);
            }
        }
    }
    __global float *partial = partials + (size_t)item * ROWS * (8 * V_VECS + 8);
    for (int r = 0; r < ROWS; r++, partial += 8 * V_VECS + 8) {
        for (int v = 0; v < V_VECS; v++) {
            vstore8(out[r][v], v, partial);
        }
        partial[8 * V_VECS] = top[r];
        partial[8 * V_VECS + 1] = sum[r];
    }
}

/* One work-item a query row: results [stream][kv_head][row][8 * V_VECS]. A sink is one more cell
 * without a value; a row that saw nothing is zero. */
__kernel void finish(const attend_args a, __global const float *partials,
                     __global const float *sinks, __global float *results) {
    uint item = (uint)get_global_id(0), heads = a.n_streams * a.n_kv_heads;
    if (item >= heads * a.n_rows) {
        return;
    }
    uint row = item % a.n_rows, stream_head = item / a.n_rows;
    size_t stride = 8 * V_VECS + 8, split_floats = (size_t)heads * a.n_tiles * ROWS * stride;
    __global const float *first =
        partials + ((size_t)stream_head * a.n_tiles * ROWS + row) * stride;
    float top = -INFINITY, sum = 0.0f;
    for (uint s = 0; s < a.n_splits; s++) {
        top = fmax(top, first[s * split_floats + 8 * V_VECS]);
    }
    float sink = -INFINITY;
    if (a.has_sinks != 0) {
        sink = sinks[stream_head % a.n_kv_heads * a.group + row % a.group];
        top = fmax(top, sink);
    }
    float8 total[V_VECS];
    for (int v = 0; v < V_VECS; v++) {
        total[v] = (float8)0.0f;
    }
    for (uint s = 0; s < a.n_splits; s++) {
        __global const float *partial = first + s * split_floats;
        float its_top = partial[8 * V_VECS];
        if (its_top == -INFINITY) {
            continue; /* it saw nothing */
        }
        float factor = exp2(its_top - top);
        sum = MULTIPLY_ADD(partial[8 * V_VECS + 1], factor, sum);
        for (int v = 0; v < V_VECS; v++) {
            total[v] = MULTIPLY_ADD(vload8(v, partial), (float8)factor, total[v]);
        }
    }
    if (a.has_sinks != 0) {
        sum += exp2(sink - top);
    }
    float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    for (int v = 0; v < V_VECS; v++) {
        vstore8(total[v] * inverse, (size_t)item * V_VECS + v, results);
    }
}
