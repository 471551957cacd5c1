#include "array/elements.h"

#include "array/convert.h"
#include "array/nditer.h"
#include "base/interrupt.h"

#include <string.h>

#define PIECE 4096 /* bytes on the stack; a multiple of every item size */

void fan_array_copy(const fan_array *dst, const fan_array *src)
{
    FAN_UNCLEARED fan_nditer w;
    fan_nditer_begin(&w, dst, false);
    fan_nditer_also(&w, src);
    fan_nditer_ready(&w);
    FAN_UNCLEARED _Alignas(16) char buf[PIECE];
    int64_t most = PIECE / (int64_t)fan_dtype_size(dst->dtype);
    for (int64_t at = 0, n; at < w.size; at += n) {
        /* Long rows without gaps are converted in place, all at once if there is one row. */
        n = w.ndim ? w.extent[w.ndim - 1] - at % w.extent[w.ndim - 1] : 1;
        const char *from = n >= 64 ? fan_nditer_whole(&w, src, at, n) : NULL;
        if (from) {
            fan_nditer_write(&w, dst, at, n, src->dtype, from);
            continue;
        }
        n = most < w.size - at ? most : w.size - at;
        char *to = fan_nditer_whole(&w, dst, at, n);
        fan_nditer_read(&w, src, at, n, dst->dtype, to ? to : buf);
        if (!to)
            fan_nditer_write(&w, dst, at, n, dst->dtype, buf);
    }
}

void fan_fill_zero(const fan_array *out)
{
    FAN_UNCLEARED fan_nditer w;
    FAN_UNCLEARED _Alignas(16) char piece[PIECE];
    int64_t size = (int64_t)fan_dtype_size(out->dtype), most = PIECE / size;
    fan_nditer_begin(&w, out, false);
    fan_nditer_ready(&w);
    memset(piece, 0, (size_t)((most < w.size ? most : w.size) * size)); /* zero in every dtype */
    for (int64_t at = 0, n; at < w.size; at += n) {
        n = w.size - at < most ? w.size - at : most;
        fan_nditer_write(&w, out, at, n, out->dtype, piece);
    }
}

/* hash_mix: spreads every bit of x over the word. */
static uint64_t hash_mix(uint64_t x)
{
    x ^= x >> 32;
    x *= 0x9fb21c651e98df25u; /* odd, about half of its bits set */
    x ^= x >> 29;
    return x;
}

uint64_t fan_array_hash(const fan_array *a)
{
    FAN_UNCLEARED fan_nditer w;
    fan_nditer_begin(&w, a, true);
    fan_nditer_ready(&w);
    FAN_UNCLEARED _Alignas(16) char buf[PIECE];
    uint64_t h = (uint64_t)a->size;
    int64_t size = (int64_t)fan_dtype_size(a->dtype), most = PIECE / size;
    /* bool bytes are hashed unchanged, so that a change from 1 to 2 is detected */
    fan_array bytes = {
        .data = a->data, .dtype = a->dtype == FAN_DT_BOOL ? FAN_DT_UINT8 : a->dtype, .strides = a->strides};
    for (int64_t at = 0, n; at < w.size && !fan_interrupted(most); at += n) {
        n = most < w.size - at ? most : w.size - at;
        const char *p = fan_nditer_whole(&w, &bytes, at, n);
        if (!p) {
            fan_nditer_read(&w, &bytes, at, n, bytes.dtype, buf);
            p = buf;
        }
        for (int64_t i = 0; i < n * size; i += 8) {
            uint64_t word = 0;
            memcpy(&word, p + i, n * size - i < 8 ? (size_t)(n * size - i) : 8);
            h = hash_mix(h ^ word) + 0x2545f4914f6cdd1du;
        }
    }
    return hash_mix(h);
}
