/* klt_file.h - the files of the codec klt: where `neap train` puts them, which one an engine takes.
 * Errors    0 or negative; on failure ret_ values are untouched. */
#ifndef NEAP_CORE_KLT_FILE_H
#define NEAP_CORE_KLT_FILE_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "klt.h"

/* Of klt and LowRAM: what `neap train` makes. */
#define NEAP_RATIO_MIN 1.5
#define NEAP_RATIO_MAX 64.0

/* A decimal number from NEAP_RATIO_MIN to NEAP_RATIO_MAX; false: anything else. */
bool neap_ratio_parse(const char *text, double *ret_ratio);
/* "klt" (*ret_ratio 0) or "klt:RATIO"; false: anything else. */
bool neap_klt_option_parse(const char *text, double *ret_ratio);

/* Digest of a GGUF, by which its files are kept: XXH3 of its size and first MiB, where metadata
 * lies. */
int neap_model_digest(const char *gguf, uint64_t *ret_digest);

/* The folder in the cache folder for what is learned from that model. */
int neap_klt_folder(uint64_t digest, char *ret_path, size_t cap);
/* The file in it; profile is head, layer or joint. */
int neap_klt_path(const char *folder, const char *profile, double ratio, char *ret_path,
                  size_t cap);

/* Opens the folder's file of a profile and ratio, else that of the next lower whole ratio there is,
 * at that ratio. Fails as below. */
int neap_klt_profile_open(const char *folder, const char *profile, uint64_t digest, double ratio,
                          neap_klt_model **ret_model);
typedef struct neap_klt_found {
    char name[32]; /* "klt-head-4" */
    char path[PATH_MAX];
} neap_klt_found;

/* Opens the model's file of that ratio: up to 4, or with heads_first, that of single heads before
 * those of a layer and of several, else the reverse; where there is none, the file of the next
 * lower whole ratio, at that ratio. Ratio 0: the first there is of joint 8, joint 6, layer 8, layer
 * 6, head 4, layer 4, joint 4, head 6, head 8, joint 12, joint 16; with heads_first head 4, head 6,
 * head 8 before. ret_found is set on failure too: where it failed. Fails: -ENOENT (nothing was
 * trained, or not for that ratio); as neap_klt_model_open(). */
int neap_klt_file_open(uint64_t digest, double ratio, bool heads_first, neap_klt_model **ret_model,
                       neap_klt_found *ret_found);
#endif
