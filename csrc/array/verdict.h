/* verdict: the answers about two arrays' bytes, and the effort that finding one may take. */
#ifndef FAN_ARRAY_VERDICT_H
#define FAN_ARRAY_VERDICT_H

#include <stdint.h>

/* X(NAME, kind, words): the verdicts, with the reason for an unknown one. */
#define FAN_VERDICT_LIST(X)                                     \
    X(DISJOINT, "disjoint", "no byte belongs to both")          \
    X(YES, "overlap", "one byte at least belongs to both")      \
    X(FAR, "unknown", "the strides reach farther than 61 bits") \
    X(HARD, "unknown",                                          \
      "too hard: the search was given up and its table of sums does not fit the budget of memory and time")

typedef enum fan_verdict {
#define X(NAME, kind, words) FAN_OVERLAP_##NAME,
    FAN_VERDICT_LIST(X)
#undef X
} fan_verdict;

const char *fan_verdict_kind(fan_verdict v);  /* "disjoint", "overlap", "unknown" */
const char *fan_verdict_words(fan_verdict v); /* the reason, as a clause */

#define FAN_OVERLAP_BUDGET (UINT64_C(256) << 20)

/* The effort that one question, or all questions of one call, may take: bytes for a table, and work, in words of a
 * table that are united (half a nanosecond each). The work is proportional to the budget: about 50 ms for the default;
 * unlimited for UINT64_MAX. */
typedef struct fan_effort {
    uint64_t bytes;
    int64_t work; /* left */
} fan_effort;

fan_effort fan_effort_of(uint64_t budget);

#endif
