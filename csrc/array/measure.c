#include "array/measure.h"

#include "array/convert.h"
#include "array/nditer.h"
#include "array/sum_isa.h"
#include "base/interrupt.h"

#define TILE 4096
#define LONG_RUN ((int64_t)1 << 18) /* elements read in place between two polls for interrupts */

void fan_stats_of(const fan_array *a, fan_stats *s)
{
    FAN_UNCLEARED _Alignas(64) char tile[TILE];
    FAN_UNCLEARED fan_nditer w;
    const fan_loops *loops = fan_loops_of(a->dtype);
    int64_t piece = fan_stats_piece(a->size), most = TILE / (int64_t)fan_dtype_size(a->dtype);
    fan_stats_begin(s);
    fan_nditer_begin(&w, a, false);
    fan_nditer_ready(&w);
    for (int64_t at = 0, end; at < a->size; at = end) {
        fan_stats_run run;
        fan_stats one;
        end = a->size - at < piece ? a->size : at + piece;
        fan_stats_run_begin(&run);
        for (int64_t i = at, n; i < end; i += n) {
            n = end - i < LONG_RUN ? end - i : LONG_RUN;
            const char *p = fan_nditer_whole(&w, a, i, n);
            if (!p) {
                n = n < most ? n : most;
                fan_nditer_read(&w, a, i, n, a->dtype, tile);
                p = tile;
            }
            loops->measure(&run, p, (size_t)n);
            if (fan_interrupted(n))
                return;
        }
        fan_stats_run_end(&run, (uint64_t)(end - at), &one);
        if (one.nonfinite)
            one.bad = 0;
        fan_stats_merge(s, &one);
    }
}
