#include "array/verdict.h"

#define WORK 100000000 /* for the default budget: about 50 ms */

const char *fan_verdict_kind(fan_verdict v)
{
    static const char *const kinds[] = {
#define X(NAME, kind, words) kind,
        FAN_VERDICT_LIST(X)
#undef X
    };
    return kinds[v];
}

const char *fan_verdict_words(fan_verdict v)
{
    static const char *const words[] = {
#define X(NAME, kind, words) words,
        FAN_VERDICT_LIST(X)
#undef X
    };
    return words[v];
}

fan_effort fan_effort_of(uint64_t budget)
{
    uint64_t times = budget / FAN_OVERLAP_BUDGET;
    int64_t work;
    if (budget == UINT64_MAX || __builtin_mul_overflow((int64_t)(times ? times : 1), (int64_t)WORK, &work))
        work = INT64_MAX;
    return (fan_effort){budget, work};
}
