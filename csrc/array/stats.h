/* stats: the statistics of a sum beside its value: norm, largest element, non-finite elements and the operand that
 * caused them.
 *
 * The squares are added in float64 in an order that depends on the number of elements alone, not on instruction set,
 * threads or tiles. An array is cut into pieces (fan_stats_piece); in a piece the number at position i goes to
 * lane i % FAN_STATS_LANES; lanes are added as a tree, pieces one after the other. */
#ifndef FAN_ARRAY_STATS_H
#define FAN_ARRAY_STATS_H

#include <stddef.h>
#include <stdint.h>

typedef struct fan_stats {
    uint64_t count;     /* elements */
    double sumsq;       /* sum of the squares of the finite elements, |z|^2 for complex; inf if it exceeds float64 */
    double absmax;      /* the largest |element| of the finite ones; 0 if there is none */
    uint64_t nonfinite; /* elements that are inf or NaN (complex: in either part) */
    size_t bad;         /* the first operand with a non-finite element; SIZE_MAX: none */
} fan_stats;

/* ---- for loops that add ---- */

#define FAN_STATS_LANES 16u
#define FAN_STATS_PIECES 256u

/* fan_stats_piece: the elements of a piece: at least 2^15 (fewer are not worth waking a thread), a multiple of 2^12. */
static inline int64_t fan_stats_piece(int64_t size)
{
    const int64_t least = (int64_t)1 << 15, unit = (int64_t)1 << 12;
    int64_t piece = (size / FAN_STATS_PIECES + unit) & -unit;
    return piece > least ? piece : least;
}

/* An unfinished piece. */
typedef struct fan_stats_run {
    double lane[FAN_STATS_LANES];
    double top;         /* the largest |x| of the finite elements */
    uint64_t numbers;   /* counted so far: 2 for each complex element */
    uint64_t nonfinite; /* elements */
} fan_stats_run;

#endif
