/* model_speed.h - one run of llama-bench, with the backend or without it. */
#ifndef NEAP_APPS_MODEL_SPEED_H
#define NEAP_APPS_MODEL_SPEED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct neap_speed_run {
    const char *path; /* of the model */
    bool with_neap;
    const char *const *args; /* more options of llama-bench, NULL-terminated */
    uint32_t n_threads;      /* set by the run */
} neap_speed_run;

typedef struct neap_speed_test {
    const char *name;
    int n_prompt, n_gen;
} neap_speed_test;

/* Runs it once; tokens per second of each test. 0, or the exit status of the error printed (also
 * when it did not run on what it should have). */
int neap_model_speed(neap_speed_run *run, const neap_speed_test *tests, size_t n_tests,
                     double *ret_tps);
#endif
