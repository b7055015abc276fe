/* learned.h - what `neap train` learns once for a model that LowRAM uses in every context: starts
 * for the value predictors, and the network that scores tokens. A file of its own beside klt's.
 *
 * Errors     0 or negative (neap.h); on failure ret_ values are untouched.
 * Threads    immutable once open.
 * Layout     docs/formats/lowram-model.md. */
#ifndef NEAP_LOWRAM_LEARNED_H
#define NEAP_LOWRAM_LEARNED_H

#include "token_scores.h"
#include "value.h"

#define NEAP_LEARNED_FILE "lowram.bin" /* its name in the model's folder (klt_file.h) */
enum { NEAP_LEARNED_NAME = 64, NEAP_LEARNED_LAYERS = 4096, NEAP_LEARNED_HEADS = 256 };

typedef struct neap_learned_layer {
    uint32_t layer; /* the model's number; ascending */
    uint32_t n_kv_heads, dk, dv, hidden;
    /* Slim's map is that of the model's weights. Otherwise it is a least-squares one: the weights
     * were not found, or a norm lies between them and the keys. */
    bool is_slim, has_key_norm;
} neap_learned_layer;

/* One KV head: what it was learned with, and the starts, for keys as they are. */
typedef struct neap_learned_head {
    neap_value_norm norm;
    float *linear;         /* [dk][dv]: Slim's Wlin */
    neap_value warm, meta; /* each head alone, with a linear branch */
} neap_learned_head;

/* ---- writing ---- */

typedef struct neap_learned_spec {
    uint64_t digest; /* of the GGUF */
    char name[NEAP_LEARNED_NAME];
    uint32_t n_layers;
    const neap_learned_layer *layers;
    const neap_learned_head *heads; /* of the first layer, the second, ... */
    const neap_token_net *net;      /* NULL: none */
} neap_learned_spec;

/* Whoever reads the file meanwhile gets the old one or the new one. Fails: NEAP_E_BOUND (a count, a
 * shape or a parameter out of range, see the layout); errors of files. */
int neap_learned_write(const char *path, const neap_learned_spec *spec);

/* ---- reading ---- */

typedef struct neap_learned neap_learned;

/* name is for the log, which says why a file is refused. Fails: NEAP_E_CORRUPT; NEAP_E_VERSION;
 * NEAP_E_CHANGED (of another GGUF than the digest says); -ENOENT; -ENOMEM. */
int neap_learned_open(const char *path, uint64_t digest, neap_learned **ret_learned);
/* The same of bytes. */
int neap_learned_parse(const void *bytes, size_t len, const char *name, uint64_t digest,
                       neap_learned **ret_learned);
void neap_learned_free(neap_learned *learned); /* takes NULL */

uint32_t neap_learned_n_layers(const neap_learned *learned);
const neap_learned_layer *neap_learned_layer_at(const neap_learned *learned, uint32_t i);
/* NULL: nothing was learned for this layer of the model. */
const neap_learned_layer *neap_learned_find(const neap_learned *learned, uint32_t layer);
const neap_token_net *neap_learned_net(const neap_learned *learned); /* NULL: none */

enum { NEAP_LEARNED_SLIM, NEAP_LEARNED_WARM, NEAP_LEARNED_META };
/* Fills a predictor of one head with a start for it: NEAP_LEARNED_SLIM only Wlin (a fit with
 * NEAP_VALUE_WLIN), the others all (NEAP_VALUE_GIVEN; from META with the norm, and Adam).
 * ret_norm, where not NULL: that head's, to be freed. Fails: NEAP_E_UNKNOWN (no such layer, head or
 * shape); -ENOMEM. */
int neap_learned_start(const neap_learned *learned, uint32_t layer, uint32_t head, int which,
                       neap_value *io, neap_value_norm *ret_norm);
#endif
