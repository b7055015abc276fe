/* cachegen_int.h - what the parts of the cachegen codec share: the tile, its model, the kernels.
 * All kernels give the same bytes: integer arithmetic, and f32 operations rounded once each in an
 * order that is part of the format. */
#ifndef NEAP_CACHEGEN_INT_H
#define NEAP_CACHEGEN_INT_H

#include "q8_int.h" /* number conversions */

#define NEAP_CG_ROWS 256u /* most rows and columns of a tile */
#define NEAP_CG_COLS 512u
#define NEAP_CG_LANES 32u
#define NEAP_CG_CLASSES 8u
#define NEAP_CG_PROB_BITS 11u
#define NEAP_CG_SLOTS (1u << NEAP_CG_PROB_BITS)
#define NEAP_CG_SYMBOLS 64u
#define NEAP_CG_ZERO 31   /* symbol of a residual of 0 */
#define NEAP_CG_ESCAPE 63 /* the code itself follows in the list of escapes */
#define NEAP_CG_STATE_LOW 0x10000u
#define NEAP_CG_CODE_MAX 0x4000
#define NEAP_CG_ROW_RAW 0xff

/* A block of a plane; data points to its first element. */
typedef struct neap_cg_tile {
    uint8_t *data;
    size_t stride;
    uint32_t rows, cols;
    int type;
    float levels; /* step over mean deviation */
} neap_cg_tile;

/* What the codes of a tile are predicted from and how their residuals are distributed. */
typedef struct neap_cg_model {
    int exponent; /* the step is 2^exponent */
    uint32_t n_classes;
    uint8_t shift[NEAP_CG_ROWS];     /* of a row: its step is 2^(exponent - shift), or ROW_RAW */
    int32_t base[NEAP_CG_COLS];      /* mean code of a column */
    int32_t weight[NEAP_CG_COLS];    /* quarters of the last code's distance from it, 0..4 */
    uint32_t class_at[NEAP_CG_COLS]; /* class of a column, times NEAP_CG_SLOTS */
    uint16_t freq[NEAP_CG_CLASSES][NEAP_CG_SYMBOLS]; /* of a class; the sum is NEAP_CG_SLOTS */
} neap_cg_model;

/* Everything a decoder needs of a tile. */
typedef struct neap_cg_stream {
    neap_cg_model model;
    uint32_t lanes[NEAP_CG_LANES];
    const uint8_t *words, *words_end;     /* u16 each */
    const uint8_t *escapes, *escapes_end; /* i16 each */
    int32_t last[NEAP_CG_COLS];           /* the last row's codes in steps of 2^exponent */
    /* Of a slot: symbol, slot - first slot of the symbol << 8, frequency << 20. */
    uint32_t slots[NEAP_CG_CLASSES * NEAP_CG_SLOTS];
} neap_cg_stream;

/* Codes of a tile as they are found. */
typedef struct neap_cg_codes {
    neap_cg_model model;
    int16_t *codes;                 /* [rows][cols]; later the symbols */
    uint8_t exact[NEAP_CG_ROWS];    /* raw rows: whether the bytes of the plane are kept */
    int row_exponent[NEAP_CG_ROWS]; /* the codes of a row are in steps of 2^this */
    uint32_t row_top[NEAP_CG_ROWS]; /* and have no larger magnitude */
    uint32_t hist[NEAP_CG_CLASSES][NEAP_CG_SYMBOLS];
    /* Of a symbol: first slot, frequency << 16. */
    uint32_t places[NEAP_CG_CLASSES * NEAP_CG_SYMBOLS];
    uint8_t *escapes, *escapes_end; /* room for i16 */
    size_t n_escapes;
} neap_cg_codes;

typedef struct neap_cg_kernel {
    const char *name;
    bool (*supported)(void);
    /* Quantises the tile and finds its model, but for freq. False: not worth coding. */
    bool (*analyse)(const neap_cg_tile *tile, neap_cg_codes *codes);
    /* Codes the symbols backwards. The words take the place of symbols already coded: each symbol
     * gives one at most. Returns the first of the words, which end where the symbols did. */
    uint16_t *(*code)(const neap_cg_codes *codes, const neap_cg_tile *tile, uint32_t *ret_lanes);
    /* Decodes the rows that are not raw into an f16 tile. False: damaged. */
    bool (*decode_f16)(neap_cg_stream *stream, const neap_cg_tile *tile);
} neap_cg_kernel;

/* The i-th kernel that this machine can run, fastest first, the scalar one last; NULL past it. */
const neap_cg_kernel *neap_cg_kernel_at(size_t i);
/* The codec's encode and decode with a kernel of one's choice. */
int neap_cg_encode_with(const neap_cg_kernel *kernel, const neap_codec_chunk *chunk, void *dst,
                        size_t cap, size_t *ret_len);
int neap_cg_decode_with(const neap_cg_kernel *kernel, const void *src, size_t len,
                        const neap_codec_chunk *chunk);

uint16_t *neap_cg_scalar_code(const neap_cg_codes *codes, const neap_cg_tile *tile,
                              uint32_t *ret_lanes);
/* The scalar decoder, for every type of element: columns of a row from first, a multiple of the
 * lanes, on. */
bool neap_cg_decode_columns(neap_cg_stream *stream, const neap_cg_tile *tile, uint32_t row,
                            uint32_t first);

#if defined(__x86_64__)
extern const neap_cg_kernel neap_cg_avx512, neap_cg_avx2;
#elif defined(__aarch64__)
extern const neap_cg_kernel neap_cg_neon;
#endif

/* 2^e, -126 <= e <= 127. */
static inline float neap_cg_power(int e) {
    return neap_f32_of_bits((uint32_t)(e + 127) << 23);
}

static inline int32_t neap_cg_predict(int32_t base, int32_t weight, int32_t last) {
    return base + ((weight * (last - base) + 2) >> 2);
}
#endif
