/* capture_rule: may these two streams be ordered under capture? (rule S7, docs/rules.md)
 *
 * The question arises whenever stream s is to wait for stream t, or for an event of t: in which
 * capture into a graph is each?
 *
 *   s in        t in                   then
 *   none        none                   go
 *   capture x   x                      go
 *   none        capture x              redirect: t replaces s, if s may be replaced
 *                                      error: s is the legacy default stream,
 *                                      which cannot be captured
 *                                      else go: s joins the capture, a legal fork
 *   capture x   none, or another one   error
 *
 * A worked case. The caller captures stream 7 and adds a gradient made there to a buffer that was
 * made outside, on the legacy default stream: s is in none, t in 7's capture. With redirection on
 * and the slot empty, 7 consumes in place of the legacy stream; with it off, the wait is refused
 * before the driver is called, and the capture stays valid.
 *
 * Pitfalls: an event may have been recorded in a capture that has ended, while its stream is in
 * none or in another one. So t's capture is that of the event, if there is an event; and s is
 * replaced only by a stream that still exists.
 *
 * A pure function: no device call, no lock. The caller gets the numbers by fan_stream_capture. */
#ifndef FAN_DEVICE_CAPTURE_RULE_H
#define FAN_DEVICE_CAPTURE_RULE_H

#include <stdbool.h>
#include <stdint.h>

typedef enum fan_capture_answer {
    FAN_CAPTURE_GO,
    FAN_CAPTURE_REDIRECT,
    FAN_CAPTURE_ERROR
} fan_capture_answer;

/* fan_capture_rule: decides S7 for a wait of stream s on stream t. `s_capture`, `t_capture`: the
 * number of each one's capture, 0: none. s_free: s may be replaced: redirection is on, and the slot
 * is empty or s is only the consumer. s_legacy: s is the legacy default stream. */
fan_capture_answer fan_capture_rule(uint64_t s_capture, uint64_t t_capture, bool s_free,
                                    bool s_legacy);

#endif
