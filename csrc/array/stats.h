/* stats: the statistics of a sum beside its value: norm, largest element, non-finite elements and
 * the operand that caused them.
 *
 * The squares are added in float64 in an order that depends on the number of elements alone, not on
 * instruction set, threads or tiles. An array is cut into pieces (fan_stats_piece); in a piece the
 * number at position i goes to lane i % FAN_STATS_LANES. After each FAN_STATS_BLOCK numbers the
 * lanes are added to totals, one for each lane, which keep what each addition loses to rounding; so
 * do the sum of a piece's totals and that of the pieces. A lane adds few numbers one after the
 * other, so the sum of many equal squares is right to the last places, too.
 *
 * Title: The scale of squares. Squares leave float64 where their roots do not: 1e200 and 1e-200 are
 * numbers, their squares are inf and 0. So squares are added of the elements times a power of two,
 * which the largest element chooses (fan_stats_scale_of): none, or one that brings large or small
 * elements near 1. What still underflows is too small to change the sum. The host first adds the
 * squares as they are, and reads the result once more if its largest element asks for a scale; a
 * device adds all three sums at once and keeps one. Only float64 and complex128 have such elements:
 * no finite number of another dtype is above 2^128 or, but for 0, below 2^-149. */
#ifndef FAN_ARRAY_STATS_H
#define FAN_ARRAY_STATS_H

#include <stddef.h>
#include <stdint.h>

typedef struct fan_stats {
    uint64_t count; /* elements */
    /* the sum of the squares of the finite elements, each times 2^-scale; |z|^2 for complex */
    double squares;
    /* what the additions of `squares` have lost; 0 in a result, which has it in `squares` */
    double rest;
    int scale;          /* see The scale of squares; mostly 0 */
    double absmax;      /* the largest |element| of the finite ones; 0 if there is none */
    uint64_t nonfinite; /* elements that are inf or NaN (complex: in either part) */
    size_t bad;         /* the first operand with a non-finite element; SIZE_MAX: none */
} fan_stats;

/* ---- for loops that add ---- */

#define FAN_STATS_LANES 16u
#define FAN_STATS_BLOCK 512u /* numbers: a multiple of what a loop counts in one step */
#define FAN_STATS_PIECES 256u

/* fan_stats_piece: the elements of a piece: at least 2^15 (fewer are not worth waking a thread), a
 * multiple of 2^12. */
static inline int64_t fan_stats_piece(int64_t size)
{
    const int64_t least = (int64_t)1 << 15;
    const int64_t unit = (int64_t)1 << 12;
    int64_t piece = (size / FAN_STATS_PIECES + unit) & -unit;
    if (piece > least)
        return piece;
    return least;
}

/* An unfinished piece. */
typedef struct fan_stats_run {
    double lane[FAN_STATS_LANES]; /* of the block that is being counted */
    /* of the blocks before; what the additions have lost */
    double total[FAN_STATS_LANES], rest[FAN_STATS_LANES];
    /* the largest |x| of the finite elements */
    double top;
    /* counted so far: 2 for each complex element */
    uint64_t numbers;
    uint64_t nonfinite; /* elements */
} fan_stats_run;

/* fan_sum_and_rest: *sum += x; what the addition loses to rounding is added to *rest. */
static inline void fan_sum_and_rest(double *sum, double *rest, double x)
{
    double before = *sum;
    double after = before + x;
    double added = after - before;
    *rest += (before - (after - added)) + (x - added);
    *sum = after;
}

/* fan_stats_block_end: adds the lanes to the totals; the next block begins. */
static inline void fan_stats_block_end(fan_stats_run *r)
{
    for (size_t i = 0; i < FAN_STATS_LANES; i++) {
        fan_sum_and_rest(&r->total[i], &r->rest[i], r->lane[i]);
        r->lane[i] = 0;
    }
}

#endif
