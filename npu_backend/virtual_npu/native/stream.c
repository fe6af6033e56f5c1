/* Streams and events. Work is finished when it is submitted, so a stream is a name and an event is a time.
 *
 * Handles carry a kind, so that a wrong or destroyed handle is an error and not a crash later.
 */
#include "cann.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

typedef struct {
    uint32_t kind;
    int32_t id;
} Stream;

typedef struct {
    uint32_t kind;
    bool timed, recorded;
    uint64_t time; /* nanoseconds of the monotonic clock when the event was recorded */
} Event;

enum { TIME_LINE = 8 }; /* ACL_EVENT_TIME_LINE: only such an event keeps its time */
enum { STREAM = 0x5354524d, EVENT = 0x4556454e, DESTROYED = 0 };

static atomic_int next_stream_id = 1;

/* NULL is the default stream of the device. */
static aclError check_stream(aclrtStream handle) {
    Stream *stream = handle;
    return !stream || stream->kind == STREAM ? VNPU_OK : vnpu_error(VNPU_INVALID_PARAM, "%p is not a stream", handle);
}

static aclError check_event(aclrtEvent handle) {
    Event *event = handle;
    return event && event->kind == EVENT ? VNPU_OK : vnpu_error(VNPU_INVALID_PARAM, "%p is not an event", handle);
}

/* ---- streams ---- */

aclError aclrtCreateStream(aclrtStream *handle) {
    Stream *stream = malloc(sizeof *stream);
    if (!stream) return VNPU_OUT_OF_MEMORY;
    *stream = (Stream){STREAM, atomic_fetch_add(&next_stream_id, 1)};
    *handle = stream;
    return VNPU_OK;
}
aclError aclrtCreateStreamWithConfig(aclrtStream *handle, uint32_t priority, uint32_t flags) { return aclrtCreateStream(handle); }

aclError aclrtDestroyStream(aclrtStream handle) {
    aclError error = check_stream(handle);
    if (error || !handle) return error;
    ((Stream *)handle)->kind = DESTROYED;
    free(handle);
    return VNPU_OK;
}
aclError aclrtDestroyStreamForce(aclrtStream handle) { return aclrtDestroyStream(handle); }

aclError aclrtStreamGetId(aclrtStream handle, int32_t *id) {
    aclError error = check_stream(handle);
    if (!error) *id = handle ? ((Stream *)handle)->id : 0;
    return error;
}

aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus *status) {
    *status = 0; /* complete */
    return check_stream(handle);
}

aclError aclrtSynchronizeStream(aclrtStream handle) { return check_stream(handle); }
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream handle, int32_t milliseconds) { return check_stream(handle); }
aclError aclrtSynchronizeDevice(void) { return VNPU_OK; }
aclError aclrtSynchronizeDeviceWithTimeout(int32_t milliseconds) { return VNPU_OK; }
aclError aclrtSetStreamFailureMode(aclrtStream handle, uint64_t mode) { return check_stream(handle); }
aclError aclrtSetStreamAttribute(aclrtStream handle, aclrtStreamAttr attribute, aclrtStreamAttrValue *value) { return check_stream(handle); }
aclError aclrtSetStreamOverflowSwitch(aclrtStream handle, uint32_t flag) { return check_stream(handle); }
aclError aclrtGetStreamOverflowSwitch(aclrtStream handle, uint32_t *flag) {
    *flag = 0;
    return check_stream(handle);
}

/* ---- events ---- */

aclError aclrtCreateEventExWithFlag(aclrtEvent *handle, uint32_t flags) {
    Event *event = malloc(sizeof *event);
    if (!event) return VNPU_OUT_OF_MEMORY;
    *event = (Event){EVENT, flags & TIME_LINE, false, 0};
    *handle = event;
    return VNPU_OK;
}
aclError aclrtCreateEventWithFlag(aclrtEvent *handle, uint32_t flags) { return aclrtCreateEventExWithFlag(handle, flags); }

aclError aclrtDestroyEvent(aclrtEvent handle) {
    aclError error = check_event(handle);
    if (error) return error;
    ((Event *)handle)->kind = DESTROYED;
    free(handle);
    return VNPU_OK;
}

aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream) {
    Event *event = handle;
    if (check_event(handle) || check_stream(stream)) return VNPU_INVALID_PARAM;
    event->recorded = true;
    event->time = vnpu_now();
    return VNPU_OK;
}

aclError aclrtResetEvent(aclrtEvent handle, aclrtStream stream) {
    if (check_event(handle) || check_stream(stream)) return VNPU_INVALID_PARAM;
    ((Event *)handle)->recorded = false;
    return VNPU_OK;
}

/* A stream has always reached what it waits for: whoever records an event has done the work before. */
aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent handle) {
    return check_event(handle) || check_stream(stream) ? VNPU_INVALID_PARAM : VNPU_OK;
}
aclError aclrtSynchronizeEvent(aclrtEvent handle) { return check_event(handle); }

aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus *status) {
    aclError error = check_event(handle);
    if (!error) *status = ((Event *)handle)->recorded ? 1 : 0;
    return error;
}

aclError aclrtQueryEventWaitStatus(aclrtEvent handle, aclrtEventWaitStatus *status) {
    *status = 0; /* nobody waits any more */
    return check_event(handle);
}

static aclError check_recorded(aclrtEvent handle) {
    aclError error = check_event(handle);
    if (error) return error;
    if (!((Event *)handle)->timed) return vnpu_error(VNPU_NO_TIMESTAMP, "the event was made without enable_timing=True, "
                                                     "so it has no time");
    if (!((Event *)handle)->recorded) return vnpu_error(VNPU_NO_TIMESTAMP, "the event was not recorded, so it has no time");
    return VNPU_OK;
}

aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent start, aclrtEvent end) {
    aclError error = check_recorded(start);
    if (!error) error = check_recorded(end);
    if (error) return error;
    *milliseconds = (float)((double)((int64_t)(((Event *)end)->time - ((Event *)start)->time)) * 1e-6);
    return VNPU_OK;
}

aclError aclrtEventGetTimestamp(aclrtEvent handle, uint64_t *microseconds) {
    aclError error = check_recorded(handle);
    if (!error) *microseconds = ((Event *)handle)->time / 1000;
    return error;
}

/* ---- host callbacks: run at once, in the caller's thread; nothing is left for the report threads ---- */

aclError aclrtLaunchCallback(aclrtCallback callback, void *user_data, aclrtCallbackBlockType block, aclrtStream stream) {
    aclError error = check_stream(stream);
    if (!error) callback(user_data);
    return error;
}
aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc callback, void *user_data) {
    return aclrtLaunchCallback((aclrtCallback)callback, user_data, 0, stream);
}
aclError aclrtSubscribeReport(uint64_t thread, aclrtStream stream) { return check_stream(stream); }
aclError aclrtUnSubscribeReport(uint64_t thread, aclrtStream stream) { return check_stream(stream); }
aclError aclrtProcessReport(int32_t milliseconds) {
    struct timespec pause = {milliseconds / 1000, (long)(milliseconds % 1000) * 1000000};
    if (milliseconds > 0) nanosleep(&pause, NULL);
    return VNPU_CALLBACK_TIMEOUT;
}
