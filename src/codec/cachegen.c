/* cachegen.c - KV chunks at 3 bits a value: the format, the scalar kernel, the entropy coder.
 *
 * After CacheGen (Liu et al., SIGCOMM 2024): what is stored are differences between neighbouring
 * tokens, quantised, entropy-coded with the statistics of their channels. Three things differ, each
 * because it measured better (SmolLM2-135M, Qwen2.5-Coder-0.5B, Gemma3-270M; 2048 tokens of prose,
 * code and documentation; mean divergence of the next 192 tokens):
 *   - a code is predicted from the channel's mean code and the token before, weighed by what serves
 *     the channel best (0 to 4 quarters). Differences to an anchor token, one in ten, cost 0.2 bits
 *     more than no differences at all, these save 0.4 of the keys' bits and some of the values'
 *   - one step for a whole tile, not one for each channel: channels get the bits they need from the
 *     entropy coder (SmolLM2: 0.037 against 0.056, at fewer bits)
 *   - rows (tokens) of small magnitude get a finer step. They are the tokens that the model attends
 *     to most, the first of the text among them, and it is their error that shows (SmolLM2: 0.014
 *     against 0.039, at the same bits)
 *
 * Format (little-endian)
 *   u32 magic "NCG" 1, u32 n_planes; for each plane u32 n_rows, u32 row_elems, u64 row_bytes,
 *   u8 type, u8 mode, u16 0. Then for each plane its data: mode RAW, the rows; mode CODED, tiles of
 *   at most 256 rows and 512 columns, row of tiles by row of tiles, each with a u32 of its length
 *   and, in the highest bit, whether it is coded. A raw tile is its rows. A coded one:
 *     i8 exponent of the step, u8 flags (1: some rows raw, 2: some rows finer), u8 classes,
 *     u8 Rice parameter, u32 escapes, u32 bytes of bits, 32 x u32 states of the lanes,
 *     escapes (i16 each),
 *     bits, lowest first: flag 1: a bit a row, raw; flag 2: for each other row a bit, and if set 4
 *       bits of shift; for each class 5 bits of largest magnitude m, m + 1 weights of 6 bits for
 *       the magnitudes 0 to m, one for the escape; for each column 3 bits of class, 3 of weight,
 * the base as a Rice code of its zigzag words of the entropy coder (u16 each), and last the raw
 * rows. In a transposed plane a row is a channel and a column a token; nothing else changes.
 *
 * Coding. A row's values are whole multiples of its step, a power of two that f16, bf16 and f32
 *   multiply exactly: decoding rounds nothing. Codes of a column in the step of the tile:
 *     p = base + round(weight / 4 * (code of the row before - base)), residual = code - (p <<
 * shift) A symbol is the residual + 31, or 63 for one beyond 31, whose code is in the list of
 * escapes. Entropy coder: rANS, 32 interleaved states of 32 bits (lane = column modulo 32) that
 * take in words of 16, probabilities of 11 bits. Each class of columns (of like spread) has its
 * table. Symbols lie row by row; the encoder runs backwards.
 *
 * Steps. d is the mean distance of the tile's values from the mean of their column, m the mean
 *   magnitude of a row: its step is the power of two nearest to levels * min(d, m), levels by the
 *   plane (keys, values), but never so small that the codes leave the digits of the type.
 *
 * Invariant: encode(decode(encode(x))) == encode(x), byte for byte.
 *   1. A tile is *settled* when every row consists of whole multiples of half the step that it
 *      should have. The values of a settled tile are kept as they are; others are rounded to their
 *      steps first. Let y be the values kept.
 *   2. All that is written is a function of y alone: a row's step is the largest power of two that
 *      divides its values, the tile's that of most rows; what cannot be brought to it (far apart,
 * or codes too long) is a raw row, of y. Integer arithmetic from there on. And y is what decoding
 *      gives back, since multiples of these steps are numbers of the type.
 *   3. y is settled, so the second time y is kept, and by 2 the bytes are the same. If x was
 *      settled, y = x. If not, let s be the step of a row, v what it was before it was brought to a
 *      power of two: v <= sqrt(2) s. Rounding moves values by s / 2 at most, so the row's m grows
 * by s / 2 at most, and d by half of the largest step at most (values in a range of one step differ
 * from their mean by half a step on average, at most), which is at most sqrt(2) levels d. With
 * either, v grows to at most (sqrt(2) + levels) s, less than the 2 sqrt(2) s that would be brought
 * to 4 s, for levels < 1.4. So the step that the row of y should have is 2 s at most, and half of
 * that divides the row. Where the digits or the range of the type set a step, this may fail: there
 * y is tried, and rounded again while it is not settled; a tile that four rounds do not settle is
 * copied.
 *   4. Rows that hold something not finite, or 2^100 and more, are copied and take no part. Values
 *      below 2^-100 (bf16, f32) are zero. A tile that coding would not shorten is copied; being a
 *      function of y, that repeats too. */
#include <assert.h>
#include <stdatomic.h>

#include "cachegen_analyse.h"
#include "codec_int.h"

enum { CG_CODED = 0, CG_RAW = 1 };
enum { CG_MAGIC = 0x0147434e /* "NCG" 1 */, CG_HEADER_BYTES = 8, CG_PLANE_BYTES = 20 };
enum { CG_TILE_BYTES = 4, CG_FIXED_BYTES = 12, CG_LANE_BYTES = 4 * NEAP_CG_LANES };
enum { CG_HAS_RAW_ROWS = 1, CG_HAS_FINE_ROWS = 2 };
enum { CG_RICE_MAX = 15, CG_RICE_UNARY = 16, CG_MAX_WEIGHT_CODE = 47 };
#define CG_TILE_CODED 0x80000000u

/* Step over mean deviation, of keys and of values. At 0.5 and 0.9 SmolLM2, Qwen and Gemma save 82.1
 * to 82.4 % of f16 at a divergence of 0.011, 0.010 and 0.017 (q8, which saves 48 %: 0.003, 0.002);
 * keys above 0.6 are what Qwen does not bear. */
static const float levels_of_plane[2] = {0.5f, 0.9f};

/* ---- bits ---- */

typedef struct bit_writer {
    uint8_t *pos, *end;
    uint64_t held;
    uint32_t n;
    bool full;
} bit_writer;

static void put_bits(bit_writer *w, uint32_t value, uint32_t n) {
    w->held |= (uint64_t)value << w->n;
    w->n += n;
    for (; w->n >= 8; w->n -= 8, w->held >>= 8) {
        if (w->pos == w->end)
            w->full = true;
        else
            *w->pos++ = (uint8_t)w->held;
    }
}

typedef struct bit_reader {
    const uint8_t *pos, *end;
    uint64_t held;
    uint32_t n;
    bool empty;
} bit_reader;

static uint32_t get_bits(bit_reader *r, uint32_t n) /* n <= 32 */
{
    while (r->n < n) {
        if (r->pos == r->end) {
            r->empty = true;
            r->n = 64;
            break;
        }
        r->held |= (uint64_t)*r->pos++ << r->n;
        r->n += 8;
    }
    const uint32_t value = (uint32_t)(r->held & ((1ull << n) - 1));
    r->held >>= n;
    r->n -= n;
    return value;
}

static uint32_t zigzag(int32_t x) {
    return (uint32_t)x << 1 ^ (uint32_t)(x >> 31);
}

static int32_t unzigzag(uint32_t z) {
    return (int32_t)(z >> 1) ^ -(int32_t)(z & 1);
}

/* Quotients of CG_RICE_UNARY and more: that many ones, then 16 bits. */
static void put_rice(bit_writer *w, uint32_t z, uint32_t k) {
    const uint32_t quotient = z >> k;
    if (quotient >= CG_RICE_UNARY) {
        put_bits(w, (1u << CG_RICE_UNARY) - 1, CG_RICE_UNARY);
        put_bits(w, z, 16);
        return;
    }
    put_bits(w, (1u << quotient) - 1, quotient + 1);
    put_bits(w, z & ((1u << k) - 1), k);
}

static uint32_t get_rice(bit_reader *r, uint32_t k) {
    uint32_t quotient = 0;
    while (quotient < CG_RICE_UNARY && get_bits(r, 1))
        quotient++;
    if (quotient == CG_RICE_UNARY) return get_bits(r, 16);
    return quotient << k | get_bits(r, k);
}

/* ---- frequencies ---- */

/* Weights on a scale of four steps an octave; 0 is absent. */
static uint32_t weight_of_code(uint32_t code) {
    return code == 0 ? 0 : (4 + (code & 3)) << (code >> 2);
}

static uint32_t code_of_weight(uint32_t weight) {
    uint32_t best = 1;
    for (uint32_t code = 1; code <= CG_MAX_WEIGHT_CODE; code++) {
        const uint32_t w = weight_of_code(code), b = weight_of_code(best);
        if ((w > weight ? w - weight : weight - w) < (b > weight ? b - weight : weight - b))
            best = code;
    }
    return best;
}

/* Frequencies of 1 and more for all symbols up to the largest magnitude, in proportion. */
static void make_freq(uint16_t *freq, uint32_t largest, const uint32_t *codes) {
    uint32_t weight[NEAP_CG_SYMBOLS] = {0}, sum = 0;
    for (uint32_t m = 0; m <= largest; m++)
        weight[NEAP_CG_ZERO + m] = weight[NEAP_CG_ZERO - m] = weight_of_code(codes[m] | !codes[m]);
    weight[NEAP_CG_ESCAPE] = weight_of_code(codes[largest + 1]);
    for (uint32_t s = 0; s < NEAP_CG_SYMBOLS; s++)
        sum += weight[s];
    int32_t left = NEAP_CG_SLOTS;
    for (uint32_t s = 0; s < NEAP_CG_SYMBOLS; s++) {
        freq[s] = (uint16_t)((uint64_t)weight[s] * NEAP_CG_SLOTS / sum);
        if (weight[s] && freq[s] == 0) freq[s] = 1;
        left -= freq[s];
    }
    for (uint32_t s = 0; left < 0 && s < NEAP_CG_SYMBOLS; s++) {
        /* From the middle outwards: 31, 32, 30, 33, ... */
        const uint32_t at = (NEAP_CG_ZERO + (s & 1 ? (s + 1) / 2 : 0u - s / 2)) % NEAP_CG_SYMBOLS;
        const int32_t spare = freq[at] > 1 ? freq[at] - 1 : 0,
                      taken = spare < -left ? spare : -left;
        freq[at] = (uint16_t)(freq[at] - taken);
        left += taken;
    }
    freq[NEAP_CG_ZERO] = (uint16_t)(freq[NEAP_CG_ZERO] + left);
}

/* The codes that describe a histogram, and the frequencies they stand for. */
static uint32_t describe(const uint32_t *hist, uint32_t *codes, uint16_t *freq) {
    uint32_t largest = 0, total = 0, pair[NEAP_CG_ZERO + 2] = {0};
    for (uint32_t m = 0; m <= NEAP_CG_ZERO; m++) {
        pair[m] = hist[NEAP_CG_ZERO + m] + (m ? hist[NEAP_CG_ZERO - m] : hist[NEAP_CG_ZERO]);
        if (pair[m]) largest = m;
        total += pair[m];
    }
    total += 2 * hist[NEAP_CG_ESCAPE];
    for (uint32_t m = 0; m <= largest; m++)
        codes[m] = code_of_weight((uint32_t)((uint64_t)pair[m] * 12288 / (total + !total)));
    codes[largest + 1] =
        hist[NEAP_CG_ESCAPE]
            ? code_of_weight((uint32_t)((uint64_t)hist[NEAP_CG_ESCAPE] * 24576 / total))
            : 0;
    make_freq(freq, largest, codes);
    return largest;
}

static void fill_slots(neap_cg_stream *stream) {
    for (uint32_t k = 0; k < stream->model.n_classes; k++) {
        uint32_t *slot = stream->slots + (size_t)k * NEAP_CG_SLOTS;
        for (uint32_t s = 0; s < NEAP_CG_SYMBOLS; s++) {
            const uint32_t freq = stream->model.freq[k][s];
            for (uint32_t i = 0; i < freq; i++)
                *slot++ = freq << 20 | i << 8 | s;
        }
    }
}

/* ---- the scalar kernel ---- */

static inline uint32_t elem_bytes(int type) {
    return type == NEAP_KV_F32 ? 4 : 2;
}

static inline void store_value(int type, uint8_t *row, uint32_t i, float x) {
    if (type == NEAP_KV_F32) {
        memcpy(row + 4 * (size_t)i, &x, sizeof x);
        return;
    }
    const uint16_t narrow = type == NEAP_KV_F16 ? neap_f16_of_f32(x) : neap_bf16_of_f32(x);
    memcpy(row + 2 * (size_t)i, &narrow, sizeof narrow);
}

static void scalar_load_f16(const uint8_t *src, uint32_t n, float *dst) {
    for (uint32_t i = 0; i < n; i++) {
        uint16_t h;
        memcpy(&h, src + 2 * (size_t)i, sizeof h);
        dst[i] = neap_f32_of_f16(h);
    }
}

static bool scalar_analyse(const neap_cg_tile *tile, neap_cg_codes *codes) {
    return cg_analyse(scalar_load_f16, tile, codes);
}

static inline bool next_word(neap_cg_stream *s, uint32_t *inout_state) {
    uint16_t word;
    if (s->words == s->words_end) return false;
    memcpy(&word, s->words, sizeof word);
    s->words += sizeof word;
    *inout_state = *inout_state << 16 | word;
    return true;
}

uint16_t *neap_cg_scalar_code(const neap_cg_codes *codes, const neap_cg_tile *tile,
                              uint32_t *ret_lanes) {
    const neap_cg_model *model = &codes->model;
    uint16_t *word = (uint16_t *)codes->codes + (size_t)tile->rows * tile->cols;
    for (uint32_t i = 0; i < NEAP_CG_LANES; i++)
        ret_lanes[i] = NEAP_CG_STATE_LOW;
    for (uint32_t r = tile->rows; r-- > 0;) {
        if (model->shift[r] == NEAP_CG_ROW_RAW) continue;
        const uint16_t *symbol = (const uint16_t *)codes->codes + (size_t)r * tile->cols;
        for (uint32_t c = tile->cols; c-- > 0;) {
            const uint32_t k = model->class_at[c] / NEAP_CG_SLOTS;
            const uint32_t place = codes->places[k * NEAP_CG_SYMBOLS + symbol[c]];
            const uint32_t freq = place >> 16, first = place & 0xffff;
            uint32_t state = ret_lanes[c % NEAP_CG_LANES];
            if (state >> (32 - NEAP_CG_PROB_BITS) >= freq) {
                *--word = (uint16_t)state;
                state >>= 16;
            }
            ret_lanes[c % NEAP_CG_LANES] =
                (state / freq << NEAP_CG_PROB_BITS) + state % freq + first;
        }
    }
    return word;
}

bool neap_cg_decode_columns(neap_cg_stream *s, const neap_cg_tile *tile, uint32_t row,
                            uint32_t first) {
    const uint32_t shift = s->model.shift[row];
    const float step = neap_cg_power(s->model.exponent - (int)shift);
    uint8_t *out = tile->data + row * tile->stride;
    for (uint32_t c = first; c < tile->cols; c++) {
        uint32_t *state = &s->lanes[c % NEAP_CG_LANES];
        const uint32_t entry = s->slots[s->model.class_at[c] + (*state & (NEAP_CG_SLOTS - 1))];
        *state = (entry >> 20) * (*state >> NEAP_CG_PROB_BITS) + (entry >> 8 & 0xfff);
        if (*state < NEAP_CG_STATE_LOW && !next_word(s, state)) return false;
        const int32_t p = neap_cg_predict(s->model.base[c], s->model.weight[c], s->last[c]);
        int32_t code = (int32_t)(((uint32_t)p << shift) + (entry & 0xff) - NEAP_CG_ZERO);
        if ((entry & 0xff) == NEAP_CG_ESCAPE) {
            int16_t escaped;
            if (s->escapes == s->escapes_end) return false;
            memcpy(&escaped, s->escapes, sizeof escaped);
            s->escapes += sizeof escaped;
            code = escaped;
        }
        if (code < -0x8000 || code > 0x7fff) return false;
        s->last[c] = code >> shift;
        store_value(tile->type, out, c, (float)code * step);
    }
    return true;
}

static bool scalar_decode(neap_cg_stream *stream, const neap_cg_tile *tile) {
    for (uint32_t r = 0; r < tile->rows; r++)
        if (stream->model.shift[r] != NEAP_CG_ROW_RAW &&
            !neap_cg_decode_columns(stream, tile, r, 0))
            return false;
    return true;
}

static bool always(void) {
    return true;
}

static const neap_cg_kernel scalar_kernel = {
    .name = "scalar",
    .supported = always,
    .analyse = scalar_analyse,
    .code = neap_cg_scalar_code,
    .decode_f16 = scalar_decode,
};

static const neap_cg_kernel *const kernels[] = {
#if defined(__x86_64__)
    &neap_cg_avx512,
    &neap_cg_avx2,
#elif defined(__aarch64__)
    &neap_cg_neon,
#endif
    &scalar_kernel,
};

const neap_cg_kernel *neap_cg_kernel_at(size_t i) {
    for (size_t k = 0; k < sizeof kernels / sizeof kernels[0]; k++)
        if (kernels[k]->supported() && i-- == 0) return kernels[k];
    return NULL;
}

/* ---- encoding a tile ---- */

static void put_u32(uint8_t *dst, uint32_t value) {
    memcpy(dst, &value, sizeof value);
}

static uint32_t get_u32(const uint8_t *src) {
    uint32_t value;
    memcpy(&value, src, sizeof value);
    return value;
}

/* The parameter that makes the bases shortest. */
static uint32_t rice_parameter(const neap_cg_model *model, uint32_t cols) {
    uint64_t sum = 0;
    for (uint32_t c = 0; c < cols; c++)
        sum += zigzag(model->base[c]);
    uint32_t k = 0;
    while (k < CG_RICE_MAX && (uint64_t)cols << (k + 1) <= sum)
        k++;
    return k;
}

static void write_rows(bit_writer *w, const neap_cg_model *model, uint32_t rows, uint8_t flags) {
    for (uint32_t r = 0; r < rows && (flags & CG_HAS_RAW_ROWS); r++)
        put_bits(w, model->shift[r] == NEAP_CG_ROW_RAW, 1);
    for (uint32_t r = 0; r < rows && (flags & CG_HAS_FINE_ROWS); r++) {
        if (model->shift[r] == NEAP_CG_ROW_RAW) continue;
        put_bits(w, model->shift[r] != 0, 1);
        if (model->shift[r]) put_bits(w, model->shift[r], 4);
    }
}

/* Describes the model in bits and sets the frequencies that the decoder will have. */
static void write_model(bit_writer *w, neap_cg_codes *codes, const neap_cg_tile *tile,
                        uint8_t flags, uint32_t rice) {
    neap_cg_model *model = &codes->model;
    write_rows(w, model, tile->rows, flags);
    for (uint32_t k = 0; k < model->n_classes; k++) {
        uint32_t code[NEAP_CG_ZERO + 2];
        const uint32_t largest = describe(codes->hist[k], code, model->freq[k]);
        put_bits(w, largest, 5);
        for (uint32_t m = 0; m <= largest + 1; m++)
            put_bits(w, code[m], 6);
    }
    for (uint32_t c = 0; c < tile->cols; c++) {
        put_bits(w, model->class_at[c] / NEAP_CG_SLOTS, 3);
        put_bits(w, (uint32_t)model->weight[c], 3);
        put_rice(w, zigzag(model->base[c]), rice);
    }
    put_bits(w, 0, 7); /* to a whole byte */
}

static void find_places(neap_cg_codes *codes) {
    for (uint32_t k = 0; k < codes->model.n_classes; k++)
        for (uint32_t s = 0, first = 0; s < NEAP_CG_SYMBOLS; s++) {
            const uint32_t freq = codes->model.freq[k][s];
            codes->places[k * NEAP_CG_SYMBOLS + s] = first | freq << 16;
            first += freq;
        }
}

/* The values of a raw row that were rounded. */
static void write_rounded(const neap_cg_tile *tile, const neap_cg_codes *codes, uint32_t row,
                          uint8_t *dst) {
    const int16_t *code = codes->codes + (size_t)row * tile->cols;
    const float step = neap_cg_power(codes->row_exponent[row]);
    for (uint32_t c = 0; c < tile->cols; c++)
        store_value(tile->type, dst, c, (float)code[c] * step);
}

/* Puts the raw rows at the end of the room, before the words overwrite their codes. Returns their
 * bytes. */
static size_t write_raw_rows(const neap_cg_tile *tile, const neap_cg_codes *codes, uint8_t *end) {
    const size_t row_bytes = (size_t)tile->cols * elem_bytes(tile->type);
    size_t n = 0, done = 0;
    for (uint32_t r = 0; r < tile->rows; r++)
        n += codes->model.shift[r] == NEAP_CG_ROW_RAW;
    for (uint32_t r = 0; r < tile->rows; r++) {
        if (codes->model.shift[r] != NEAP_CG_ROW_RAW) continue;
        uint8_t *dst = end - (n - done++) * row_bytes;
        if (codes->exact[r])
            memcpy(dst, tile->data + r * tile->stride, row_bytes);
        else
            write_rounded(tile, codes, r, dst);
    }
    return n * row_bytes;
}

/* Codes the tile into dst. Returns the bytes, or 0 when they would not be less than room. */
static size_t encode_tile(const neap_cg_kernel *kernel, const neap_cg_tile *tile, uint8_t *dst,
                          size_t room, int16_t *scratch) {
    neap_cg_codes codes;
    if (room < CG_FIXED_BYTES + CG_LANE_BYTES) return 0;
    uint8_t *end = dst + room;
    codes.codes = scratch;
    codes.escapes = dst + CG_FIXED_BYTES + CG_LANE_BYTES;
    codes.escapes_end = end;
    if (!kernel->analyse(tile, &codes)) return 0;
    uint8_t flags = 0;
    size_t n_raw = 0;
    for (uint32_t r = 0; r < tile->rows; r++) {
        const uint8_t shift = codes.model.shift[r];
        n_raw += shift == NEAP_CG_ROW_RAW;
        flags |= (uint8_t)(shift == NEAP_CG_ROW_RAW ? CG_HAS_RAW_ROWS
                           : shift                  ? CG_HAS_FINE_ROWS
                                                    : 0);
    }
    const uint32_t rice = rice_parameter(&codes.model, tile->cols);
    uint8_t *bits = codes.escapes + 2 * codes.n_escapes;
    bit_writer w = {.pos = bits, .end = end};
    write_model(&w, &codes, tile, flags, rice);
    if (w.full || (size_t)(end - w.pos) < n_raw * tile->cols * elem_bytes(tile->type)) return 0;
    const size_t raw_bytes = write_raw_rows(tile, &codes, end);
    uint32_t lanes[NEAP_CG_LANES];
    find_places(&codes);
    const uint16_t *word = kernel->code(&codes, tile, lanes);
    const size_t word_bytes =
        2 * (size_t)((const uint16_t *)scratch + (size_t)tile->rows * tile->cols - word);
    if ((size_t)(end - w.pos) - raw_bytes <= word_bytes) return 0;
    dst[0] = (uint8_t)codes.model.exponent;
    dst[1] = flags;
    dst[2] = (uint8_t)codes.model.n_classes;
    dst[3] = (uint8_t)rice;
    put_u32(dst + 4, (uint32_t)codes.n_escapes);
    put_u32(dst + 8, (uint32_t)(w.pos - bits));
    memcpy(dst + CG_FIXED_BYTES, lanes, sizeof lanes);
    memcpy(w.pos, word, word_bytes);
    memmove(w.pos + word_bytes, end - raw_bytes, raw_bytes);
    return (size_t)(w.pos - dst) + word_bytes + raw_bytes;
}

/* ---- decoding a tile ---- */

static bool read_rows(bit_reader *r, neap_cg_model *model, uint32_t rows, uint8_t flags,
                      size_t *ret_n_raw) {
    *ret_n_raw = 0;
    for (uint32_t i = 0; i < rows; i++) {
        const bool raw = (flags & CG_HAS_RAW_ROWS) && get_bits(r, 1);
        model->shift[i] = raw ? NEAP_CG_ROW_RAW : 0;
        *ret_n_raw += raw;
    }
    for (uint32_t i = 0; i < rows && (flags & CG_HAS_FINE_ROWS); i++)
        if (model->shift[i] == 0 && get_bits(r, 1)) model->shift[i] = (uint8_t)get_bits(r, 4);
    return !r->empty;
}

static bool read_model(bit_reader *r, neap_cg_model *model, uint32_t cols, uint32_t rice) {
    for (uint32_t k = 0; k < model->n_classes; k++) {
        uint32_t code[NEAP_CG_ZERO + 2];
        const uint32_t largest = get_bits(r, 5);
        for (uint32_t m = 0; m <= largest + 1; m++) {
            code[m] = get_bits(r, 6);
            if (code[m] > CG_MAX_WEIGHT_CODE) return false;
        }
        make_freq(model->freq[k], largest, code);
    }
    for (uint32_t c = 0; c < cols; c++) {
        const uint32_t class = get_bits(r, 3);
        model->class_at[c] = class * NEAP_CG_SLOTS;
        model->weight[c] = (int32_t)get_bits(r, 3);
        model->base[c] = unzigzag(get_rice(r, rice));
        if (class >= model->n_classes || model->weight[c] > 4 || model->base[c] < -0x8000 ||
            model->base[c] > 0x7fff)
            return false;
    }
    return !r->empty;
}

static bool lanes_are_done(const neap_cg_stream *stream) {
    for (uint32_t i = 0; i < NEAP_CG_LANES; i++)
        if (stream->lanes[i] != NEAP_CG_STATE_LOW) return false;
    return stream->words == stream->words_end && stream->escapes == stream->escapes_end;
}

static bool decode_tile(const neap_cg_kernel *kernel, const neap_cg_tile *tile, const uint8_t *src,
                        size_t len) {
    neap_cg_stream s;
    if (len < CG_FIXED_BYTES + CG_LANE_BYTES) return false;
    const uint8_t *end = src + len, flags = src[1];
    const size_t escape_bytes = 2 * (size_t)get_u32(src + 4), bit_bytes = get_u32(src + 8);
    s.model.exponent = (int8_t)src[0];
    s.model.n_classes = src[2];
    if (s.model.exponent < CG_MIN_EXPONENT - 1 || s.model.exponent > 100 ||
        flags > (CG_HAS_RAW_ROWS | CG_HAS_FINE_ROWS) || s.model.n_classes == 0 ||
        s.model.n_classes > NEAP_CG_CLASSES || src[3] > CG_RICE_MAX)
        return false;
    memcpy(s.lanes, src + CG_FIXED_BYTES, sizeof s.lanes);
    for (uint32_t i = 0; i < NEAP_CG_LANES; i++)
        if (s.lanes[i] < NEAP_CG_STATE_LOW) return false;
    s.escapes = src + CG_FIXED_BYTES + CG_LANE_BYTES;
    if ((size_t)(end - s.escapes) < escape_bytes) return false;
    s.escapes_end = s.escapes + escape_bytes;
    if ((size_t)(end - s.escapes_end) < bit_bytes) return false;
    bit_reader r = {.pos = s.escapes_end, .end = s.escapes_end + bit_bytes};
    size_t n_raw = 0;
    if (!read_rows(&r, &s.model, tile->rows, flags, &n_raw) ||
        !read_model(&r, &s.model, tile->cols, src[3]) || r.pos != r.end)
        return false;
    const size_t row_bytes = (size_t)tile->cols * elem_bytes(tile->type);
    s.words = r.end;
    if ((size_t)(end - s.words) < n_raw * row_bytes) return false;
    const uint8_t *raw = s.words_end = end - n_raw * row_bytes;
    if ((s.words_end - s.words) % 2 != 0) return false;
    memcpy(s.last, s.model.base, sizeof s.last);
    fill_slots(&s);
    const bool whole =
        tile->type == NEAP_KV_F16 ? kernel->decode_f16(&s, tile) : scalar_decode(&s, tile);
    if (!whole || !lanes_are_done(&s)) return false;
    for (uint32_t i = 0; i < tile->rows; i++) {
        if (s.model.shift[i] != NEAP_CG_ROW_RAW) continue;
        memcpy(tile->data + i * tile->stride, raw, row_bytes);
        raw += row_bytes;
    }
    return true;
}

/* ---- planes ---- */

static int plane_mode(const neap_codec_plane *plane) {
    const bool known =
        plane->type == NEAP_KV_F16 || plane->type == NEAP_KV_BF16 || plane->type == NEAP_KV_F32;
    if (!known || plane->row_bytes != (size_t)plane->row_elems * elem_bytes(plane->type))
        return CG_RAW;
    return plane->row_elems == 0 || plane->n_rows == 0 ? CG_RAW : CG_CODED;
}

static uint32_t n_tiles_of(uint32_t n, uint32_t most) {
    return n / most + (n % most != 0);
}

/* Rows of tiles have 256 rows; columns are shared out evenly, in blocks of lanes. */
static uint32_t tile_cols(const neap_codec_plane *plane) {
    const uint32_t blocks = n_tiles_of(plane->row_elems, NEAP_CG_LANES);
    const uint32_t n = n_tiles_of(plane->row_elems, NEAP_CG_COLS);
    return n_tiles_of(blocks, n) * NEAP_CG_LANES;
}

static neap_cg_tile tile_at(const neap_codec_plane *plane, size_t plane_index, uint32_t row,
                            uint32_t col) {
    const uint32_t rows = plane->n_rows - row, cols = plane->row_elems - col;
    const uint32_t most = tile_cols(plane);
    return (neap_cg_tile){.data = (uint8_t *)plane->data + row * plane->row_stride +
                                  (size_t)col * elem_bytes(plane->type),
                          .stride = plane->row_stride,
                          .rows = rows < NEAP_CG_ROWS ? rows : NEAP_CG_ROWS,
                          .cols = cols < most ? cols : most,
                          .type = plane->type,
                          .levels = levels_of_plane[plane_index]};
}

static size_t tile_bytes(const neap_cg_tile *tile) {
    return (size_t)tile->rows * tile->cols * elem_bytes(tile->type);
}

static void copy_rows(uint8_t *dst, size_t dst_stride, const uint8_t *src, size_t src_stride,
                      size_t row_bytes, size_t n) {
    for (size_t r = 0; r < n && row_bytes; r++)
        memcpy(dst + r * dst_stride, src + r * src_stride, row_bytes);
}

static size_t header_bytes(const neap_codec_chunk *chunk) {
    return CG_HEADER_BYTES + CG_PLANE_BYTES * chunk->n_planes;
}

/* The header has no freedom: decoding compares it with the one of the chunk it decodes into. */
static void write_header(const neap_codec_chunk *chunk, uint8_t *dst) {
    put_u32(dst, CG_MAGIC);
    put_u32(dst + 4, (uint32_t)chunk->n_planes);
    for (size_t i = 0; i < chunk->n_planes; i++) {
        const neap_codec_plane *plane = &chunk->planes[i];
        uint8_t *entry = dst + CG_HEADER_BYTES + CG_PLANE_BYTES * i;
        const uint64_t row_bytes = plane->row_bytes;
        put_u32(entry, plane->n_rows);
        put_u32(entry + 4, plane->row_elems);
        memcpy(entry + 8, &row_bytes, sizeof row_bytes);
        entry[16] = (uint8_t)plane->type;
        entry[17] = (uint8_t)plane_mode(plane);
        entry[18] = entry[19] = 0;
    }
}

/* Bytes for the codes of the largest tile, while encoding; one more to align them. */
static size_t scratch_bytes(const neap_codec_chunk *chunk) {
    size_t bytes = 0;
    for (size_t i = 0; i < chunk->n_planes; i++) {
        const neap_codec_plane *plane = &chunk->planes[i];
        if (plane_mode(plane) != CG_CODED) continue;
        const neap_cg_tile tile = tile_at(plane, i, 0, 0);
        const size_t wanted = 2 * (size_t)tile.rows * tile.cols + 1;
        bytes = wanted > bytes ? wanted : bytes;
    }
    return bytes;
}

static size_t cachegen_bound(const neap_codec_chunk *chunk) {
    size_t bytes = header_bytes(chunk) + neap_codec_raw_bytes(chunk) + scratch_bytes(chunk);
    for (size_t i = 0; i < chunk->n_planes; i++) {
        const neap_codec_plane *plane = &chunk->planes[i];
        if (plane_mode(plane) == CG_CODED)
            bytes += CG_TILE_BYTES * (size_t)n_tiles_of(plane->n_rows, NEAP_CG_ROWS) *
                     n_tiles_of(plane->row_elems, tile_cols(plane));
    }
    return bytes;
}

static uint8_t *encode_plane(const neap_cg_kernel *kernel, const neap_codec_plane *plane,
                             size_t index, uint8_t *out, int16_t *scratch) {
    if (plane_mode(plane) == CG_RAW) {
        copy_rows(out, plane->row_bytes, plane->data, plane->row_stride, plane->row_bytes,
                  plane->n_rows);
        return out + plane->n_rows * plane->row_bytes;
    }
    for (uint32_t row = 0; row < plane->n_rows; row += NEAP_CG_ROWS)
        for (uint32_t col = 0; col < plane->row_elems; col += tile_cols(plane)) {
            const neap_cg_tile tile = tile_at(plane, index, row, col);
            const size_t raw = tile_bytes(&tile), row_bytes = raw / tile.rows;
            size_t len = encode_tile(kernel, &tile, out + CG_TILE_BYTES, raw, scratch);
            put_u32(out, len ? (uint32_t)len | CG_TILE_CODED : (uint32_t)raw);
            if (len == 0) {
                copy_rows(out + CG_TILE_BYTES, row_bytes, tile.data, tile.stride, row_bytes,
                          tile.rows);
                len = raw;
            }
            out += CG_TILE_BYTES + len;
        }
    return out;
}

int neap_cg_encode_with(const neap_cg_kernel *kernel, const neap_codec_chunk *chunk, void *dst,
                        size_t cap, size_t *ret_len) {
    assert(chunk->n_planes <= 2);
    const size_t bound = cachegen_bound(chunk);
    if (cap < bound) return NEAP_E_BOUND;
    uint8_t *scratch = (uint8_t *)dst + bound - scratch_bytes(chunk);
    scratch += (uintptr_t)scratch % 2;
    uint8_t *out = (uint8_t *)dst + header_bytes(chunk);
    write_header(chunk, dst);
    for (size_t i = 0; i < chunk->n_planes; i++)
        out = encode_plane(kernel, &chunk->planes[i], i, out, (int16_t *)(void *)scratch);
    *ret_len = (size_t)(out - (uint8_t *)dst);
    return 0;
}

static int decode_tiles(const neap_cg_kernel *kernel, const neap_codec_plane *plane, size_t index,
                        const uint8_t **pos, const uint8_t *end) {
    for (uint32_t row = 0; row < plane->n_rows; row += NEAP_CG_ROWS)
        for (uint32_t col = 0; col < plane->row_elems; col += tile_cols(plane)) {
            const neap_cg_tile tile = tile_at(plane, index, row, col);
            const size_t raw = tile_bytes(&tile), row_bytes = raw / tile.rows;
            if (end - *pos < CG_TILE_BYTES) return NEAP_E_CORRUPT;
            const uint32_t head = get_u32(*pos);
            const size_t len = head & ~CG_TILE_CODED;
            *pos += CG_TILE_BYTES;
            if ((size_t)(end - *pos) < len) return NEAP_E_CORRUPT;
            if (head & CG_TILE_CODED) {
                if (!decode_tile(kernel, &tile, *pos, len)) return NEAP_E_CORRUPT;
            } else {
                if (len != raw) return NEAP_E_CORRUPT;
                copy_rows(tile.data, tile.stride, *pos, row_bytes, row_bytes, tile.rows);
            }
            *pos += len;
        }
    return 0;
}

int neap_cg_decode_with(const neap_cg_kernel *kernel, const void *src, size_t len,
                        const neap_codec_chunk *chunk) {
    assert(chunk->n_planes <= 2);
    uint8_t expected[CG_HEADER_BYTES + 2 * CG_PLANE_BYTES];
    const size_t header = header_bytes(chunk);
    write_header(chunk, expected);
    if (len < header || memcmp(src, expected, header) != 0) return NEAP_E_CORRUPT;
    const uint8_t *pos = (const uint8_t *)src + header, *end = (const uint8_t *)src + len;
    for (size_t i = 0; i < chunk->n_planes; i++) {
        const neap_codec_plane *plane = &chunk->planes[i];
        if (plane_mode(plane) == CG_CODED) {
            const int err = decode_tiles(kernel, plane, i, &pos, end);
            if (err) return err;
            continue;
        }
        const size_t bytes = plane->n_rows * plane->row_bytes;
        if ((size_t)(end - pos) < bytes) return NEAP_E_CORRUPT;
        copy_rows(plane->data, plane->row_stride, pos, plane->row_bytes, plane->row_bytes,
                  plane->n_rows);
        pos += bytes;
    }
    return pos == end ? 0 : NEAP_E_CORRUPT;
}

/* The fastest kernel, looked up once: asking the CPU is slow under a hypervisor. */
static const neap_cg_kernel *best_kernel(void) {
    static _Atomic(const neap_cg_kernel *) best;
    const neap_cg_kernel *kernel = atomic_load_explicit(&best, memory_order_relaxed);
    if (kernel) return kernel;
    kernel = neap_cg_kernel_at(0);
    atomic_store_explicit(&best, kernel, memory_order_relaxed);
    return kernel;
}

static int cachegen_encode(const neap_codec_chunk *chunk, void *dst, size_t cap, size_t *ret_len) {
    return neap_cg_encode_with(best_kernel(), chunk, dst, cap, ret_len);
}

static int cachegen_decode(const void *src, size_t len, const neap_codec_chunk *chunk) {
    return neap_cg_decode_with(best_kernel(), src, len, chunk);
}

const neap_codec neap_codec_cachegen = {
    .name = "cachegen",
    .lossless = false,
    .bound = cachegen_bound,
    .encode = cachegen_encode,
    .decode = cachegen_decode,
};
