/* Software HCCL: communicators and collectives for ranks on this host. Nothing is implemented yet. */
#include "cann.h"

/* torch_npu sets options before any communicator exists. */
int HcclSetConfig(int option, int64_t value) { return VNPU_OK; }
