/* value: what a slot can hold, and the table of the frontend, for objects that the core cannot
 * read. */
#ifndef FAN_BUFFER_VALUE_H
#define FAN_BUFFER_VALUE_H

#include "array/patch.h"
#include "buffer/accum.h"
#include "device/batch.h"
#include "device/capture_rule.h"
#include "device/event.h"
#include "device/memory.h"
#include "device/stream.h"

/* A gradient or a sum. Moved by assignment, copied by fan_value_copy, ended by fan_value_drop. A
 * zeroed value is undefined. */
typedef struct fan_value {
    fan_form form;
    fan_dtype dtype; /* FAN_DT_NONE for objects */
    bool weak;       /* a Python scalar (D5) */
    /* the frontend's: the object itself gives the address of the memory of the array, and may be
     * read again (is_unchanged) */
    bool own_memory;
    uint8_t origin; /* the frontend's: what kind of thing it came from */
    /* the frontend's: the sum comes back as the origin of the lowest rank, the lowest key among
     * equals (D15) */
    uint8_t rank;
    /* Not held: the memory holds it. NULL for undefined values, zeros, and objects without
     * parts. */
    fan_device *device;
    /* the dense array; for a symbolic zero a view that gives its shape; the values of a partial
     * one */
    fan_array *array;
    fan_sparse *sparse;
    fan_patch *patch;  /* where a partial one lies; else NULL */
    void *object;      /* the frontend's object; NULL for what the core made itself */
    fan_array **parts; /* of an object: the arrays that it lists as its own (__fanin_parts__) */
    size_t nparts;
} fan_value;

/* The common properties of the plain contributions of one slot (plain.h): host arrays of one shape
 * and order of axes, or numbers. Their memory is gap-free, or, of rows of a larger array, has gaps
 * of one size along one axis. */
#define FAN_PLAIN_NDIM 4
typedef struct fan_plain_kind {
    fan_dtype dtype;
    uint8_t origin; /* as in fan_value */
    int8_t ndim;
    /* whether the memory holds the value is checked when it is used: `plain_value` may call out
     * then, and no lock may be held */
    bool check_at_use;
    /* an immutable number: the frontend makes an object of what its sum is written into */
    bool scalar;
    bool weak;   /* as in fan_value */
    bool inside; /* the value itself, of at most 8 bytes, is stored instead of its address */
    /* of its axes in memory, and its gaps (fan_plain_order); 0: C order, without gaps */
    uint32_t order;
    int64_t shape[FAN_PLAIN_NDIM];
} fan_plain_kind;

#define FAN_BUSY_BYTES 65536 /* from here on the frontend is left while elements are read */

/* The frontend's functions for plain entries (plain.h), called inside the interpreter
 * (fan_frontend.plain). They call no other code but where it is stated. */
typedef struct fan_plain_frontend {
    void (*hold)(void *object);
    /* drop_if_shared: gives up a hold that is not the last one, and returns whether it was such.
     * Calls nothing back. */
    bool (*drop_if_shared)(void *object);
    /* is_unchanged: whether a gradient is what it was when it came: memory, dtype, shape. */
    bool (*is_unchanged)(void *object, const fan_plain_kind *kind, const char *data);
    /* has_own_value: of a kind that is checked at use: whether its memory holds its value. May call
     * its library. */
    bool (*has_own_value)(void *object);
    /* is_detached: of such a kind: whether it requires no gradient, so that it may itself be a sum,
     * or be written. May call its library. */
    bool (*is_detached)(void *object);
    /* is_unique: whether the buffer has the only reference to the object, weak ones counted, as far
     * as Python's counts show. */
    bool (*is_unique)(void *object);
    /* unshared: whether the buffer's hold on the array is the only one, and its memory cannot be
     * reached otherwise. */
    bool (*unshared)(void *object);
    /* writable: whether its memory may be written. */
    bool (*writable)(void *object, const fan_plain_kind *kind);
    /* fresh: a new array of the kind that `like` is of, and where its first element is; the
     * caller's hold. NULL: none, or not a plain one. May call its library. */
    void *(*fresh)(void *like, const fan_plain_kind *kind, char **data);
    /* copy: a fresh one with the elements of `of`, whose address *data becomes; else as fresh. */
    void *(*copy)(void *of, const fan_plain_kind *kind, char **data);
    /* number: an immutable number of a kind (fan_plain_kind.scalar); the caller's hold, or NULL. */
    void *(*number)(const fan_plain_kind *kind, const char *value);
    /* wrote: reports, before it happens, that an array is about to be written, for libraries that
     * count writes. May call its library; false: it refused. */
    bool (*wrote)(void *object);
} fan_plain_frontend;

/* The frontend's callbacks. With a lock of ours held are called `alone`, `plain_value` of a kind
 * that is not checked at use, and `drop` of a hold that is not the last one; nothing else. */
typedef struct fan_frontend {
    void (*hold)(void *object);
    void (*drop)(void *object);
    /* unshared: whether the hold of the buffer on the object is the only one, and its memory cannot
     * be reached otherwise. */
    bool (*unshared)(void *object);
    /* alone: whether only the buffer keeps the object and its memory alive, as far as reference
     * counts show without a call. v: the value that it is held as; NULL: it is parked as a plain
     * entry. A guess: it decides when something is summed, never what. Calls no other code: a lock
     * may be held. */
    bool (*alone)(void *object, const fan_value *v);
    /* lent: whether the memory is the lender's again once the sum is taken: such a contribution is
     * copied where others are handed through (A14). v as in alone. NULL: none is. */
    bool (*lent)(const void *object, const fan_value *v);
    /* plain_value: makes the value of a plain entry, whose first element is at `data`, with a hold
     * of its own on the object. Calls no other code, unless the kind is checked at use: a lock may
     * be held. *kept: whether the library that was called has a hold on the object now. */
    fan_status (*plain_value)(void *object, char *data, const fan_plain_kind *kind, fan_value *out,
                              bool *kept, fan_error *err);
    /* is_unchanged: whether host memory of the caller lies where it lay when it was added, with the
     * same size, dtype and shape. Called whenever it is about to be read. Calls no other code.
     * NULL: memory never moves. */
    bool (*is_unchanged)(const fan_value *v);
    /* clear_error: clears the exception of an FAN_ERR_EXTERN that is not reported. May be NULL. */
    void (*clear_error)(void);
    /* combine: A1, A8: a new value from two; `combine` is the slot's, may be NULL. FAN_ERR_EXTERN
     * with the cause kept by the frontend. */
    fan_status (*combine)(void *combine, const fan_value *old, const fan_value *new_,
                          fan_value *out, fan_error *err);
    /* multiply: W7: a new value, by the object's own operator: times the weight, or, where `divide`
     * is set, over it. Fails as combine does. */
    fan_status (*multiply)(const fan_value *v, const fan_weight *weight, bool divide,
                           fan_value *out, fan_error *err);
    /* fresh: an array on `d` for a sum of what `origin` is, allocated by the library that owns that
     * kind; work queued on `on` may write it at once. *out NULL, and FAN_OK: the core is to
     * allocate. May be NULL. */
    fan_status (*fresh)(uint8_t origin, fan_device *d, fan_stream *on, fan_dtype dtype, int ndim,
                        const int64_t *shape, const fan_array *like, fan_array **out,
                        fan_error *err);
    /* allow_threads_begin, allow_threads_end: around anything that may take long (FAN_BUSY_BYTES)
     * or block; the second gets what the first gave. */
    void *(*allow_threads_begin)(void);
    void (*allow_threads_end)(void *left);
    /* check_signals: between the parts of a long wait; anything but FAN_OK ends the wait (a
     * signal's handler raised). May be NULL. */
    fan_status (*check_signals)(fan_error *err);
    /* mismatch: S6: the consumer of `slot` is a leaf on another stream than the producer's. Called
     * once per process, and never with `err` of a failing call. */
    fan_status (*mismatch)(const char *buffer, size_t slot, const fan_stream *producer,
                           const fan_stream *consumer, fan_error *err);
    /* plain: for plain entries (plain.h); NULL: there are none. */
    const fan_plain_frontend *plain;
} fan_frontend;

/* fan_frontend_leave: lets other threads of the frontend in, where `when` is set and it can;
 * fan_frontend_return ends that, with what the first gave. NULL: they were not let in. */
static inline void *fan_frontend_leave(const fan_frontend *frontend, bool when)
{
    if (!when || !frontend->allow_threads_begin)
        return NULL;
    return frontend->allow_threads_begin();
}
static inline void fan_frontend_return(const fan_frontend *frontend, void *left)
{
    if (left)
        frontend->allow_threads_end(left);
}

/* fan_value_none: an undefined one. */
static inline fan_value fan_value_none(void)
{
    return (fan_value){.dtype = FAN_DT_NONE};
}
/* fan_value_copy: *dst becomes another value of the same things, with holds of its own;
 * FAN_ERR_NOMEM. */
fan_status fan_value_copy(const fan_frontend *f, const fan_value *v, fan_value *dst,
                          fan_error *err);
/* fan_value_drop: drops all and makes *v undefined. */
void fan_value_drop(const fan_frontend *f, fan_value *v);
/* fan_value_set_origin: the value becomes one of another kind (D15): if its object is of its old
 * kind, it is dropped, and the memory stays. */
void fan_value_set_origin(const fan_frontend *f, fan_value *v, uint8_t origin, uint8_t rank);
/* fan_value_use: checks that the caller of `name` has not donated the memory of a value; with
 * `donate` the call does (fan_backend.use, for each of its arrays). Objects donate nothing. On
 * failure nothing is donated. */
fan_status fan_value_use(const fan_value *v, const char *name, bool donate, fan_error *err);
/* fan_value_returned: its memory is the donor's again (fan_backend.returned). */
void fan_value_returned(const fan_value *v);
/* fan_value_shape: of dense, sparse, partial and zero values; returns the rank, -1 for objects and
 * undefined. */
int fan_value_shape(const fan_value *v, const int64_t **shape);
/* fan_value_arrays: the *n arrays of its memory, in `own` or, for an object, those that it
 * lists. */
fan_array *const *fan_value_arrays(const fan_value *v, fan_array *own[3], size_t *n);
/* fan_value_bytes: what it keeps alive, expanded axes counted once. */
uint64_t fan_value_bytes(const fan_value *v);

/* fan_value_number: the value of a Python int or bool, or of a sum of such, on the host (D5); 0 of
 * anything else. */
int64_t fan_value_number(const fan_value *v);
/* fan_weak_int_fits: whether dtype d has a Python int; floats have any, rounded. */
bool fan_weak_int_fits(int64_t i, fan_dtype d);

/* Python's ints and bools at the beginning of a left fold, summed as they are (D5). */
typedef struct fan_int_run {
    __int128 sum;
    bool ints; /* one of them was no bool */
} fan_int_run;
/* fan_int_run_add: adds a value, which, wherever it lies, is `number` (fan_value_number).
 *   false: the run ended before it */
bool fan_int_run_add(fan_int_run *r, const fan_value *v, int64_t number);
/* fan_int_run_put: the same of a Python scalar of this dtype at `data`. */
bool fan_int_run_put(fan_int_run *r, fan_dtype dtype, const char *data);
/* fan_int_run_leaves: whether the sum of the run, in dtype d, is no longer what it was: it does not
 * fit, and what comes next, NULL for nothing, is no integer that would continue the count modulo
 * 2^bits. `scale` NULL: none. */
bool fan_int_run_leaves(const fan_int_run *r, const fan_value *next, const fan_scale *scale,
                        fan_dtype d);

fan_value fan_value_dense(fan_array *a, fan_device *d); /* takes the hold of a */
fan_value fan_value_sparse(fan_sparse *s, fan_device *d);
/* fan_value_set_patch: a dense value becomes a partial one, with a hold of its own on the patch. */
void fan_value_set_patch(fan_value *v, fan_patch *patch);

/* The parts of a sparse gradient with the structure of another one, while it is made. */
typedef struct fan_sparse_parts {
    fan_array *indices;
    fan_array *pointers;
    fan_array *values;
} fan_sparse_parts;
/* fan_sparse_parts_end: *out is made of the parts, with the structure of `like`, if `status` is
 * FAN_OK; the parts are dropped. Returns `status`, or why it could not be made. */
fan_status fan_sparse_parts_end(fan_sparse_parts *parts, fan_status status, const fan_sparse *like,
                                fan_sparse **out, fan_error *err);

#endif
