/* How it is done: the elements are cut into tiles that fit the first cache together with what is read beside them. For each tile the operands
 * are taken in order, up to FAN_ADD_MOST at a time: one that already is in the accumulation dtype and without gaps is read where it
 * lies, any other is first converted into a spare tile. The running sum stays in its tile; the last step writes straight into `out` where
 * that needs no conversion.
 *
 * What can go wrong: `out` is one of the operands. A tile of `out` is therefore written only after every operand's tile has been read: by the
 * very last step, which reads element i of all its sources before it writes element i. */
#include "array/sum.h"

#include "array/convert.h"
#include "array/sum_loops.h"
#include "array/walk.h"

#include <string.h>

#define TILE 8192u   /* bytes; a multiple of every item size */
#define LONG_ROW 128 /* rows of so many elements are not mixed in one tile, so that they can be read where they lie */

typedef struct job {
    const fan_array *out;
    const fan_operand *in;
    size_t n;
    const fan_loops *last;  /* of the last accumulation dtype */
    const char *factor;     /* NULL: no scale */
    fan_walk walk;
} job;

/* fold: elements [at, at + len). */
static void fold(const job *j, int64_t at, int64_t len, char *tile, char *spare)
{
    const char *src[FAN_ADD_MOST];
    int sources = 0;
    bool spare_used = false;
    fan_dtype acc = j->in[0].acc;
    const fan_loops *loops = fan_loops_of(acc);
#define FLUSH()                                                                                                       \
    (loops->add(tile, src, sources, (size_t)len * loops->parts), src[0] = tile, sources = 1, spare_used = false)

    for (size_t k = 0; k < j->n; k++) {
        const fan_operand *one = &j->in[k];
        if (one->acc != acc) { /* the sum widens (D3) */
            FLUSH();
            int64_t from = (int64_t)fan_dtype_size(acc), to = (int64_t)fan_dtype_size(one->acc);
            fan_convert(spare, one->acc, to, tile, acc, from, len);
            char *other = tile;
            src[0] = tile = spare;
            spare = other;
            acc = one->acc;
            loops = fan_loops_of(acc);
        }
        if (sources == loops->most)
            FLUSH();
        const char *p = one->array->dtype == acc ? fan_walk_whole(&j->walk, one->array, at, len) : NULL;
        if (!p) {
            if (spare_used)
                FLUSH();
            fan_walk_read(&j->walk, one->array, at, len, acc, spare);
            spare_used = true;
            p = spare;
        }
        src[sources++] = p;
    }
#undef FLUSH
    char *to = acc == j->out->dtype && !j->factor ? fan_walk_whole(&j->walk, j->out, at, len) : NULL;
    loops->add(to ? to : tile, src, sources, (size_t)len * loops->parts);
    if (j->factor)
        loops->scale(tile, j->factor, (size_t)len);
    if (!to)
        fan_walk_write(&j->walk, j->out, at, len, acc, tile);
}

void fan_scale_as(const fan_scale *scale, fan_dtype d, char *factor)
{
    double parts[2] = {scale->re, scale->im};
    switch (fan_dtype_kind(d)) {
    case 'f':
        fan_convert(factor, d, 0, (const char *)parts, FAN_FLOAT64, 0, 1);
        break;
    case 'c':
        fan_convert(factor, d, 0, (const char *)parts, FAN_COMPLEX128, 0, 1);
        break;
    default:
        fan_convert(factor, d, 0, (const char *)&scale->i, FAN_INT64, 0, 1);
        break;
    }
}

void fan_sum(const fan_array *out, const fan_operand *in, size_t n, const fan_scale *scale)
{
    FAN_UNCLEARED job j;
    FAN_UNCLEARED _Alignas(64) char tile[TILE], spare[TILE];
    _Alignas(16) char factor[16];
    unsigned widest = 1;
    if (out->size == 0)
        return;
    fan_walk_begin(&j.walk, out, false);
    for (size_t k = 0; k < n; k++) {
        unsigned size = (unsigned)fan_dtype_size(in[k].acc);
        widest = size > widest ? size : widest;
        fan_walk_also(&j.walk, in[k].array);
    }
    fan_walk_ready(&j.walk);
    j.out = out;
    j.in = in;
    j.n = n;
    j.factor = NULL;
    if (scale && scale->on) {
        fan_scale_as(scale, in[n - 1].acc, factor);
        j.factor = factor;
    }
    int64_t most = TILE / widest;
    int64_t row = j.walk.ndim > 1 ? j.walk.extent[j.walk.ndim - 1] : 0;
    for (int64_t at = 0, len; at < j.walk.size; at += len) {
        int64_t rest = row >= LONG_ROW ? row - at % row : j.walk.size - at;
        len = rest < most ? rest : most;
        fold(&j, at, len, tile, spare);
    }
}

void fan_sum_flat(char *out, const char *const *src, size_t n, size_t count, fan_dtype dtype, fan_dtype acc)
{
    if (dtype == acc) {
        const fan_loops *loops = fan_loops_of(dtype);
        const char *some[FAN_ADD_MOST];
        for (size_t done = 0; done < n;) {
            int k = 0;
            if (done)
                some[k++] = out;
            while (k < loops->most && done < n)
                some[k++] = src[done++];
            loops->add(out, some, k, count * loops->parts);
        }
        return;
    }
    fan_array views[64];
    fan_operand in[64];
    int64_t shape = (int64_t)count, stride = (int64_t)fan_dtype_size(dtype);
    fan_array to = {.data = out, .dtype = dtype, .ndim = 1, .size = shape, .shape = &shape, .strides = &stride};
    for (size_t i = 0; i < n && i < 64; i++) {
        views[i] = (fan_array){.data = (char *)src[i], .dtype = dtype, .ndim = 1, .size = shape, .shape = &shape, .strides = &stride};
        in[i] = (fan_operand){&views[i], acc};
    }
    fan_sum(&to, in, n, NULL);
}

/* ---- reduce ---- */

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
    return fan_dtype_kind(d) == 'f' ? FAN_FLOAT64 : fan_dtype_kind(d) == 'c' ? FAN_COMPLEX128 : d;
}

#define REDUCE_TILE 256 /* elements of the result that grow side by side */

/* by_rows: a tile of the result grows by one row for each element of the reduced axes. */
static void by_rows(const fan_array *out, const part *kept, const part *gone, const fan_walk *w)
{
    FAN_UNCLEARED _Alignas(64) char tile[REDUCE_TILE * 16], spare[REDUCE_TILE * 16];
    fan_dtype acc = fan_reduce_dtype(kept->a.dtype);
    const fan_loops *loops = fan_loops_of(acc);
    for (int64_t at = 0, n; at < w->size; at += n) {
        n = w->size - at < REDUCE_TILE ? w->size - at : REDUCE_TILE;
        fan_array row = kept->a;
        int64_t index[FAN_MAX_NDIM] = {0};
        for (int64_t k = 0; k < gone->a.size; k++) {
            fan_walk_read(w, &row, at, n, acc, k ? spare : tile);
            if (k) {
                const char *src[] = {tile, spare};
                loops->add(tile, src, 2, (size_t)n * loops->parts);
            }
            for (int i = gone->a.ndim - 1; i >= 0; i--) {
                row.data += gone->strides[i];
                if (++index[i] < gone->shape[i])
                    break;
                row.data -= gone->strides[i] * gone->shape[i];
                index[i] = 0;
            }
        }
        fan_walk_write(w, out, at, n, acc, tile);
    }
}

/* by_elements: each element of the result is one run over the reduced axes. */
static void by_elements(const fan_array *out, const part *kept, const part *gone, const fan_walk *w)
{
    FAN_UNCLEARED _Alignas(64) char spare[REDUCE_TILE * 16];
    FAN_UNCLEARED fan_walk inner;
    _Alignas(16) char sum[16];
    fan_dtype acc = fan_reduce_dtype(kept->a.dtype);
    const fan_loops *loops = fan_loops_of(acc);
    size_t size = fan_dtype_size(acc);
    fan_walk_begin(&inner, &gone->a, true);
    fan_walk_ready(&inner);
    for (int64_t at = 0; at < w->size; at++) {
        fan_array run = gone->a;
        run.data = fan_walk_whole(w, &kept->a, at, 1);
        for (int64_t k = 0, n; k < run.size; k += n) {
            n = run.size - k < REDUCE_TILE ? run.size - k : REDUCE_TILE;
            fan_walk_read(&inner, &run, k, n, acc, spare);
            if (k == 0)
                memcpy(sum, spare, size);
            size_t skip = k == 0; /* nothing is added to the first */
            loops->add_up(sum, spare + skip * size, (size_t)n - skip);
        }
        fan_walk_write(w, out, at, 1, acc, sum);
    }
}

void fan_reduce(const fan_array *out, const fan_array *in)
{
    FAN_UNCLEARED part kept, gone, to;
    FAN_UNCLEARED fan_walk w;
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
    fan_walk_begin(&w, &kept.a, false);
    fan_walk_also(&w, &to.a);
    fan_walk_ready(&w);
    bool runs = gone.a.size >= 64 && (kept.a.size < 16 || gone.nearest < kept.nearest);
    (runs ? by_elements : by_rows)(&to.a, &kept, &gone, &w);
}

/* ---- fill ---- */

void fan_fill_zero(const fan_array *out)
{
    FAN_UNCLEARED fan_walk w;
    FAN_UNCLEARED _Alignas(16) char piece[REDUCE_TILE * 16];
    int64_t size = (int64_t)fan_dtype_size(out->dtype);
    fan_walk_begin(&w, out, false);
    fan_walk_ready(&w);
    memset(piece, 0, (size_t)(REDUCE_TILE * size)); /* in every dtype zero is that */
    for (int64_t at = 0, n; at < w.size; at += n) {
        n = w.size - at < REDUCE_TILE ? w.size - at : REDUCE_TILE;
        fan_walk_write(&w, out, at, n, out->dtype, piece);
    }
}
