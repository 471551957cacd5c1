/* The rules of a capture in progress (capture.h): its members, what each has before it, and what
 * breaks it. */
#include "device/sim/capture.h"

#include "base/mem.h"

#include <stdatomic.h>
#include <string.h>

static atomic_uint_fast64_t last_capture;

static int add_member(fan_capture_run *run)
{
    if (fan_grow((void **)&run->before, &run->cap, (size_t)run->members + 1, sizeof *run->before))
        return -1;
    if (fan_grow((void **)&run->work, &run->work_cap, (size_t)run->members + 1, sizeof *run->work))
        return -1;
    fan_clock_init(&run->before[run->members]);
    run->work[run->members++] = 0;
    return 0;
}

fan_status fan_capture_begin(fan_capture_run *run, fan_capture_mode mode, uint64_t thread,
                             fan_error *err)
{
    memset(run, 0, sizeof *run);
    run->id = atomic_fetch_add(&last_capture, 1) + 1;
    run->mode = mode;
    run->thread = thread;
    if (add_member(run))
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a capture");
    return FAN_OK;
}

void fan_capture_fini(fan_capture_run *run)
{
    for (uint32_t i = 0; i < run->members; i++)
        fan_clock_fini(&run->before[i]);
    fan_free(run->before);
    fan_free(run->work);
    memset(run, 0, sizeof *run);
}

int fan_capture_work(fan_capture_run *run, uint32_t member)
{
    if (run->broken)
        return FAN_CAPTURE_INVALIDATED;
    if (fan_clock_set(&run->before[member], member, run->work[member] + 1))
        return -1;
    run->work[member]++;
    return 0;
}

int fan_capture_record(fan_capture_run *run, uint32_t member, fan_clock *event)
{
    if (run->broken)
        return FAN_CAPTURE_INVALIDATED;
    return fan_clock_copy(event, &run->before[member]) ? -1 : 0;
}

int fan_capture_wait(fan_capture_run *run, uint32_t member, const fan_clock *event)
{
    if (run->broken)
        return FAN_CAPTURE_INVALIDATED;
    return fan_clock_join(&run->before[member], event) ? -1 : 0;
}

int fan_capture_pull(fan_capture_run *run, const fan_clock *event, uint32_t *member)
{
    if (run->broken)
        return FAN_CAPTURE_INVALIDATED;
    if (add_member(run))
        return -1;
    *member = run->members - 1;
    if (fan_clock_copy(&run->before[*member], event) == 0)
        return 0;
    run->members--;
    return -1;
}

int fan_capture_break(fan_capture_run *run, int code)
{
    bool before = run->broken && !run->ended;
    run->broken = true;
    return before ? FAN_CAPTURE_INVALIDATED : code;
}

int fan_capture_end(fan_capture_run *run, uint32_t member, uint64_t thread)
{
    if (thread != run->thread && run->mode != FAN_CAPTURE_RELAXED)
        return FAN_CAPTURE_WRONG_THREAD;
    if (member != 0)
        return fan_capture_break(run, FAN_CAPTURE_UNMATCHED);
    run->ended = true;
    if (run->broken)
        return FAN_CAPTURE_INVALIDATED;
    for (uint32_t i = 1; i < run->members; i++) {
        if (fan_clock_get(&run->before[0], i) < run->work[i])
            return FAN_CAPTURE_UNJOINED;
    }
    return 0;
}

bool fan_capture_forbids(const fan_capture_run *run, uint64_t thread, fan_capture_mode mine)
{
    if (run->ended)
        return false;
    if (run->mode == FAN_CAPTURE_RELAXED)
        return false;
    if (mine == FAN_CAPTURE_RELAXED)
        return false;
    return run->thread == thread || (run->mode == FAN_CAPTURE_GLOBAL && mine == FAN_CAPTURE_GLOBAL);
}

const char *fan_capture_words(int code)
{
    switch (code) {
    case FAN_CAPTURE_VALUE:
        return "the stream is in the wrong state for this call";
    case FAN_CAPTURE_UNSUPPORTED:
        return "not permitted while a stream is captured";
    case FAN_CAPTURE_INVALIDATED:
        return "an earlier violation has broken this capture; end it and begin again";
    case FAN_CAPTURE_MERGE:
        return "two captures would become one";
    case FAN_CAPTURE_UNMATCHED:
        return "the capture did not begin on this stream";
    case FAN_CAPTURE_UNJOINED:
        return "a stream that was pulled into the capture was not joined back";
    case FAN_CAPTURE_ISOLATION:
        return "a captured stream would wait for work outside its capture";
    case FAN_CAPTURE_IMPLICIT:
        return "the legacy default stream would depend on a captured stream";
    case FAN_CAPTURE_EVENT:
        return "an event that was recorded on a captured stream has no time";
    case FAN_CAPTURE_WRONG_THREAD:
        return "another thread began this capture";
    default:
        return "not legal under capture";
    }
}
