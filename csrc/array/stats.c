#include "array/stats.h"

#include <string.h>

/* Pieces have at least this many elements (less is not worth waking a thread), in a multiple of PIECE_UNIT. */
#define PIECE_LEAST ((int64_t)1 << 15)
#define PIECE_UNIT ((int64_t)1 << 12)

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
