/* What the files of the software HCCL share: a communicator is ranks on one host with one piece of shared memory.
 *
 *     hccl_rendezvous.c  how ranks find each other
 *     hccl_group.c       a communicator's life: how ranks wait for each other, and notice that one is gone
 *     hccl_reduce.c      element types and reductions
 *     hccl_p2p.c         send and receive, alone, in batches and in groups
 *     hccl.c             the collectives
 *
 * Calls return when the data has arrived, so streams are not looked at. The memory is a memfd that the root hands to
 * the others over an abstract socket: nothing has a name in the file system, so nothing stays behind,
     whoever is killed.
 */
#ifndef VIRTUAL_NPU_HCCL_H
#define VIRTUAL_NPU_HCCL_H

#include "cann.h"

#include <stdatomic.h>

#ifdef VIRTUAL_NPU_CHECK_PROTOTYPES
#include "third_party/hccl/inc/hccl/hccl.h"
#else
typedef unsigned HcclResult, HcclDataType, HcclReduceOp, HcclConfig, HcclSendRecvType;
typedef void *HcclComm;
typedef union { int32_t value; } HcclConfigValue;
typedef struct { char internal[4108]; } HcclRootInfo;
typedef struct {
    char reserved[24]; /* starts with the size of the caller's own version of this struct */
    uint32_t hcclBufferSize, hcclDeterministic;
    char hcclCommName[128], hcclUdi[128];
    uint32_t hcclOpExpansionMode, hcclRdmaTrafficClass, hcclRdmaServiceLevel, hcclWorldRankID;
    uint64_t hcclJobID;
    uint8_t aclGraphZeroCopyEnable;
    int32_t hcclExecTimeOut; /* seconds, -1 when it is not set; the fields after it mean nothing here */
} HcclCommConfig;
typedef struct {
    HcclSendRecvType sendRecvType; /* 0 send, 1 receive */
    void *buf;
    uint64_t count;
    HcclDataType dataType;
    uint32_t remoteRank;
} HcclSendRecvItem;
#endif

/* Codes of the vendor's hccl_types.h. */
enum {
    VHCCL_OK = 0,
    VHCCL_INVALID_PARAM = 1,
    VHCCL_INTERNAL = 4,
    VHCCL_NOT_SUPPORTED = 5,
    VHCCL_SYSCALL = 8,
    VHCCL_TIMEOUT = 9,
    VHCCL_REMOTE = 21, /* another rank failed, left or died */
};

enum {
    VHCCL_MAX_RANKS = 256,
    VHCCL_ALL_RANKS = VHCCL_MAX_RANKS, /* as the peer that is waited for */
    VHCCL_SLOT = 2 << 20,              /* bytes that each rank puts out per step of a collective */
    VHCCL_RING = 8 << 20,              /* bytes that a sender may be ahead of the receiver */
};

/* What a rank called, for the check that all ranks called the same. */
typedef struct {
    int32_t kind, type, op, root; /* -1 where it has no meaning */
    uint64_t count;
} Call;

enum { CALL_BARRIER, CALL_ALL_REDUCE, CALL_REDUCE, CALL_BROADCAST, CALL_ALL_GATHER, CALL_REDUCE_SCATTER, CALL_SCATTER,
    CALL_ALL_TO_ALL, CALL_SEND, CALL_RECEIVE, CALL_KINDS };

typedef struct {
    _Atomic uint32_t state;    /* 0 not there yet, then VHCCL_JOINED, VHCCL_LEFT */
    _Atomic uint32_t doorbell; /* futex: rung by whoever moved bytes of a ring that this rank uses */
    Call call[2];
} __attribute__((aligned(64))) Rank;

typedef struct {
    _Atomic uint32_t arrived;    /* at the barrier */
    _Atomic uint32_t generation; /* futex: how many barriers are complete */
    _Atomic uint32_t broken;     /* 1 + the rank whose collective failed; nothing works afterwards */
    Rank ranks[];
} Segment;

typedef struct {
    Segment *segment;
    size_t bytes;
    int fd;
    uint32_t size, rank, parity;
    uint64_t timeout; /* nanoseconds that a call waits for others */
    char name[128];
} Comm;

/* The word for a kind of call. */
const char *vhccl_call_name(int kind);
/* Note one call; `bytes` are those of the buffers that this rank gave, read or written. */
void vhccl_count(int kind, uint64_t bytes);
/* Switch to the other half of the slots. With two halves a rank may fill one while others still read the other. */
void vhccl_flip(Comm *comm);
/* The slot of a rank in the current half. */
char *vhccl_slot(const Comm *comm, uint32_t rank);
/* Wait for all ranks at this point, and check that they are in the same call. */
HcclResult vhccl_meet(Comm *comm, const Call *call);
/* Sleep until `*word` is no longer `seen`, a tenth of a second at most. `peer` is the rank that it takes; that it is
 * gone, or the deadline past, is an error. */
HcclResult vhccl_nap(Comm *comm, _Atomic uint32_t *word, uint32_t seen, uint32_t peer, uint64_t deadline);
/* Change a futex word and wake who waits for it. */
void vhccl_ring(_Atomic uint32_t *word);
/* Fail if an earlier call of this communicator did: its memory is in no known state. */
HcclResult vhccl_check_usable(const Comm *comm);
/* Keep a message like vnpu_error, and make every later call of the communicator fail. */
HcclResult vhccl_break(Comm *comm, HcclResult code, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* The memfd of a group, made by the root and passed to the others; -1 and errno when somebody does not come. */
int vhccl_rendezvous(const HcclRootInfo *info, uint32_t size, size_t bytes, uint64_t seconds);
/* Keep a message with what errno says; returns `code`. */
HcclResult vhccl_fail(HcclResult code, const char *what);
/* Bytes of the ring from one rank to another, and where it lies: counters, then data. */
char *vhccl_ring_memory(const Comm *comm, uint32_t from, uint32_t to);

/* Bytes of one element, or 0 for an unknown type. */
size_t vhccl_element_size(HcclDataType type);
/* `to[i] = op over rank of from[rank * stride bytes][i]`, in the order of the ranks; half types accumulate in float. */
HcclResult vhccl_reduce(void *to, const char *from, size_t stride, uint32_t ranks, size_t count, HcclDataType type,
                        HcclReduceOp op);

#endif
