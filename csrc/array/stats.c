#include "array/stats.h"

#include "array/convert.h"
#include "array/sum_loops.h"
#include "array/nditer.h"
#include "base/interrupt.h"

#include <string.h>

/* Pieces are no shorter (a thread should be worth waking), and a multiple of this. */
#define PIECE_LEAST ((int64_t)1 << 15)
#define PIECE_UNIT ((int64_t)1 << 12)
#define TILE 4096
#define LONG_RUN ((int64_t)1 << 18) /* elements that are read where they lie between two questions */

void fan_stats_begin(fan_stats *s) { *s = (fan_stats){.bad = SIZE_MAX}; }

void fan_stats_merge(fan_stats *into, const fan_stats *next)
{
    into->count += next->count;
    into->sumsq += next->sumsq;
    into->absmax = next->absmax > into->absmax ? next->absmax : into->absmax;
    into->nonfinite += next->nonfinite;
    into->bad = next->bad < into->bad ? next->bad : into->bad;
}

int64_t fan_stats_piece(int64_t size)
{
    int64_t piece = size / FAN_STATS_PIECES + 1;
    piece += PIECE_UNIT - 1;
    piece -= piece % PIECE_UNIT;
    return piece > PIECE_LEAST ? piece : PIECE_LEAST;
}

void fan_stats_run_begin(fan_stats_run *r) { memset(r, 0, sizeof *r); }

void fan_stats_run_end(const fan_stats_run *r, uint64_t count, fan_stats *s)
{
    double sum[FAN_STATS_LANES];
    memcpy(sum, r->lane, sizeof sum);
    for (unsigned half = FAN_STATS_LANES / 2; half; half /= 2)
        for (unsigned i = 0; i < half; i++)
            sum[i] += sum[i + half];
    *s = (fan_stats){.count = count, .sumsq = sum[0], .absmax = r->top, .nonfinite = r->nonfinite, .bad = SIZE_MAX};
}

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
