/* opencl_device.c - finds a device, and gives out the memory it shares with the host.
 *
 * How memory is shared. A kernel that follows an array of chunk pointers needs pointers that mean
 * the same on both sides, and restores write into some chunks while a kernel reads others: that is
 * fine-grained SVM. Where the device has it for the whole process (CL_DEVICE_SVM_FINE_GRAIN_SYSTEM)
 * our own mappings serve as they are (Intel's runtime for CPUs). PoCL 3.1 has it for buffers only,
 * so there a region comes from clSVMAlloc: more than asked for, of which the aligned inside is
 * used. Eviction gives pages of it back with madvise as it does elsewhere; a device whose memory
 * does not go along with that is not used (probed at open). Buffers over host memory
 * (CL_MEM_USE_HOST_PTR) would need no allocation, but have no pointers, and host and device must
 * not be in one at the same time. */
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "err.h"
#include "opencl_int.h"
#include "vm.h"

enum { PLATFORMS_MAX = 16, DEVICES_MAX = 16, PROBE_PAGES = 16 };

/* ---- the library ---- */

static int load(neap_opencl *cl, const char **ret_reason) {
    static const char *const names[] = {"libOpenCL.so.1", "libOpenCL.so"};
    for (size_t i = 0; cl->library == NULL && i < sizeof names / sizeof names[0]; i++) {
        cl->library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    }
    if (cl->library == NULL) {
        *ret_reason = "libOpenCL is not installed";
        return -ENODEV;
    }
    const struct {
        const char *name;
        void *into;
    } wanted[] = {
#define X(name) {"cl" #name, &cl->api.name},
        NEAP_CL_FUNCTIONS(X)
#undef X
    };
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++) {
        void *address = dlsym(cl->library, wanted[i].name);
        if (address == NULL) {
            *ret_reason = "libOpenCL is older than OpenCL 2.0";
            return -ENODEV;
        }
        memcpy(wanted[i].into, &address, sizeof address);
    }
    return 0;
}

/* ---- the device ---- */

static bool has_extension(const neap_opencl *cl, cl_device_id device, const char *name) {
    size_t len = 0, name_len = strlen(name);
    if (cl->api.GetDeviceInfo(device, CL_DEVICE_EXTENSIONS, 0, NULL, &len) != CL_SUCCESS) {
        return false;
    }
    char *all = calloc(1, len + 1);
    bool found = false;
    if (all != NULL &&
        cl->api.GetDeviceInfo(device, CL_DEVICE_EXTENSIONS, len, all, NULL) == CL_SUCCESS) {
        for (const char *at = strstr(all, name); at != NULL && !found;
             at = strstr(at + name_len, name)) {
            found = (at == all || at[-1] == ' ') && (at[name_len] == ' ' || at[name_len] == '\0');
        }
    }
    free(all);
    return found;
}

static cl_device_svm_capabilities svm_of(const neap_opencl *cl, cl_device_id device) {
    cl_device_svm_capabilities svm = 0;
    cl_int err = cl->api.GetDeviceInfo(device, CL_DEVICE_SVM_CAPABILITIES, sizeof svm, &svm, NULL);
    return err == CL_SUCCESS ? svm : 0; /* before 2.0 there is none */
}

static bool suits(const neap_opencl *cl, cl_device_id device) {
    cl_bool available = CL_FALSE, compiler = CL_FALSE;
    cl_uint bits = 0;
    cl->api.GetDeviceInfo(device, CL_DEVICE_AVAILABLE, sizeof available, &available, NULL);
    cl->api.GetDeviceInfo(device, CL_DEVICE_COMPILER_AVAILABLE, sizeof compiler, &compiler, NULL);
    cl->api.GetDeviceInfo(device, CL_DEVICE_ADDRESS_BITS, sizeof bits, &bits, NULL);
    return available && compiler && bits == 8 * sizeof(void *) &&
           (svm_of(cl, device) &
            (CL_DEVICE_SVM_FINE_GRAIN_BUFFER | CL_DEVICE_SVM_FINE_GRAIN_SYSTEM)) != 0;
}

static int choose(neap_opencl *cl, const char **ret_reason) {
    static const cl_device_type types[] = {CL_DEVICE_TYPE_GPU, CL_DEVICE_TYPE_ALL};
    cl_platform_id platforms[PLATFORMS_MAX];
    cl_device_id devices[DEVICES_MAX];
    cl_uint n_platforms = 0, n_seen = 0;
    if (cl->api.GetPlatformIDs(PLATFORMS_MAX, platforms, &n_platforms) != CL_SUCCESS) {
        n_platforms = 0;
    }
    n_platforms = n_platforms < PLATFORMS_MAX ? n_platforms : PLATFORMS_MAX;
    for (size_t t = 0; t < sizeof types / sizeof types[0]; t++) {
        for (cl_uint p = 0; p < n_platforms; p++) {
            cl_uint n = 0;
            if (cl->api.GetDeviceIDs(platforms[p], types[t], DEVICES_MAX, devices, &n) !=
                CL_SUCCESS) {
                continue;
            }
            n = n < DEVICES_MAX ? n : DEVICES_MAX;
            n_seen += n;
            for (cl_uint d = 0; d < n; d++) {
                if (suits(cl, devices[d])) {
                    cl->device = devices[d];
                    return 0;
                }
            }
        }
    }
    *ret_reason = n_seen == 0 ? "no OpenCL device" : "no OpenCL device with fine-grained SVM";
    return -ENODEV;
}

static void describe(neap_opencl *cl, bool allow_half) {
    cl_device_type type = 0;
    cl->api.GetDeviceInfo(cl->device, CL_DEVICE_NAME, sizeof cl->name - 1, cl->name, NULL);
    cl->api.GetDeviceInfo(cl->device, CL_DEVICE_TYPE, sizeof type, &type, NULL);
    cl->system_svm = (svm_of(cl, cl->device) & CL_DEVICE_SVM_FINE_GRAIN_SYSTEM) != 0;
    cl->uses_half = allow_half && has_extension(cl, cl->device, "cl_khr_fp16");
    /* The items of a CPU's work-group run one after the other; a GPU's side by side, on rows that
     * read the same K and V. */
    size_t most = 1;
    cl->api.GetDeviceInfo(cl->device, CL_DEVICE_MAX_WORK_GROUP_SIZE, sizeof most, &most, NULL);
    cl->group_items = (type & CL_DEVICE_TYPE_GPU) == 0 ? 1 : most < 64 ? most : 64;
}

/* ---- shared memory ---- */

int neap_opencl_reserve(neap_opencl *cl, size_t len, size_t align, void **ret_base) {
    const size_t page = neap_vm_page();
    align = align < page ? page : align;
    if (len == 0 || len > SIZE_MAX - 2 * align) {
        return -ENOMEM;
    }
    len = (len + page - 1) / page * page;
    neap_cl_shared *shared = calloc(1, sizeof *shared);
    if (shared == NULL) {
        return -ENOMEM;
    }
    shared->raw = cl->api.SVMAlloc(cl->context, CL_MEM_READ_WRITE | CL_MEM_SVM_FINE_GRAIN_BUFFER,
                                   len + align, 0);
    if (shared->raw == NULL) {
        free(shared);
        return -ENOMEM;
    }
    shared->len = len;
    shared->base = (char *)shared->raw + (align - (uintptr_t)shared->raw % align) % align;
    int err = neap_vm_drop(shared->base, len); /* zeros, not yet committed */
    if (err != 0) {
        cl->api.SVMFree(cl->context, shared->raw);
        free(shared);
        return err;
    }
    pthread_mutex_lock(&cl->lock);
    shared->next = cl->shared;
    cl->shared = shared;
    pthread_mutex_unlock(&cl->lock);
    *ret_base = shared->base;
    return 0;
}

void neap_opencl_release(neap_opencl *cl, void *base) {
    neap_cl_shared *found = NULL;
    pthread_mutex_lock(&cl->lock);
    for (neap_cl_shared **at = &cl->shared; *at != NULL; at = &(*at)->next) {
        if ((*at)->base == base) {
            found = *at;
            *at = found->next;
            break;
        }
    }
    pthread_mutex_unlock(&cl->lock);
    if (found != NULL) {
        neap_vm_drop(found->base, found->len); /* the allocator may keep the range */
        cl->api.SVMFree(cl->context, found->raw);
        free(found);
    }
}

/* Whether pages of shared memory go back to the kernel and read as zero after that. */
static int probe(neap_opencl *cl, const char **ret_reason) {
    const size_t len = PROBE_PAGES * neap_vm_page();
    void *base;
    uint64_t held = 1;
    if (cl->system_svm) {
        return 0;
    }
    int err = neap_opencl_reserve(cl, len, 1, &base);
    if (err == 0) {
        memset(base, 0x5a, len);
        err = neap_vm_drop(base, len);
        err = err == 0 ? neap_vm_held(base, len, &held) : err;
        bool gone = err == 0 && held == 0 && *(volatile char *)base == 0;
        neap_opencl_release(cl, base);
        if (gone) {
            return 0;
        }
    }
    *ret_reason = "the device's shared memory cannot be given back by pages";
    return -ENODEV;
}

/* ---- open and close ---- */

static int open_device(neap_opencl *cl, bool allow_half, const char **ret_reason) {
    cl_int err = CL_SUCCESS;
    int failed = load(cl, ret_reason);
    failed = failed == 0 ? choose(cl, ret_reason) : failed;
    if (failed != 0) {
        return failed;
    }
    describe(cl, allow_half);
    cl->context = cl->api.CreateContext(NULL, 1, &cl->device, NULL, NULL, &err);
    if (cl->context != NULL) {
        cl->queue = cl->api.CreateCommandQueueWithProperties(cl->context, cl->device, NULL, &err);
    }
    if (cl->context == NULL || cl->queue == NULL) {
        *ret_reason = "the OpenCL device gives no context";
        return -ENODEV;
    }
    return probe(cl, ret_reason);
}

int neap_opencl_open(bool allow_half, neap_opencl **ret_cl, const char **ret_reason) {
    neap_opencl *cl = calloc(1, sizeof *cl);
    if (cl == NULL) {
        *ret_reason = "no memory";
        return -ENOMEM;
    }
    pthread_mutex_init(&cl->lock, NULL);
    int err = open_device(cl, allow_half, ret_reason);
    if (err != 0) {
        neap_opencl_close(cl);
        return err;
    }
    *ret_cl = cl;
    return 0;
}

void neap_opencl_close(neap_opencl *cl) {
    if (cl == NULL) {
        return;
    }
    while (cl->variants != NULL) {
        neap_cl_variant *variant = cl->variants;
        cl->variants = variant->next;
        if (variant->attend != NULL) {
            cl->api.ReleaseKernel(variant->attend);
        }
        if (variant->finish != NULL) {
            cl->api.ReleaseKernel(variant->finish);
        }
        if (variant->program != NULL) {
            cl->api.ReleaseProgram(variant->program);
        }
        free(variant);
    }
    if (cl->scratch != NULL) {
        cl->api.SVMFree(cl->context, cl->scratch);
    }
    if (cl->queue != NULL) {
        cl->api.ReleaseCommandQueue(cl->queue);
    }
    if (cl->context != NULL) {
        cl->api.ReleaseContext(cl->context);
    }
    /* Not unloaded: drivers leave threads and exit handlers behind. */
    pthread_mutex_destroy(&cl->lock);
    free(cl);
}

const char *neap_opencl_device(const neap_opencl *cl) {
    return cl->name;
}

bool neap_opencl_uses_half(const neap_opencl *cl) {
    return cl->uses_half;
}

bool neap_opencl_needs_reserve(const neap_opencl *cl) {
    return !cl->system_svm;
}
