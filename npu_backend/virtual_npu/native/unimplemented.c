/* Functions that torch_npu links against and the virtual NPU lacks: each says so by name and fails.
 *
 * They are here because the loader would refuse torch_npu without them. What torch_npu only looks up at run time
 * (dlsym) is simply absent: torch_npu names it in its own exception. Signatures do not matter to a function that reads no
 * argument, so this file includes no vendor header.
 */
#include "cann.h"

#define FAILS(name) \
    aclError name(void) { return vnpu_unimplemented(#name); }

/* Device binaries: there is no device that could run one. */
FAILS(aclrtBinaryGetFunction)
FAILS(aclrtBinaryLoadFromData)
FAILS(aclrtGetFunctionAddr)
FAILS(rtDevBinaryRegister)
FAILS(rtFunctionRegister)
FAILS(rtGetC2cCtrlAddr)
FAILS(rtKernelLaunch)

/* Memory mapped piece by piece (expandable segments), and shared between processes. */
FAILS(aclrtReleaseMemAddress)
FAILS(aclrtMallocPhysical)
FAILS(aclrtFreePhysical)
FAILS(aclrtMapMem)
FAILS(aclrtUnmapMem)
FAILS(aclrtDeviceGetBareTgid)
FAILS(aclrtMemExportToShareableHandle)
FAILS(aclrtMemImportFromShareableHandle)
FAILS(aclrtMemSetPidToShareableHandle)

/* A group of several devices within one process (torch_npu 2.9). */
FAILS(HcclCommInitAll)

/* The first of those that expandable segments need: told so by this code, torch_npu warns and goes on without them. */
aclError aclrtReserveMemAddress(void) {
    return vnpu_error(VNPU_FEATURE_NOT_SUPPORTED, "expandable segments are not implemented");
}

/* Dumps of device tensors. */
FAILS(aclmdlInitDump)
FAILS(aclmdlSetDump)
FAILS(aclmdlFinalizeDump)

/* The profiler and the log: torch_npu calls these all the time, so they do nothing instead of failing. */
int32_t MsprofRegisterCallback(void) { return 0; }
int32_t MsprofReportAdditionalInfo(void) { return 0; }
int32_t MsprofReportApi(void) { return 0; }
int32_t MsprofReportCompactInfo(void) { return 0; }
uint64_t MsprofGetHashId(void) { return 0; }
uint64_t MsprofSysCycleTime(void) { return vnpu_now(); }
void aclAppLog(void) {}
