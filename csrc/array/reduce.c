#include "array/reduce.h"

#include "array/convert.h"
#include "array/elements.h"
#include "array/nditer.h"
#include "array/sum_isa.h"
#include "base/interrupt.h"

#include <string.h>

/* A part of the axes of an array, as an array of its own on the stack. */
typedef struct part {
    fan_array a;
    int64_t shape[FAN_MAX_NDIM], strides[FAN_MAX_NDIM];
    int64_t nearest; /* smallest |stride| */
} part;

static void part_begin(part *p, const fan_array *of)
{
    memset(&p->a, 0, sizeof p->a);
    p->a.data = of->data;
    p->a.dtype = of->dtype;
    p->a.size = 1;
    p->a.shape = p->shape;
    p->a.strides = p->strides;
    p->nearest = INT64_MAX;
}

static void part_axis(part *p, int64_t extent, int64_t stride)
{
    if (extent == 1) /* whose stride may be anything */
        return;
    int64_t near = stride < 0 ? -stride : stride;
    p->shape[p->a.ndim] = extent;
    p->strides[p->a.ndim++] = stride;
    p->a.size *= extent;
    p->nearest = near < p->nearest ? near : p->nearest;
}

fan_dtype fan_reduce_dtype(fan_dtype d)
{
    return fan_dtype_kind(d) == 'f' ? FAN_DT_FLOAT64 : fan_dtype_kind(d) == 'c' ? FAN_DT_COMPLEX128 : d;
}

#define REDUCE_TILE 256 /* elements of the result that grow side by side */

/* by_rows: a tile of the result grows by one row for each element of the reduced axes. */
static void by_rows(const fan_array *out, const part *kept, const part *gone, const fan_nditer *w)
{
    FAN_UNCLEARED _Alignas(64) char tile[REDUCE_TILE * 16], scratch[REDUCE_TILE * 16];
    fan_dtype acc = fan_reduce_dtype(kept->a.dtype);
    const fan_loops *loops = fan_loops_of(acc);
    for (int64_t at = 0, n; at < w->size; at += n) {
        n = w->size - at < REDUCE_TILE ? w->size - at : REDUCE_TILE;
        fan_array row = kept->a;
        int64_t index[FAN_MAX_NDIM] = {0};
        for (int64_t k = 0; k < gone->a.size; k++) {
            fan_nditer_read(w, &row, at, n, acc, k ? scratch : tile);
            if (k) {
                const char *src[] = {tile, scratch};
                loops->own(tile, src, 2, (size_t)n * loops->parts, NULL);
            }
            for (int i = gone->a.ndim - 1; i >= 0; i--) {
                row.data += gone->strides[i];
                if (++index[i] < gone->shape[i])
                    break;
                row.data -= gone->strides[i] * gone->shape[i];
                index[i] = 0;
            }
            if (fan_interrupted(n))
                return;
        }
        fan_nditer_write(w, out, at, n, acc, tile);
    }
}

/* by_elements: each element of the result is one run over the reduced axes. */
static void by_elements(const fan_array *out, const part *kept, const part *gone, const fan_nditer *w)
{
    FAN_UNCLEARED _Alignas(64) char scratch[REDUCE_TILE * 16];
    FAN_UNCLEARED fan_nditer inner;
    _Alignas(16) char sum[16];
    fan_dtype acc = fan_reduce_dtype(kept->a.dtype);
    const fan_loops *loops = fan_loops_of(acc);
    size_t size = fan_dtype_size(acc);
    fan_nditer_begin(&inner, &gone->a, true);
    fan_nditer_ready(&inner);
    for (int64_t at = 0; at < w->size; at++) {
        fan_array run = gone->a;
        run.data = fan_nditer_whole(w, &kept->a, at, 1);
        for (int64_t k = 0, n; k < run.size; k += n) {
            n = run.size - k < REDUCE_TILE ? run.size - k : REDUCE_TILE;
            fan_nditer_read(&inner, &run, k, n, acc, scratch);
            if (k == 0)
                memcpy(sum, scratch, size);
            size_t skip = k == 0; /* nothing is added to the first */
            loops->add_up(sum, scratch + skip * size, (size_t)n - skip);
            if (fan_interrupted(n))
                return;
        }
        fan_nditer_write(w, out, at, 1, acc, sum);
    }
}

void fan_reduce(const fan_array *out, const fan_array *in)
{
    FAN_UNCLEARED part kept, gone, to;
    FAN_UNCLEARED fan_nditer w;
    int lead = in->ndim - out->ndim;
    if (out->size == 0)
        return;
    if (in->size == 0) { /* an axis of extent 0 is reduced */
        fan_fill_zero(out);
        return;
    }
    part_begin(&kept, in);
    part_begin(&gone, in);
    part_begin(&to, out);
    for (int i = 0; i < in->ndim; i++) {
        bool stays = i >= lead && out->shape[i - lead] == in->shape[i];
        part_axis(stays ? &kept : &gone, in->shape[i], in->strides[i]);
        if (stays)
            part_axis(&to, in->shape[i], out->strides[i - lead]);
    }
    fan_nditer_begin(&w, &kept.a, false);
    fan_nditer_also(&w, &to.a);
    fan_nditer_ready(&w);
    bool runs = gone.a.size >= 64 && (kept.a.size < 16 || gone.nearest < kept.nearest);
    (runs ? by_elements : by_rows)(&to.a, &kept, &gone, &w);
}
