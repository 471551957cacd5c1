/* device_stats: the statistics that a device writes for the host to read later. C and CUDA C.
 *
 * The memory holds one fan_device_stats, followed by rows: each block of threads fills one, and the
 * rows are added in order. The number of rows depends on the number of elements alone, so the order
 * in which squares are added does, too. */
#ifndef FAN_ARRAY_DEVICE_STATS_H
#define FAN_ARRAY_DEVICE_STATS_H

#include "array/lowp.h"

#ifndef __CUDACC__
#include <math.h>
#endif

/* The fields of fan_stats for a result, and the contribution that first had an inf or a NaN. */
typedef struct fan_device_stats {
    uint64_t count;
    double squares, absmax;
    int64_t scale;
    uint64_t nonfinite;
    uint64_t bad; /* 1: some contribution had an inf or a NaN */
    int64_t key;  /* .. the key of the first of them */
} fan_device_stats;

typedef struct fan_stats_partial {
    /* of the scales 0, FAN_STATS_SCALE and -FAN_STATS_SCALE */
    double squares, large_squares, small_squares;
    double absmax;
    uint64_t nonfinite;
    uint64_t bad; /* the first operand with an inf or a NaN; UINT64_MAX: none */
} fan_stats_partial;

#define FAN_STATS_WORDS 7 /* of 8 bytes each */
#define FAN_STATS_PARTIAL_WORDS 6
#define FAN_STATS_MOST_PARTIALS 1024
/* Per row, until there are FAN_STATS_MOST_PARTIALS rows */
#define FAN_STATS_PARTIAL_ELEMENTS 1024

/* fan_stats_partials: returns the largest number of rows for `size` elements. */
FAN_LOW int64_t fan_stats_partials(int64_t size)
{
    int64_t rows = size / FAN_STATS_PARTIAL_ELEMENTS + (size % FAN_STATS_PARTIAL_ELEMENTS != 0);
    return rows < FAN_STATS_MOST_PARTIALS ? rows : FAN_STATS_MOST_PARTIALS;
}

/* The scale of squares (array/stats.h): FAN_STATS_SCALE if the largest element is above
 * FAN_STATS_LARGE, its negative if it is below FAN_STATS_SMALL and not 0, else 0. */
#define FAN_STATS_SCALE 600
#define FAN_STATS_SHRINK 0x1p-600 /* 2^-FAN_STATS_SCALE */
#define FAN_STATS_GROW 0x1p600    /* 2^FAN_STATS_SCALE */
#define FAN_STATS_LARGE 0x1p400
#define FAN_STATS_SMALL 0x1p-400

/* fan_stats_scale_of: returns the scale for elements up to `absmax`; inf: complex ones beyond
 * float64. */
FAN_LOW int fan_stats_scale_of(double absmax)
{
    if (absmax > FAN_STATS_LARGE)
        return FAN_STATS_SCALE;
    if (absmax > 0 && absmax < FAN_STATS_SMALL)
        return -FAN_STATS_SCALE;
    return 0;
}

/* fan_complex_abs: returns |z| of finite parts; inf if it exceeds float64. If the square leaves
 * float64's range, both parts are scaled by a power of two. One formula for the host and every
 * device. */
FAN_LOW double fan_complex_abs(double re, double im)
{
    double square = re * re + im * im;
    if (square > 1e-280 && square < 1e280)
        return sqrt(square);
    double there = square < 1 ? 0x1p600 : 0x1p-600;
    double back = square < 1 ? 0x1p-600 : 0x1p600;
    re *= there;
    im *= there;
    return sqrt(re * re + im * im) * back;
}

#endif
