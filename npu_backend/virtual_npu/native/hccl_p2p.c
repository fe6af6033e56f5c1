/* Send and receive: one ring of bytes per ordered pair of ranks; each message is its length and then its bytes.
 *
 * A send is done once its bytes are in the ring, so up to VHCCL_RING bytes may be under way. A batch or group moves all
 * of its messages a piece at a time, whatever their order, so that ranks which send to each other do not block.
 */
#include "hccl.h"

#include <stdlib.h>
#include <string.h>

enum { SEND = 0, RECEIVE = 1 };

typedef struct {
    _Atomic uint64_t written, read; /* bytes since the start; the ring holds the difference */
    char room[4096 - 2 * sizeof(uint64_t)];
    char data[];
} Ring;

typedef struct {
    Comm *comm;
    uint32_t kind, peer;
    char *data;
    uint64_t bytes, moved;
    bool announced; /* its length has been sent, or received */
} Transfer;

static Ring *ring_of(const Transfer *transfer) {
    uint32_t self = transfer->comm->rank, peer = transfer->peer;
    return (Ring *)(transfer->kind == SEND ? vhccl_ring_memory(transfer->comm, self,
            peer) : vhccl_ring_memory(transfer->comm, peer, self));
}

static bool is_done(const Transfer *transfer) { return transfer->announced && transfer->moved == transfer->bytes; }

/* Move up to `bytes` between memory and the ring; returns how many it were. */
static uint64_t move(Ring *ring, uint32_t kind, char *memory, uint64_t bytes) {
    uint64_t written = atomic_load(&ring->written), read = atomic_load(&ring->read);
    uint64_t possible = kind == SEND ? VHCCL_RING - (written - read) : written - read;
    uint64_t place = (kind == SEND ? written : read) % VHCCL_RING;
    if (bytes > possible) bytes = possible;
    uint64_t first = bytes < VHCCL_RING - place ? bytes : VHCCL_RING - place; /* up to the ring's end, then from its start */
    if (kind == SEND) {
        memcpy(ring->data + place, memory, first);
        memcpy(ring->data, memory + first, bytes - first);
        atomic_store(&ring->written, written + bytes);
    } else {
        memcpy(memory, ring->data + place, first);
        memcpy(memory + first, ring->data, bytes - first);
        atomic_store(&ring->read, read + bytes);
    }
    return bytes;
}

/* Move what can be moved now. Sets `*progress` if that was anything. */
static HcclResult advance(Transfer *transfer, bool *progress) {
    Ring *ring = ring_of(transfer);
    uint64_t before = transfer->moved;
    bool was_announced = transfer->announced;
    if (!transfer->announced) {
        uint64_t length = transfer->bytes;
        uint64_t held = atomic_load(&ring->written) - atomic_load(&ring->read);
        if (transfer->kind == SEND ? VHCCL_RING - held < sizeof length : held < sizeof length) return VHCCL_OK;
        move(ring, transfer->kind, (char *)&length, sizeof length);
        transfer->announced = true;
        if (length != transfer->bytes)
            return vhccl_break(transfer->comm, VHCCL_INVALID_PARAM, "rank %u sent %llu bytes, %llu are expected",
                               transfer->peer,
                               (unsigned long long)length, (unsigned long long)transfer->bytes);
    }
    transfer->moved += move(ring, transfer->kind, transfer->data + transfer->moved, transfer->bytes - transfer->moved);
    if (transfer->announced == was_announced && transfer->moved == before) return VHCCL_OK;
    *progress = true;
    vhccl_ring(&transfer->comm->segment->ranks[transfer->peer].doorbell);
    return VHCCL_OK;
}

/* Messages of one pair and direction keep their order: only the first unfinished one may move. */
static bool is_next(const Transfer *transfers, size_t index) {
    for (size_t i = 0; i < index; i++) {
        const Transfer *a = &transfers[i], *b = &transfers[index];
        if (!is_done(a) && a->comm == b->comm && a->kind == b->kind && a->peer == b->peer) return false;
    }
    return true;
}

static HcclResult complete(Transfer *transfers, size_t count) {
    uint64_t start = vnpu_now();
    for (;;) {
        bool progress = false;
        const Transfer *waiting = NULL;
        uint32_t seen = 0;
        for (size_t i = 0; i < count; i++) {
            Transfer *transfer = &transfers[i];
            if (is_done(transfer) || !is_next(transfers, i)) continue;
            if (!waiting) seen = atomic_load(&transfer->comm->segment->ranks[transfer->comm->rank].doorbell);
            HcclResult error = vhccl_check_usable(transfer->comm);
            if (!error) error = advance(transfer, &progress);
            if (error) return error;
            if (!is_done(transfer) && !waiting) waiting = transfer;
        }
        if (!progress && !waiting) return VHCCL_OK;
        if (progress) continue;
        /* Nothing moves: sleep until somebody rings, or a moment, as another communicator's bell is not heard here. */
        Comm *comm = waiting->comm;
        HcclResult error = vhccl_nap(comm, &comm->segment->ranks[comm->rank].doorbell, seen, waiting->peer,
                                     start + comm->timeout);
        if (error) return error;
    }
}

/* ---- groups: between start and end, messages are collected; the end moves them all ---- */

static __thread int group_depth;
static __thread Transfer *group;
static __thread size_t group_size;

static HcclResult run(Transfer *transfers, size_t count) {
    for (size_t i = 0; i < count; i++) {
        vhccl_count(transfers[i].kind == SEND ? CALL_SEND : CALL_RECEIVE, transfers[i].bytes);
        if (transfers[i].peer < transfers[i].comm->size) continue;
        vnpu_error(VHCCL_INVALID_PARAM, "HCCL: rank %u is not in the group of %u", transfers[i].peer,
                   transfers[i].comm->size);
        return VHCCL_INVALID_PARAM;
    }
    if (!group_depth) return complete(transfers, count);
    Transfer *larger = realloc(group, (group_size + count) * sizeof *group);
    if (!larger) return VHCCL_INTERNAL;
    group = larger;
    memcpy(group + group_size, transfers, count * sizeof *group);
    group_size += count;
    return VHCCL_OK;
}

HcclResult HcclGroupStart(void) {
    group_depth++;
    return VHCCL_OK;
}

HcclResult HcclGroupEnd(void) {
    if (!group_depth || --group_depth) return group_depth ? VHCCL_OK : VHCCL_NOT_SUPPORTED;
    HcclResult error = complete(group, group_size);
    group_size = 0;
    return error;
}

static Transfer transfer_of(HcclComm comm, uint32_t kind, void *data, uint64_t count, HcclDataType type,
                            uint32_t peer) {
    return (Transfer){comm, kind, peer, data, count * vhccl_element_size(type), 0, false};
}

HcclResult HcclSend(void *data, uint64_t count, HcclDataType type, uint32_t peer, HcclComm comm, aclrtStream stream) {
    Transfer transfer = transfer_of(comm, SEND, data, count, type, peer);
    return run(&transfer, 1);
}

HcclResult HcclRecv(void *data, uint64_t count, HcclDataType type, uint32_t peer, HcclComm comm, aclrtStream stream) {
    Transfer transfer = transfer_of(comm, RECEIVE, data, count, type, peer);
    return run(&transfer, 1);
}

HcclResult HcclBatchSendRecv(HcclSendRecvItem *items, uint32_t count, HcclComm comm, aclrtStream stream) {
    Transfer *transfers = malloc((count ? count : 1) * sizeof *transfers);
    if (!transfers) return VHCCL_INTERNAL;
    for (uint32_t i = 0; i < count; i++)
        transfers[i] = transfer_of(comm, items[i].sendRecvType == 0 ? SEND : RECEIVE, items[i].buf, items[i].count,
                                   items[i].dataType, items[i].remoteRank);
    HcclResult error = run(transfers, count);
    free(transfers);
    return error;
}
