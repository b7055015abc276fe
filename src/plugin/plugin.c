/* plugin.c - the ggml backend: entry point, registration, device.
 * A program loads libggml-neap.so through GGML_BACKEND_PATH; the device is named NEAP. */
#include <stdio.h>
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "bytes.h"
#include "err.h"
#include "plugin_int.h"
#include "proc.h"
#include "profile_file.h"
#include "write_budget.h"

/* ---- engine of the process ---- */

static pthread_once_t engine_once = PTHREAD_ONCE_INIT;
static neap_engine *engine;

static uint64_t env_bytes(const char *name) {
    const char *text = getenv(name);
    uint64_t bytes = 0;
    uint32_t permille = 0;
    if (text == NULL || text[0] == '\0') {
        return 0;
    }
    if (neap_size_parse(text, &bytes, &permille) != 0 || permille != 0) {
        neap_log(NEAP_LOG_WARN, "%s=%s ignored: not a size (like 512M or 2G)", name, text);
        return 0;
    }
    return bytes;
}

static const char *env_text(const char *name) {
    const char *text = getenv(name);
    return text != NULL && text[0] != '\0' ? text : NULL;
}

/* On unless it says off. */
static bool env_is_on(const char *name) {
    const char *text = env_text(name);
    if (text != NULL && strcmp(text, "on") != 0 && strcmp(text, "off") != 0) {
        neap_log(NEAP_LOG_WARN, "%s=%s ignored: neither on nor off", name, text);
        return true;
    }
    return text == NULL || strcmp(text, "on") == 0;
}

static bool env_flag(const char *name) {
    const char *text = env_text(name);
    return text != NULL && strcmp(text, "0") != 0;
}

/* Off unless it is asked for: what is only in memory otherwise is written to a file. */
static void env_write_behind(neap_options *options) {
    const char *text = env_text("NEAP_WRITE_BEHIND");
    if (text != NULL && neap_write_behind_parse(text, &options->write_behind_bytes,
                                                &options->write_behind_on_battery) != 0) {
        neap_log(NEAP_LOG_WARN, "NEAP_WRITE_BEHIND=%s ignored: not on, off, always or a size",
                 text);
    }
}

static neap_attend_mode env_attend(void) {
    static const char *const names[] = {"auto", "ggml", "neap", "opencl"};
    const char *text = env_text("NEAP_ATTN");
    for (int i = 0; text != NULL && i < 4; i++) {
        if (strcmp(text, names[i]) == 0) {
            return (neap_attend_mode)i;
        }
    }
    if (text != NULL) {
        neap_log(NEAP_LOG_WARN, "NEAP_ATTN=%s ignored: not auto, ggml, neap or opencl", text);
    }
    return NEAP_ATTEND_AUTO;
}

/* The file of the device profile: NEAP_PROFILE, or the one in the cache folder for the device that
 * the swap folder is on. NULL: none ("off", or no cache folder). */
static const char *profile_path(const char *swap_dir, char *path, size_t cap) {
    const char *wanted = env_text("NEAP_PROFILE");
    char folder[PATH_MAX];
    neap_device device;
    if (wanted != NULL) {
        return strcmp(wanted, "off") == 0 ? NULL : wanted;
    }
    int err = neap_swap_folder(swap_dir, folder, sizeof folder);
    if (err == 0) {
        err = neap_profile_locate(folder, &device, path, cap);
    }
    return err == 0 ? path : NULL;
}

/* Only our kernels read KV that is held coded. */
static const char *env_kv(void) {
    const char *text = env_text("NEAP_KV");
    if (text == NULL || strcmp(text, "f16") == 0 || neap_attend_choice != NEAP_ATTEND_HOST) {
        return text;
    }
    neap_log(NEAP_LOG_WARN, "NEAP_KV=%s ignored: it needs our attention, NEAP_ATTN is ggml", text);
    return NULL;
}

static uint32_t env_select(const char *kv) {
    const char *text = env_text("NEAP_KV_SELECT");
    const uint64_t cells =
        text == NULL || strcmp(text, "off") == 0 ? 0 : env_bytes("NEAP_KV_SELECT");
    if (cells > 0 && (kv == NULL || strcmp(kv, "f16") == 0)) {
        neap_log(NEAP_LOG_WARN,
                 "NEAP_KV_SELECT=%s has no effect: it is of KV held coded (--kv klt, lowram)",
                 text);
    }
    return cells < 1u << 24 ? (uint32_t)cells : 1u << 24;
}

/* The only place where the backend reads its environment. */
static void create_engine(void) {
    char profile[PATH_MAX];
    neap_attend_choice = env_attend();
    neap_capture_open(env_text("NEAP_CAPTURE"));
    neap_options options = {
        .program = program_invocation_short_name,
        .codec = env_text("NEAP_CODEC"),
        .kv = env_kv(),
        .policy = env_text("NEAP_POLICY"),
        .swap_dir = env_text("NEAP_SWAP_DIR"),
        .swap_limit_bytes = env_bytes("NEAP_SWAP_LIMIT"),
        .keep_bytes = env_bytes("NEAP_KEEP"),
        .poison = env_flag("NEAP_POISON"),
        .no_control = env_flag("NEAP_NO_CONTROL"),
        .watch_pressure = env_is_on("NEAP_PRESSURE"),
        .pressure_watch = env_text("MEMORY_PRESSURE_WATCH"),
        .pressure_write = env_text("MEMORY_PRESSURE_WRITE"),
    };
    env_write_behind(&options);
    uint64_t long_cells = env_bytes("NEAP_ATTN_CELLS"); /* neap bench attn */
    if (long_cells > 0 && long_cells <= 1 << 20) {
        neap_attend_long_cells = (int64_t)long_cells;
    }
    neap_select_budget = env_select(options.kv);
    options.kv_in_parts = neap_select_budget > 0;
    options.profile = profile_path(options.swap_dir, profile, sizeof profile);
    if (neap_attend_choice == NEAP_ATTEND_OPENCL) {
        neap_attend_open_device(&options);
    }
    int err = neap_engine_create(&options, &engine);
    if (err != 0) {
        neap_log(NEAP_LOG_ERROR, "cannot start: %s (codec %s, kv %s, policy %s)",
                 neap_strerror(err), options.codec != NULL ? options.codec : "default",
                 options.kv != NULL ? options.kv : "default",
                 options.policy != NULL ? options.policy : "default");
    }
}

neap_engine *neap_plugin_engine(void) {
    pthread_once(&engine_once, create_engine);
    return engine;
}

/* ---- device ---- */

static const char *device_name(ggml_backend_dev_t device) {
    (void)device;
    return "NEAP";
}

static const char *device_description(ggml_backend_dev_t device) {
    (void)device;
    return "CPU with elastic memory";
}

static void device_memory(ggml_backend_dev_t device, size_t *free_bytes, size_t *total_bytes) {
    (void)device;
    uint64_t available = 0, total = 0;
    neap_mem_available(&available, &total);
    *free_bytes = available;
    *total_bytes = total;
}

static enum ggml_backend_dev_type device_type(ggml_backend_dev_t device) {
    (void)device;
    return GGML_BACKEND_DEVICE_TYPE_GPU;
}

static void device_props(ggml_backend_dev_t device, struct ggml_backend_dev_props *props) {
    *props = (struct ggml_backend_dev_props){
        .name = device_name(device),
        .description = device_description(device),
        .type = device_type(device),
        .caps = {.mmap_support = true},
    };
    device_memory(device, &props->memory_free, &props->memory_total);
}

static ggml_backend_t device_init_backend(ggml_backend_dev_t device, const char *params) {
    (void)params;
    return neap_backend_create(device);
}

static ggml_backend_buffer_type_t device_buffer_type(ggml_backend_dev_t device) {
    (void)device;
    return &neap_buffer_type;
}

static bool is_host_type(ggml_backend_buffer_type_t type) {
    return type->iface.is_host != NULL && type->iface.is_host(type);
}

/* The CPU backend is asked about the operation as if our buffers were its own. */
static bool device_supports_op(ggml_backend_dev_t device, const struct ggml_tensor *op) {
    (void)device;
    ggml_backend_dev_t cpu = neap_host_cpu();
    struct ggml_tensor copy = *op, sources[GGML_MAX_SRC];
    for (int i = 0; i < GGML_MAX_SRC; i++) {
        if (op->src[i] == NULL) {
            continue;
        }
        sources[i] = *op->src[i];
        if (sources[i].buffer != NULL && sources[i].buffer->buft == &neap_buffer_type) {
            sources[i].buffer = NULL;
        }
        copy.src[i] = &sources[i];
    }
    if (!cpu->iface.supports_op(cpu, &copy)) {
        return false;
    }
    neap_weights_note_op(op);
    return true;
}

/* Any host memory is read where it lies, so that a whole graph is one split without copies. With
 * nothing of ours in use (no layer was offloaded) we decline, or the scheduler would send us the
 * small graphs all the same. */
static bool device_supports_buft(ggml_backend_dev_t device, ggml_backend_buffer_type_t type) {
    (void)device;
    if (type == &neap_buffer_type) {
        return true;
    }
    if (!neap_plugin_in_use()) {
        return false;
    }
    if (is_host_type(type)) {
        return true;
    }
    ggml_backend_buffer_type_t *extra = neap_host_cpu_extra();
    for (; extra != NULL && *extra != NULL; extra++) {
        if (*extra == type) {
            return true;
        }
    }
    return false;
}

static struct ggml_backend_device device_neap = {
    .iface =
        {
            .get_name = device_name,
            .get_description = device_description,
            .get_memory = device_memory,
            .get_type = device_type,
            .get_props = device_props,
            .init_backend = device_init_backend,
            .get_buffer_type = device_buffer_type,
            .supports_op = device_supports_op,
            .supports_buft = device_supports_buft,
        },
};

/* ---- registration ---- */

static const char *reg_name(ggml_backend_reg_t reg) {
    (void)reg;
    return "NEAP";
}

static size_t reg_device_count(ggml_backend_reg_t reg) {
    (void)reg;
    return 1;
}

static ggml_backend_dev_t reg_device(ggml_backend_reg_t reg, size_t index) {
    (void)reg;
    return index == 0 ? &device_neap : NULL;
}

static struct ggml_backend_feature *reg_features(ggml_backend_reg_t reg) {
    (void)reg;
    static struct ggml_backend_feature features[] = {{"VERSION", NEAP_VERSION}, {NULL, NULL}};
    return features;
}

static void *reg_proc_address(ggml_backend_reg_t reg, const char *name) {
    (void)reg;
    const struct {
        const char *name;
        void (*address)(void);
    } known[] = {
        {"ggml_backend_set_n_threads", (void (*)(void))neap_backend_set_n_threads},
        {"ggml_backend_set_abort_callback", (void (*)(void))neap_backend_set_abort},
        {"ggml_backend_get_features", (void (*)(void))reg_features},
    };
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        if (strcmp(name, known[i].name) == 0) {
            void *address;
            memcpy(&address, &known[i].address, sizeof address);
            return address;
        }
    }
    return NULL;
}

static struct ggml_backend_reg reg_neap = {
    .api_version = GGML_BACKEND_API_VERSION,
    .iface =
        {
            .get_name = reg_name,
            .get_device_count = reg_device_count,
            .get_device = reg_device,
            .get_proc_address = reg_proc_address,
        },
};

static ggml_backend_reg_t registration(const void *caller) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static int state; /* 0 untried, 1 bound, -1 refused */
    pthread_mutex_lock(&lock);
    if (state == 0) {
        state = neap_host_bind(caller) ? 1 : -1;
        device_neap.reg = &reg_neap;
        neap_buffer_type.device = &device_neap;
    }
    pthread_mutex_unlock(&lock);
    return state == 1 ? &reg_neap : NULL;
}

/* Entry point of dynamically loaded backends. NULL: refused, the program runs on without us. */
NEAP_API ggml_backend_reg_t ggml_backend_init(void);
NEAP_API ggml_backend_reg_t ggml_backend_init(void) {
    return registration(__builtin_return_address(0));
}

/* For programs that link the backend in: ggml_backend_register(ggml_backend_neap_reg()). */
NEAP_API ggml_backend_reg_t ggml_backend_neap_reg(void);
NEAP_API ggml_backend_reg_t ggml_backend_neap_reg(void) {
    return registration(NULL);
}
