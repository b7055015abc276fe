/* opencl_int.h - what the files of this folder share; the only ones that see OpenCL. */
#ifndef NEAP_OPENCL_INT_H
#define NEAP_OPENCL_INT_H

#include <pthread.h>

#define CL_TARGET_OPENCL_VERSION 200
#include <CL/cl.h>

#include "attend_args.h"
#include "opencl_attn.h"

/* The functions that are used, by name without "cl". */
#define NEAP_CL_FUNCTIONS(X)            \
    X(GetPlatformIDs)                   \
    X(GetDeviceIDs)                     \
    X(GetDeviceInfo)                    \
    X(CreateContext)                    \
    X(ReleaseContext)                   \
    X(CreateCommandQueueWithProperties) \
    X(ReleaseCommandQueue)              \
    X(CreateProgramWithSource)          \
    X(BuildProgram)                     \
    X(GetProgramBuildInfo)              \
    X(ReleaseProgram)                   \
    X(CreateKernel)                     \
    X(ReleaseKernel)                    \
    X(SetKernelArg)                     \
    X(SetKernelArgSVMPointer)           \
    X(SetKernelExecInfo)                \
    X(EnqueueNDRangeKernel)             \
    X(Finish)                           \
    X(SVMAlloc)                         \
    X(SVMFree)

typedef struct neap_cl_api {
#define X(name) __typeof__(cl##name) *(name);
    NEAP_CL_FUNCTIONS(X)
#undef X
} neap_cl_api;

/* Memory that host and device share. */
typedef struct neap_cl_shared {
    struct neap_cl_shared *next;
    void *raw; /* what SVMAlloc gave */
    char *base;
    size_t len;
} neap_cl_shared;

/* attend.cl built for one size of heads. */
typedef struct neap_cl_variant {
    struct neap_cl_variant *next;
    uint32_t k_elems, v_elems, rows;
    cl_program program;
    cl_kernel attend, finish; /* NULL: it does not build */
} neap_cl_variant;

struct neap_opencl {
    neap_cl_api api; /* constant after open, as all down to uses_half */
    void *library;
    cl_device_id device;
    cl_context context;
    cl_command_queue queue;
    char name[256];
    size_t group_items; /* work-items of a work-group */
    bool system_svm, uses_half;

    pthread_mutex_t lock; /* guards the rest, and the kernels' arguments */
    bool broken;          /* a launch failed: nothing more is asked of the device */
    neap_cl_shared *shared;
    neap_cl_variant *variants;
    char *scratch; /* SVM */
    size_t scratch_cap;
};

/* The text of attend_args.h and attend.cl, put in by the build. */
extern const char neap_attend_source[];
extern const size_t neap_attend_source_len;
#endif
