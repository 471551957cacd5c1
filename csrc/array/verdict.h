/* verdict: what is said of two arrays' bytes, and what finding it out may cost. */
#ifndef FAN_ARRAY_VERDICT_H
#define FAN_ARRAY_VERDICT_H

#include <stdint.h>

/* X(NAME, kind, words): the verdicts, and why one could not tell. */
#define FAN_VERDICT_LIST(X)                                            \
    X(DISJOINT, "disjoint", "no byte belongs to both")                 \
    X(YES, "overlap", "one byte at least belongs to both")             \
    X(FAR, "unknown", "the strides reach farther than can be counted") \
    X(HARD, "unknown",                                                 \
      "too hard: the search was given up and its table of sums does not fit the budget of memory and time")

typedef enum fan_verdict {
#define X(NAME, kind, words) FAN_OVERLAP_##NAME,
    FAN_VERDICT_LIST(X)
#undef X
} fan_verdict;

const char *fan_verdict_kind(fan_verdict v);  /* "disjoint", "overlap", "unknown" */
const char *fan_verdict_words(fan_verdict v); /* a sentence's worth of why */

#define FAN_OVERLAP_BUDGET (UINT64_C(256) << 20)

/* What one question, or all questions of one call, may cost: bytes for a table, and work, in words of a table that are
 * united (half a nanosecond). The work that goes with a budget is in proportion to it: about 50 ms for the default, and
 * more for more; without end for UINT64_MAX. */
typedef struct fan_effort {
    uint64_t bytes;
    int64_t work; /* left */
} fan_effort;

fan_effort fan_effort_of(uint64_t budget);

#endif
