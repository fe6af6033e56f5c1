/* Memory: host memory with the bookkeeping of a device's. An allocation past a device's size fails as on the device.
 *
 * All allocations are kept in one array ordered by address, so that a pointer into the middle of one is found too. The
 * array stays short: torch_npu's caching allocator asks for large segments, rarely.
 */
#include "cann.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { ALIGNMENT = 512, HOST = -1 };

typedef struct {
    char *start;
    size_t size;
    int device; /* HOST for pinned host memory */
} Allocation;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Allocation *allocations;
static size_t count, capacity;
static size_t used[VNPU_MAX_DEVICES];

/* Index of the first allocation that starts after `pointer`; the one before it is the only one that can hold it. */
static size_t index_after(const void *pointer) {
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (allocations[middle].start <= (const char *)pointer) low = middle + 1;
        else high = middle;
    }
    return low;
}

static aclError add(void **pointer, size_t size, int device) {
    aclError error = VNPU_OK;
    size = size ? size : ALIGNMENT;
    pthread_mutex_lock(&lock);
    if (device != HOST && size > vnpu_device_memory() - used[device]) {
        error = vnpu_error(VNPU_OUT_OF_MEMORY, "device %d is out of memory: %zu bytes asked for, %zu of %zu in use", device, size,
                           used[device], vnpu_device_memory());
    } else if (count == capacity) {
        size_t larger = capacity ? 2 * capacity : 64;
        Allocation *moved = realloc(allocations, larger * sizeof *moved);
        if (moved) allocations = moved, capacity = larger;
        else error = VNPU_OUT_OF_MEMORY;
    }
    if (!error && posix_memalign(pointer, ALIGNMENT, size)) {
        error = vnpu_error(VNPU_OUT_OF_MEMORY, "the host has no %zu bytes left for the memory of a virtual device", size);
    }
    if (!error) {
        size_t place = index_after(*pointer);
        memmove(&allocations[place + 1], &allocations[place], (count - place) * sizeof *allocations);
        allocations[place] = (Allocation){*pointer, size, device};
        count++;
        if (device != HOST) used[device] += size;
    }
    pthread_mutex_unlock(&lock);
    return error;
}

static aclError release(void *pointer) {
    aclError error = VNPU_OK;
    pthread_mutex_lock(&lock);
    size_t after = index_after(pointer);
    if (!after || allocations[after - 1].start != (char *)pointer) {
        error = vnpu_error(VNPU_INVALID_PARAM, "%p was not allocated here", pointer);
    } else {
        Allocation *allocation = &allocations[after - 1];
        if (allocation->device != HOST) used[allocation->device] -= allocation->size;
        memmove(allocation, allocation + 1, (count - after) * sizeof *allocation);
        count--;
        free(pointer);
    }
    pthread_mutex_unlock(&lock);
    return error;
}

aclError aclrtMalloc(void **pointer, size_t size, aclrtMemMallocPolicy policy) {
    int device = vnpu_current_device();
    if (device < 0) return vnpu_error(VNPU_NO_CONTEXT, "memory was asked for before a device was set");
    return add(pointer, size, device);
}
aclError aclrtMallocAlign32(void **pointer, size_t size, aclrtMemMallocPolicy policy) { return aclrtMalloc(pointer, size, policy); }
aclError aclrtFree(void *pointer) { return release(pointer); }

aclError aclrtMallocHost(void **pointer, size_t size) { return add(pointer, size, HOST); }
aclError aclrtMallocHostWithCfg(void **pointer, uint64_t size, aclrtMallocConfig *config) { return add(pointer, size, HOST); }
aclError aclrtFreeHost(void *pointer) { return release(pointer); }

/* torch_npu may ask for a device's properties before it has set one in this thread: all have the same size. */
aclError aclrtGetMemInfo(aclrtMemAttr kind, size_t *available, size_t *total) {
    int device = vnpu_current_device() < 0 ? 0 : vnpu_current_device();
    pthread_mutex_lock(&lock);
    *total = vnpu_device_memory();
    *available = *total - used[device];
    pthread_mutex_unlock(&lock);
    return VNPU_OK;
}

aclError aclrtPointerGetAttributes(const void *pointer, aclrtPtrAttributes *attributes) {
    memset(attributes, 0, sizeof *attributes);
    attributes->location.type = 2; /* memory that this runtime did not allocate */
    pthread_mutex_lock(&lock);
    size_t after = index_after(pointer);
    if (after && (const char *)pointer < allocations[after - 1].start + allocations[after - 1].size) {
        int device = allocations[after - 1].device;
        attributes->location.type = device == HOST ? 0 : 1;
        attributes->location.id = device == HOST ? 0 : (uint32_t)device;
    }
    pthread_mutex_unlock(&lock);
    return VNPU_OK;
}

/* ---- copies: done when the call returns, also the asynchronous ones ---- */

aclError aclrtMemcpy(void *to, size_t room, const void *from, size_t size, aclrtMemcpyKind kind) {
    if (size > room) return vnpu_error(VNPU_INVALID_PARAM, "a copy of %zu bytes does not fit into %zu", size, room);
    memmove(to, from, size);
    return VNPU_OK;
}
aclError aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, aclrtMemcpyKind kind, aclrtStream stream) {
    return aclrtMemcpy(to, room, from, size, kind);
}
aclError aclrtMemset(void *to, size_t room, int32_t value, size_t size) {
    if (size > room) return vnpu_error(VNPU_INVALID_PARAM, "setting %zu bytes does not fit into %zu", size, room);
    memset(to, value, size);
    return VNPU_OK;
}
aclError aclrtMemsetAsync(void *to, size_t room, int32_t value, size_t size, aclrtStream stream) {
    return aclrtMemset(to, room, value, size);
}
