/* mask.c - what an attention mask shows, read before the graph is computed.
 * Only masks that are inputs of the graph have their values by then. */
#include <string.h>

#include "plugin_int.h"

bool neap_mask_usable(const struct ggml_tensor *mask) {
    return mask != NULL && mask->data != NULL && neap_host_op(mask->op) == NEAP_OP_EMPTY &&
           (mask->type == GGML_TYPE_F16 || mask->type == GGML_TYPE_F32);
}

const char *neap_mask_row(const struct ggml_tensor *mask, int64_t stream, int64_t token) {
    return (const char *)mask->data + (size_t)token * mask->nb[1] +
           (size_t)(stream % mask->ne[3]) * mask->nb[3];
}

bool neap_mask_hides(const struct ggml_tensor *mask, const char *row, int64_t cell) {
    if (mask->type == GGML_TYPE_F16) {
        return ((const uint16_t *)(const void *)row)[cell] == 0xfc00; /* -inf */
    }
    return ((const float *)(const void *)row)[cell] == -__builtin_inff();
}

bool neap_mask_shows_cells(const struct ggml_tensor *mask, int64_t stream, uint32_t first,
                           uint32_t n) {
    for (int64_t token = 0; token < mask->ne[1]; token++) {
        const char *row = neap_mask_row(mask, stream, token);
        for (int64_t cell = first; cell < mask->ne[0] && cell < (int64_t)first + n; cell++) {
            if (!neap_mask_hides(mask, row, cell)) {
                return true;
            }
        }
    }
    return false;
}
