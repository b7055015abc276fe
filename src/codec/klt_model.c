/* klt_model.c - the model file: written and read.
 *
 * Reader and writer walk the same list of sections, whose kinds, sizes and offsets follow from the
 * counts and the groups; and both check the same ranges. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bytes.h"
#include "err.h"
#include "file.h"
#include "klt_int.h"
#include "textfile.h"

enum {
    VERSION = 2,
    HEADER_BYTES = 128,
    ENTRY_BYTES = 32,
    ROPE_BYTES = 16 + NEAP_KLT_HEAD_DIM / 2 * 4,
    BLOCK_BYTES = 56,
    GROUP_BYTES = 32,
    ALIGN = 64,
    TABLE_VALUES = 2 * 256 - 2,
};
#define FILE_MAX (UINT64_C(1) << 34)

static const char magic[8] = "NEAPKLT";

typedef struct header {
    char magic[8];
    uint32_t version, profile;
    uint64_t file_bytes, digest;
    uint32_t outlier_permille, n_ropes, n_blocks, n_groups, n_sections;
    float ratio;
    uint64_t id;
    char name[NEAP_KLT_NAME];
} header;
_Static_assert(sizeof(header) == HEADER_BYTES, "the header of the file");

typedef struct entry {
    uint32_t kind, group;
    uint64_t offset, bytes, checksum;
} entry;
_Static_assert(sizeof(entry) == ENTRY_BYTES, "an entry of the directory");

enum { TABLES = 1, ROPES, BLOCKS, GROUPS, COMPONENTS, F, G, METRIC };

/* ---- shape ---- */

uint32_t neap_klt_group_columns(const neap_klt_block *block, const neap_klt_group *group) {
    return block->n_layers * group->n_heads * (block->k_head_dim + block->v_head_dim);
}

bool neap_klt_next_head(const neap_klt_block *block, const neap_klt_group *group,
                        neap_klt_head *head) {
    if (head->dim == 0) { /* before the first */
        *head = (neap_klt_head){.head = group->first_head, .dim = block->k_head_dim};
        return true;
    }
    head->column += head->dim;
    head->tile += NEAP_ROUND_UP(head->dim, NEAP_KLT_TILE) / NEAP_KLT_TILE;
    if (++head->head < group->first_head + group->n_heads) return true;
    head->head = group->first_head;
    if (++head->layer < block->n_layers) return true;
    head->layer = 0;
    if (head->is_v) return false;
    head->is_v = true;
    head->dim = block->v_head_dim;
    return true;
}

uint64_t neap_klt_metric_values(const neap_klt_block *block, const neap_klt_group *group) {
    const uint64_t k = block->k_head_dim, v = block->v_head_dim;
    return (k * k + v * v) * block->n_layers * group->n_heads;
}

static uint64_t section_bytes(const neap_klt_spec *spec, uint32_t kind, const neap_klt_block *block,
                              const neap_klt_group *group) {
    const uint64_t columns = group ? neap_klt_group_columns(block, group) : 0;
    switch (kind) {
    case TABLES:
        return TABLE_VALUES * sizeof(float);
    case ROPES:
        return (uint64_t)spec->n_ropes * ROPE_BYTES;
    case BLOCKS:
        return (uint64_t)spec->n_blocks * BLOCK_BYTES;
    case GROUPS:
        return (uint64_t)spec->n_groups * GROUP_BYTES;
    case COMPONENTS:
        return (uint64_t)group->n_components * 5;
    case METRIC:
        return neap_klt_metric_values(block, group) * 2;
    default:
        return columns * group->n_components * 2;
    }
}

/* The walk over the sections: entry zeroed but for offset, the end of the directory, is before the
 * first. */
static bool next_section(const neap_klt_spec *spec, entry *at, uint32_t *block) {
    at->offset = NEAP_ROUND_UP(at->offset + at->bytes, ALIGN);
    if (at->kind <= COMPONENTS - 1)
        at->kind++;
    else if (at->kind == COMPONENTS)
        at->kind = spec->groups[at->group].f ? F : G;
    else if (at->kind == F || (at->kind == G && spec->groups[at->group].metric))
        at->kind++;
    else {
        at->kind = COMPONENTS;
        at->group++;
    }
    if (at->kind < COMPONENTS) {
        at->bytes = section_bytes(spec, at->kind, NULL, NULL);
        return true;
    }
    if (at->group >= spec->n_groups) return false;
    const neap_klt_block *b = &spec->blocks[*block];
    if (at->group >= b->first_group + b->n_groups) b = &spec->blocks[++*block];
    at->bytes = section_bytes(spec, at->kind, b, &spec->groups[at->group]);
    return true;
}

/* ---- ranges ---- */

static bool in_range(float x, float low, float high) {
    return x >= low && x <= high; /* no for NaN */
}

static bool all_finite(const uint16_t *values, uint64_t n) {
    uint32_t worst = 0;
    for (uint64_t i = 0; i < n; i++) {
        const uint32_t magnitude = values[i] & 0x7fffu;
        worst = magnitude > worst ? magnitude : worst;
    }
    return worst < NEAP_F16_INF;
}

static const char *check_tables(const neap_klt_spec *spec) {
    for (uint32_t b = 1; b <= NEAP_KLT_BITS; b++)
        for (uint32_t i = 0; i < 1u << b; i++) {
            const float *table = spec->tables[b];
            if (!in_range(table[i], -64, 64)) return "a value of a quantiser table";
            if (i > 0 && !(table[i - 1] < table[i])) return "a quantiser table does not ascend";
        }
    return NULL;
}

static const char *check_ropes(const neap_klt_spec *spec) {
    for (uint32_t r = 0; r < spec->n_ropes; r++) {
        const neap_klt_rope *rope = &spec->ropes[r];
        if (rope->mode > NEAP_KLT_ROPE_NEOX) return "the mode of a RoPE table";
        if (rope->n_dims % 2 || rope->n_dims > NEAP_KLT_HEAD_DIM ||
            (rope->n_dims == 0) != (rope->mode == NEAP_KLT_ROPE_NONE))
            return "the dims of a RoPE table";
        if (!in_range(rope->magnitude, 1e-3f, 1e3f)) return "the magnitude of a RoPE table";
        for (uint32_t i = 0; i < rope->n_dims / 2; i++)
            if (!in_range(rope->radians[i], -64, 64)) return "an angle of a RoPE table";
    }
    return NULL;
}

static const char *check_blocks(const neap_klt_spec *spec) {
    int64_t last = -1;
    uint32_t group = 0;
    for (uint32_t i = 0; i < spec->n_blocks; i++) {
        const neap_klt_block *b = &spec->blocks[i];
        if (b->n_layers < 1 || b->n_layers > NEAP_KLT_LAYERS) return "the layers of a block";
        if (b->n_kv_heads < 1 || b->n_kv_heads > NEAP_KLT_HEADS) return "the KV heads of a block";
        if (b->k_head_dim < 1 || b->k_head_dim > NEAP_KLT_HEAD_DIM || b->v_head_dim < 1 ||
            b->v_head_dim > NEAP_KLT_HEAD_DIM)
            return "the elements of a block's heads";
        for (uint32_t l = 0; l < b->n_layers; l++) {
            if (b->layers[l] <= last) return "the layers of the blocks do not ascend";
            last = b->layers[l];
            if (b->ropes[l] >= spec->n_ropes || spec->ropes[b->ropes[l]].n_dims > b->k_head_dim)
                return "the RoPE table of a layer";
        }
        if (b->first_group != group || b->n_groups < 1 || b->n_groups > b->n_kv_heads ||
            b->n_groups > spec->n_groups - group)
            return "the groups of a block";
        group += b->n_groups;
    }
    return group == spec->n_groups ? NULL : "the groups of the blocks";
}

static const char *check_group_shapes(const neap_klt_spec *spec) {
    for (uint32_t i = 0; i < spec->n_blocks; i++) {
        const neap_klt_block *b = &spec->blocks[i];
        uint32_t head = 0;
        for (uint32_t g = b->first_group; g < b->first_group + b->n_groups; g++) {
            const neap_klt_group *group = &spec->groups[g];
            if (group->first_head != head || group->n_heads < 1 ||
                group->n_heads > b->n_kv_heads - head)
                return "the heads of a group";
            head += group->n_heads;
            const uint32_t columns = neap_klt_group_columns(b, group);
            if (columns > NEAP_KLT_COLUMNS) return "the columns of a group";
            if (group->n_components < 1 || group->n_components > columns)
                return "the components of a group";
            if (!in_range(group->outlier_error, 0, 3e38f)) return "the outlier error of a group";
            if (!in_range(group->unit, 1e-20f, 1e20f)) return "the unit of a group";
            if (!group->f && !group->metric) return "neither F nor a metric in a group";
        }
        if (head != b->n_kv_heads) return "the heads of a block's groups";
    }
    return NULL;
}

static const char *check_group_values(const neap_klt_spec *spec) {
    for (uint32_t i = 0; i < spec->n_blocks; i++) {
        const neap_klt_block *b = &spec->blocks[i];
        for (uint32_t g = b->first_group; g < b->first_group + b->n_groups; g++) {
            const neap_klt_group *group = &spec->groups[g];
            const uint64_t n = (uint64_t)neap_klt_group_columns(b, group) * group->n_components;
            for (uint32_t c = 0; c < group->n_components; c++) {
                const uint32_t bits = group->bits[c];
                if (bits < 1 || bits > (c ? group->bits[c - 1] : NEAP_KLT_BITS))
                    return "the bits of a component";
                if (!in_range(group->sd[c], 1e-12f, c ? group->sd[c - 1] : 1e12f))
                    return "the deviation of a component";
            }
            if ((group->f && !all_finite(group->f, n)) || !all_finite(group->g, n) ||
                (group->metric && !all_finite(group->metric, neap_klt_metric_values(b, group))))
                return "an element of a matrix is not finite";
        }
    }
    return NULL;
}

static const char *check_counts(const neap_klt_spec *spec) {
    if (!memchr(spec->name, 0, sizeof spec->name)) return "the name";
    if (spec->profile < NEAP_KLT_PER_HEAD || spec->profile > NEAP_KLT_FOUR_LAYERS)
        return "the profile";
    if (spec->outlier_permille > 100) return "the share of outliers";
    if (!in_range(spec->ratio, 1, 1000)) return "the ratio";
    if (spec->n_ropes < 1 || spec->n_ropes > NEAP_KLT_ROPES) return "the number of RoPE tables";
    if (spec->n_blocks < 1 || spec->n_blocks > NEAP_KLT_BLOCKS) return "the number of blocks";
    if (spec->n_groups < 1 || spec->n_groups > NEAP_KLT_GROUPS) return "the number of groups";
    return NULL;
}

/* ---- writing ---- */

static void put_ropes(const neap_klt_spec *spec, uint8_t *dst) {
    for (uint32_t r = 0; r < spec->n_ropes; r++, dst += ROPE_BYTES) {
        const neap_klt_rope *rope = &spec->ropes[r];
        memcpy(dst, rope, 12);
        memcpy(dst + 16, rope->radians, rope->n_dims / 2 * sizeof *rope->radians);
    }
}

static void put_blocks(const neap_klt_spec *spec, uint8_t *dst) {
    for (uint32_t i = 0; i < spec->n_blocks; i++, dst += BLOCK_BYTES) {
        const neap_klt_block *b = &spec->blocks[i];
        uint32_t fields[BLOCK_BYTES / 4] = {b->n_layers};
        memcpy(fields + 1, b->layers, b->n_layers * sizeof *fields);
        memcpy(fields + 5, b->ropes, b->n_layers * sizeof *fields);
        const uint32_t rest[] = {b->n_kv_heads, b->k_head_dim, b->v_head_dim, b->first_group,
                                 b->n_groups};
        memcpy(fields + 9, rest, sizeof rest);
        memcpy(dst, fields, sizeof fields);
    }
}

static void put_groups(const neap_klt_spec *spec, uint8_t *dst) {
    for (uint32_t g = 0; g < spec->n_groups; g++, dst += GROUP_BYTES) {
        const neap_klt_group *group = &spec->groups[g];
        const uint32_t fields[GROUP_BYTES / 4] = {
            group->first_head,         group->n_heads,
            group->n_components,       neap_f32_bits(group->outlier_error),
            group->metric != NULL,     group->f != NULL,
            neap_f32_bits(group->unit)};
        memcpy(dst, fields, sizeof fields);
    }
}

static void put_section(const neap_klt_spec *spec, const entry *at, uint8_t *dst) {
    const neap_klt_group *group = &spec->groups[at->group];
    switch (at->kind) {
    case TABLES:
        for (uint32_t b = 1; b <= NEAP_KLT_BITS; b++, dst += sizeof(float) << (b - 1))
            memcpy(dst, spec->tables[b], sizeof(float) << b);
        break;
    case ROPES:
        put_ropes(spec, dst);
        break;
    case BLOCKS:
        put_blocks(spec, dst);
        break;
    case GROUPS:
        put_groups(spec, dst);
        break;
    case COMPONENTS:
        memcpy(dst, group->sd, group->n_components * sizeof *group->sd);
        memcpy(dst + group->n_components * sizeof *group->sd, group->bits, group->n_components);
        break;
    case F:
        memcpy(dst, group->f, at->bytes);
        break;
    case G:
        memcpy(dst, group->g, at->bytes);
        break;
    default:
        memcpy(dst, group->metric, at->bytes);
        break;
    }
}

static int put_all(const neap_klt_spec *spec, uint8_t **ret_bytes, size_t *ret_len) {
    header head = {.version = VERSION,
                   .profile = spec->profile,
                   .digest = spec->digest,
                   .outlier_permille = spec->outlier_permille,
                   .ratio = spec->ratio,
                   .n_ropes = spec->n_ropes,
                   .n_blocks = spec->n_blocks,
                   .n_groups = spec->n_groups};
    memcpy(head.magic, magic, sizeof magic);
    memcpy(head.name, spec->name, strlen(spec->name));
    uint32_t block = 0;
    for (entry at = {0}; next_section(spec, &at, &block);)
        head.n_sections++;
    const uint64_t directory = HEADER_BYTES + (uint64_t)head.n_sections * ENTRY_BYTES;
    block = 0;
    for (entry at = {.offset = directory}; next_section(spec, &at, &block);)
        head.file_bytes = at.offset + at.bytes;
    if (head.file_bytes > FILE_MAX) return -EFBIG;
    uint8_t *bytes = calloc(1, head.file_bytes), *pos = bytes + HEADER_BYTES;
    if (!bytes) return -ENOMEM;
    block = 0;
    for (entry at = {.offset = directory}; next_section(spec, &at, &block); pos += ENTRY_BYTES) {
        put_section(spec, &at, bytes + at.offset);
        at.checksum = neap_checksum(bytes + at.offset, at.bytes);
        memcpy(pos, &at, sizeof at);
    }
    memcpy(bytes, &head, sizeof head);
    head.id = neap_checksum(bytes, directory);
    memcpy(bytes, &head, sizeof head);
    *ret_bytes = bytes;
    *ret_len = head.file_bytes;
    return 0;
}

int neap_klt_model_build(const neap_klt_spec *spec, const char *name, uint8_t **ret_bytes,
                         size_t *ret_len) {
    const char *wrong = check_counts(spec);
    if (!wrong) wrong = check_tables(spec);
    if (!wrong) wrong = check_ropes(spec);
    if (!wrong) wrong = check_blocks(spec);
    if (!wrong) wrong = check_group_shapes(spec);
    if (!wrong) wrong = check_group_values(spec);
    if (wrong) {
        neap_log(NEAP_LOG_ERROR, "klt model %s not written: out of range: %s", name, wrong);
        return NEAP_E_BOUND;
    }
    return put_all(spec, ret_bytes, ret_len);
}

int neap_klt_model_write(const char *path, const neap_klt_spec *spec) {
    uint8_t *bytes = NULL;
    size_t len = 0;
    int err = neap_klt_model_build(spec, path, &bytes, &len);
    if (!err) err = neap_textfile_replace(path, (const char *)bytes, len);
    free(bytes);
    return err;
}

/* ---- reading ---- */

static int refuse(const char *name, int err, const char *why) {
    neap_log(NEAP_LOG_ERROR, "klt model %s refused: %s", name, why);
    return err;
}

static const char *get_ropes(neap_klt_model *model, const uint8_t *src) {
    for (uint32_t r = 0; r < model->spec.n_ropes; r++, src += ROPE_BYTES) {
        neap_klt_rope *rope = &model->ropes[r];
        memcpy(rope, src, 12);
        memcpy(rope->radians, src + 16, sizeof rope->radians);
    }
    return check_ropes(&model->spec);
}

static const char *get_blocks(neap_klt_model *model, const uint8_t *src) {
    for (uint32_t i = 0; i < model->spec.n_blocks; i++, src += BLOCK_BYTES) {
        uint32_t fields[BLOCK_BYTES / 4];
        memcpy(fields, src, sizeof fields);
        neap_klt_block *b = &model->blocks[i];
        *b = (neap_klt_block){.n_layers = fields[0],
                              .n_kv_heads = fields[9],
                              .k_head_dim = fields[10],
                              .v_head_dim = fields[11],
                              .first_group = fields[12],
                              .n_groups = fields[13]};
        memcpy(b->layers, fields + 1, sizeof b->layers);
        memcpy(b->ropes, fields + 5, sizeof b->ropes);
    }
    return check_blocks(&model->spec);
}

/* F and metric are the file's bytes until it is known where they lie. */
static const char *get_groups(neap_klt_model *model, const uint8_t *src, const uint8_t *bytes) {
    for (uint32_t g = 0; g < model->spec.n_groups; g++, src += GROUP_BYTES) {
        uint32_t fields[GROUP_BYTES / 4];
        memcpy(fields, src, sizeof fields);
        if (fields[4] > 1 || fields[5] > 1 || fields[7]) return "the matrices of a group";
        const uint16_t *there = (const uint16_t *)(const void *)bytes;
        model->groups[g] = (neap_klt_group){.first_head = fields[0],
                                            .n_heads = fields[1],
                                            .n_components = fields[2],
                                            .outlier_error = neap_f32_of_bits(fields[3]),
                                            .unit = neap_f32_of_bits(fields[6]),
                                            .f = fields[5] ? there : NULL,
                                            .metric = fields[4] ? there : NULL};
    }
    return check_group_shapes(&model->spec);
}

static const char *get_section(neap_klt_model *model, const entry *at, const uint8_t *bytes) {
    const uint8_t *src = bytes + at->offset;
    neap_klt_group *group = &model->groups[at->group];
    switch (at->kind) {
    case TABLES:
        for (uint32_t b = 1; b <= NEAP_KLT_BITS; b++, src += sizeof(float) << (b - 1))
            memcpy(model->tables[b], src, sizeof(float) << b);
        return check_tables(&model->spec);
    case ROPES:
        return get_ropes(model, src);
    case BLOCKS:
        return get_blocks(model, src);
    case GROUPS:
        return get_groups(model, src, bytes);
    case COMPONENTS:
        group->sd = (const float *)(const void *)src;
        group->bits = src + group->n_components * sizeof(float);
        return NULL;
    case F:
        group->f = (const uint16_t *)(const void *)src;
        return NULL;
    case G:
        group->g = (const uint16_t *)(const void *)src;
        return NULL;
    default:
        group->metric = (const uint16_t *)(const void *)src;
        return NULL;
    }
}

static bool is_zero(const uint8_t *bytes, uint64_t n) {
    for (uint64_t i = 0; i < n; i++)
        if (bytes[i]) return false;
    return true;
}

static const char *get_sections(neap_klt_model *model, const header *head, const uint8_t *bytes) {
    uint32_t n = 0, block = 0;
    uint64_t end = HEADER_BYTES + (uint64_t)head->n_sections * ENTRY_BYTES;
    entry at = {.offset = end}, found;
    while (next_section(&model->spec, &at, &block)) {
        if (n == head->n_sections) return "a section is missing";
        memcpy(&found, bytes + HEADER_BYTES + (size_t)n++ * ENTRY_BYTES, sizeof found);
        at.checksum = found.checksum;
        if (memcmp(&at, &found, sizeof at) != 0 || at.offset > head->file_bytes ||
            at.bytes > head->file_bytes - at.offset)
            return "a section is not where it must be";
        if (!is_zero(bytes + end, at.offset - end)) return "a gap is not zero";
        if (neap_checksum(bytes + at.offset, at.bytes) != at.checksum)
            return "the checksum of a section";
        const char *wrong = get_section(model, &at, bytes);
        if (wrong) return wrong;
        end = at.offset + at.bytes;
    }
    if (n != head->n_sections || end != head->file_bytes) return "more than its sections";
    return check_group_values(&model->spec);
}

static int make_room(neap_klt_model *model) {
    neap_klt_spec *spec = &model->spec;
    model->ropes = calloc(spec->n_ropes, sizeof *model->ropes);
    model->turns = calloc(spec->n_ropes, sizeof *model->turns);
    model->blocks = calloc(spec->n_blocks, sizeof *model->blocks);
    model->groups = calloc(spec->n_groups, sizeof *model->groups);
    model->bases = calloc(spec->n_groups, sizeof *model->bases);
    model->arenas = calloc(spec->n_groups, sizeof *model->arenas);
    if (!model->ropes || !model->turns || !model->blocks || !model->groups || !model->bases ||
        !model->arenas)
        return -ENOMEM;
    spec->ropes = model->ropes;
    spec->blocks = model->blocks;
    spec->groups = model->groups;
    for (uint32_t b = 1; b <= NEAP_KLT_BITS; b++)
        spec->tables[b] = model->tables[b];
    model->bytes =
        sizeof *model + spec->n_ropes * (sizeof *model->ropes + sizeof *model->turns) +
        spec->n_blocks * sizeof *model->blocks +
        spec->n_groups * (sizeof *model->groups + sizeof *model->bases + sizeof *model->arenas);
    return 0;
}

static int check_header(const uint8_t *bytes, size_t len, uint64_t digest, const char *name,
                        header *head) {
    const neap_head_fault fault = neap_head_check(bytes, len, sizeof *head, magic, VERSION);
    if (fault == NEAP_HEAD_MAGIC) return refuse(name, NEAP_E_VERSION, "not a klt model");
    if (fault == NEAP_HEAD_VERSION)
        return refuse(name, NEAP_E_VERSION, "a klt model of another version");
    memcpy(head, bytes, sizeof *head);
    const uint64_t directory = HEADER_BYTES + (uint64_t)head->n_sections * ENTRY_BYTES;
    if (fault || directory > len) return refuse(name, NEAP_E_CORRUPT, "damaged: its length");
    const int err = neap_checksum_verify(bytes, directory, offsetof(header, id));
    if (err == NEAP_E_CORRUPT) return refuse(name, err, "damaged: the checksum of its directory");
    if (err) return err;
    if (head->digest != digest) {
        neap_log(NEAP_LOG_ERROR,
                 "klt model %s refused: made for another GGUF, %.63s (%016llx, not %016llx)", name,
                 head->name, (unsigned long long)head->digest, (unsigned long long)digest);
        return NEAP_E_CHANGED;
    }
    return 0;
}

static int parse(const void *bytes, size_t len, uint64_t digest, double ratio, const char *name,
                 neap_klt_model **ret_model) {
    header head;
    int err = check_header(bytes, len, digest, name, &head);
    if (err) return err;
    neap_klt_model *model = calloc(1, sizeof *model);
    if (!model) return -ENOMEM;
    model->id = head.id;
    neap_klt_spec *spec = &model->spec;
    *spec = (neap_klt_spec){.digest = head.digest,
                            .profile = head.profile,
                            .outlier_permille = head.outlier_permille,
                            .ratio = head.ratio,
                            .n_ropes = head.n_ropes,
                            .n_blocks = head.n_blocks,
                            .n_groups = head.n_groups};
    memcpy(spec->name, head.name, sizeof spec->name);
    const char *wrong = check_counts(spec);
    if (!wrong) err = make_room(model);
    if (!wrong && !err) wrong = get_sections(model, &head, bytes);
    if (wrong) {
        neap_log(NEAP_LOG_ERROR, "klt model %s refused: damaged: %s", name, wrong);
        err = NEAP_E_CORRUPT;
    }
    for (uint32_t g = 0; !wrong && !err && g < spec->n_groups; g++)
        model->bases[g].f_width = model->groups[g].n_components;
    uint8_t *bits = NULL;
    if (!wrong && !err && ratio > 0 && (float)ratio != spec->ratio)
        err = neap_klt_model_set_ratio(model, ratio, &bits);
    if (!wrong && !err) err = neap_klt_make_bases(model);
    free(bits);
    if (err)
        neap_klt_model_close(model);
    else
        *ret_model = model;
    return err;
}

int neap_klt_model_parse(const void *bytes, size_t len, uint64_t digest, const char *name,
                         neap_klt_model **ret_model) {
    return parse(bytes, len, digest, 0, name, ret_model);
}

int neap_klt_model_open(const char *path, uint64_t digest, neap_klt_model **ret_model) {
    return neap_klt_model_open_at(path, digest, 0, ret_model);
}

int neap_klt_model_open_at(const char *path, uint64_t digest, double ratio,
                           neap_klt_model **ret_model) {
    neap_file *file = NULL;
    neap_file_id id;
    int err = neap_file_open_read(path, &file);
    if (err) return err;
    uint8_t *bytes = NULL;
    err = neap_file_identity(file, &id);
    if (!err && id.size_bytes > FILE_MAX) err = refuse(path, NEAP_E_VERSION, "not a klt model");
    if (!err && !(bytes = aligned_alloc(NEAP_DIRECT_ALIGN,
                                        NEAP_ROUND_UP(id.size_bytes + 1, NEAP_DIRECT_ALIGN))))
        err = -ENOMEM;
    if (!err && id.size_bytes > 0) err = neap_file_read(file, bytes, id.size_bytes, 0);
    if (!err) err = parse(bytes, id.size_bytes, digest, ratio, path, ret_model);
    free(bytes);
    neap_file_close(file);
    return err;
}

void neap_klt_model_close(neap_klt_model *model) {
    if (!model) return;
    if (model->guest) model->guest->free(model->guest_self);
    for (uint32_t g = 0; model->arenas && g < model->spec.n_groups; g++)
        free(model->arenas[g]);
    free(model->arenas);
    free(model->bases);
    free(model->groups);
    free(model->blocks);
    free(model->turns);
    free(model->ropes);
    free(model);
}

const neap_klt_spec *neap_klt_model_spec(const neap_klt_model *model) {
    return &model->spec;
}

uint64_t neap_klt_model_id(const neap_klt_model *model) {
    return model->id;
}

size_t neap_klt_model_memory(const neap_klt_model *model) {
    return model->guest ? model->guest_memory : model->bytes;
}

size_t neap_klt_model_bytes(const neap_klt_model *model) {
    return model->bytes;
}

size_t neap_klt_scratch_bytes(const neap_klt_model *model) {
    return model->scratch_bytes;
}

int neap_klt_model_find(const neap_klt_model *model, uint32_t layer, uint32_t *ret_at) {
    for (uint32_t i = 0; i < model->spec.n_blocks; i++)
        for (uint32_t l = 0; l < model->blocks[i].n_layers; l++)
            if (model->blocks[i].layers[l] == layer) {
                *ret_at = l;
                return (int)i;
            }
    return -1;
}
