/* klt_guest.c - models of other codecs: see klt.h. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "klt_int.h"

int neap_klt_model_of_guest(const neap_klt_guest_model *guest, neap_klt_model **ret_model) {
    neap_klt_model *model = calloc(1, sizeof *model);
    const size_t size = guest->n_blocks * sizeof *model->blocks;
    neap_klt_block *blocks = malloc(size);
    if (!model || !blocks) {
        free(model);
        free(blocks);
        return -ENOMEM;
    }
    memcpy(blocks, guest->blocks, size);
    model->blocks = blocks;
    model->spec.blocks = blocks;
    model->spec.n_blocks = guest->n_blocks;
    model->id = guest->id;
    model->bytes = guest->bytes;
    model->guest_memory = guest->memory_bytes;
    model->scratch_bytes = guest->scratch_bytes;
    model->guest = guest->guest;
    model->guest_self = guest->self;
    *ret_model = model;
    return 0;
}

bool neap_klt_is_guest(const neap_klt_model *model) {
    return model->guest != NULL;
}
