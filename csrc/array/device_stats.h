/* device_stats: statistics as a device writes them down, for the host to read later. C, and CUDA C.
 *
 * The memory has one fan_device_stats and, behind it, rows, of which each block of threads fills one before they are
 * added up in order. How many there are depends on the number of elements alone, and with it the order in which squares
 * are added.
 */
#ifndef FAN_ARRAY_DEVICE_STATS_H
#define FAN_ARRAY_DEVICE_STATS_H

#include "array/lowp.h"

/* What fan_stats says of a result, and who spoiled it. */
typedef struct fan_device_stats {
    uint64_t count;
    double sumsq, absmax;
    uint64_t nonfinite;
    uint64_t bad; /* 1: some contribution had an inf or a NaN: */
    int64_t key;  /* .. the first of them */
} fan_device_stats;

typedef struct fan_stats_partial {
    double sumsq, absmax;
    uint64_t nonfinite;
    uint64_t bad; /* the first operand with an inf or a NaN; UINT64_MAX: none */
} fan_stats_partial;

#define FAN_STATS_WORDS 6 /* of 8 bytes each */
#define FAN_STATS_PARTIAL_WORDS 4
#define FAN_STATS_MOST_PARTIALS 1024
#define FAN_STATS_PARTIAL_ELEMENTS 1024 /* of a row, until there are the most rows */

/* fan_stats_partials: how many rows the statistics of so many elements have at most. */
FAN_LOW int64_t fan_stats_partials(int64_t size)
{
    int64_t rows = size / FAN_STATS_PARTIAL_ELEMENTS + (size % FAN_STATS_PARTIAL_ELEMENTS != 0);
    return rows < FAN_STATS_MOST_PARTIALS ? rows : FAN_STATS_MOST_PARTIALS;
}

#endif
