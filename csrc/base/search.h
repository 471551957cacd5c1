/* search: binary search in sorted arrays of structs, and a sort of them by digits. */
#ifndef FAN_BASE_SEARCH_H
#define FAN_BASE_SEARCH_H

#include "base/status.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* fan_number_of: returns the number at offset `at` of a struct. */
static inline uint64_t fan_number_of(const void *one, size_t at)
{
    uint64_t number;
    memcpy(&number, (const char *)one + at, sizeof number);
    return number;
}

/* fan_search_end: the structs at `all` (n of `size` bytes) are sorted by the number at offset `hi`,
 * such as the end of a range. Returns the index of the first whose number exceeds `at`, or n. */
static inline size_t fan_search_end(const void *all, size_t n, size_t size, size_t hi, uint64_t at)
{
    size_t first = 0;
    size_t last = n;
    while (first < last) {
        size_t mid = first + (last - first) / 2;
        if (fan_number_of((const char *)all + mid * size, hi) > at)
            last = mid;
        else
            first = mid + 1;
    }
    return first;
}

/* fan_sort_digits: sorts n < 2^32 structs of `size` bytes by the number at offset `at`, stably,
 * over as many digits as they differ in: addresses of one heap differ in few. `room` has room for
 * all. Inline, so that `size` is a constant of each caller. */
static inline __attribute__((always_inline)) void fan_sort_digits(void *all, void *room, size_t n,
                                                                  size_t size, size_t at)
{
    enum {
        MOST_BITS = 11
    };
    char *from = all;
    char *to = room;
    uint64_t least = UINT64_MAX;
    uint64_t most = 0;
    int bits = MOST_BITS;
    if (n < (size_t)1 << MOST_BITS)
        bits = 8;
    const size_t digits = (size_t)1 << bits;
    for (size_t i = 0; i < n; i++) {
        uint64_t number = fan_number_of(from + i * size, at);
        if (number < least)
            least = number;
        if (number > most)
            most = number;
    }
    for (int shift = 0; n > 1 && shift < 64 && (most - least) >> shift; shift += bits) {
        FAN_UNINITIALIZED uint32_t ends[(1 << MOST_BITS) + 1];
        memset(ends, 0, (digits + 1) * sizeof *ends);
        for (size_t i = 0; i < n; i++) {
            uint64_t number = fan_number_of(from + i * size, at) - least;
            ends[(number >> shift & (digits - 1)) + 1]++;
        }
        for (size_t i = 0; i < digits; i++)
            ends[i + 1] += ends[i];
        for (size_t i = 0; i < n; i++) {
            uint64_t number = fan_number_of(from + i * size, at) - least;
            size_t place = ends[number >> shift & (digits - 1)]++;
            memcpy(to + place * size, from + i * size, size);
        }
        char *swap = from;
        from = to;
        to = swap;
    }
    if (from != (char *)all)
        memcpy(all, from, n * size);
}

#endif
