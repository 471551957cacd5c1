/* fast: the fast path: gradients that need no decision, from add to take, in slots that hold nothing else.
 *
 * A gap-free host array of the slot's own dtype and shape, with no stream, is parked as its object and the address of
 * its first element. Size and kind are asked at the door: what the fast path could not sum at a take is never parked by
 * it, but for one large array alone, which a chain without fan-in takes as it came. As soon as anything else comes to
 * the slot, or more is asked of it than a sum, what is parked becomes items like any other (materialize.h), and the
 * rest of the buffer knows nothing of these files. They decide what the general path decides for such a gradient: S2,
 * S3, A6, A7, A10, A14, A15, A16, S22's scale and out=.
 *
 *   add    a sum that is the buffer's own, and over the budget: added into it, in place; else parked
 *   fold   over the budget: the ready prefix is summed into its first term, where that may be written (A6), or into a
 *          fresh one, which stays in the list as the first: the slot remains one of the fast path
 *   take   1. claim every slot  2. where does each sum go?  3. is what will be read what it was?  4. sum  5. let go
 *
 * No lock is taken. The fast path is for a frontend whose interpreter lets one thread in at a time, as Python's GIL
 * does, and leaves the interpreter only while jobs run and while a thread waits: so all that changes a slot, by
 * whichever way, happens inside the interpreter. Its counters are plain numbers for the same reason. Every function
 * here is called inside the interpreter; a frontend without such a lock offers no fan_fast_frontend, and there is no
 * fast path.
 */
#ifndef FAN_BUFFER_FAST_H
#define FAN_BUFFER_FAST_H

#include "base/pool.h"
#include "base/trace.h"
#include "buffer/buffer.h"
#include "buffer/fast_list.h"

/* What the fast path asks of its frontend, always inside the interpreter (fan_frontend.fast). None calls anybody but
 * those that say so. */
typedef struct fan_fast_frontend {
    void (*hold)(void *object);
    /* drop_if_shared: gives up a hold that is not the last one, and says whether it was such: nothing is called back.
     */
    bool (*drop_if_shared)(void *object);
    /* is_unchanged: whether a gradient is what it was when it came: memory, dtype, shape. */
    bool (*is_unchanged)(void *object, const fan_fast_kind *kind, const char *data);
    /* has_own_value: of a kind that is checked at use: whether its memory holds its value. is_detached: and whether it
     * asks for no gradient, so that it may itself be a sum, or be written. Both may call its library. */
    bool (*has_own_value)(void *object);
    bool (*is_detached)(void *object);
    bool (*nobody_else_has)(void *object); /* the object: neither a reference nor a weak one; as far as Python knows */
    /* unshared: the buffer's hold on the array is the only one, and its memory cannot be reached otherwise. writable:
     * its memory may be written. */
    bool (*unshared)(void *object);
    bool (*writable)(void *object, const fan_fast_kind *kind);
    /* fresh: a new array of the kind that `like` is of, and where its first element is; the caller's hold. NULL: none,
     * or not for the fast path. May call its library. */
    void *(*fresh)(void *like, const fan_fast_kind *kind, char **data);
    /* number: an immutable number of a kind (fan_fast_kind.scalar); the caller's hold, or NULL. */
    void *(*number)(const fan_fast_kind *kind, const char *value);
    /* wrote: says, before it happens, that an array is about to be written, for libraries that count writes. May call
     * its library; false: it refused. */
    bool (*wrote)(void *object);
} fan_fast_frontend;

#define FAN_FAST_BYTES 65536 /* larger arrays are summed without the interpreter */
#define FAN_FAST_TERMS 64    /* terms of one pass */

/* fan_fast_is_large: an array of `bytes` is summed in recycled memory, by the general path: of such the fast path hands
 * one through, and sums none. fan_fast_fits: whether it sums arrays of `bytes` each, of which `acc` is the accumulation
 * dtype. */
static inline bool fan_fast_is_large(uint64_t bytes) { return bytes >= FAN_POOL_FROM; }
bool fan_fast_fits(fan_dtype dtype, fan_dtype acc, uint64_t bytes);

/* fan_fast_add_inplace: adds one gradient into the slot's sum and keeps no reference. false: nothing happened, as there
 * is no sum that may be written, or the budget wants the gradient to wait. */
bool fan_fast_add_inplace(fan_buffer *b, size_t slot, const fan_fast_kind *kind, const fan_fast_term *one, bool alone);

/* fan_fast_add: adds one gradient. *added false: nothing happened, and fan_buffer_add knows what to do or to say. kind:
 * NULL of an undefined one. `alone` as in fan_contribution. The buffer takes a hold of its own. A status that is not
 * FAN_OK: it is parked, and the fold that it made due failed. */
fan_status fan_fast_add(fan_buffer *b, size_t slot, const fan_fast_kind *kind, const fan_fast_term *one, bool alone,
                        bool *added, fan_error *err);

/* A batch of gradients. */
typedef struct fan_fast_batch {
    size_t n;
    bool far; /* no near cache holds it: `prefetch` is worth its calls */
    /* read: the k-th of them, the same each time. kind: set where one->object is. false: not for the fast path. */
    bool (*read)(void *ctx, size_t k, size_t *slot, fan_fast_kind *kind, fan_fast_term *one);
    void *(*again)(void *ctx, size_t k, size_t *slot); /* the object and the slot of one that was read */
    void (*prefetch)(void *ctx, size_t k);             /* k may be past the end */
    void *ctx;
} fan_fast_batch;
/* fan_fast_add_many: adds all or, with *added false, none of them. */
fan_status fan_fast_add_many(fan_buffer *b, const fan_fast_batch *batch, bool *added, fan_error *err);
/* fan_fast_prefetch: fetches into the cache what an add to `slot`, or a take of it, will look at. A slot that is not
 * there is fine. */
void fan_fast_prefetch(const fan_buffer *b, size_t slot);

/* Slots [first, end). */
typedef struct fan_span {
    size_t first, end;
} fan_span;

typedef enum fan_fast_where { FAN_FAST_NOWHERE, FAN_FAST_THERE, FAN_FAST_REFUSED } fan_fast_where;

/* Where the caller of a take wants its sums. */
typedef struct fan_fast_outs {
    /* at: NOWHERE: this sum is not written into an array of the caller's. THERE: *object (a hold), *data and *bytes say
     * where, and it is gap-free, may be written, and is of *kind, which is NULL for a slot whose sum is undefined.
     * REFUSED: not for the fast path. */
    fan_fast_where (*at)(void *ctx, size_t slot, const fan_fast_kind *kind, void **object, char **data,
                         uint64_t *bytes);
    void *ctx;
} fan_fast_outs;

/* fan_fast_take: a take of the slots of a span: results[i], all NULL before, gets the sum of slot first + i with a hold
 * of the caller's, or NULL where it is undefined; the slots are empty then. outs: NULL: none. False: nothing happened,
 * and fan_buffer_take knows what to do or to say. */
bool fan_fast_take(fan_buffer *b, fan_span span, const fan_take *how, const fan_fast_outs *outs, void **results);

/* fan_fast_is_flat: whether one thread that reads all n runs of `bytes` side by side is the quickest way to sum them.
 */
#define FAN_FAST_PARALLEL_BYTES ((uint64_t)4 << 20) /* of terms and sum, from which on several threads pay */
#define FAN_FAST_FEW_RUNS 8 /* runs that are read side by side where they are not in a near cache */
static inline bool fan_fast_is_flat(uint64_t bytes, size_t n)
{
    return bytes <= FAN_FAST_BYTES || (n <= FAN_FAST_FEW_RUNS && (n + 1) * bytes < FAN_FAST_PARALLEL_BYTES);
}

/* fan_fast_sum: the sum of 2 to FAN_FAST_TERMS arrays of one kind into `out`, one of them or apart from all, and
 * counted. The interpreter is left meanwhile where that pays: the caller holds what they belong to. */
void fan_fast_sum(const fan_frontend *f, const fan_fast_kind *kind, const char *const *src, size_t n, char *out);
/* fan_fast_allowed: false while a trace or debug=True is on, or this thread records: they need the general path. */
extern atomic_bool fan_debug_on; /* as fan_get_debug tells it; who begins a call has said that options are read */
static inline bool fan_fast_allowed(void)
{
    return !atomic_load_explicit(&fan_debug_on, memory_order_relaxed) && !fan_storage_redirected() &&
           (atomic_load_explicit(&fan_traces, memory_order_relaxed) == 0 || !fan_trace_on());
}

#endif
