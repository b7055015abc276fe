/* lowram_module.h - LowRAM as a module of its own, which brings BLAS: loaded only where the codec
 * is asked for. Its fits are guests of klt (codec/klt.h). */
#ifndef NEAP_LOWRAM_MODULE_H
#define NEAP_LOWRAM_MODULE_H

#include "klt.h"
#include "lowram.h"
#include "neap.h"

#define NEAP_LOWRAM_MODULE_FILE "neap-lowram.so"
#define NEAP_LOWRAM_MODULE_SYMBOL "neap_lowram_entry"

typedef struct neap_lowram_module {
    const char *version; /* NEAP_VERSION: it is loaded by no other */
    /* Once, first: where the log goes; BLAS keeps to the caller's thread. */
    void (*open)(void (*log)(int level, const char *line, void *ctx), void *ctx);
    void (*defaults)(neap_lowram_options *ret_options, double ratio);
    uint32_t (*rows_needed)(const neap_lowram_options *options, const neap_lowram_layer *layers,
                            uint32_t n_layers);
    /* Fails: as neap_lowram_fit(). */
    int (*make)(const neap_lowram_options *options, const neap_lowram_layer *layers,
                uint32_t n_layers, const neap_lowram_context *context, neap_klt_model **ret_model);
} neap_lowram_module;

extern NEAP_API const neap_lowram_module neap_lowram_entry;
#endif
