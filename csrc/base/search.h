/* search: where in a sorted list something stands. */
#ifndef FAN_BASE_SEARCH_H
#define FAN_BASE_SEARCH_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* fan_search_end: of n structs of `size` bytes at `all`, ranges in the order of their ends, each of which stands `hi`
 * bytes into its struct: the first that ends behind `at`; n: none does. */
static inline size_t fan_search_end(const void *all, size_t n, size_t size, size_t hi, uint64_t at)
{
    size_t first = 0, behind = n;
    while (first < behind) {
        size_t mid = first + (behind - first) / 2;
        uint64_t end;
        memcpy(&end, (const char *)all + mid * size + hi, sizeof end);
        if (end > at)
            behind = mid;
        else
            first = mid + 1;
    }
    return first;
}

#endif
