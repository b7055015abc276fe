/* source.c - finds the file that holds a weight tensor's bytes.
 * A loader that maps its file hands over an address inside the mapping: path and offset follow from
 * it. Otherwise the GGUF files that the process has open are parsed, the tensor is looked up by
 * name, and three samples of its bytes are compared. */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <errno.h>

#include "file.h"
#include "plugin_int.h"
#include "proc.h"
#include "vm.h"

enum { SAMPLE_BYTES = 4096 };

static bool samples_match(const char *path, uint64_t offset, const char *data, size_t size) {
    neap_file *file;
    if (neap_file_open_read(path, &file) != 0) {
        return false;
    }
    char sample[SAMPLE_BYTES];
    size_t len = size < SAMPLE_BYTES ? size : SAMPLE_BYTES;
    const size_t at[3] = {0, (size - len) / 2, size - len};
    bool match = true;
    for (int i = 0; i < 3 && match; i++) {
        match = neap_file_read(file, sample, len, offset + at[i]) == 0 &&
                memcmp(sample, data + at[i], len) == 0;
    }
    neap_file_close(file);
    return match;
}

static int find_in(const char *path, const struct ggml_tensor *tensor, const void *data,
                   size_t size, uint64_t *ret_offset) {
    struct gguf_context *gguf = neap_host_fn.gguf_init_from_file(
        path, (struct gguf_init_params){.no_alloc = true, .ctx = NULL});
    if (gguf == NULL) {
        return -ENOENT;
    }
    int err = -ENOENT;
    int64_t id = neap_host_fn.gguf_find_tensor(gguf, tensor->name);
    if (id >= 0 && neap_host_fn.gguf_get_tensor_size(gguf, id) == size) {
        uint64_t offset =
            neap_host_fn.gguf_get_data_offset(gguf) + neap_host_fn.gguf_get_tensor_offset(gguf, id);
        if (samples_match(path, offset, data, size)) {
            *ret_offset = offset;
            err = 0;
        }
    }
    neap_host_fn.gguf_free(gguf);
    return err;
}

int neap_source_find(const struct ggml_tensor *tensor, const void *data, size_t size,
                     char **ret_path, uint64_t *ret_offset) {
    char path[PATH_MAX];
    uint64_t offset;
    if (neap_vm_mapping(data, path, sizeof path, &offset) == 0 && path[0] == '/' &&
        samples_match(path, offset, data, size)) {
        *ret_path = strdup(path);
        *ret_offset = offset;
        return *ret_path != NULL ? 0 : -ENOMEM;
    }
    int err = -ENOENT;
    for (int i = 0; err != 0 && neap_proc_open_path(i, path, sizeof path) != -ENOENT; i++) {
        size_t len = strlen(path);
        if (len > 5 && strcmp(path + len - 5, ".gguf") == 0) {
            err = find_in(path, tensor, data, size, &offset);
        }
    }
    if (err == 0) {
        *ret_path = strdup(path);
        *ret_offset = offset;
        return *ret_path != NULL ? 0 : -ENOMEM;
    }
    return err;
}
