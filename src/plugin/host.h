/* host.h - the ggml that the hosting program itself uses, found at load time.
 * The plug-in has no link-time dependency on ggml: one .so serves every host, also one that carries
 * a copy of its own, and the host's own CPU kernels compute.
 * Threads   host_bind once, before anything else; the table is constant afterwards. */
#ifndef NEAP_PLUGIN_HOST_H
#define NEAP_PLUGIN_HOST_H

#include <stdbool.h>

#include "ggml.h"
#include "ggml-backend.h"
#include "ggml-backend-impl.h"
#include "gguf.h"

typedef struct neap_host {
    ggml_backend_buffer_t (*buffer_init)(ggml_backend_buffer_type_t, struct ggml_backend_buffer_i,
                                         void *, size_t);
    void (*buffer_free)(ggml_backend_buffer_t);
    ggml_backend_dev_t (*dev_by_type)(enum ggml_backend_dev_type);
    size_t (*nbytes)(const struct ggml_tensor *);
    size_t (*row_size)(enum ggml_type, int64_t);
    int64_t (*blck_size)(enum ggml_type);
    size_t (*type_size)(enum ggml_type);
    const char *(*op_name)(enum ggml_op);
    const char *(*type_name)(enum ggml_type);
    const struct ggml_type_traits *(*get_type_traits)(enum ggml_type);
    struct ggml_threadpool_params (*threadpool_params_default)(int);
    struct gguf_context *(*gguf_init_from_file)(const char *, struct gguf_init_params);
    void (*gguf_free)(struct gguf_context *);
    int64_t (*gguf_find_tensor)(const struct gguf_context *, const char *);
    size_t (*gguf_get_data_offset)(const struct gguf_context *);
    size_t (*gguf_get_tensor_offset)(const struct gguf_context *, int64_t);
    size_t (*gguf_get_tensor_size)(const struct gguf_context *, int64_t);
} neap_host;

extern neap_host neap_host_fn;

/* Operations by name: their numbers differ between ggml versions that share an interface version.
 */
typedef enum neap_op {
    NEAP_OP_OTHER,
    NEAP_OP_EMPTY,
    NEAP_OP_SET_ROWS,
    NEAP_OP_ROPE,
    NEAP_OP_ADD,
    NEAP_OP_GET_ROWS,
    NEAP_OP_MUL,
    NEAP_OP_RMS_NORM,
    NEAP_OP_MUL_MAT,
    NEAP_OP_MUL_MAT_ID,
    NEAP_OP_FLASH_ATTN,
    NEAP_OP_SOFT_MAX,
    NEAP_OP_CUSTOM
} neap_op;
neap_op neap_host_op(enum ggml_op op);
/* The host's number of an operation, which it has. */
enum ggml_op neap_host_op_number(neap_op op);

/* Fills the table from the library that contains caller (a code address in the host) and checks
 * that it is the ggml this plug-in was built against. On refusal logs why and returns false. */
bool neap_host_bind(const void *caller);

/* The host's CPU device, its backend interface functions by name, and its extra buffer types
 * (repacked weights); NULL when the host has none. */
ggml_backend_dev_t neap_host_cpu(void);
void *neap_host_cpu_proc(const char *name);
ggml_backend_buffer_type_t *neap_host_cpu_extra(void);
/* True when the host's CPU backend was built with OpenMP (it then has threads of its own). */
bool neap_host_has_openmp(void);
#endif
