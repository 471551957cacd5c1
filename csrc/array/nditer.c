/* nditer: the walk: which axes are joined; reading and writing stretches of it; then what is made
 * of it: copies, zeroes and hashes. */
#include "array/nditer.h"

#include "array/convert.h"
#include "base/float_mode.h"
#include "base/interrupt.h"

#include <string.h>

/* nditer_steps_as_one: returns whether the end of axis `in` of `a` continues as the next step of
 * axis `out`. */
static bool nditer_steps_as_one(const fan_array *a, int out, int in)
{
    int64_t whole;
    return !__builtin_mul_overflow(a->shape[in], a->strides[in], &whole) &&
           whole == a->strides[out];
}

void fan_nditer_begin(fan_nditer *w, const fan_array *leader, bool in_order)
{
    w->ndim = 0;
    w->size = leader->size;
    for (int i = 0; i < leader->ndim; i++) {
        if (leader->shape[i] == 1)
            continue;
        int at = w->ndim++;
        if (!in_order) {
            int64_t step = fan_magnitude(leader->strides[i]);
            for (; at > 0 && fan_magnitude(leader->strides[w->axis[at - 1]]) < step; at--)
                w->axis[at] = w->axis[at - 1];
        }
        w->axis[at] = i;
    }
    w->joined = ~(uint64_t)0;
    fan_nditer_also(w, leader);
}

void fan_nditer_also(fan_nditer *w, const fan_array *a)
{
    for (int i = 0; i + 1 < w->ndim; i++) {
        if (!nditer_steps_as_one(a, w->axis[i], w->axis[i + 1]))
            w->joined &= ~((uint64_t)1 << i);
    }
    for (int i = 0; i < w->ndim; i++)
        w->extent[i] = a->shape[w->axis[i]];
}

void fan_nditer_ready(fan_nditer *w)
{
    int n = 0;
    for (int i = 0; i < w->ndim; i++) {
        int64_t extent = w->extent[i];
        if (i > 0 && (w->joined >> (i - 1) & 1u))
            extent *= w->extent[--n];
        w->extent[n] = extent;
        w->axis[n++] = w->axis[i];
    }
    w->ndim = n;
}

void fan_nditer_one(fan_nditer *w, const fan_array *a, bool in_order)
{
    fan_nditer_begin(w, a, in_order);
    fan_nditer_ready(w);
}

/* A position in the walk: an index for each axis, and the address of that element of one array. */
typedef struct place {
    int64_t index[FAN_MAX_NDIM];
    char *p;
} place;

static void nditer_seek(const fan_nditer *w, const fan_array *a, int64_t at, place *here)
{
    here->p = a->data;
    for (int i = w->ndim - 1; i >= 0; i--) {
        here->index[i] = i ? at % w->extent[i] : at;
        at /= w->extent[i];
        here->p += here->index[i] * a->strides[w->axis[i]];
    }
}

/* nditer_step: advances by n elements along the innermost axis, at most to its end; then to the
 * next row. */
static void nditer_step(const fan_nditer *w, const fan_array *a, int64_t n, place *here)
{
    int i = w->ndim - 1;
    here->index[i] += n;
    here->p += n * a->strides[w->axis[i]];
    for (; i > 0 && here->index[i] == w->extent[i]; i--) {
        here->p -= w->extent[i] * a->strides[w->axis[i]];
        here->index[i] = 0;
        here->index[i - 1]++;
        here->p += a->strides[w->axis[i - 1]];
    }
}

char *fan_nditer_whole(const fan_nditer *w, const fan_array *a, int64_t at, int64_t n)
{
    if (w->ndim == 0)
        return a->data;
    int last = w->ndim - 1;
    int64_t pitch = a->strides[w->axis[last]];
    if (n > 1 && pitch != fan_dtype_step(a->dtype))
        return NULL;
    if (last == 0)
        return a->data + at * pitch;
    if (at % w->extent[last] + n > w->extent[last])
        return NULL;
    FAN_UNINITIALIZED place here;
    nditer_seek(w, a, at, &here);
    return here.p;
}

static void nditer_carry(const fan_nditer *w, const fan_array *a, int64_t at, int64_t n,
                         fan_dtype d, char *buf, bool write)
{
    int64_t size = fan_dtype_step(d);
    if (n <= 0)
        return;
    if (w->ndim == 0) {
        if (write)
            fan_convert(a->data, a->dtype, 0, buf, d, 0, 1);
        else
            fan_convert(buf, d, 0, a->data, a->dtype, 0, 1);
        return;
    }
    int last = w->ndim - 1;
    int64_t pitch = a->strides[w->axis[last]];
    FAN_UNINITIALIZED place here;
    nditer_seek(w, a, at, &here);
    while (n) {
        int64_t m = fan_min(w->extent[last] - here.index[last], n);
        if (write)
            fan_convert(here.p, a->dtype, pitch, buf, d, size, m);
        else
            fan_convert(buf, d, size, here.p, a->dtype, pitch, m);
        buf += m * size;
        nditer_step(w, a, m, &here);
        n -= m;
    }
}

void fan_nditer_read(const fan_nditer *w, const fan_array *a, int64_t at, int64_t n, fan_dtype d,
                     char *buf)
{
    nditer_carry(w, a, at, n, d, buf, false);
}

void fan_nditer_write(const fan_nditer *w, const fan_array *a, int64_t at, int64_t n, fan_dtype d,
                      const char *buf)
{
    nditer_carry(w, a, at, n, d, (char *)(uintptr_t)buf, true);
}

const char *fan_nditer_elements(const fan_nditer *w, const fan_array *a, int64_t at, int64_t n,
                                fan_dtype d, char *buf)
{
    const char *whole = NULL;
    if (a->dtype == d)
        whole = fan_nditer_whole(w, a, at, n);
    if (whole)
        return whole;
    fan_nditer_read(w, a, at, n, d, buf);
    return buf;
}

#define PIECE 4096 /* bytes on the stack; a multiple of every item size */

void fan_array_copy(const fan_array *dst, const fan_array *src)
{
    FAN_UNINITIALIZED fan_nditer w;
    FAN_DEFAULT_FLOAT_MODE;
    fan_nditer_begin(&w, dst, false);
    fan_nditer_also(&w, src);
    fan_nditer_ready(&w);
    FAN_UNINITIALIZED _Alignas(16) char buf[PIECE];
    int64_t most = PIECE / fan_dtype_step(dst->dtype);
    int64_t row = 1;
    if (w.ndim)
        row = w.extent[w.ndim - 1];
    int64_t n;
    for (int64_t at = 0; at < w.size; at += n) {
        /* Long rows without gaps are converted in place, all at once if there is one row. */
        n = row - at % row;
        const char *from = NULL;
        if (n >= 64)
            from = fan_nditer_whole(&w, src, at, n);
        if (from) {
            fan_nditer_write(&w, dst, at, n, src->dtype, from);
            continue;
        }
        n = fan_min(most, w.size - at);
        char *to = fan_nditer_whole(&w, dst, at, n);
        if (to) {
            fan_nditer_read(&w, src, at, n, dst->dtype, to);
            continue;
        }
        fan_nditer_read(&w, src, at, n, dst->dtype, buf);
        fan_nditer_write(&w, dst, at, n, dst->dtype, buf);
    }
}

void fan_fill_zero(const fan_array *out)
{
    FAN_UNINITIALIZED fan_nditer w;
    FAN_UNINITIALIZED _Alignas(16) char piece[PIECE];
    int64_t size = fan_dtype_step(out->dtype);
    fan_nditer_one(&w, out, false);
    int64_t most = fan_min(PIECE / size, w.size);
    memset(piece, 0, (size_t)(most * size)); /* zero in every dtype */
    for (int64_t at = 0; at < w.size; at += most)
        fan_nditer_write(&w, out, at, fan_min(most, w.size - at), out->dtype, piece);
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
    FAN_UNINITIALIZED fan_nditer w;
    fan_nditer_one(&w, a, true);
    FAN_UNINITIALIZED _Alignas(16) char buf[PIECE];
    uint64_t h = (uint64_t)a->size;
    int64_t size = fan_dtype_step(a->dtype);
    int64_t most = PIECE / size;
    /* bool bytes are hashed unchanged, so that a change from 1 to 2 is detected */
    fan_array bytes = {.data = a->data, .dtype = a->dtype, .strides = a->strides};
    if (a->dtype == FAN_DT_BOOL)
        bytes.dtype = FAN_DT_UINT8;
    for (int64_t at = 0; at < w.size && !fan_interrupted(most); at += most) {
        int64_t n = fan_min(most, w.size - at);
        const char *p = fan_nditer_elements(&w, &bytes, at, n, bytes.dtype, buf);
        for (int64_t i = 0; i < n * size; i += 8) {
            uint64_t word = 0;
            memcpy(&word, p + i, (size_t)fan_min(n * size - i, 8));
            h = hash_mix(h ^ word) + 0x2545f4914f6cdd1du;
        }
    }
    return hash_mix(h);
}
