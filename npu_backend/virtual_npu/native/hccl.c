/* Software HCCL: communicators and collectives for ranks on this host. Nothing is implemented yet. */
#include "cann.h"
