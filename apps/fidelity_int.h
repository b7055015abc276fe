/* fidelity_int.h - what the methods of `neap bench fidelity` share.
 *   fidelity_method.c   their table, and all but
 *   fidelity_lowram.c   LowRAM and its ablations */
#ifndef NEAP_APPS_FIDELITY_INT_H
#define NEAP_APPS_FIDELITY_INT_H

#include <errno.h>

#include "bytes.h"
#include "cli.h"
#include "fidelity_method.h"
#include "half.h"

/* K or V of one layer. */
typedef struct neap_method_plane {
    uint32_t n_rows, n_heads, dim;
    bool is_k;
    float *rows; /* [n_rows][n_heads * dim] */
} neap_method_plane;

typedef struct neap_method_context {
    const neap_method *method;
    neap_session *session;
    neap_kv_file *state;
    const neap_session_layer *layers;
    uint32_t n_layers, n_cells;
    float *rows;            /* room for the widest plane */
    double ratio;           /* the method's parameter, or what eviction leaves of it */
    neap_method_kept *kept; /* its tokens: the cells' positions where they are not 0, 1, ... */
} neap_method_context;

struct neap_method_kind {
    const char *name;
    double parameter, least, most; /* its own one; least 0: it takes none */
    bool flag;                     /* -rotated, -centred, -q, -v */
    bool warm;
    double rest;  /* of evictions: what the kept tokens are compressed by at most; else 0 */
    bool by_mass; /* evicts by the attention so far */
    int (*plane)(const neap_method_context *c, const neap_method_plane *p, uint64_t *inout_bytes);
    int (*whole)(const neap_method_context *c, uint64_t *inout_bytes);
};

static inline int neap_method_no_memory(void) {
    return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s", neap_strerror(-ENOMEM));
}

static inline void neap_method_load(const uint16_t *from, float *to, size_t n) {
    for (size_t i = 0; i < n; i++)
        to[i] = neap_f32_of_f16(from[i]);
}

static inline void neap_method_store(const float *from, uint16_t *to, size_t n) {
    for (size_t i = 0; i < n; i++)
        to[i] = neap_f16_of_f32(from[i]);
}

static inline uint16_t *neap_method_rows(const neap_method_context *c, uint32_t layer, bool is_k) {
    return neap_kv_file_rows(c->state, layer, is_k ? 0 : 1)->data;
}

static inline uint32_t neap_method_dim(const neap_session_layer *layer, bool is_k) {
    return is_k ? layer->k_head_dim : layer->v_head_dim;
}

/* Keys of a layer to before RoPE, or back; positions are the rows' numbers. */
void neap_method_turn(const neap_session_layer *layer, float *rows, uint32_t n_rows, size_t stride,
                      bool back);
/* Whether they can be; an error of neap.h. */
int neap_method_require_rope(const neap_method_context *c);

/* ---- LowRAM ---- */

/* Of the method's kind and parameter. */
void neap_method_lowram_defaults(neap_method *method);
/* Changes them by "/OPTION..."; false: no such option, or not with the others. */
bool neap_method_lowram_options(const char *text, neap_method *method);
int neap_method_lowram(const neap_method_context *c, uint64_t *inout_bytes);
#endif
