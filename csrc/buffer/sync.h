/* sync: which stream waits for which? (rules S, docs/rules.md)
 *
 * The question, for one gradient g on device D from producer stream P for consumer stream C: on
 * which stream A is the sum taken, when may it start, and where is it ready (R)?
 *
 *   case                   condition            A              event on P   R
 *   'A' FAN_CASE_SAME      C on D, C == P       C              no           P           S8
 *   'a' FAN_CASE_OTHER     C on D, C != P       C              yes          P           S9, g on C
 *   'B' FAN_CASE_PRODUCER  C not on D, P on D   P              yes          P           S10
 *   'C' FAN_CASE_CURRENT   neither on D         current of D   yes          P           S11
 *   '+' FAN_CASE_LATER     A is set             as it was      if A != P    as it was
 *   '-' FAN_CASE_HOST      D has no streams     none           no           none        S3
 *
 * A worked case. Two producers p1, p2, consumer c, one device:
 *
 *   p1  ==g1==*e1                      S9   record e1; A = c; R = p1; no wait yet
 *   p2      ==g2==*e2                  '+'  record e2
 *   c              ^e1 ^e2 [g1 + g2]   S13  c waits e1; S12: and e2; the sum runs on c;
 *                                      S16, S17: R = c, no event
 *
 * What can go wrong: a wait on the wrong event (S15: the event of the sum replaces the first
 * producer's), a stream of another device taken for the same one because indexes match (ids carry
 * the device), memory that goes back while a stream still reads it (the marks). S7 is
 * device/capture_rule.h's.
 *
 * Everything here is a pure function of its arguments: no allocation, no device call, no lock.
 * Plans are what to do; order.c does it. Each wait, record and mark is a plan bit, so that a proof
 * can leave it out and find what it is for. */
#ifndef FAN_BUFFER_SYNC_H
#define FAN_BUFFER_SYNC_H

#include "buffer/rules.h"
#include "base/fault.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A stream in the rules: two numbers that are never reused. device 0 is every device without
 * streams; stream 0: none. */
typedef struct fan_stream_id {
    uint64_t device;
    uint64_t stream;
} fan_stream_id;

static inline bool fan_stream_id_same(fan_stream_id a, fan_stream_id b)
{
    if (FAN_FAULT(STREAMS_BY_DEVICE))
        return a.device == b.device || a.stream == b.stream;
    return (a.device == b.device || FAN_FAULT(STREAMS_BY_NUMBER)) && a.stream == b.stream;
}
static inline bool fan_stream_id_set(fan_stream_id a)
{
    return a.stream != 0;
}

/* X(NAME, word): the plan bits. A left-out record leaves an event that was never recorded, and
 * waiting for that does nothing. */
#define FAN_PLAN_LIST(X)        \
    X(S9_RECORD, "S9.record")   \
    X(S9_MARK, "S9.mark")       \
    X(S10_RECORD, "S10.record") \
    X(S11_RECORD, "S11.record") \
    X(S12_RECORD, "S12.record") \
    X(S12_WAIT, "S12.wait")     \
    X(S12_MARK, "S12.mark")     \
    X(S13_WAIT, "S13.wait")     \
    X(S13_MARK, "S13.mark")     \
    X(S15_RECORD, "S15.record") \
    X(S18_RECORD, "S18.record") \
    X(S18_WAIT, "S18.wait")     \
    X(S19_MARK, "S19.mark")     \
    X(S20_WAIT, "S20.wait")     \
    X(S20_MARK, "S20.mark")     \
    X(S21_WAIT, "S21.wait")     \
    X(S21_MARK, "S21.mark")     \
    X(S21_RECORD, "S21.record") \
    X(S22_WAIT, "S22.wait")     \
    X(S22_MARK, "S22.mark")     \
    X(S22_RECORD, "S22.record")

enum {
#define X(NAME, word) FAN_PLAN_INDEX_##NAME,
    FAN_PLAN_LIST(X)
#undef X
    FAN_PLAN_COUNT
};

enum {
#define X(NAME, word) FAN_PLAN_##NAME = 1u << FAN_PLAN_INDEX_##NAME,
    FAN_PLAN_LIST(X)
#undef X
};

/* fan_plan_bits: the bits that `word` names: "S12" (all of the rule), "S12.wait"; 0 where there is
 * none. */
uint64_t fan_plan_bits(const char *word);
const char *fan_plan_word(int index);

/* The state of a slot's streams. All zero: no gradient yet. */
typedef struct fan_sync_slot {
    fan_stream_id consumer;
    fan_stream_id accum;
    fan_stream_id ready;
    bool has_event; /* E: recorded where the value became ready */
} fan_sync_slot;

/* Zero: a device without streams, or a slot that has no gradient yet. */
typedef enum fan_sync_case {
    FAN_CASE_HOST,
    FAN_CASE_SAME,
    FAN_CASE_OTHER,
    FAN_CASE_PRODUCER,
    FAN_CASE_CURRENT,
    FAN_CASE_LATER
} fan_sync_case;

/* fan_sync_letter: the letter of the case in traces and messages. */
char fan_sync_letter(fan_sync_case stream_case);

typedef struct fan_sync_add {
    fan_sync_case stream_case;
    fan_stream_id producer; /* after S4 */
    fan_sync_slot slot;     /* after the add (unchanged for '+') */
    /* an event on P: the slot's E for a first gradient, the contribution's own for a later one */
    bool record;
    bool mark; /* g is used on A from now on (S9) */
    uint64_t rules;
} fan_sync_add;

/* fan_sync_add_plan: S3-S5, S8-S11. D is the array's device, P and C may be unset, `current` is D's
 * current stream (unset if D has none). C is the consumer's stream as the buffer was given it;
 * where the slot has fixed one already, the slot's counts. */
fan_sync_add fan_sync_add_plan(uint64_t D, fan_stream_id P, fan_stream_id C, fan_stream_id current,
                               fan_sync_slot slot);

typedef struct fan_sync_convert {
    /* true: on P, before its event. false: on A, after A waited for P; then it is ready on A. */
    bool on_producer;
    uint64_t rules;
} fan_sync_convert;

/* fan_sync_convert_plan: S21. */
fan_sync_convert fan_sync_convert_plan(uint64_t D, const fan_sync_add *add);

typedef struct fan_sync_term {
    uint64_t wait; /* the plan bit by which A waits for its event; 0: it does not */
    /* .. and by which it is used on A. Also where P is A: its memory may belong to a third stream
     * (Lifetime). */
    uint64_t mark;
    uint64_t rules;
} fan_sync_term;

/* fan_sync_term_plan: S12, S13: one term of a fold that runs on A. first: the slot's value, or what
 * was its first gradient. covered: a newer event of the same stream, of another term, comes after
 * this term's: waiting for that one is enough. */
fan_sync_term fan_sync_term_plan(fan_stream_id accum, fan_stream_id producer, bool first,
                                 bool covered);

typedef struct fan_sync_fold {
    bool wait_taker; /* A waits for the taker's stream, because `out` is the taker's */
    bool mark_out;   /* .. and `out` is used on A */
    /* after: R = A (S17); an event on A that others may wait for, or none (S15, S16) */
    fan_sync_slot slot;
    uint64_t rules;
} fan_sync_fold;

/* fan_sync_fold_plan: S3, S14-S17, for a sum that stays in the slot. */
fan_sync_fold fan_sync_fold_plan(fan_sync_slot slot);

/* fan_sync_finish_plan: S3, S22, for a sum that is handed out. `taker`: the stream that will use
 * it; unset: it is not known. */
fan_sync_fold fan_sync_finish_plan(fan_sync_slot slot, bool has_out, fan_stream_id taker);

typedef struct fan_sync_take {
    bool wait;       /* S18 */
    bool record_now; /* S18: no event yet: record one on R first */
    bool mark;       /* S19 */
    uint64_t rules;
} fan_sync_take;

/* fan_sync_take_plan: S18, S19, for a defined value; `consumer` unset: no wait. */
fan_sync_take fan_sync_take_plan(fan_sync_slot slot, fan_stream_id consumer);

#endif
