/* patch: made and checked; its view; whether patches have elements in common. */
#include "array/patch.h"

#include "base/fault.h"
#include "base/mem.h"

#include <stdlib.h>
#include <string.h>

/* ---- made ---- */

/* One block: the patch, four runs of numbers, and `from`. */
static fan_patch *patch_alloc(int ndim, int values)
{
    size_t numbers = 3 * (size_t)ndim + (size_t)values;
    size_t bytes = sizeof(fan_patch) + numbers * sizeof(int64_t) + (size_t)ndim;
    fan_patch *p = fan_alloc(bytes);
    if (!p)
        return NULL;
    atomic_init(&p->refs, 1);
    p->ndim = ndim;
    p->values = values;
    p->shape = (void *)(p + 1);
    p->start = p->shape + ndim;
    p->step = p->start + ndim;
    p->extent = p->step + ndim;
    p->from = (int8_t *)(p->extent + values);
    return p;
}

/* The last place of axis k that the patch has. */
static bool patch_last(const fan_patch *p, int k, int64_t *last)
{
    int64_t more = 0;
    if (p->from[k] >= 0)
        more = p->extent[p->from[k]] - 1;
    int64_t reach;
    if (__builtin_mul_overflow(p->step[k], more, &reach))
        return false;
    return !__builtin_add_overflow(p->start[k], reach, last);
}

/* Whether axis k of the whole has all places of the patch. */
static bool patch_axis_inside(const fan_patch *p, int k)
{
    int64_t last;
    if (p->size == 0)
        return true;
    if (!patch_last(p, k, &last))
        return false;
    bool begins = p->start[k] >= 0 && p->start[k] < p->shape[k];
    bool ends = last >= 0 && last < p->shape[k];
    return begins && ends;
}

/* Whether each axis of the patch that has several elements goes on along the whole. */
static bool patch_is_injective(const fan_patch *p)
{
    for (int v = 0; v < p->values; v++) {
        bool moves = p->extent[v] <= 1;
        for (int k = 0; k < p->ndim && !moves; k++)
            moves = p->from[k] == v && p->step[k] != 0;
        if (!moves)
            return false;
    }
    return true;
}

static fan_status patch_check(const fan_patch *p, fan_error *err)
{
    char text[160];
    for (int k = 0; k < p->ndim; k++) {
        if (p->from[k] >= p->values)
            return fan_fail(err, FAN_ERR_VALUE, "axis %d of a partial gradient goes along none", k);
        if (!patch_axis_inside(p, k)) {
            return fan_fail(err, FAN_ERR_VALUE,
                            "a partial gradient leaves axis %d of its whole, of shape %s", k,
                            fan_shape_text(p->ndim, p->shape, text, sizeof text));
        }
    }
    if (p->size > 0 && !patch_is_injective(p))
        return fan_fail(err, FAN_ERR_VALUE, "a partial gradient has one element twice");
    return FAN_OK;
}

fan_status fan_patch_new(int ndim, const int64_t *shape, const int64_t *start, const int64_t *step,
                         const int8_t *from, int values, const int64_t *extent, fan_patch **out,
                         fan_error *err)
{
    int64_t whole;
    int64_t size;
    bool has_axes = ndim >= 0 && ndim <= FAN_MAX_NDIM;
    bool patch_has_axes = values >= 0 && values <= FAN_MAX_NDIM;
    if (!has_axes || !patch_has_axes)
        return fan_fail(err, FAN_ERR_VALUE, "a partial gradient has 0 to %d axes", FAN_MAX_NDIM);
    FAN_TRY(fan_shape_check(ndim, shape, 16, &whole, err));
    FAN_TRY(fan_shape_check(values, extent, 16, &size, err));
    fan_patch *p = patch_alloc(ndim, values);
    if (!p)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    size_t axes = (size_t)ndim;
    memcpy(p->shape, shape, axes * sizeof *shape);
    memcpy(p->start, start, axes * sizeof *start);
    memcpy(p->step, step, axes * sizeof *step);
    memcpy(p->extent, extent, (size_t)values * sizeof *extent);
    memcpy(p->from, from, axes);
    p->whole = whole;
    p->size = size;
    fan_status status = patch_check(p, err);
    if (status != FAN_OK) {
        fan_free(p);
        return status;
    }
    *out = p;
    return FAN_OK;
}

fan_patch *fan_patch_hold(fan_patch *p)
{
    atomic_fetch_add_explicit(&p->refs, 1, memory_order_relaxed);
    return p;
}

void fan_patch_drop(fan_patch *p)
{
    if (!p || atomic_fetch_sub_explicit(&p->refs, 1, memory_order_acq_rel) > 1)
        return;
    fan_free(p);
}

fan_status fan_patch_view(const fan_patch *p, const fan_array *whole, fan_array **out,
                          fan_error *err)
{
    int64_t strides[FAN_MAX_NDIM] = {0};
    int64_t at = 0;
    for (int k = 0; k < p->ndim && p->size > 0; k++) {
        int64_t step = p->step[k];
        int64_t start = p->start[k];
        if (FAN_FAULT(PATCH_STEP) && step < 0 && p->from[k] >= 0) {
            start += step * (p->extent[p->from[k]] - 1);
            step = -step;
        }
        at += start * whole->strides[k];
        if (p->from[k] >= 0)
            strides[p->from[k]] += step * whole->strides[k];
    }
    return fan_array_view(whole->storage, whole->data + at, whole->dtype, p->values, p->extent,
                          strides, whole->writable, out, err);
}

/* ---- in common ---- */

int fan_patch_order(const fan_patch *a, const fan_patch *b)
{
    size_t axes = (size_t)a->ndim;
    if (a->values != b->values)
        return a->values - b->values;
    /* start and step lie behind each other */
    int order = memcmp(a->start, b->start, 2 * axes * sizeof *a->start);
    if (order == 0)
        order = memcmp(a->from, b->from, axes);
    if (order == 0)
        order = memcmp(a->extent, b->extent, (size_t)a->values * sizeof *a->extent);
    return order;
}

/* The lowest and the highest place of a patch along an axis. */
static int64_t patch_low(const fan_patch *p, int axis)
{
    int64_t last = p->start[axis];
    (void)patch_last(p, axis, &last);
    return fan_min(p->start[axis], last);
}

static int64_t patch_high(const fan_patch *p, int axis)
{
    int64_t last = p->start[axis];
    (void)patch_last(p, axis, &last);
    return fan_max(p->start[axis], last);
}

/* What is sorted: the lowest and the highest place along the axis that is looked at. */
typedef struct extent {
    int64_t low, high;
    const fan_patch *patch;
} extent;

static int by_low(const void *a, const void *b)
{
    const extent *one = a;
    const extent *two = b;
    return (one->low > two->low) - (one->low < two->low);
}

/* Whether two patches whose steps along an axis are the same are at other places modulo it. */
static bool patch_interleaves(const fan_patch *a, const fan_patch *b)
{
    for (int k = 0; k < a->ndim; k++) {
        int64_t step = fan_magnitude(a->step[k]);
        bool strided = a->from[k] >= 0 && b->from[k] >= 0 && step > 1;
        if (!strided || step != fan_magnitude(b->step[k]))
            continue;
        if (patch_low(a, k) % step != patch_low(b, k) % step)
            return true;
    }
    return false;
}

/* Up to here all pairs are looked at. */
#define FEW 16

static bool few_interleave(const extent *some, size_t n)
{
    if (n > FEW)
        return false;
    for (size_t i = 0; i < n; i++) {
        for (size_t k = 0; k < i; k++) {
            if (!patch_interleaves(some[i].patch, some[k].patch))
                return false;
        }
    }
    return true;
}

/* Patches that meet along all axes before `axis`: they are cut into runs that meet along it, too,
 * and these along the next. */
static bool extents_disjoint(extent *some, size_t n, int axis, int ndim)
{
    if (n < 2)
        return true;
    if (axis == ndim)
        return few_interleave(some, n);
    for (size_t i = 0; i < n; i++) {
        some[i].low = patch_low(some[i].patch, axis);
        some[i].high = patch_high(some[i].patch, axis);
    }
    qsort(some, n, sizeof *some, by_low);
    size_t begin = 0;
    int64_t high = some[0].high;
    for (size_t i = 1; i < n; i++) {
        if (some[i].low > high) {
            if (!extents_disjoint(some + begin, i - begin, axis + 1, ndim))
                return false;
            begin = i;
            high = some[i].high; /* those before were sorted anew by the call */
        }
        high = fan_max(high, some[i].high);
    }
    return extents_disjoint(some + begin, n - begin, axis + 1, ndim);
}

bool fan_patches_disjoint(const fan_patch **patches, size_t n)
{
    if (n < 2)
        return true;
    extent *some = fan_alloc(n * sizeof *some);
    if (!some)
        return false;
    for (size_t i = 0; i < n; i++)
        some[i].patch = patches[i];
    bool disjoint = extents_disjoint(some, n, 0, patches[0]->ndim);
    fan_free(some);
    return disjoint;
}
