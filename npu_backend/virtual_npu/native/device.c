/* Devices, contexts, what a chip is, and the runtime's life: init, errors, options. */
#include "cann.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CANN_VERSION "8.5.0" /* what this runtime says it is */

static __thread int current_device = -1;
static __thread char recent_error[512];

/* A context is a device: its handle is the address of one of these. */
static char contexts[VNPU_MAX_DEVICES];
static bool device_used[VNPU_MAX_DEVICES];
/* Core limits that a program asked for (torch.npu.set_device_limit); 0 means the chip's own number. */
static uint32_t core_limit[VNPU_MAX_DEVICES][2];

long long vnpu_environment(const char *name, long long otherwise) {
    const char *text = getenv(name);
    return text && *text ? atoll(text) : otherwise;
}

uint64_t vnpu_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

aclError vnpu_error(aclError code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int used = snprintf(recent_error, sizeof recent_error, "virtual NPU (arithmetic by the CPU): ");
    vsnprintf(recent_error + used, sizeof recent_error - used, format, arguments);
    va_end(arguments);
    return code;
}

aclError vnpu_unimplemented(const char *function) {
    vnpu_error(VNPU_NOT_SUPPORTED, "%s is not implemented", function);
    fprintf(stderr, "%s\n", recent_error);
    return VNPU_NOT_SUPPORTED;
}

const char *aclGetRecentErrMsg(void) { return recent_error; }

/* ---- life ---- */

aclError aclInit(const char *config_path) { return VNPU_OK; }
aclError aclFinalize(void) { return VNPU_OK; }
aclError aclrtPeekAtLastError(aclrtLastErrLevel level) { return VNPU_OK; }
aclError aclrtGetLastError(aclrtLastErrLevel level) { return VNPU_OK; }

/* ---- devices and contexts ---- */

/* Of `count` devices those that ASCEND_RT_VISIBLE_DEVICES names, up to the first one that does not exist. All virtual
 * devices are alike, so only their number matters. */
static int visible_devices(int count) {
    const char *text = getenv("ASCEND_RT_VISIBLE_DEVICES");
    if (!text) return count;
    int visible = 0;
    while (visible < count) {
        char *end;
        long device = strtol(text, &end, 10);
        if (end == text || device < 0 || device >= count) break;
        visible++;
        text = end + strspn(end, " ");
        if (*text++ != ',') break;
    }
    return visible;
}

int vnpu_device_count(void) {
    long long count = vnpu_environment("VIRTUAL_NPU_DEVICES", 1);
    return visible_devices(count < 1 ? 1 : count > VNPU_MAX_DEVICES ? VNPU_MAX_DEVICES : (int)count);
}

int vnpu_current_device(void) { return current_device; }

static aclError check_device(int64_t device) {
    if (device >= 0 && device < vnpu_device_count()) return VNPU_OK;
    return vnpu_error(VNPU_INVALID_DEVICE, "device %lld does not exist: there are %d", (long long)device, vnpu_device_count());
}

aclError aclrtGetDeviceCount(uint32_t *count) {
    *count = (uint32_t)vnpu_device_count();
    return VNPU_OK;
}

aclError aclrtSetDevice(int32_t device) {
    aclError error = check_device(device);
    if (error) return error;
    device_used[device] = true;
    current_device = device;
    return VNPU_OK;
}

aclError aclrtGetDevice(int32_t *device) {
    if (current_device < 0) return vnpu_error(VNPU_NO_CONTEXT, "no device was set in this thread");
    *device = current_device;
    return VNPU_OK;
}

aclError aclrtResetDevice(int32_t device) { return check_device(device); }

aclError aclrtCreateContext(aclrtContext *context, int32_t device) {
    aclError error = aclrtSetDevice(device);
    if (!error) *context = &contexts[device];
    return error;
}

aclError aclrtGetCurrentContext(aclrtContext *context) {
    if (current_device < 0) return vnpu_error(VNPU_NO_CONTEXT, "no device was set in this thread");
    *context = &contexts[current_device];
    return VNPU_OK;
}

aclError aclrtSetCurrentContext(aclrtContext context) { return aclrtSetDevice((int32_t)((char *)context - contexts)); }

aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active) {
    aclError error = check_device(device);
    if (error) return error;
    if (flags) *flags = 0;
    *active = device_used[device];
    return VNPU_OK;
}

aclError aclrtGetLogicDevIdByUserDevId(const int32_t user_device, int32_t *const logic_device) {
    *logic_device = user_device;
    return check_device(user_device);
}

/* All devices share the host's memory, so each can reach every other. */
aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer) {
    *can = device != peer;
    return check_device(device) || check_device(peer) ? VNPU_INVALID_DEVICE : VNPU_OK;
}
aclError aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t flags) { return check_device(peer); }

/* ---- what the chip is ---- */

const char *aclrtGetSocName(void) {
    const char *name = getenv("VIRTUAL_NPU_SOC");
    return name && *name ? name : "Ascend910B1";
}

size_t vnpu_device_memory(void) { return (size_t)vnpu_environment("VIRTUAL_NPU_MEMORY_BYTES", 64ll << 30); }

static uint32_t cores(aclrtDevResLimitType vector) {
    return (uint32_t)(vector ? vnpu_environment("VIRTUAL_NPU_VECTOR_CORES", 48) : vnpu_environment("VIRTUAL_NPU_CUBE_CORES", 24));
}

aclError aclrtGetDeviceInfo(uint32_t device, aclrtDevAttr attribute, int64_t *value) {
    aclError error = check_device(device);
    if (error) return error;
    switch ((int)attribute) {
        case 101: /* AI cores */
        case 102: *value = cores(0); return VNPU_OK;
        case 201: *value = cores(1); return VNPU_OK;
        case 204: *value = vnpu_environment("VIRTUAL_NPU_UB_BYTES", 196608); return VNPU_OK;
        case 301: *value = (int64_t)vnpu_device_memory(); return VNPU_OK;
        case 501: *value = 0; return VNPU_OK; /* not a slice of a chip */
        default: return vnpu_error(VNPU_NOT_SUPPORTED, "device attribute %d is not known", (int)attribute);
    }
}

aclError aclGetDeviceCapability(uint32_t device, aclDeviceInfo info, int64_t *value) {
    aclError error = check_device(device);
    if (error) return error;
    switch ((int)info) {
        case 0: *value = cores(0); return VNPU_OK;
        case 1: *value = cores(1); return VNPU_OK;
        case 2: *value = 0; return VNPU_OK; /* the L2 cache is not modelled */
        default: return vnpu_error(VNPU_NOT_SUPPORTED, "capability %d is not known", (int)info);
    }
}

/* torch_npu chooses between old and new behaviour by CANN's version; without one it assumes the oldest. */
aclError aclsysGetVersionStr(char *package, char *version) {
    strcpy(version, CANN_VERSION);
    return VNPU_OK;
}

aclError aclsysGetCANNVersion(aclCANNPackageName package, aclCANNPackageVersion *version) {
    memset(version, 0, sizeof *version);
    strcpy(version->version, CANN_VERSION);
    return VNPU_OK;
}

aclError aclGetCannAttributeList(const aclCannAttr **list, size_t *count) {
    static const aclCannAttr attributes[] = {0, 1}; /* inf and nan are kept; bfloat16 exists */
    *list = attributes;
    *count = sizeof attributes / sizeof *attributes;
    return VNPU_OK;
}

aclError aclGetCannAttribute(aclCannAttr attribute, int32_t *value) {
    *value = (int)attribute == 0 || (int)attribute == 1;
    return VNPU_OK;
}

/* ---- core limits: kept and given back; nothing is scheduled by them ---- */

aclError aclrtGetDeviceResLimit(int32_t device, aclrtDevResLimitType type, uint32_t *value) {
    aclError error = check_device(device);
    if (error) return error;
    *value = core_limit[device][type != 0] ? core_limit[device][type != 0] : cores(type);
    return VNPU_OK;
}

aclError aclrtSetDeviceResLimit(int32_t device, aclrtDevResLimitType type, uint32_t value) {
    aclError error = check_device(device);
    if (!error) core_limit[device][type != 0] = value;
    return error;
}

aclError aclrtResetDeviceResLimit(int32_t device) {
    aclError error = check_device(device);
    if (!error) memset(core_limit[device], 0, sizeof core_limit[device]);
    return error;
}

aclError aclrtGetStreamResLimit(aclrtStream stream, aclrtDevResLimitType type, uint32_t *value) {
    return aclrtGetDeviceResLimit(current_device < 0 ? 0 : current_device, type, value);
}
aclError aclrtGetResInCurrentThread(aclrtDevResLimitType type, uint32_t *value) {
    return aclrtGetStreamResLimit(NULL, type, value);
}

/* ---- options that mean nothing without kernels: accepted ---- */

aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode mode) { return VNPU_OK; }
aclError aclrtSetOpWaitTimeout(uint32_t seconds) { return VNPU_OK; }
aclError aclrtSetOpExecuteTimeOut(uint32_t seconds) { return VNPU_OK; }
aclError aclrtSetOpExecuteTimeOutV2(uint64_t microseconds, uint64_t *actual) {
    if (actual) *actual = microseconds;
    return VNPU_OK;
}
aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) { return VNPU_OK; }
aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) { return VNPU_OK; }
aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t *value) {
    *value = 0;
    return VNPU_OK;
}
aclError aclSetCompileopt(aclCompileOpt option, const char *value) { return VNPU_OK; }
size_t aclGetCompileoptSize(aclCompileOpt option) { return 1; }
aclError aclGetCompileopt(aclCompileOpt option, char *value, size_t length) {
    if (length) value[0] = 0;
    return VNPU_OK;
}
