/* fidelity_method.h - what `neap bench fidelity` compares: ways to keep a context in fewer bytes.
 *
 * A method replaces the rows of a state (llama_session.h) by what it would give back of them, and
 * counts all bytes that it keeps for the context. Codecs of neap (none, q8, cachegen, klt) code
 * chunk by chunk as an eviction does; the others are references:
 *
 *   q8_0, q4_0 ...    llama.cpp's own types; with -rotated as it turns the heads of quantised
 *                     caches: by Hadamard matrices of 64 elements and, keys, of the whole head
 *   turboquant:BITS   (Zandieh et al.) heads turned at random, Lloyd-Max codes, one scale each;
 *                     with -centred, keys less their mean over the context
 *   lowram:RATIO      LowRAM's fit of the context (lowram.h), factors and residuals in f16;
 *                     lowram-q: quantised; with -warm the predictors start
 *                     from what `neap train` learned, else from the context. Options may follow, as
 *                     in lowram:3/g=2/no-residuals: fidelity_lowram.c
 *   evict:RATIO       tokens that later ones will hardly look at are dropped, by what `neap train`
 *                     learned to predict, the rest is exact; evict-mass: by the attention so far
 *   lowram-e:RATIO    evicted, then LowRAM: half of the tokens first, see token_scores.h; the ratio
 *                     is that of all tokens. lowram-eq: quantised; -mass as above
 *   kivi:BITS         (Liu et al.) keys by channel in groups of 32 tokens, values by token in
 *                     groups of 32 channels, scale and least value in f16; the last 128 tokens
 *                     exact
 *   xkv:RATIO         (Chang et al.) four adjacent layers' keys before RoPE, and their values, as
 *                     two factors of low rank in f16; xkv-v: only the values
 *
 * Errors    0, or the exit status of an error that has been printed. */
#ifndef NEAP_APPS_FIDELITY_METHOD_H
#define NEAP_APPS_FIDELITY_METHOD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "klt.h"
#include "learned.h"
#include "llama_session.h"
#include "lowram.h"

#define NEAP_METHOD_NAME 64

typedef struct neap_method_kind neap_method_kind;

/* LowRAM's options of a method (fidelity_lowram.c). */
typedef struct neap_method_lowram_choice {
    neap_lowram_options fit;
    neap_value_options values;
    int adam_steps; /* negative: the closed form */
    int learned;    /* NEAP_LEARNED_* that fits start from; negative: none */
    unsigned pair;  /* source and target; 0: LowRAM whole */
} neap_method_lowram_choice;

typedef struct neap_method {
    char name[NEAP_METHOD_NAME]; /* as it was given: "klt-joint:8" */
    const neap_method_kind *kind;
    double parameter;      /* after the colon, or the kind's own */
    neap_klt_model *klt;   /* of klt-... */
    neap_learned *learned; /* of LowRAM that starts from it, and of evictions but -mass */
    uint64_t learned_bytes;
    neap_method_lowram_choice lowram; /* of lowram-... */
} neap_method;

/* Methods that --method knows, for the help text. */
#define NEAP_METHOD_HELP                                                                          \
    "  none, q8, cachegen     neap's codecs\n"                                                    \
    "  klt-head:R, klt-layer:R, klt-joint:R\n"                                                    \
    "                         codec klt at ratio R, where neap train has made it\n"               \
    "  lowram:R, lowram-q:R   LowRAM at ratio R, factors and residuals in f16; quantised;\n"      \
    "                         lowram-q-warm:R: starting from what neap train has learned\n"       \
    "                         with options, as lowram:3/g=2/no-residuals: see neap-bench(1)\n"    \
    "  ablations              alone: LowRAM's, the list of them\n"                                \
    "  evict:R                tokens dropped, the others exact; by a predictor that neap train\n" \
    "                         has made; evict-mass:R: by the attention so far\n"                  \
    "  lowram-e:R, lowram-eq:R\n"                                                                 \
    "                         tokens dropped, then LowRAM, quantised; lowram-e-mass:R,\n"         \
    "                         lowram-eq-mass:R likewise by the attention so far\n"                \
    "  turboquant:B           TurboQuant at B bits (4); turboquant-centred:B with centred keys\n" \
    "  q8_0, q5_0, q4_0       llama.cpp's types, heads as they are; -rotated: as it turns them\n" \
    "  kivi:B                 KIVI at B bits (2)\n"                                               \
    "  xkv:R, xkv-v:R         xKV at ratio R (4) on keys and values; on values alone\n"           \
    "\n"

/* LowRAM's ablations, as a list for --method. */
extern const char neap_method_ablations[];

/* Whether that is a method's name; else says so: the status. */
int neap_method_check(const char *name);
/* NAME[:PARAMETER] for a model; klt-PROFILE:RATIO, -warm and evictions take the file that `neap
 * train` made for it. *ret_is_there false: there is no such file; nothing is printed then. */
int neap_method_open(const char *name, const char *model_path, neap_method *ret_method,
                     bool *ret_is_there);
/* A klt file by its path; digest 0: of whatever model it was made from. */
int neap_method_open_klt(const char *path, uint64_t digest, neap_method *ret_method);
void neap_method_close(neap_method *method); /* takes a zeroed one */

/* What a method keeps for a context. */
typedef struct neap_method_kept {
    uint64_t bytes;
    uint32_t *tokens; /* malloc'd: those, ascending; NULL: all */
    size_t n_tokens;
} neap_method_kept;

/* Replaces the rows of the state's first cache, those of the session's layers; positions are the
 * numbers of the cells. Rows of tokens that are not kept stay as they are: the session must forget
 * them. The session has read the context watched. */
int neap_method_apply(const neap_method *method, neap_session *session, neap_kv_file *state,
                      neap_method_kept *ret_kept);
/* Of K and of V: squares of what the kept tokens' rows lost, and of what they were. Adds to them.
 */
typedef struct neap_method_loss {
    double lost[2], power[2];
} neap_method_loss;
void neap_method_add_loss(const neap_session *session, const neap_kv_file *exact,
                          const neap_kv_file *state, const neap_method_kept *kept,
                          neap_method_loss *io);
/* What is kept once for the model: klt's file in memory, LowRAM's starts, TurboQuant's matrix and
 * codes. */
uint64_t neap_method_model_bytes(const neap_method *method, const neap_session *session);
/* f16 bytes of the rows that methods replace. */
uint64_t neap_method_raw_bytes(const neap_session *session, const neap_kv_file *state);
#endif
