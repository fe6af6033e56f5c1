/* A communicator's life: its memory, how ranks wait for each other and notice that one is gone, joining and leaving. */
#define _GNU_SOURCE
#include "hccl.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { JOINED = 1, LEFT = 2 };
enum { PAGE = 4096 };
static const uint64_t SECOND = 1000000000u;
static const uint64_t LOOK_ROUND = 100000000u; /* nanoseconds between two looks at whether the others live */
static const int TRIES = 50;                   /* yields before a waiting rank goes to sleep */

/* ---- layout of the memory: header, two halves of slots, a ring per ordered pair; pages exist once touched ---- */

static size_t header_bytes(uint32_t size) { return (sizeof(Segment) + size * sizeof(Rank) + PAGE - 1) / PAGE * PAGE; }
static size_t slots_bytes(uint32_t size) { return (size_t)2 * size * VHCCL_SLOT; }
static size_t ring_bytes(void) { return (size_t)VHCCL_RING + PAGE; }

void vhccl_flip(Comm *comm) { comm->parity ^= 1; }

char *vhccl_slot(const Comm *comm, uint32_t rank) {
    return (char *)comm->segment + header_bytes(comm->size) + ((size_t)comm->parity * comm->size + rank) * VHCCL_SLOT;
}

char *vhccl_ring_memory(const Comm *comm, uint32_t from, uint32_t to) {
    char *rings = (char *)comm->segment + header_bytes(comm->size) + slots_bytes(comm->size);
    return rings + ((size_t)from * comm->size + to) * ring_bytes();
}

/* ---- waiting ---- */

HcclResult vhccl_break(Comm *comm, HcclResult code, const char *format, ...) {
    char message[400];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    uint32_t unbroken = 0;
    atomic_compare_exchange_strong(&comm->segment->broken, &unbroken, comm->rank + 1);
    vnpu_error((aclError)code, "HCCL, rank %u of %u: %s", comm->rank, comm->size, message);
    return code;
}

HcclResult vhccl_check_usable(const Comm *comm) {
    uint32_t broken = atomic_load(&comm->segment->broken);
    if (!broken) return VHCCL_OK;
    vnpu_error(VHCCL_REMOTE, "HCCL, rank %u of %u: a collective of this group failed in rank %u", comm->rank,
               comm->size, broken - 1);
    return VHCCL_REMOTE;
}

/* Each rank holds a lock on one byte of the memfd. The kernel drops it when the process ends, however it ends, and does
 * not hand it to forked children; so whoever joined and has no lock is dead. */
static bool is_dead(const Comm *comm, uint32_t rank) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
    return rank != comm->rank && !fcntl(comm->fd, F_GETLK, &lock) && lock.l_type == F_UNLCK;
}

static const char *what_ended(const Comm *comm, uint32_t rank) {
    uint32_t state = atomic_load(&comm->segment->ranks[rank].state);
    return state == LEFT ? "left the group" : state == JOINED && is_dead(comm, rank) ? "died" : NULL;
}

HcclResult vhccl_nap(Comm *comm, _Atomic uint32_t *word, uint32_t seen, uint32_t peer, uint64_t deadline) {
    struct timespec pause = {0, (long)LOOK_ROUND};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &pause, NULL, 0);
    if (atomic_load(word) != seen) return VHCCL_OK;
    HcclResult error = vhccl_check_usable(comm);
    if (error) return error;
    uint32_t first = peer == VHCCL_ALL_RANKS ? 0 : peer, last = peer == VHCCL_ALL_RANKS ? comm->size - 1 : peer;
    for (uint32_t rank = first; rank <= last; rank++) {
        const char *end = what_ended(comm, rank);
        if (!end || atomic_load(word) != seen) continue; /* its last act may have been what we wait for */
        return vhccl_break(comm, VHCCL_REMOTE, "rank %u %s while this rank waits for it", rank, end);
    }
    if (vnpu_now() <= deadline) return VHCCL_OK;
    return vhccl_break(comm, VHCCL_TIMEOUT, "the other ranks did not come within %llu s (HCCL_EXEC_TIMEOUT)",
                       (unsigned long long)(comm->timeout / SECOND));
}

void vhccl_ring(_Atomic uint32_t *word) {
    atomic_fetch_add(word, 1);
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static HcclResult wait_for_all(Comm *comm, uint32_t seen, uint64_t deadline) {
    _Atomic uint32_t *generation = &comm->segment->generation;
    for (int i = 0; i < TRIES && atomic_load(generation) == seen; i++) sched_yield();
    HcclResult error = VHCCL_OK;
    while (!error && atomic_load(generation) == seen) error = vhccl_nap(comm, generation, seen, VHCCL_ALL_RANKS,
           deadline);
    return error;
}

static HcclResult barrier(Comm *comm, uint64_t deadline) {
    Segment *segment = comm->segment;
    uint32_t generation = atomic_load(&segment->generation);
    if (atomic_fetch_add(&segment->arrived, 1) + 1 < comm->size)
        return wait_for_all(comm, generation, deadline);
    atomic_store(&segment->arrived, 0);
    vhccl_ring(&segment->generation);
    return VHCCL_OK;
}

HcclResult vhccl_meet(Comm *comm, const Call *call) {
    comm->segment->ranks[comm->rank].call[comm->parity] = *call;
    HcclResult error = barrier(comm, vnpu_now() + comm->timeout);
    for (uint32_t rank = 0; !error && rank < comm->size; rank++) {
        const Call *other = &comm->segment->ranks[rank].call[comm->parity];
        if (!memcmp(other, call, sizeof *call)) continue;
        error = vhccl_break(comm, VHCCL_INVALID_PARAM,
                            "ranks are in different calls: %s (type %d, op %d, root %d, count %llu) here, "
                            "%s (type %d, op %d, root %d, count %llu) in rank %u",
                            vhccl_call_name(call->kind), call->type, call->op, call->root, (unsigned long long)call->count,
                            vhccl_call_name(other->kind), other->type, other->op, other->root, (unsigned long long)other->count,
                                      rank);
    }
    return error;
}

/* ---- joining and leaving ---- */

HcclResult vhccl_fail(HcclResult code, const char *what) {
    vnpu_error((aclError)code, "HCCL: %s: %s", what, strerror(errno));
    return code;
}

static HcclResult join(Comm *comm, const HcclRootInfo *info, uint64_t seconds) {
    uint64_t deadline = vnpu_now() + seconds * SECOND;
    comm->bytes = header_bytes(comm->size) + slots_bytes(comm->size) + (size_t)comm->size * comm->size * ring_bytes();
    comm->fd = vhccl_rendezvous(info, comm->size, comm->bytes, seconds);
    if (comm->fd < 0) return vhccl_fail(VHCCL_TIMEOUT,
        "the root or a rank of the group did not come (HCCL_CONNECT_TIMEOUT)");
    struct flock alive = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = comm->rank, .l_len = 1};
    if (fcntl(comm->fd, F_SETLK, &alive)) return vhccl_fail(VHCCL_INVALID_PARAM,
        "two ranks of the group have the same number");
    comm->segment = mmap(NULL, comm->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, comm->fd, 0);
    if (comm->segment == MAP_FAILED) return vhccl_fail(VHCCL_SYSCALL, "mmap");
    atomic_store(&comm->segment->ranks[comm->rank].state, JOINED);
    return barrier(comm, deadline);
}

static void release(Comm *comm) {
    if (comm->segment && comm->segment != MAP_FAILED) {
        atomic_store(&comm->segment->ranks[comm->rank].state, LEFT);
        munmap(comm->segment, comm->bytes);
    }
    if (comm->fd >= 0) close(comm->fd);
    free(comm);
}

HcclResult HcclCommInitRootInfoConfig(uint32_t size, const HcclRootInfo *info, uint32_t rank,
                                      const HcclCommConfig *config, HcclComm *result) {
    if (!size || size > VHCCL_MAX_RANKS || rank >= size) {
        vnpu_error(VHCCL_INVALID_PARAM, "HCCL: rank %u of %u; groups have 1 to %d ranks", rank, size, VHCCL_MAX_RANKS);
        return VHCCL_INVALID_PARAM;
    }
    Comm *comm = calloc(1, sizeof *comm);
    if (!comm) return VHCCL_INTERNAL;
    comm->size = size;
    comm->rank = rank;
    uint64_t seconds = (uint64_t)vnpu_environment("HCCL_EXEC_TIMEOUT", 1836);
    if (config) {
        size_t known;
        memcpy(&known, config, sizeof known);
        bool has_timeout = known >= offsetof(HcclCommConfig, hcclExecTimeOut) + sizeof config->hcclExecTimeOut;
        if (has_timeout && config->hcclExecTimeOut > 0) seconds = (uint64_t)config->hcclExecTimeOut;
        snprintf(comm->name, sizeof comm->name, "%s", config->hcclCommName);
    }
    comm->timeout = seconds * SECOND;
    if (!comm->name[0]) snprintf(comm->name, sizeof comm->name, "virtual-%.15s", info->internal);
    HcclResult error = join(comm, info, (uint64_t)vnpu_environment("HCCL_CONNECT_TIMEOUT", 120));
    if (error) {
        release(comm);
        return error;
    }
    *result = comm;
    return VHCCL_OK;
}

HcclResult HcclCommInitRootInfo(uint32_t size, const HcclRootInfo *info, uint32_t rank, HcclComm *result) {
    return HcclCommInitRootInfoConfig(size, info, rank, NULL, result);
}

HcclResult HcclCommDestroy(HcclComm handle) {
    if (handle) release(handle);
    return VHCCL_OK;
}

/* ---- facts and options ---- */

HcclResult HcclGetCommName(HcclComm handle, char *name) {
    strcpy(name, ((Comm *)handle)->name);
    return VHCCL_OK;
}
HcclResult HcclGetRankSize(HcclComm handle, uint32_t *size) {
    *size = ((Comm *)handle)->size;
    return VHCCL_OK;
}
HcclResult HcclGetRankId(HcclComm handle, uint32_t *rank) {
    *rank = ((Comm *)handle)->rank;
    return VHCCL_OK;
}
/* A failure is an error of the call that met it; nothing fails behind its back. */
HcclResult HcclGetCommAsyncError(HcclComm handle, HcclResult *error) {
    *error = VHCCL_OK;
    return VHCCL_OK;
}
const char *aclGetRecentErrMsg(void);
const char *HcclGetErrorString(HcclResult code) { return code ? aclGetRecentErrMsg() : "no error"; }
/* How many entries of the vendor's HcclCommConfigCapability are known: all up to the time limit of a communicator. */
uint32_t HcclGetCommConfigCapability(void) { return 9; }
HcclResult HcclSetConfig(HcclConfig option, HcclConfigValue value) { return VHCCL_OK; }
