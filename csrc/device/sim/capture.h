/* capture: the rules for capturing streams into a graph, as a state machine on stream numbers
 * alone.
 *
 * A capture has members: the stream that it began on (0) and those that joined. Each member has a
 * clock over the members: the work that is ordered before its next work. An event of a capture is
 * such a clock. The codes are those of the CUDA driver; a violation breaks the capture, and a
 * broken one can only be ended.
 *
 *   | call | fails with |
 *   |---|---|
 *   | anything but the end of a broken capture | 901 |
 *   | a capture on a stream that is in one | 1, and nothing breaks |
 *   | a wait that would join two captures | 902, both break |
 *   | the end on another stream than the beginning | 903 |
 *   | the end while some member's work is not ordered before the first stream's next work | 904 |
 *   | a captured stream waits for work outside | 905 |
 *   | the legacy stream, beside a captured blocking stream or joining a capture | 906 |
 *   | the time of a captured event | 907 |
 *   | the end on another thread, unless relaxed | 908 |
 *   | synchronizing a captured stream or its device, an unsafe call | 900 | */
#ifndef FAN_DEVICE_SIM_CAPTURE_H
#define FAN_DEVICE_SIM_CAPTURE_H

#include "base/clock.h"
#include "base/status.h"

#include <stdbool.h>

typedef enum fan_capture_mode {
    FAN_CAPTURE_GLOBAL,
    FAN_CAPTURE_THREAD_LOCAL,
    FAN_CAPTURE_RELAXED
} fan_capture_mode;

enum {
    FAN_CAPTURE_VALUE = 1,
    FAN_CAPTURE_UNSUPPORTED = 900,
    FAN_CAPTURE_INVALIDATED = 901,
    FAN_CAPTURE_MERGE = 902,
    FAN_CAPTURE_UNMATCHED = 903,
    FAN_CAPTURE_UNJOINED = 904,
    FAN_CAPTURE_ISOLATION = 905,
    FAN_CAPTURE_IMPLICIT = 906,
    FAN_CAPTURE_EVENT = 907,
    FAN_CAPTURE_WRONG_THREAD = 908
};

typedef struct fan_capture_run {
    uint64_t id; /* never reused */
    fan_capture_mode mode;
    uint64_t thread; /* the thread that began it */
    bool broken;
    bool ended;
    uint32_t members;
    fan_clock *before; /* of each member: the work ordered before its next work */
    uint64_t *work;    /* of each member: pieces of work so far */
    size_t cap;
    size_t work_cap;
} fan_capture_run;

/* fan_capture_begin: begins it with its first member. FAN_ERR_NOMEM. */
fan_status fan_capture_begin(fan_capture_run *run, fan_capture_mode mode, uint64_t thread,
                             fan_error *err);
void fan_capture_fini(fan_capture_run *run);
/* fan_capture_work: notes work on a member. Returns 0 or a code, as do the next ones; -1: out of
 * memory, nothing changed. */
int fan_capture_work(fan_capture_run *run, uint32_t member);
/* fan_capture_record: records an event on a member. */
int fan_capture_record(fan_capture_run *run, uint32_t member, fan_clock *event);
/* fan_capture_wait: makes a member wait for an event of the capture. */
int fan_capture_wait(fan_capture_run *run, uint32_t member, const fan_clock *event);
/* fan_capture_pull: makes a stream from outside that waits for an event of c a member. */
int fan_capture_pull(fan_capture_run *run, const fan_clock *event, uint32_t *member);
/* fan_capture_break: breaks the capture after a violation elsewhere; returns `code`, or the code of
 * an earlier break. */
int fan_capture_break(fan_capture_run *run, int code);
/* fan_capture_end: ends it on a member's stream and a thread, with any code, except for 903 and
 * 908. */
int fan_capture_end(fan_capture_run *run, uint32_t member, uint64_t thread);
/* fan_capture_forbids: returns whether an unsafe call by `thread` in mode `mine` disturbs c. */
bool fan_capture_forbids(const fan_capture_run *run, uint64_t thread, fan_capture_mode mine);
/* fan_capture_words: returns the text of a code. */
const char *fan_capture_words(int code);

#endif
