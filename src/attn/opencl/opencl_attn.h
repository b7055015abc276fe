/* opencl_attn.h - the attention of attn.h computed by an OpenCL device that reads the KV chunks
 * where they lie.
 *
 * The device must address the chunks by the host's own pointers: with fine-grained system SVM any
 * memory does; with fine-grained buffer SVM (PoCL 3.1) the regions that hold the chunks are
 * reserved through neap_opencl_reserve. Nothing of K or V is copied. Queries, mask, sinks and the
 * result, which are small, are copied.
 *
 * libOpenCL is loaded when first asked for: nothing depends on it at link time.
 *
 * Errors     0 or negative (base/err.h). A device that fails gives -EIO; the caller then computes
 *            on the CPU.
 * Threads    any; attentions run one after the other.
 * Ownership  the handle is freed by close, after everything reserved was given back. */
#ifndef NEAP_OPENCL_ATTN_H
#define NEAP_OPENCL_ATTN_H

#include "attn.h"

typedef struct neap_opencl neap_opencl;

/* Opens the first device that can do this, GPUs before others. allow_half: where the device has
 * cl_khr_fp16, products are f16 (mzCache section 4.2): an NMSE of about 5e-7 against f64 where
 * scores are as in models, more where they are huge or values subnormal. Else, and everywhere else:
 * f32. Fails: -ENODEV, with a reason in ret_reason (static). */
int neap_opencl_open(bool allow_half, neap_opencl **ret_cl, const char **ret_reason);
void neap_opencl_close(neap_opencl *cl); /* takes NULL */
const char *neap_opencl_device(const neap_opencl *cl);
bool neap_opencl_uses_half(const neap_opencl *cl);
/* Whether chunks must lie in memory of neap_opencl_reserve. */
bool neap_opencl_needs_reserve(const neap_opencl *cl);

/* len bytes at a multiple of align (a power of two) that host and device both read and write,
 * which read as zero, are committed when written, and of which whole pages may be given back with
 * neap_vm_drop while no attention reads them. Fails: -ENOMEM. */
int neap_opencl_reserve(neap_opencl *cl, size_t len, size_t align, void **ret_base);
void neap_opencl_release(neap_opencl *cl, void *base); /* all of it accessible */

/* NULL: the device can compute this shape. Else why it cannot (static). Builds what is not built
 * yet. */
const char *neap_opencl_refuses(neap_opencl *cl, const neap_attn_shape *shape);
/* Computes a shape that is not refused and whose chunks are there, but for those that the mask
 * hides from every row: shape's ready and wait are not called. The result hangs on shape and data
 * only, as that of the CPU kernels does; its bits are the device's. */
int neap_opencl_attn(neap_opencl *cl, const neap_attn_shape *shape);
#endif
