/* windows: the sum of some arrays in a window, by way of a random tree of windows and messages. */
#ifndef FAN_TESTS_WINDOWS_H
#define FAN_TESTS_WINDOWS_H

#include "array/window.h"
#include "check.h"
#include "oracle.h"

static int64_t forms_met[4], packed_bytes, packed_numbers;

/* window_sent: merges `part` into w by a message, which other bytes follow. */
static void window_sent(fan_window *w, const fan_window *part)
{
    size_t room = fan_window_room(part);
    size_t used = 0;
    size_t more = (size_t)random_below(9);
    char *bytes = malloc(room + more + 1);
    size_t size = fan_window_pack(part, bytes);
    CHECK(size <= room);
    CHECK_OK(fan_window_merge_packed(w, bytes, size + more, &used, NULL));
    CHECK_INT(used, size);
    packed_bytes += (int64_t)size;
    packed_numbers += fan_window_size(part);
    free(bytes);
}

static fan_window *window_of(fan_array *const *in, size_t n, fan_dtype d, int64_t size)
{
    fan_window *w = fan_window_new(d, size);
    int64_t count[4];
    if (n < 3 || one_in(3)) {
        size_t some;
        for (size_t k = 0; k < n; k += some) {
            some = 1 + (size_t)random_below((int64_t)(n - k));
            CHECK_OK(fan_window_add(w, (const fan_array *const *)in + k, some, NULL));
        }
    } else {
        size_t middle = 1 + (size_t)random_below((int64_t)n - 1);
        const size_t ends[] = {0, middle, n};
        for (int half = 0; half < 2; half++) {
            size_t from = ends[half];
            fan_window *part = window_of(in + from, ends[half + 1] - from, d, size);
            if (random_below(2))
                CHECK_OK(fan_window_merge(w, part, NULL));
            else
                window_sent(w, part);
            fan_window_free(part);
        }
    }
    fan_window_forms(w, count);
    for (int k = 0; k < 4; k++)
        forms_met[k] += count[k];
    return w;
}

/* windows_met: whether there were blocks of each form, and messages. */
static bool windows_met(void)
{
    printf("windows: %lld blocks empty, %lld of 64 bits, %lld of 128, %lld of superaccumulators; "
           "%lld elements sent in "
           "%lld bytes\n",
           (long long)forms_met[0], (long long)forms_met[1], (long long)forms_met[2],
           (long long)forms_met[3], (long long)packed_numbers, (long long)packed_bytes);
    for (int k = 1; k < 4; k++) {
        if (forms_met[k] == 0)
            return false;
    }
    return packed_bytes != 0;
}

#endif
