/* host.c - binds the plug-in to the ggml of the hosting program. See host.h. */
#include "host.h"

#include <dlfcn.h>
#include <link.h>
#include <stdlib.h>
#include <string.h>

#include "err.h"

neap_host neap_host_fn;

static neap_op op_class[GGML_OP_COUNT];

neap_op neap_host_op(enum ggml_op op) {
    return (unsigned)op < GGML_OP_COUNT ? op_class[op] : NEAP_OP_OTHER;
}

enum ggml_op neap_host_op_number(neap_op op) {
    int number = 0;
    while (number < GGML_OP_COUNT - 1 && op_class[number] != op) {
        number++;
    }
    return (enum ggml_op)number;
}

static void classify_ops(void) {
    static const struct {
        const char *name;
        neap_op op;
    } known[] = {
        {"NONE", NEAP_OP_EMPTY},
        {"RESHAPE", NEAP_OP_EMPTY},
        {"VIEW", NEAP_OP_EMPTY},
        {"PERMUTE", NEAP_OP_EMPTY},
        {"TRANSPOSE", NEAP_OP_EMPTY},
        {"SET_ROWS", NEAP_OP_SET_ROWS},
        {"ROPE", NEAP_OP_ROPE},
        {"ADD", NEAP_OP_ADD},
        {"GET_ROWS", NEAP_OP_GET_ROWS},
        {"MUL", NEAP_OP_MUL},
        {"RMS_NORM", NEAP_OP_RMS_NORM},
        {"MUL_MAT", NEAP_OP_MUL_MAT},
        {"MUL_MAT_ID", NEAP_OP_MUL_MAT_ID},
        {"FLASH_ATTN_EXT", NEAP_OP_FLASH_ATTN},
        {"SOFT_MAX", NEAP_OP_SOFT_MAX},
        {"CUSTOM", NEAP_OP_CUSTOM},
    };
    for (int op = 0; op < GGML_OP_COUNT; op++) {
        const char *name = neap_host_fn.op_name((enum ggml_op)op);
        for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
            if (strcmp(name, known[i].name) == 0) {
                op_class[op] = known[i].op;
            }
        }
    }
}

/* The host's library may be loaded RTLD_LOCAL (Python), so it is opened again by its own name. */
static void *host_library(const void *caller) {
    Dl_info info;
    struct link_map *map = NULL;
    if (caller == NULL || dladdr1(caller, &info, (void **)&map, RTLD_DL_LINKMAP) == 0 ||
        map == NULL || map->l_name[0] == '\0') {
        return dlopen(NULL, RTLD_LAZY);
    }
    return dlopen(map->l_name, RTLD_LAZY | RTLD_NOLOAD);
}

static bool fill_table(void *library) {
    const struct {
        const char *name;
        void *slot;
    } symbols[] = {
        {"ggml_backend_buffer_init", &neap_host_fn.buffer_init},
        {"ggml_backend_buffer_free", &neap_host_fn.buffer_free},
        {"ggml_backend_dev_by_type", &neap_host_fn.dev_by_type},
        {"ggml_nbytes", &neap_host_fn.nbytes},
        {"ggml_row_size", &neap_host_fn.row_size},
        {"ggml_blck_size", &neap_host_fn.blck_size},
        {"ggml_type_size", &neap_host_fn.type_size},
        {"ggml_op_name", &neap_host_fn.op_name},
        {"ggml_type_name", &neap_host_fn.type_name},
        {"ggml_get_type_traits", &neap_host_fn.get_type_traits},
        {"ggml_threadpool_params_default", &neap_host_fn.threadpool_params_default},
        {"gguf_init_from_file", &neap_host_fn.gguf_init_from_file},
        {"gguf_free", &neap_host_fn.gguf_free},
        {"gguf_find_tensor", &neap_host_fn.gguf_find_tensor},
        {"gguf_get_data_offset", &neap_host_fn.gguf_get_data_offset},
        {"gguf_get_tensor_offset", &neap_host_fn.gguf_get_tensor_offset},
        {"gguf_get_tensor_size", &neap_host_fn.gguf_get_tensor_size},
    };
    for (size_t i = 0; i < sizeof symbols / sizeof symbols[0]; i++) {
        void *address = dlsym(library, symbols[i].name);
        if (address == NULL) {
            neap_log(NEAP_LOG_ERROR,
                     "backend: not used: this program's ggml does not export %s (use a build with "
                     "shared libraries)",
                     symbols[i].name);
            return false;
        }
        memcpy(symbols[i].slot, &address, sizeof address);
    }
    return true;
}

bool neap_host_bind(const void *caller) {
    void *library = host_library(caller);
    if (library == NULL) {
        neap_log(NEAP_LOG_ERROR, "backend: not used: cannot find this program's ggml: %s",
                 dlerror());
        return false;
    }
    void *address = dlsym(library, "ggml_version");
    const char *(*version)(void) = NULL;
    memcpy(&version, &address, sizeof address);
    const char *found = version != NULL ? version() : "before 0.9.5";
    if (strcmp(found, NEAP_GGML_VERSION) != 0) {
        neap_log(NEAP_LOG_ERROR,
                 "backend: not used: this program's ggml is %s, the backend was built for %s "
                 "(build it with -DNEAP_LLAMA_DIR=<the program's llama.cpp>)",
                 found, NEAP_GGML_VERSION);
        return false;
    }
    if (!fill_table(library)) {
        return false;
    }
    classify_ops();
    return true;
}

ggml_backend_dev_t neap_host_cpu(void) {
    return neap_host_fn.dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

void *neap_host_cpu_proc(const char *name) {
    ggml_backend_dev_t cpu = neap_host_cpu();
    if (cpu == NULL || cpu->reg->iface.get_proc_address == NULL) {
        return NULL;
    }
    return cpu->reg->iface.get_proc_address(cpu->reg, name);
}

ggml_backend_buffer_type_t *neap_host_cpu_extra(void) {
    void *address = neap_host_cpu_proc("ggml_backend_dev_get_extra_bufts");
    ggml_backend_dev_get_extra_bufts_t get = NULL;
    memcpy(&get, &address, sizeof address);
    return get != NULL ? get(neap_host_cpu()) : NULL;
}

bool neap_host_has_openmp(void) {
    void *address = neap_host_cpu_proc("ggml_backend_get_features");
    ggml_backend_get_features_t get = NULL;
    memcpy(&get, &address, sizeof address);
    if (get == NULL) {
        return false;
    }
    for (struct ggml_backend_feature *f = get(neap_host_cpu()->reg); f->name != NULL; f++) {
        if (strcmp(f->name, "OPENMP") == 0) {
            return strcmp(f->value, "0") != 0;
        }
    }
    return false;
}
