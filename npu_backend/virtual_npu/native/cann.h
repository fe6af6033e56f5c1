/* What the virtual NPU's C files share: the few CANN types they need, the error codes they return, and their helpers.
 *
 * Device memory is host memory and every call is finished when it returns, so streams and events only have to keep
 * order and time. Facts about the chip come from the environment (npu_backend/soc.py is their one source).
 *
 * Built with -DVIRTUAL_NPU_CHECK_PROTOTYPES, the vendor's headers of a torch_npu wheel replace the types below: a test
 * does so, and the compiler then compares every signature of ours with the real one.
 */
#ifndef VIRTUAL_NPU_CANN_H
#define VIRTUAL_NPU_CANN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef VIRTUAL_NPU_CHECK_PROTOTYPES
#include "acl/acl.h"
#include "acl/acl_op_compiler.h"
#else
typedef int aclError;
typedef void *aclrtStream, *aclrtEvent, *aclrtContext;
typedef void (*aclrtCallback)(void *user_data);
typedef void (*aclrtHostFunc)(void *user_data);
typedef unsigned aclrtMemMallocPolicy, aclrtMemcpyKind, aclrtMemAttr, aclrtFloatOverflowMode, aclrtCallbackBlockType;
typedef unsigned aclrtDevAttr, aclrtDevResLimitType, aclrtStreamAttr, aclrtStreamStatus, aclrtLastErrLevel;
typedef unsigned aclrtEventRecordedStatus, aclrtEventWaitStatus, aclrtMemLocationType, aclSysParamOpt, aclCompileOpt;
typedef int aclCannAttr, aclDeviceInfo; /* enums with a negative member */
typedef struct aclrtMallocConfig aclrtMallocConfig;
typedef union { uint64_t failure_mode; uint32_t reserve[4]; } aclrtStreamAttrValue;
typedef unsigned aclCANNPackageName;
typedef struct { char version[128], major[64], minor[64], release[64], patch[64], reserved[128]; } aclCANNPackageVersion;
typedef struct { uint32_t id; aclrtMemLocationType type; } aclrtMemLocation;
typedef struct { aclrtMemLocation location; uint32_t pageSize; uint32_t rsv[4]; } aclrtPtrAttributes;
#endif

/* Codes of the vendor's acl_base_rt.h and rt_error_codes.h that torch_npu tells apart. */
enum {
    VNPU_OK = 0,
    VNPU_INVALID_PARAM = 100000,
    VNPU_CALLBACK_TIMEOUT = 100036,
    VNPU_NOT_SUPPORTED = 200001,
    VNPU_INVALID_DEVICE = 107001,
    VNPU_NO_CONTEXT = 107002, /* no device was set in this thread: torch_npu then sets one */
    VNPU_NO_TIMESTAMP = 107006,
    VNPU_FEATURE_NOT_SUPPORTED = 207000,
    VNPU_OUT_OF_MEMORY = 207001,
};

enum { VNPU_MAX_DEVICES = 64 };

/* Number of devices that this process sees, at least 1. */
int vnpu_device_count(void);
/* The device that this thread uses, or -1 when it has set none. */
int vnpu_current_device(void);
/* Bytes of memory that one device has. */
size_t vnpu_device_memory(void);
/* An integer of the environment, or `otherwise` when it is absent. */
long long vnpu_environment(const char *name, long long otherwise);
/* Keep a message for aclGetRecentErrMsg (torch_npu puts it into its exception) and return `code`. */
aclError vnpu_error(aclError code, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Report on stderr that `function` is missing from the virtual NPU; returns VNPU_NOT_SUPPORTED. */
aclError vnpu_unimplemented(const char *function);
/* Nanoseconds of the monotonic clock. */
uint64_t vnpu_now(void);

#endif
