/* klt_ratio.c - an open model at a higher ratio than its file's: fewer bits for the same
 * components, the last ones with none left out. G's first rows, and F's first columns, stay what
 * they are. */
#include <errno.h>
#include <stdlib.h>

#include "bytes.h"
#include "klt_int.h"
#include "neap.h"

/* Deviations of all groups in one unit, and the bits that the ratio leaves a row of all of them; 0:
 * out of reach. */
static uint64_t gather(const neap_klt_model *model, double ratio, neap_klt_spectrum *spectra,
                       float *sds, uint8_t *bits) {
    const neap_klt_spec *spec = &model->spec;
    uint64_t budget = 0, at = 0;
    for (uint32_t i = 0; i < spec->n_blocks; i++) {
        const neap_klt_block *block = &spec->blocks[i];
        for (uint32_t g = block->first_group; g < block->first_group + block->n_groups; g++) {
            const neap_klt_group *group = &spec->groups[g];
            const uint64_t here = neap_klt_budget_bits(neap_klt_group_columns(block, group),
                                                       spec->outlier_permille, ratio);
            if (here == 0) return 0;
            budget += here;
            spectra[g] = (neap_klt_spectrum){group->n_components, sds + at, bits + at};
            for (uint32_t c = 0; c < group->n_components; c++)
                sds[at++] = group->sd[c] * group->unit;
        }
    }
    return budget;
}

int neap_klt_model_set_ratio(neap_klt_model *model, double ratio, uint8_t **ret_bits) {
    if (!((float)ratio > model->spec.ratio && ratio <= 1000)) return NEAP_E_BOUND;
    const uint32_t n = model->spec.n_groups;
    size_t n_components = 0;
    for (uint32_t g = 0; g < n; g++)
        n_components += model->groups[g].n_components;
    neap_klt_spectrum *spectra = malloc(n * sizeof *spectra);
    float *sds = malloc(n_components * sizeof *sds);
    uint8_t *bits = malloc(n_components);
    int err = spectra && sds && bits ? 0 : -ENOMEM;
    if (!err) {
        const uint64_t budget = gather(model, ratio, spectra, sds, bits);
        if (budget == 0) err = NEAP_E_BOUND;
        if (!err) neap_klt_allocate(spectra, n, budget, NULL);
    }
    for (uint32_t g = 0; !err && g < n; g++) {
        neap_klt_group *group = &model->groups[g];
        uint32_t kept = 0;
        while (kept < group->n_components && spectra[g].bits[kept] > 0)
            kept++;
        if (kept == 0) spectra[g].bits[kept++] = 1; /* a group has to have one */
        group->n_components = kept;
        group->bits = spectra[g].bits;
    }
    if (!err) {
        const uint64_t both[2] = {model->id, neap_f32_bits((float)ratio)};
        model->id = neap_checksum(both, sizeof both);
        model->spec.ratio = (float)ratio;
        *ret_bits = bits;
    } else
        free(bits);
    free(spectra);
    free(sds);
    return err;
}
