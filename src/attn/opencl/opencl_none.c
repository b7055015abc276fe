/* opencl_none.c - stands in for the other files where the OpenCL headers were missing at build
 * time. */
#include <errno.h>

#include "opencl_attn.h"

int neap_opencl_open(bool allow_half, neap_opencl **ret_cl, const char **ret_reason) {
    (void)allow_half, (void)ret_cl;
    *ret_reason = "built without OpenCL (its headers were missing)";
    return -ENODEV;
}

void neap_opencl_close(neap_opencl *cl) {
    (void)cl;
}

const char *neap_opencl_device(const neap_opencl *cl) {
    (void)cl;
    return "";
}

bool neap_opencl_uses_half(const neap_opencl *cl) {
    (void)cl;
    return false;
}

bool neap_opencl_needs_reserve(const neap_opencl *cl) {
    (void)cl;
    return false;
}

int neap_opencl_reserve(neap_opencl *cl, size_t len, size_t align, void **ret_base) {
    (void)cl, (void)len, (void)align, (void)ret_base;
    return -ENODEV;
}

void neap_opencl_release(neap_opencl *cl, void *base) {
    (void)cl, (void)base;
}

const char *neap_opencl_refuses(neap_opencl *cl, const neap_attn_shape *shape) {
    (void)cl, (void)shape;
    return "built without OpenCL";
}

int neap_opencl_attn(neap_opencl *cl, const neap_attn_shape *shape) {
    (void)cl, (void)shape;
    return -ENODEV;
}
