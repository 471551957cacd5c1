/* array: storage, counted and released by its last drop; geometry, with checked arithmetic; arrays
 * of our own memory, small ones in one block with their storage; views, which are checked to lie
 * inside their storage; and views of views. */
#include "array/array.h"
#include "base/fault.h"

#include "base/mem.h"

#include <string.h>

/* ---- storage ---- */

static void release_ours(fan_storage *s)
{
    fan_free_data(s->data, s->bytes);
}

/* The memory is freed with the storage. */
static void release_block(fan_storage *s)
{
    (void)s;
}

static void storage_begin(fan_storage *s, void *data, size_t n, void (*release)(fan_storage *),
                          void *ctx)
{
    atomic_init(&s->refs, 1);
    s->data = data;
    s->bytes = n;
    s->release = release;
    s->ctx = ctx;
    atomic_init(&s->ended, NULL);
}

fan_storage *fan_storage_wrap(void *data, size_t n, void (*release)(fan_storage *), void *ctx)
{
    fan_storage *s = fan_alloc(sizeof *s);
    if (s)
        storage_begin(s, data, n, release, ctx);
    return s;
}

atomic_int fan_storage_redirects;
static _Thread_local fan_storage_make storage_make;

bool fan__storage_redirected(void)
{
    return storage_make != NULL;
}

fan_storage_make fan_storage_redirect(fan_storage_make make)
{
    fan_storage_make was = storage_make;
    atomic_fetch_add_explicit(&fan_storage_redirects, (make != NULL) - (was != NULL),
                              memory_order_relaxed);
    storage_make = make;
    return was;
}

fan_status fan_storage_check(const fan_storage *s, fan_error *err)
{
    const char *why = NULL;
    if (s)
        why = atomic_load_explicit(&s->ended, memory_order_acquire);
    if (why)
        return fan_fail(err, FAN_ERR_STATE, "%s", why);
    return FAN_OK;
}

fan_storage *fan_storage_new(size_t n)
{
    if (fan_storage_redirected())
        return storage_make(n);
    void *data = fan_alloc_data(n);
    if (!data)
        return NULL;
    fan_storage *s = fan_storage_wrap(data, n, release_ours, NULL);
    if (!s)
        fan_free_data(data, n);
    return s;
}

void fan_storage_drop(fan_storage *s)
{
    if (!s || atomic_fetch_sub_explicit(&s->refs, 1, memory_order_acq_rel) > 1)
        return;
    if (s->release)
        s->release(s);
    fan_free(s);
}

bool fan_storage_only_ours(const fan_storage *s)
{
    /* Acquire: pairs with the release of the last other drop, after which this thread may write. */
    bool one_hold = atomic_load_explicit(&s->refs, memory_order_acquire) == 1;
    bool ours = s->release == release_ours || s->release == release_block;
    return ours && one_hold;
}

/* ---- geometry: checked arithmetic throughout; the reach is computed in one place ---- */

static fan_status check_ndim(int ndim, fan_error *err)
{
    if (ndim >= 0 && ndim <= FAN_MAX_NDIM)
        return FAN_OK;
    return fan_fail(err, FAN_ERR_VALUE, "an array has 0 to %d axes, got %d", FAN_MAX_NDIM, ndim);
}

fan_status fan_shape_check(int ndim, const int64_t *shape, size_t itemsize, int64_t *size,
                           fan_error *err)
{
    FAN_TRY(check_ndim(ndim, err));
    /* The product of the nonzero extents must fit, times the item size: strides are computed from
     * it even if the array is empty. */
    int64_t bytes = (int64_t)itemsize;
    bool wraps = itemsize > INT64_MAX;
    bool empty = itemsize == 0;
    for (int i = 0; i < ndim; i++) {
        if (shape[i] < 0) {
            return fan_fail(err, FAN_ERR_VALUE, "axis %d: expected a non-negative extent, got %lld",
                            i, (long long)shape[i]);
        }
        empty |= shape[i] == 0;
        wraps |= shape[i] != 0 && __builtin_mul_overflow(bytes, shape[i], &bytes);
    }
    if (wraps || (uint64_t)bytes > SIZE_MAX) {
        char text[128];
        return fan_fail(err, FAN_ERR_VALUE, "an array of shape %s has too many bytes for 64 bits",
                        fan_shape_text(ndim, shape, text, sizeof text));
    }
    *size = 0;
    if (!empty)
        *size = bytes / (int64_t)itemsize;
    return FAN_OK;
}

/* array_reach: computes the offsets of the lowest byte and of the end of the highest, relative to
 * the first element. Both 0 when empty; false on overflow. */
static bool array_reach(int ndim, const int64_t *shape, const int64_t *strides, int64_t itemsize,
                        int64_t *lo, int64_t *hi)
{
    int64_t low = 0;
    int64_t high = itemsize;
    bool wraps = false;
    *lo = 0;
    *hi = 0;
    for (int i = 0; i < ndim; i++) {
        int64_t way = 0;
        if (shape[i] <= 0)
            return true;
        if (shape[i] > 1) {
            /* the whole product, one step more than is reached: stepping along the axis cannot
             * overflow */
            wraps |= __builtin_mul_overflow(shape[i], strides[i], &way);
            wraps |= __builtin_sub_overflow(way, strides[i], &way);
        }
        int64_t *end = &high;
        if (way < 0)
            end = &low;
        wraps |= __builtin_add_overflow(*end, way, end);
    }
    int64_t width;
    wraps |= __builtin_sub_overflow(high, low, &width);
    if (wraps)
        return false;
    *lo = low;
    *hi = high;
    return true;
}

void fan_array_reach(const fan_array *a, int64_t *lo, int64_t *hi)
{
    /* checked when `a` was made */
    (void)array_reach(a->ndim, a->shape, a->strides, fan_dtype_step(a->dtype), lo, hi);
}

/* array_axes_by_stride: sorts the axes by |stride|, largest first, C order among ties (D16). */
static void array_axes_by_stride(const fan_array *like, int *axes)
{
    for (int i = 0; i < like->ndim; i++) {
        int64_t stride = fan_magnitude(like->strides[i]);
        int at = i;
        for (; at > 0 && fan_magnitude(like->strides[axes[at - 1]]) < stride; at--)
            axes[at] = axes[at - 1];
        axes[at] = i;
    }
}

void fan_dense_strides(int ndim, const int64_t *shape, size_t itemsize, const fan_array *like,
                       int64_t *strides)
{
    int axes[FAN_MAX_NDIM];
    bool follow = like && like->ndim == ndim && !fan_array_expanded(like);
    if (FAN_FAULT(AXES_FORGOTTEN))
        follow = false;
    if (follow)
        array_axes_by_stride(like, axes);
    int64_t step = (int64_t)itemsize;
    for (int i = ndim - 1; i >= 0; i--) {
        int axis = i;
        if (follow)
            axis = axes[i];
        strides[axis] = step;
        if (shape[axis] > 0)
            step *= shape[axis];
    }
}

bool fan_array_dense(const fan_array *a)
{
    int axes[FAN_MAX_NDIM];
    int64_t step = fan_dtype_step(a->dtype);
    if (a->size == 0)
        return true;
    array_axes_by_stride(a, axes);
    /* Axes of extent 1 may have any stride and be anywhere in the order: skip them. */
    for (int i = a->ndim - 1; i >= 0; i--) {
        int axis = axes[i];
        if (a->shape[axis] == 1)
            continue;
        if (a->strides[axis] != step)
            return false;
        step *= a->shape[axis];
    }
    return true;
}

bool fan_array_same_view(const fan_array *a, const fan_array *b)
{
    if (a == b)
        return true;
    if (a->dtype != b->dtype || !fan_array_same_shape(a, b))
        return false;
    if (a->size == 0)
        return true;
    for (int i = 0; i < a->ndim; i++) {
        if (a->shape[i] > 1 && a->strides[i] != b->strides[i])
            return false;
    }
    return a->data == b->data;
}

uint64_t fan_array_expanded(const fan_array *a)
{
    uint64_t axes = 0;
    for (int i = 0; i < a->ndim; i++) {
        if (a->strides[i] == 0 && a->shape[i] > 1)
            axes |= (uint64_t)1 << i;
    }
    return axes;
}

bool fan_broadcasts_from(int ndim, const int64_t *shape, int from_ndim, const int64_t *from)
{
    if (from_ndim > ndim)
        return false;
    for (int i = 0; i < from_ndim; i++) {
        if (from[i] != 1 && from[i] != shape[ndim - from_ndim + i])
            return false;
    }
    return true;
}

char *fan_shape_text(int ndim, const int64_t *shape, char *buf, size_t size)
{
    if (size == 0)
        return buf;
    buf[0] = '\0';
    fan_append(buf, size, "(");
    for (int i = 0; i < ndim; i++)
        fan_append(buf, size, i ? ", %lld" : "%lld", (long long)shape[i]);
    fan_append(buf, size, ndim == 1 ? ",)" : ")");
    return buf;
}

/* ---- arrays ---- */

/* array_room: returns the size of an array with its dims appended. */
static size_t array_room(int ndim)
{
    if (ndim <= FAN_INLINE_NDIM)
        return sizeof(fan_array);
    return sizeof(fan_array) + 2 * (size_t)ndim * sizeof(int64_t);
}

static void array_begin(fan_array *a, fan_dtype dtype, int ndim, int64_t size)
{
    atomic_init(&a->refs, 1);
    a->storage = NULL;
    a->data = NULL;
    a->dtype = dtype;
    a->ndim = ndim;
    a->size = size;
    a->shape = a->dims;
    if (ndim > FAN_INLINE_NDIM)
        a->shape = (void *)(a + 1);
    a->strides = a->shape + ndim;
    a->writable = true;
    a->in_storage = false;
}

/* array_blank: allocates an array with room for its dims, geometry not yet set; NULL when out of
 * memory. */
static fan_array *array_blank(fan_dtype dtype, int ndim, int64_t size)
{
    fan_array *a = fan_alloc(array_room(ndim));
    if (a)
        array_begin(a, dtype, ndim, size);
    return a;
}

/* array_after: begins the array that follows its storage in one block. */
static fan_array *array_after(fan_storage *s, fan_dtype dtype, int ndim, int64_t size)
{
    _Static_assert(sizeof(fan_storage) % _Alignof(fan_array) == 0,
                   "an array may follow its storage");
    fan_array *a = (void *)(s + 1);
    array_begin(a, dtype, ndim, size);
    a->storage = s;
    a->in_storage = true;
    return a;
}

#define DATA_ALIGN 64
/* of data; up to this size an array, its storage and its data share one block */
#define SMALL_BYTES 4096

/* array_new_small: allocates an array with its memory in one block, geometry not yet set; NULL when
 * out of memory. */
static fan_array *array_new_small(fan_dtype dtype, int ndim, int64_t size)
{
    size_t head = sizeof(fan_storage) + array_room(ndim) + DATA_ALIGN - 1;
    size_t bytes = (size_t)size * fan_dtype_size(dtype);
    fan_storage *s = fan_alloc(head + bytes);
    if (!s)
        return NULL;
    uintptr_t data = ((uintptr_t)s + head) & ~(uintptr_t)(DATA_ALIGN - 1);
    storage_begin(s, (void *)data, bytes, release_block, NULL);
    return array_after(s, dtype, ndim, size);
}

/* array_new_large: as small, with memory from the pool or a block of its own. */
static fan_array *array_new_large(fan_dtype dtype, int ndim, int64_t size)
{
    fan_array *a = array_blank(dtype, ndim, size);
    fan_storage *s = NULL;
    if (a)
        s = fan_storage_new((size_t)size * fan_dtype_size(dtype));
    if (!s) {
        fan_free(a);
        return NULL;
    }
    a->storage = s;
    return a;
}

static fan_array *array_new(bool one_block, fan_dtype dtype, int ndim, int64_t size)
{
    if (one_block)
        return array_new_small(dtype, ndim, size);
    return array_new_large(dtype, ndim, size);
}

fan_status fan_array_new(fan_dtype dtype, int ndim, const int64_t *shape, const fan_array *like,
                         fan_array **out, fan_error *err)
{
    *out = NULL;
    int64_t size;
    size_t itemsize = fan_dtype_size(dtype);
    if (itemsize == 0)
        return fan_fail(err, FAN_ERR_TYPE, "an array needs a dtype");
    FAN_TRY(fan_shape_check(ndim, shape, itemsize, &size, err));
    bool one_block = (size_t)size * itemsize <= SMALL_BYTES && !fan_storage_redirected();
    fan_array *a = array_new(one_block, dtype, ndim, size);
    if (!a) {
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for an array of %lld bytes",
                        (long long)size * (long long)itemsize);
    }
    if (ndim)
        memcpy(a->shape, shape, (size_t)ndim * sizeof *shape);
    fan_dense_strides(ndim, shape, itemsize, like, a->strides);
    if (size)
        a->data = a->storage->data;
    *out = a;
    return FAN_OK;
}

/* array_outside: reports why a view does not fit `storage`. lo == hi: its reach overflows. */
__attribute__((noinline, cold)) static fan_status array_outside(const fan_storage *storage,
                                                                const char *data, int ndim,
                                                                const int64_t *shape, int64_t lo,
                                                                int64_t hi, fan_error *err)
{
    uintptr_t at = (uintptr_t)data;
    uintptr_t first = at + (uintptr_t)lo;
    uintptr_t end = at + (uintptr_t)hi;
    uintptr_t from = (uintptr_t)storage->data;
    char text[128];
    fan_shape_text(ndim, shape, text, sizeof text);
    if (lo == hi) {
        return fan_fail(err, FAN_ERR_VALUE,
                        "the strides of an array of shape %s reach farther than 64 bits", text);
    }
    if (!data) {
        return fan_fail(err, FAN_ERR_VALUE,
                        "an array of shape %s has no memory: its address is NULL", text);
    }
    if (first > at || end < at || end < first) {
        return fan_fail(err, FAN_ERR_VALUE,
                        "the strides of an array of shape %s leave the address space", text);
    }
    return fan_fail(
        err, FAN_ERR_VALUE,
        "an array of shape %s reaches from byte %lld to %lld of memory that has %zu byte%s", text,
        (long long)(first - from), (long long)(end - from), storage->bytes,
        FAN_PLURAL(storage->bytes));
}

fan_status fan_array_like(const fan_array *a, fan_array **out, fan_error *err)
{
    int64_t step = fan_dtype_step(a->dtype);
    size_t bytes = (size_t)(a->size * step);
    fan_array *made = array_new(bytes <= SMALL_BYTES, a->dtype, a->ndim, a->size);
    *out = made;
    if (!made)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for an array of %zu bytes", bytes);
    for (int i = a->ndim - 1; i >= 0; i--) {
        made->shape[i] = a->shape[i];
        made->strides[i] = step;
        if (a->shape[i] > 0)
            step *= a->shape[i];
    }
    if (a->size)
        made->data = made->storage->data;
    return FAN_OK;
}

/* array_check_view: checks that every element of a view lies inside `storage`, which may be
 * foreign; computes its size. */
static fan_status array_check_view(const fan_storage *storage, const char *data, size_t itemsize,
                                   int ndim, const int64_t *shape, const int64_t *strides,
                                   int64_t *size, fan_error *err)
{
    int64_t lo, hi;
    if (itemsize == 0)
        return fan_fail(err, FAN_ERR_TYPE, "an array needs a dtype");
    FAN_TRY(fan_shape_check(ndim, shape, itemsize, size, err));
    if (!array_reach(ndim, shape, strides, (int64_t)itemsize, &lo, &hi))
        return array_outside(storage, NULL, ndim, shape, 0, 0, err);
    if (*size == 0)
        return FAN_OK;
    uintptr_t at = (uintptr_t)data;
    uintptr_t first = at + (uintptr_t)lo;
    uintptr_t end = at + (uintptr_t)hi;
    uintptr_t from = (uintptr_t)storage->data;
    bool wraps = first > at || end < at || end < first;
    bool inside = first >= from && end - from <= storage->bytes;
    bool outside = storage->bytes && !inside;
    if (!data || wraps || outside)
        return array_outside(storage, data, ndim, shape, lo, hi, err);
    return FAN_OK;
}

/* array_set_view: sets the geometry of a checked view. */
static void array_set_view(fan_array *a, char *data, const int64_t *shape, const int64_t *strides,
                           bool writable)
{
    size_t dims = (size_t)a->ndim * sizeof *shape;
    a->writable = writable;
    if (dims)
        memcpy(a->shape, shape, dims);
    if (a->size == 0) {
        /* the strides of an empty array are never used and may be anything */
        fan_dense_strides(a->ndim, shape, fan_dtype_size(a->dtype), NULL, a->strides);
        return;
    }
    if (dims)
        memcpy(a->strides, strides, dims);
    a->data = data;
}

fan_status fan_array_view(fan_storage *storage, char *data, fan_dtype dtype, int ndim,
                          const int64_t *shape, const int64_t *strides, bool writable,
                          fan_array **out, fan_error *err)
{
    int64_t size;
    *out = NULL;
    FAN_TRY(
        array_check_view(storage, data, fan_dtype_size(dtype), ndim, shape, strides, &size, err));
    fan_array *a = array_blank(dtype, ndim, size);
    if (!a)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a view");
    array_set_view(a, data, shape, strides, writable);
    a->storage = fan_storage_hold(storage);
    *out = a;
    return FAN_OK;
}

fan_status fan_array_foreign(const fan_storage *of, char *data, fan_dtype dtype, int ndim,
                             const int64_t *shape, const int64_t *strides, bool writable,
                             fan_array **out, fan_error *err)
{
    int64_t size;
    *out = NULL;
    FAN_TRY(array_check_view(of, data, fan_dtype_size(dtype), ndim, shape, strides, &size, err));
    fan_storage *s = fan_alloc(sizeof *s + array_room(ndim));
    if (!s)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a view");
    storage_begin(s, of->data, of->bytes, of->release, of->ctx);
    fan_array *a = array_after(s, dtype, ndim, size);
    array_set_view(a, data, shape, strides, writable);
    *out = a;
    return FAN_OK;
}

fan_array *fan_array_hold(fan_array *a)
{
    atomic_fetch_add_explicit(&a->refs, 1, memory_order_relaxed);
    return a;
}

void fan_array_drop(fan_array *a)
{
    if (!a || atomic_fetch_sub_explicit(&a->refs, 1, memory_order_acq_rel) > 1)
        return;
    fan_storage *s = a->storage;
    if (!a->in_storage)
        fan_free(a);
    fan_storage_drop(s);
}

/* array_revise: makes a view of some of a's elements with another shape and strides, from `data`
 * on. */
static fan_status array_revise(const fan_array *a, char *data, int ndim, const int64_t *shape,
                               const int64_t *strides, bool writable, fan_array **out,
                               fan_error *err)
{
    return fan_array_view(a->storage, data, a->dtype, ndim, shape, strides, writable, out, err);
}

fan_status fan_array_compact(const fan_array *a, uint64_t axes, fan_array **out, fan_error *err)
{
    int64_t shape[FAN_MAX_NDIM];
    axes &= fan_array_expanded(a);
    for (int i = 0; i < a->ndim; i++) {
        shape[i] = a->shape[i];
        if (axes >> i & 1u)
            shape[i] = 1;
    }
    return array_revise(a, a->data, a->ndim, shape, a->strides, a->writable, out, err);
}

fan_status fan_array_broadcast(const fan_array *a, int ndim, const int64_t *shape, fan_array **out,
                               fan_error *err)
{
    int64_t strides[FAN_MAX_NDIM];
    *out = NULL;
    FAN_TRY(check_ndim(ndim, err));
    if (!fan_broadcasts_from(ndim, shape, a->ndim, a->shape)) {
        char from[128], to[128];
        return fan_fail(err, FAN_ERR_VALUE, "an array of shape %s does not broadcast to %s",
                        fan_shape_text(a->ndim, a->shape, from, sizeof from),
                        fan_shape_text(ndim, shape, to, sizeof to));
    }
    int fresh = ndim - a->ndim;
    bool stretched = false;
    for (int i = 0; i < ndim; i++) {
        bool same = i >= fresh && a->shape[i - fresh] == shape[i];
        strides[i] = 0;
        if (same)
            strides[i] = a->strides[i - fresh];
        stretched |= !same && shape[i] != 1;
    }
    return array_revise(a, a->data, ndim, shape, strides, a->writable && !stretched, out, err);
}

static bool slice_fits(const fan_array *a, int axis, int64_t start, int64_t count)
{
    if (axis < 0 || axis >= a->ndim)
        return false;
    if (start < 0 || count < 0)
        return false;
    return start <= a->shape[axis] && count <= a->shape[axis] - start;
}

fan_status fan_array_slice(const fan_array *a, int axis, int64_t start, int64_t count,
                           fan_array **out, fan_error *err)
{
    int64_t shape[FAN_MAX_NDIM];
    *out = NULL;
    if (!slice_fits(a, axis, start, count)) {
        return fan_fail(err, FAN_ERR_VALUE, "no elements %lld to %lld along axis %d",
                        (long long)start, (long long)count, axis);
    }
    memcpy(shape, a->shape, (size_t)a->ndim * sizeof *shape);
    shape[axis] = count;
    char *data = a->data;
    if (a->size && count)
        data += start * a->strides[axis];
    return array_revise(a, data, a->ndim, shape, a->strides, a->writable, out, err);
}
