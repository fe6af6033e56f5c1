/* How often each operation was called in this process, and how many bytes its buffers held: `npu-backend run --count`. */
#include "hccl.h"

static const char *const names[CALL_KINDS] = {"barrier", "all_reduce", "reduce", "broadcast", "all_gather",
    "reduce_scatter", "scatter", "all_to_all", "send", "receive"};
static _Atomic uint64_t calls_of[CALL_KINDS], bytes_of[CALL_KINDS];

const char *vhccl_call_name(int kind) { return names[kind]; }

void vhccl_count(int kind, uint64_t bytes) {
    atomic_fetch_add(&calls_of[kind], 1);
    atomic_fetch_add(&bytes_of[kind], bytes);
}

/* For counting.py: the name of a kind and its numbers, NULL behind the last one. */
const char *vhccl_counted(uint32_t kind, uint64_t *calls, uint64_t *bytes) {
    if (kind >= CALL_KINDS) return NULL;
    *calls = atomic_load(&calls_of[kind]);
    *bytes = atomic_load(&bytes_of[kind]);
    return names[kind];
}
