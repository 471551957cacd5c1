/* capture_rule: may these two streams meet under capture? (rule S7, docs/rules.md)
 *
 * The question, wherever stream s is to wait for stream t, or for an event of t: in which capture into a graph is each?
 *
 *   s in        t in                   then
 *   none        none                   go
 *   capture x   x                      go
 *   none        capture x              redirect: t stands in for s, where s may be replaced
 *                                      error: s is the legacy default stream, which cannot be captured
 *                                      else go: s joins the capture, a legal fork
 *   capture x   none, or another one   error
 *
 * A worked case. The caller captures stream 7 and adds a gradient made there to a buffer that was made outside, on the
 * legacy default stream: s is none, t is 7's capture. With redirection on and the slot empty, 7 consumes in the legacy
 * stream's place; with it off, the wait is refused before the driver hears of it, and the capture stays valid.
 *
 * What can go wrong: an event that was recorded in a capture which has ended, while its stream is in none or in another
 * one. So t's capture is the event's, where there is an event; and s is replaced only by a stream that still is there.
 *
 * A pure function of its arguments: no device call, no lock. Who asks for the numbers (fan_stream_capture) does.
 */
#ifndef FAN_DEVICE_CAPTURE_RULE_H
#define FAN_DEVICE_CAPTURE_RULE_H

#include <stdbool.h>
#include <stdint.h>

typedef enum fan_capture_answer { FAN_CAPTURE_GO, FAN_CAPTURE_REDIRECT, FAN_CAPTURE_ERROR } fan_capture_answer;

/* fan_capture_rule: S7, at a wait of stream s on stream t. `s_capture`, `t_capture`: number of the capture each is in,
 * 0: none. s_free: s may be replaced: redirection is on, and the slot is empty or s is only the consumer. s_legacy: s
 * is the legacy default stream. */
fan_capture_answer fan_capture_rule(uint64_t s_capture, uint64_t t_capture, bool s_free, bool s_legacy);

#endif
