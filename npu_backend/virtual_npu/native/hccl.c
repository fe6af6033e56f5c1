/* The collectives. Each goes in steps: every rank puts a piece into its slot, all meet, each takes what is its own.
 *
 * Slots have two halves that alternate between steps,
     so a rank that is a step ahead writes where nobody reads any more,
 * and no second meeting per step is needed. Operands may be the same memory.
 */
#include "hccl.h"

#include <string.h>

static uint64_t smaller(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* Whether this call can start: the group is whole, and the element type is known. `elements`: those of all buffers. */
static HcclResult start(const Comm *comm, int kind, HcclDataType type, uint64_t elements, size_t *element) {
    *element = vhccl_element_size(type);
    vhccl_count(kind, elements * *element);
    if (*element) return vhccl_check_usable(comm);
    vnpu_error(VHCCL_NOT_SUPPORTED, "HCCL: element type %d is not known", (int)type);
    return VHCCL_NOT_SUPPORTED;
}

HcclResult HcclBarrier(HcclComm handle, aclrtStream stream) {
    Comm *comm = handle;
    HcclResult error = vhccl_check_usable(comm);
    vhccl_count(CALL_BARRIER, 0);
    vhccl_flip(comm);
    return error ? error : vhccl_meet(comm, &(Call){CALL_BARRIER, -1, -1, -1, 0});
}

/* Each rank reduces its own share of a step into the first slot, from which all then copy the whole. */
HcclResult HcclAllReduce(void *from, void *to, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm handle,
                         aclrtStream stream) {
    Comm *comm = handle;
    size_t element;
    HcclResult error = start(comm, CALL_ALL_REDUCE, type, 2 * count, &element);
    Call call = {CALL_ALL_REDUCE, (int)type, (int)op, -1, count};
    uint64_t done = 0;
    do {
        if (error) return error;
        vhccl_flip(comm);
        uint64_t n = smaller(count - done, VHCCL_SLOT / element);
        memcpy(vhccl_slot(comm, comm->rank), (char *)from + done * element, n * element);
        error = vhccl_meet(comm, &call);
        if (error) return error;
        uint64_t first = n * comm->rank / comm->size, last = n * (comm->rank + 1) / comm->size;
        char *share = vhccl_slot(comm, 0) + first * element;
        error = vhccl_reduce(share, share, VHCCL_SLOT, comm->size, last - first, type, op);
        if (!error) error = vhccl_meet(comm, &call);
        if (!error) memcpy((char *)to + done * element, vhccl_slot(comm, 0), n * element);
        done += n;
    } while (done < count);
    return error;
}

HcclResult HcclReduce(void *from, void *to, uint64_t count, HcclDataType type, HcclReduceOp op, uint32_t root,
                      HcclComm handle, aclrtStream stream) {
    Comm *comm = handle;
    size_t element;
    HcclResult error = start(comm, CALL_REDUCE, type, comm->rank == root ? 2 * count : count, &element);
    Call call = {CALL_REDUCE, (int)type, (int)op, (int)root, count};
    uint64_t done = 0;
    do {
        if (error) return error;
        vhccl_flip(comm);
        uint64_t n = smaller(count - done, VHCCL_SLOT / element);
        memcpy(vhccl_slot(comm, comm->rank), (char *)from + done * element, n * element);
        error = vhccl_meet(comm, &call);
        if (!error && comm->rank == root)
            error = vhccl_reduce((char *)to + done * element, vhccl_slot(comm, 0), VHCCL_SLOT, comm->size, n, type, op);
        done += n;
    } while (done < count);
    return error;
}

HcclResult HcclBroadcast(void *data, uint64_t count, HcclDataType type, uint32_t root, HcclComm handle,
                         aclrtStream stream) {
    Comm *comm = handle;
    size_t element;
    HcclResult error = start(comm, CALL_BROADCAST, type, count, &element);
    Call call = {CALL_BROADCAST, (int)type, -1, (int)root, count};
    uint64_t done = 0;
    do {
        if (error) return error;
        vhccl_flip(comm);
        uint64_t n = smaller(count - done, VHCCL_SLOT / element);
        char *piece = (char *)data + done * element;
        if (comm->rank == root) memcpy(vhccl_slot(comm, root), piece, n * element);
        error = vhccl_meet(comm, &call);
        if (!error && comm->rank != root) memcpy(piece, vhccl_slot(comm, root), n * element);
        done += n;
    } while (done < count);
    return error;
}

/* ---- pieces of different length per rank; without `counts` and `places` (in elements) all alike, side by side ---- */

typedef struct {
    const uint64_t *counts, *places;
    uint64_t count;
} Pieces;

static uint64_t piece_count(const Pieces *pieces, uint32_t rank) { return pieces->counts
                            ? pieces->counts[rank] : pieces->count; }
static uint64_t piece_place(const Pieces *pieces, uint32_t rank) { return pieces->places
                            ? pieces->places[rank] : rank * pieces->count; }
static uint64_t longest(const Comm *comm, const Pieces *pieces) {
    uint64_t most = 0;
    for (uint32_t rank = 0; rank < comm->size; rank++)
        if (piece_count(pieces, rank) > most) most = piece_count(pieces, rank);
    return most;
}
static uint64_t whole(const Comm *comm, const Pieces *pieces) {
    uint64_t sum = 0;
    for (uint32_t rank = 0; rank < comm->size; rank++) sum += piece_count(pieces, rank);
    return sum;
}
/* How much of a piece is moved in a step that starts at `done` and takes up to `step` elements. */
static uint64_t part(uint64_t count, uint64_t done, uint64_t step) { return done < count ? smaller(count - done,
                     step) : 0; }

/* Each rank puts the lengths of its pieces into its slot, for all to read. */
static HcclResult show_counts(Comm *comm, const Call *call, const Pieces *pieces) {
    vhccl_flip(comm);
    uint64_t *own = (uint64_t *)vhccl_slot(comm, comm->rank);
    for (uint32_t rank = 0; rank < comm->size; rank++) own[rank] = piece_count(pieces, rank);
    return vhccl_meet(comm, call);
}

/* Where lengths are given, all ranks must have given the same, and `own` for this rank's piece: what a slot holds past
 * a shorter piece is of an earlier step. */
static HcclResult check_counts(Comm *comm, const Call *call, const Pieces *pieces, uint64_t own) {
    HcclResult error = pieces->counts ? show_counts(comm, call, pieces) : VHCCL_OK;
    for (uint32_t other = 0; pieces->counts && !error && other < comm->size; other++)
        for (uint32_t rank = 0; !error && rank < comm->size; rank++) {
            uint64_t expected = piece_count(pieces, rank), given = ((const uint64_t *)vhccl_slot(comm, other))[rank];
            if (other == comm->rank && rank == comm->rank) given = own;
            if (given != expected)
                error = vhccl_break(comm, VHCCL_INVALID_PARAM, "%s: the piece of rank %u has %llu elements here, "
                                    "%llu in rank %u", vhccl_call_name(call->kind), rank, (unsigned long long)expected,
                                    (unsigned long long)given, other);
        }
    return error;
}

static HcclResult all_gather(void *from, uint64_t count, void *to, Pieces pieces, HcclDataType type, Comm *comm) {
    size_t element;
    HcclResult error = start(comm, CALL_ALL_GATHER, type, count + whole(comm, &pieces), &element);
    Call call = {CALL_ALL_GATHER, (int)type, -1, -1, pieces.counts ? 0 : pieces.count};
    if (!error) error = check_counts(comm, &call, &pieces, count);
    uint64_t most = longest(comm, &pieces), done = 0;
    do {
        if (error) return error;
        vhccl_flip(comm);
        uint64_t step = VHCCL_SLOT / element;
        memcpy(vhccl_slot(comm, comm->rank), (char *)from + done * element, part(count, done, step) * element);
        error = vhccl_meet(comm, &call);
        for (uint32_t rank = 0; !error && rank < comm->size; rank++)
            memcpy((char *)to + (piece_place(&pieces, rank) + done) * element, vhccl_slot(comm, rank),
                   part(piece_count(&pieces, rank), done, step) * element);
        done += step;
    } while (done < most);
    return error;
}

HcclResult HcclAllGather(void *from, void *to, uint64_t count, HcclDataType type, HcclComm comm, aclrtStream stream) {
    return all_gather(from, count, to, (Pieces){NULL, NULL, count}, type, comm);
}

HcclResult HcclAllGatherV(void *from, uint64_t count, void *to, const void *counts, const void *places,
                          HcclDataType type, HcclComm comm, aclrtStream stream) {
    return all_gather(from, count, to, (Pieces){counts, places, 0}, type, comm);
}

/* A slot is divided among the ranks that its pieces go to. */
static char *compartment(const Comm *comm, uint32_t from, uint32_t to, uint64_t step_bytes) {
    return vhccl_slot(comm, from) + to * step_bytes;
}

static void put_pieces(const Comm *comm, const char *from, const Pieces *pieces, uint64_t done, uint64_t step,
                       size_t element) {
    for (uint32_t rank = 0; rank < comm->size; rank++)
        memcpy(compartment(comm, comm->rank, rank, step * element), from + (piece_place(pieces, rank) + done) * element,
               part(piece_count(pieces, rank), done, step) * element);
}

static HcclResult reduce_scatter(void *from, Pieces pieces, void *to, uint64_t count, HcclDataType type,
                                 HcclReduceOp op, Comm *comm) {
    size_t element;
    HcclResult error = start(comm, CALL_REDUCE_SCATTER, type, whole(comm, &pieces) + count, &element);
    Call call = {CALL_REDUCE_SCATTER, (int)type, (int)op, -1, pieces.counts ? 0 : pieces.count};
    if (!error) error = check_counts(comm, &call, &pieces, count);
    uint64_t most = longest(comm, &pieces), done = 0;
    do {
        if (error) return error;
        vhccl_flip(comm);
        uint64_t step = VHCCL_SLOT / comm->size / element;
        put_pieces(comm, from, &pieces, done, step, element);
        error = vhccl_meet(comm, &call);
        if (!error)
            error = vhccl_reduce((char *)to + done * element, compartment(comm, 0, comm->rank, step * element),
                                 VHCCL_SLOT, comm->size,
                                 part(count, done, step), type, op);
        done += step;
    } while (done < most);
    return error;
}

HcclResult HcclReduceScatter(void *from, void *to, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm comm,
                             aclrtStream stream) {
    return reduce_scatter(from, (Pieces){NULL, NULL, count}, to, count, type, op, comm);
}

HcclResult HcclReduceScatterV(void *from, const void *counts, const void *places, void *to, uint64_t count,
                              HcclDataType type, HcclReduceOp op, HcclComm comm, aclrtStream stream) {
    return reduce_scatter(from, (Pieces){counts, places, 0}, to, count, type, op, comm);
}

HcclResult HcclScatter(void *from, void *to, uint64_t count, HcclDataType type, uint32_t root, HcclComm handle,
                       aclrtStream stream) {
    Comm *comm = handle;
    size_t element;
    HcclResult error = start(comm, CALL_SCATTER, type, comm->rank == root ? (comm->size + 1) * count : count, &element);
    Call call = {CALL_SCATTER, (int)type, -1, (int)root, count};
    Pieces pieces = {NULL, NULL, count};
    uint64_t done = 0;
    do {
        if (error) return error;
        vhccl_flip(comm);
        uint64_t step = VHCCL_SLOT / comm->size / element;
        if (comm->rank == root) put_pieces(comm, from, &pieces, done, step, element);
        error = vhccl_meet(comm, &call);
        if (!error)
            memcpy((char *)to + done * element, compartment(comm, root, comm->rank, step * element), part(count, done,
                   step) * element);
        done += step;
    } while (done < count);
    return error;
}

/* How much all ranks send to whom gives the number of steps, and shows counts that do not fit. */
static HcclResult agree(Comm *comm, const Call *call, const Pieces *out, const Pieces *in, uint64_t *most) {
    HcclResult error = show_counts(comm, call, out);
    *most = 0;
    for (uint32_t from = 0; !error && from < comm->size; from++) {
        const uint64_t *row = (const uint64_t *)vhccl_slot(comm, from);
        for (uint32_t to = 0; to < comm->size; to++)
            if (row[to] > *most) *most = row[to];
        if (row[comm->rank] != piece_count(in, from))
            error = vhccl_break(comm, VHCCL_INVALID_PARAM, "all_to_all: rank %u sends %llu elements, "
                                "%llu are expected", from,
                                (unsigned long long)row[comm->rank], (unsigned long long)piece_count(in, from));
    }
    return error;
}

static HcclResult all_to_all(const void *from, Pieces out, void *to, Pieces in, HcclDataType type, Comm *comm) {
    size_t element;
    HcclResult error = start(comm, CALL_ALL_TO_ALL, type, whole(comm, &out) + whole(comm, &in), &element);
    Call call = {CALL_ALL_TO_ALL, (int)type, -1, -1, 0};
    uint64_t most = 0;
    if (!error) error = agree(comm, &call, &out, &in, &most);
    if (error) return error;
    uint64_t step = VHCCL_SLOT / comm->size / element;
    for (uint64_t done = 0; !error && done < most; done += step) {
        vhccl_flip(comm);
        put_pieces(comm, from, &out, done, step, element);
        error = vhccl_meet(comm, &call);
        for (uint32_t rank = 0; !error && rank < comm->size; rank++)
            memcpy((char *)to + (piece_place(&in, rank) + done) * element, compartment(comm, rank, comm->rank,
                   step * element),
                   part(piece_count(&in, rank), done, step) * element);
    }
    return error;
}

HcclResult HcclAlltoAllV(const void *from, const void *out_counts, const void *out_places, HcclDataType type,
                         const void *to, const void *in_counts, const void *in_places, HcclDataType in_type,
                         HcclComm comm, aclrtStream stream) {
    return all_to_all(from, (Pieces){out_counts, out_places, 0}, (void *)to, (Pieces){in_counts, in_places, 0}, type,
                      comm);
}

HcclResult HcclAlltoAll(const void *from, uint64_t count, HcclDataType type, const void *to, uint64_t in_count,
                        HcclDataType in_type, HcclComm comm, aclrtStream stream) {
    return all_to_all(from, (Pieces){NULL, NULL, count}, (void *)to, (Pieces){NULL, NULL, in_count}, type, comm);
}
