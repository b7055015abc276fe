/* shape_model.h - models of the paper's shapes for measuring time: F16, random weights, the
 * tokenizer of a model that set-up fetched. They say nothing that means anything.
 * Errors    0, or the exit status of an error that has been printed. */
#ifndef NEAP_APPS_SHAPE_MODEL_H
#define NEAP_APPS_SHAPE_MODEL_H

#include <stdbool.h>

#include "cli.h"

/* "qwen3-0.6b-shape", "exaone-4.0-1.2b-shape"; "tiny-shape", for trying. NULL is none. */
bool neap_shape_model_known(const char *name);
/* Path of its file in the benchmarks' cache folder, written first if it is not there whole. The
 * same bytes every time; a file is there under its name only when it is complete. */
int neap_shape_model_make(const char *name, char path[NEAP_PATH_MAX]);
#endif
