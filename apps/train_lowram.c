/* train_lowram.c - see train_lowram.h. */
#include "train_lowram.h"

#include <errno.h>
#include <stdio.h>
#include <sys/stat.h>

#include "cli.h"
#include "learned.h"

static double shown_begin, shown_share; /* for the callback */

static void show(double done) {
    neap_progress_set(shown_begin + shown_share * done, "learning to predict values");
}

int neap_train_lowram(const neap_predictors *predictors, const char *folder, const char *model,
                      uint64_t digest, double begin, double share, json_t **ret_result) {
    char path[NEAP_PATH_MAX];
    struct stat info;
    neap_predictors_result r;
    shown_begin = begin;
    shown_share = share;
    if (snprintf(path, sizeof path, "%s/%s", folder, NEAP_LEARNED_FILE) >= (int)sizeof path)
        return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s: %s", folder,
                              neap_strerror(-ENAMETOOLONG));
    int err = neap_predictors_write(predictors, path, model, digest, show, &r);
    *ret_result = NULL;
    if (err == -ENODATA) return 0;
    if (!err && stat(path, &info) != 0) err = -errno;
    if (err) return neap_cli_error(NEAP_EXIT_FAILED, NULL, "%s: %s", path, neap_strerror(err));
    *ret_result =
        json_pack("{s:s, s:I, s:I, s:i, s:i, s:i, s:f, s:f, s:f, s:f, s:f}", "path", path, "bytes",
                  (json_int_t)info.st_size, "tokens", (json_int_t)r.n_tokens, "heads",
                  (int)r.n_heads, "layers_slim", (int)r.n_slim, "layers_key_norm",
                  (int)r.n_key_norms, "linear", r.linear, "warm", r.warm, "meta", r.meta,
                  "attention_error", r.net_error, "attention_untrained", r.untrained_error);
    return *ret_result
               ? 0
               : neap_cli_error(NEAP_EXIT_FAILED, NULL, "train: %s", neap_strerror(-ENOMEM));
}

bool neap_train_lowram_is_there(const char *folder, uint64_t digest) {
    char path[NEAP_PATH_MAX];
    neap_learned *learned = NULL;
    const bool there =
        snprintf(path, sizeof path, "%s/%s", folder, NEAP_LEARNED_FILE) < (int)sizeof path &&
        neap_learned_open(path, digest, &learned) == 0;
    neap_learned_free(learned);
    return there;
}

static double number(const json_t *result, const char *key) {
    return json_number_value(json_object_get(result, key));
}

void neap_train_lowram_print(const json_t *result) {
    printf("\nLowRAM: %s in %s\n", neap_cli_size((uint64_t)number(result, "bytes")),
           json_string_value(json_object_get(result, "path")));
    printf(
        "values of %.0f heads from their keys, variance explained: linear %.3f, warm start %.3f, "
        "meta-initialisation after its steps %.3f\n",
        number(result, "heads"), number(result, "linear"), number(result, "warm"),
        number(result, "meta"));
    if (number(result, "layers_key_norm") > 0)
        printf("%.0f layers with a norm between weights and keys: the linear map is of least "
               "squares\n",
               number(result, "layers_key_norm"));
    if (number(result, "attention_untrained") > 0)
        printf("attention to come, squared error of its logarithm: %.3f, as it was %.3f\n",
               number(result, "attention_error"), number(result, "attention_untrained"));
}
