/* profile_file.h - where device profiles are kept. Format: docs/formats/profile.md.
 * Errors    0 or negative; on failure ret_ values are untouched. */
#ifndef NEAP_CORE_PROFILE_FILE_H
#define NEAP_CORE_PROFILE_FILE_H

#include <stddef.h>

#include "device.h"
#include "profile.h"

/* The swap folder: what was wanted, or (NULL, "") the default one. */
int neap_swap_folder(const char *wanted, char *ret_path, size_t cap);
/* The device of that swap folder, and the file in the cache folder for it. */
int neap_profile_locate(const char *swap_folder, neap_device *ret_device, char *ret_path,
                        size_t cap);

/* Fails: -ENOENT ...; NEAP_E_CORRUPT (damaged), NEAP_E_VERSION (of another version),
 * NEAP_E_CHANGED (measured on another device). */
int neap_profile_load(const char *path, const neap_device *device, neap_profile *ret_profile);
/* Replaces the file. */
int neap_profile_save(const char *path, const neap_device *device, const neap_profile *profile);
/* Puts the times of a kind of attention into the file that is there. Fails: -ENOENT ... */
int neap_profile_save_attention(const char *path, const neap_device *device, const char *kind,
                                neap_attention_times times);
/* Puts the rates that restores showed (0: none) into the file and leaves the rest of it as it is; a
 * file that is missing, damaged or of another device is made anew. Fails: NEAP_E_VERSION ... */
int neap_profile_save_restored(const char *path, const neap_device *device, const char *codec,
                               uint64_t read_bps, uint64_t decode_bps);
#endif
