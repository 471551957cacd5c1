/* array: a strided view of memory, and the counted memory under it. No devices.
 *
 *   fan_storage   counted memory; when the last hold goes, `release` gets it back
 *   fan_array     a view: a dtype, a shape, byte strides, a first element; holds one storage
 *
 * A view of another's memory is made by a storage whose `release` tells the other. Views are immutable once made, so
 * they are shared freely between threads; counts are atomic.
 */
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
    size_t bytes; /* 0 also where the extent is not known (foreign memory) */
    /* release: called once, by the last drop, on whichever thread that is, with no lock of ours held; it frees the
     * storage's memory and `ctx`, not the storage itself. */
    void (*release)(struct fan_storage *self);
    void *ctx;
    /* NULL; else whoever lent the memory has taken it back, and nothing may touch it: why, a text that lives as long as
     * the storage (fan_storage_check). */
    _Atomic(const char *) ended;
} fan_storage;

/* fan_storage_new: `n` bytes of host memory (aligned to 64; not zeroed), one hold. NULL when out of memory. */
fan_storage *fan_storage_new(size_t n);
/* fan_storage_redirect: from now on memory of this thread's fan_storage_new and fan_array_new comes from `make` (NULL:
 * the host's); returns what it came from. It is not the core's own (fan_storage_only_ours): somebody lends it. */
typedef fan_storage *(*fan_storage_make)(size_t n);
fan_storage_make fan_storage_redirect(fan_storage_make make);
/* fan_storage_redirected: whether this thread's is redirected: one load where no thread's is. */
extern atomic_int fan_storage_redirects;
bool fan__storage_redirected(void);
static inline bool fan_storage_redirected(void)
{
    return atomic_load_explicit(&fan_storage_redirects, memory_order_relaxed) > 0 && fan__storage_redirected();
}
/* fan_storage_wrap: a storage over memory of others; NULL when out of memory (release is then not called). */
fan_storage *fan_storage_wrap(void *data, size_t n, void (*release)(fan_storage *), void *ctx);
static inline fan_storage *fan_storage_hold(fan_storage *s)
{
    atomic_fetch_add_explicit(&s->refs, 1, memory_order_relaxed);
    return s;
}
void fan_storage_drop(fan_storage *s); /* NULL is fine */
/* fan_storage_ended: the memory was taken back. fan_storage_check: FAN_ERR_STATE with the reason where the memory was
 * taken back. NULL is fine. */
static inline bool fan_storage_ended(const fan_storage *s)
{
    return s && atomic_load_explicit(&s->ended, memory_order_acquire);
}
fan_status fan_storage_check(const fan_storage *s, fan_error *err);
/* fan_storage_only_ours: memory of the core's own, with one hold. */
bool fan_storage_only_ours(const fan_storage *s);

typedef struct fan_array {
    atomic_size_t refs;
    fan_storage *storage; /* held */
    char *data;           /* element [0, 0, ..] */
    fan_dtype dtype;
    int ndim;
    int64_t size;     /* number of elements */
    int64_t *shape;   /* points into `dims`, or to the heap */
    int64_t *strides; /* bytes */
    bool writable;
    bool in_storage; /* it stands in the block of its storage, and goes with that */
    int64_t dims[2 * FAN_INLINE_NDIM];
} fan_array;

/* fan_array_new: fresh host memory, C order (or in the order of `like`'s strides: D16; like may be NULL), not zeroed.
 */
fan_status fan_array_new(fan_dtype dtype, int ndim, const int64_t *shape, const fan_array *like, fan_array **out,
                         fan_error *err);
/* fan_array_like: the same of another's dtype and shape, in C order. */
fan_status fan_array_like(const fan_array *a, fan_array **out, fan_error *err);
/* fan_array_view: a view into `storage` (held by the view; the caller keeps its own hold). Checks ndim, extents >= 0,
 * products and reach with checked arithmetic and, if storage->bytes > 0, that every element lies inside; FAN_ERR_VALUE
 * otherwise. */
fan_status fan_array_view(fan_storage *storage, char *data, fan_dtype dtype, int ndim, const int64_t *shape,
                          const int64_t *strides, bool writable, fan_array **out, fan_error *err);
/* fan_array_foreign: the same into memory of others, with a storage of its own in the same block: *of says what it
 * shall be, but for its count. Failing, nothing is released. */
fan_status fan_array_foreign(const fan_storage *of, char *data, fan_dtype dtype, int ndim, const int64_t *shape,
                             const int64_t *strides, bool writable, fan_array **out, fan_error *err);
fan_array *fan_array_hold(fan_array *a);
void fan_array_drop(fan_array *a);

/* fan_shape_check: product of extents and bytes by checked multiplication; FAN_ERR_VALUE on a negative extent or
 * overflow.
 */
fan_status fan_shape_check(int ndim, const int64_t *shape, size_t itemsize, int64_t *size, fan_error *err);
/* fan_dense_strides: strides of a gap-free array of `shape` whose axes are ordered as those of `like` (NULL: C order).
 */
void fan_dense_strides(int ndim, const int64_t *shape, size_t itemsize, const fan_array *like, int64_t *strides);
/* fan_array_reach: offsets in bytes of the lowest byte and of the byte behind the highest, seen from `data`. Both 0
 * when empty. */
void fan_array_reach(const fan_array *a, int64_t *lo, int64_t *hi);
/* fan_array_dense: any permutation of a gap-free layout with positive strides (size-1 axes apart): it cannot overlap
 * itself. */
bool fan_array_dense(const fan_array *a);
/* fan_array_in_c_order: gap-free in C order (size-1 axes may have any stride). */
static inline bool fan_array_in_c_order(const fan_array *a)
{
    int64_t step = (int64_t)fan_dtype_size(a->dtype);
    for (int i = a->ndim - 1; i >= 0; step *= a->shape[i--])
        if (a->strides[i] != step && a->shape[i] > 1)
            return false;
    return true;
}
static inline bool fan_array_same_shape(const fan_array *a, const fan_array *b)
{
    return a->ndim == b->ndim && (a->ndim == 0 || memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) == 0);
}
/* fan_array_same_view: same data, dtype, shape and strides: element i of one is element i of the other. */
bool fan_array_same_view(const fan_array *a, const fan_array *b);
/* fan_array_expanded: bit i is set where axis i (< 64) has stride 0 and extent > 1. */
uint64_t fan_array_expanded(const fan_array *a);
/* fan_array_compact: the view of `a` with the expanded axes in `axes` cut to extent 1. */
fan_status fan_array_compact(const fan_array *a, uint64_t axes, fan_array **out, fan_error *err);
/* fan_array_broadcast: `a` seen with `shape` (NumPy's rules; new and stretched axes get stride 0, not writable). */
fan_status fan_array_broadcast(const fan_array *a, int ndim, const int64_t *shape, fan_array **out, fan_error *err);
/* fan_array_slice: the elements start .. start + count - 1 of `a` along `axis`. */
fan_status fan_array_slice(const fan_array *a, int axis, int64_t start, int64_t count, fan_array **out, fan_error *err);
/* fan_broadcasts_from: true if `shape` is what `from` broadcasts to (A9). */
bool fan_broadcasts_from(int ndim, const int64_t *shape, int from_ndim, const int64_t *from);
/* fan_shape_text: "(3, 4)", "(3,)", "()" into buf; truncates. Returns buf. */
char *fan_shape_text(int ndim, const int64_t *shape, char *buf, size_t size);

#endif
