/* train_lowram.h - `neap train`'s part for LowRAM. */
#ifndef NEAP_APPS_TRAIN_LOWRAM_H
#define NEAP_APPS_TRAIN_LOWRAM_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "predictors.h"

/* Writes the file in the model's folder, with a share of the progress bar from begin on, and says
 * what it learned as an object; NULL where there was nothing to learn from. Returns an exit status,
 * having said why. */
int neap_train_lowram(const neap_predictors *predictors, const char *folder, const char *model,
                      uint64_t digest, double begin, double share, json_t **ret_result);
/* Whether the file is there, of that model and good. */
bool neap_train_lowram_is_there(const char *folder, uint64_t digest);
/* What that object says. */
void neap_train_lowram_print(const json_t *result);
#endif
