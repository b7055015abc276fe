/* lowram_use.h - codec lowram of an engine, or KV held as LowRAM codes it (option kv): its module,
 * and the fits of contexts. */
#ifndef NEAP_CORE_LOWRAM_USE_H
#define NEAP_CORE_LOWRAM_USE_H

#include <stdbool.h>

#include "core_int.h"

/* "lowram" (*ret_ratio: the default) or "lowram:RATIO", as of klt; false: anything else. */
bool neap_lowram_option_parse(const char *text, double *ret_ratio);
/* Loads the module, which lies beside this library, or in lib or lib/neap beside its folder;
 * without it q8 does the work, and that is said. */
void neap_lowram_load(neap_engine *engine);
void neap_lowram_unload(neap_engine *engine);
/* Whether a fit can be of that cache, as far as it tells itself. [L] */
bool neap_lowram_knows(const neap_kv *kv);
/* Makes fits of contexts that have none, before they are evicted. Alone. */
void neap_lowram_prepare(neap_engine *engine);
/* The same, after a computation, of those whose time has come (kv lowram). Whether there is one. */
bool neap_lowram_follow(neap_engine *engine);
/* Makes them in advance, until the engine is used. By the idle thread. And whether it may have some
 * to make: with kv lowram it has none. */
void neap_lowram_fit_idle(neap_engine *engine);
bool neap_lowram_fits_idle(const neap_engine *engine);
#endif
