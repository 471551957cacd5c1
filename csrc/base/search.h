/* search: binary search in sorted arrays of structs. */
#ifndef FAN_BASE_SEARCH_H
#define FAN_BASE_SEARCH_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* fan_search_end: the structs at `all` (n of `size` bytes) are sorted by the number at offset `hi`,
 * such as the end of a range. Returns the index of the first whose number exceeds `at`, or n. */
static inline size_t fan_search_end(const void *all, size_t n, size_t size, size_t hi, uint64_t at)
{
    size_t first = 0;
    size_t last = n;
    while (first < last) {
        size_t mid = first + (last - first) / 2;
        uint64_t end;
        memcpy(&end, (const char *)all + mid * size + hi, sizeof end);
        if (end > at)
            last = mid;
        else
            first = mid + 1;
    }
    return first;
}

#endif
