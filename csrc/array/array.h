/* array: a strided view of memory, and the reference-counted memory under it. No devices.
 *
 *   fan_storage   counted memory; the last drop calls `release`
 *   fan_array     a view: dtype, shape, byte strides, first element; holds one storage
 *
 * Memory of other libraries is wrapped in a storage whose `release` notifies its owner. Views are
 * immutable once made, so threads share them freely; counts are atomic. */
#ifndef FAN_ARRAY_ARRAY_H
#define FAN_ARRAY_ARRAY_H

#include "array/dtype.h"
#include "base/status.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define FAN_MAX_NDIM 64
#define FAN_INLINE_NDIM 4

typedef struct fan_storage {
    atomic_size_t refs;
    void *data;   /* lowest address, for identity and bounds; may be NULL when bytes == 0 */
    size_t bytes; /* 0 also if the extent is unknown (foreign memory) */
    /* Called once, by the last drop, on any thread, with no lock of ours held. Frees the memory and
     * `ctx`, not the storage itself. */
    void (*release)(struct fan_storage *self);
    void *ctx;
    /* NULL; else the lender has taken the memory back and it must not be touched: the reason, a
     * text that lives as long as the storage (fan_storage_check). */
    _Atomic(const char *) ended;
} fan_storage;

/* fan_storage_new: allocates `n` bytes of host memory (aligned to 64; not zeroed), one hold. NULL
 * when out of memory. */
fan_storage *fan_storage_new(size_t n);
/* fan_storage_redirect: makes fan_storage_new and fan_array_new of this thread allocate by `make`
 * (NULL: from the host); returns the previous function. Such memory does not count as the core's
 * own (fan_storage_only_ours). */
typedef fan_storage *(*fan_storage_make)(size_t n);
fan_storage_make fan_storage_redirect(fan_storage_make make);
/* fan_storage_redirected: returns whether this thread's allocations are redirected; one load if no
 * thread's are. */
extern atomic_int fan_storage_redirects;
bool fan__storage_redirected(void);
static inline bool fan_storage_redirected(void)
{
    return atomic_load_explicit(&fan_storage_redirects, memory_order_relaxed) > 0 &&
           fan__storage_redirected();
}
/* fan_storage_wrap: makes a storage over foreign memory; NULL when out of memory (release is then
 * not called). */
fan_storage *fan_storage_wrap(void *data, size_t n, void (*release)(fan_storage *), void *ctx);
static inline fan_storage *fan_storage_hold(fan_storage *s)
{
    /* made from a reference, which orders it */
    atomic_fetch_add_explicit(&s->refs, 1, memory_order_relaxed);
    return s;
}
void fan_storage_drop(fan_storage *s); /* s may be NULL */
/* fan_storage_ended: returns whether the lender has taken the memory back; false for NULL. */
static inline bool fan_storage_ended(const fan_storage *s)
{
    return s && atomic_load_explicit(&s->ended, memory_order_acquire);
}
/* fan_storage_check: FAN_ERR_STATE with the reason if the lender has taken the memory back. Accepts
 * NULL. */
fan_status fan_storage_check(const fan_storage *s, fan_error *err);
/* fan_storage_only_ours: returns whether the memory is the core's own, with one hold. */
bool fan_storage_only_ours(const fan_storage *s);

typedef struct fan_array {
    atomic_size_t refs;
    fan_storage *storage; /* held */
    char *data;           /* element [0, 0, ..] */
    fan_dtype dtype;
    int ndim;
    int64_t size;     /* number of elements */
    int64_t *shape;   /* points to `dims` or into the heap */
    int64_t *strides; /* bytes */
    bool writable;
    bool in_storage; /* allocated in the block of its storage, and freed with it */
    int64_t dims[2 * FAN_INLINE_NDIM];
} fan_array;

/* fan_array_new: allocates an array in host memory, not zeroed, in C order or in the order of
 * `like`'s strides (D16; like may be NULL). */
fan_status fan_array_new(fan_dtype dtype, int ndim, const int64_t *shape, const fan_array *like,
                         fan_array **out, fan_error *err);
/* fan_array_like: as fan_array_new, with the dtype and shape of `a`, in C order. */
fan_status fan_array_like(const fan_array *a, fan_array **out, fan_error *err);
/* fan_array_view: makes a view of `storage` (held by the view; the caller keeps its own hold).
 * Checks ndim, extents >= 0, products and reach with checked arithmetic and, if storage->bytes > 0,
 * that every element lies inside; FAN_ERR_VALUE otherwise. */
fan_status fan_array_view(fan_storage *storage, char *data, fan_dtype dtype, int ndim,
                          const int64_t *shape, const int64_t *strides, bool writable,
                          fan_array **out, fan_error *err);
/* fan_array_foreign: as fan_array_view for foreign memory, with a copy of *of (all but the count)
 * as its storage, in the same block. On failure nothing is released. */
fan_status fan_array_foreign(const fan_storage *of, char *data, fan_dtype dtype, int ndim,
                             const int64_t *shape, const int64_t *strides, bool writable,
                             fan_array **out, fan_error *err);
fan_array *fan_array_hold(fan_array *a);
void fan_array_drop(fan_array *a);

/* fan_shape_check: computes the number of elements by checked multiplication; FAN_ERR_VALUE on a
 * negative extent or if the bytes overflow. */
fan_status fan_shape_check(int ndim, const int64_t *shape, size_t itemsize, int64_t *size,
                           fan_error *err);
/* fan_dense_strides: computes the strides of a gap-free array of `shape` with axes in the order of
 * `like`'s (NULL, or expanded along an axis: C order; D16). */
void fan_dense_strides(int ndim, const int64_t *shape, size_t itemsize, const fan_array *like,
                       int64_t *strides);
/* fan_array_reach: computes the byte offsets of the lowest byte and of the end of the highest,
 * relative to `data`. Both 0 when empty. */
void fan_array_reach(const fan_array *a, int64_t *lo, int64_t *hi);
/* fan_magnitude: returns |x|; INT64_MAX for INT64_MIN. */
static inline int64_t fan_magnitude(int64_t x)
{
    if (x == INT64_MIN)
        return INT64_MAX;
    return x < 0 ? -x : x;
}
static inline int64_t fan_min(int64_t a, int64_t b)
{
    return a < b ? a : b;
}
static inline int64_t fan_max(int64_t a, int64_t b)
{
    return a > b ? a : b;
}
static inline uint64_t fan_umin(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}
static inline uint64_t fan_umax(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}
/* fan_array_dense: true for any permutation of a gap-free layout with positive strides (size-1 axes
 * ignored): it cannot overlap itself. */
bool fan_array_dense(const fan_array *a);
/* fan_array_in_c_order: true if gap-free in C order (size-1 axes may have any stride). */
static inline bool fan_array_in_c_order(const fan_array *a)
{
    int64_t step = fan_dtype_step(a->dtype);
    for (int i = a->ndim - 1; i >= 0; step *= a->shape[i--]) {
        if (a->strides[i] != step && a->shape[i] > 1)
            return false;
    }
    return true;
}
static inline bool fan_array_same_shape(const fan_array *a, const fan_array *b)
{
    return a->ndim == b->ndim &&
           (a->ndim == 0 || memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) == 0);
}
/* fan_array_same_view: true if data, dtype, shape and strides are equal. */
bool fan_array_same_view(const fan_array *a, const fan_array *b);
/* fan_array_expanded: returns a mask: bit i is set if axis i (< 64) has stride 0 and extent > 1. */
uint64_t fan_array_expanded(const fan_array *a);
/* fan_array_compact: makes the view of `a` with the expanded axes in `axes` cut to extent 1. */
fan_status fan_array_compact(const fan_array *a, uint64_t axes, fan_array **out, fan_error *err);
/* fan_array_broadcast: makes a view of `a` with `shape` (NumPy's rules; new and stretched axes get
 * stride 0; not writable). */
fan_status fan_array_broadcast(const fan_array *a, int ndim, const int64_t *shape, fan_array **out,
                               fan_error *err);
/* fan_array_slice: makes a view of the elements start .. start + count - 1 of `a` along `axis`. */
fan_status fan_array_slice(const fan_array *a, int axis, int64_t start, int64_t count,
                           fan_array **out, fan_error *err);
/* fan_broadcasts_from: true if `shape` is what `from` broadcasts to (A9). */
bool fan_broadcasts_from(int ndim, const int64_t *shape, int from_ndim, const int64_t *from);
/* fan_shape_text: writes "(3, 4)", "(3,)", "()" to buf; truncates. Returns buf. */
char *fan_shape_text(int ndim, const int64_t *shape, char *buf, size_t size);

#endif
