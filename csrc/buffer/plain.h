/* plain: plain entries, and their sums: host arrays of one kind, in a slot to which nothing else
 * came.
 *
 * Nothing about them needs a decision on the way: no stream, no conversion, and a sum is one pass
 * over memory. So they are not made values: an entry is the object and the address of its first
 * element, computed once at the add. Size and kind are checked there, too: what could not be summed
 * here is not parked as a plain entry, but for one large array alone, which a chain without fan-in
 * takes as it came. Their common properties are their kind (value.h); the geometry of its memory is
 * in list.h, with the entries themselves. The plan is the constant one: no stream waits, and the
 * sum is dense, into the first entry (A6) or into fresh memory.
 *
 *   add    add_plain.c   past the budget: added into a sum that is the buffer's own, in place;
 *                        else parked
 *   fold   budget.c      past the budget: the ready prefix is summed, and its sum stays in the
 *                        list as the first
 *   take   take_plain.c  claimed; where does each sum go? is what will be read unchanged? summed;
 *                        handed over
 *
 * A slot with plain entries gets a state (slot.h) as soon as another contribution is added, or a
 * call needs more than a sum; the entries stay in its list, and fan_gather makes values of them for
 * each sum.
 *
 * No lock is taken here. Plain entries are for a frontend whose interpreter lets one thread in at a
 * time, as Python's GIL does, and leaves the interpreter only while jobs run and while a thread
 * waits: so all that changes a slot happens inside the interpreter. The counters are added to
 * without a lock for the same reason (fan_counter_add). The C API has a lock for each buffer in its
 * place (py/base/api_lock.h). A frontend without such a lock offers no fan_plain_frontend, and has
 * no plain entries. */
#ifndef FAN_BUFFER_PLAIN_H
#define FAN_BUFFER_PLAIN_H

#include "array/convert.h"
#include "array/extents.h"
#include "base/pool.h"
#include "base/trace.h"
#include "buffer/slot.h"

#define FAN_PLAIN_BYTES 65536 /* larger arrays are summed without the interpreter */
#define FAN_PLAIN_TERMS 64    /* terms of one pass */

/* fan_counter_add: as FAN_COUNT, inside the interpreter: no other thread counts meanwhile. */
static inline void fan_counter_add(atomic_uint_fast64_t *counter, uint64_t n)
{
    uint64_t before = atomic_load_explicit(counter, memory_order_relaxed);
    atomic_store_explicit(counter, before + n, memory_order_relaxed);
}

/* fan_plain_is_large: an array of `bytes` is summed in recycled memory, by the general path. */
static inline bool fan_plain_is_large(uint64_t bytes)
{
    return bytes >= FAN_POOL_FROM;
}
/* fan_plain_fits: whether arrays of `bytes` each are summed here, of which `acc` is the
 * accumulation dtype. */
bool fan_plain_fits(fan_dtype dtype, fan_dtype acc, uint64_t bytes);
/* of terms and sum, from which on several threads pay */
#define FAN_PLAIN_PARALLEL_BYTES ((uint64_t)4 << 20)
/* runs that are read side by side where they are not in a near cache */
#define FAN_PLAIN_FEW_RUNS 8
/* fan_plain_is_flat: whether one thread that reads all n runs of `bytes` side by side is the
 * quickest way to sum them. */
static inline bool fan_plain_is_flat(uint64_t bytes, size_t n)
{
    if (bytes <= FAN_PLAIN_BYTES)
        return true;
    return n <= FAN_PLAIN_FEW_RUNS && (n + 1) * bytes < FAN_PLAIN_PARALLEL_BYTES;
}
/* as fan_get_debug returns it; the caller has declared that options are read */
extern atomic_bool fan_debug_on;
/* fan_plain_allowed: false while a trace or debug=True is on, or this thread records: they need the
 * general path. */
static inline bool fan_plain_allowed(void)
{
    if (atomic_load_explicit(&fan_debug_on, memory_order_relaxed) || fan_storage_redirected())
        return false;
    return atomic_load_explicit(&fan_traces, memory_order_relaxed) == 0 || !fan_trace_on();
}

/* ---- for the frontend ---- */

/* fan_plain_add: adds one plain contribution, of which the caller has set the bits of *one. `kind`
 * is NULL where it is undefined. The buffer takes a hold of its own, on the object or on a copy,
 * which *one is then; it takes none where it adds into its sum at once.
 *   *added true: the contribution is added; with a status other than FAN_OK the fold failed that it
 *     made due
 *   *added false: nothing happened, and fan_buffer_add decides, or raises */
fan_status fan_plain_add(fan_buffer *b, size_t slot, const fan_plain_kind *kind, fan_entry *one,
                         bool *added, fan_error *err);

/* fan_plain_add_weighted: the same of a defined one with a weight. */
fan_status fan_plain_add_weighted(fan_buffer *b, size_t slot, const fan_plain_kind *kind,
                                  fan_entry *one, const fan_weight *weight, bool *added,
                                  fan_error *err);

/* A batch of gradients. */
typedef struct fan_plain_batch {
    size_t n;
    bool far; /* no near cache holds it: `prefetch` is worth its calls */
    /* read: reads the k-th of them, the same each time; *kind is set where one->object is. Returns
     * whether it is a plain one. */
    bool (*read)(void *ctx, size_t k, size_t *slot, fan_plain_kind *kind, fan_entry *one);
    /* the object and the slot of one that was read */
    void *(*again)(void *ctx, size_t k, size_t *slot);
    void (*prefetch)(void *ctx, size_t k); /* k may be past the end */
    void *ctx;
} fan_plain_batch;
/* fan_plain_add_many: adds all or, with *added false, none of them. */
fan_status fan_plain_add_many(fan_buffer *b, const fan_plain_batch *batch, bool *added,
                              fan_error *err);
/* fan_plain_prefetch: fetches into the cache what an add to `slot`, or a take of it, reads. The
 * slot need not exist. */
void fan_plain_prefetch(const fan_buffer *b, size_t slot);

/* Slots [first, end). */
typedef struct fan_span {
    size_t first;
    size_t end;
} fan_span;

typedef enum fan_plain_where {
    FAN_PLAIN_NOWHERE,
    FAN_PLAIN_THERE,
    FAN_PLAIN_REFUSED
} fan_plain_where;

/* Where the caller of a take wants its sums. */
typedef struct fan_plain_outs {
    /* at: NOWHERE: this sum is not written into an array of the caller's. THERE: *object (a hold),
     * *data and *bytes are its place, and it is gap-free, may be written, and is of *kind, which is
     * NULL for a slot whose sum is undefined. REFUSED: it is for the general path. */
    fan_plain_where (*at)(void *ctx, size_t slot, const fan_plain_kind *kind, void **object,
                          char **data, uint64_t *bytes);
    void *ctx;
} fan_plain_outs;

/* fan_plain_take: a take of the slots of a span. results[i], all NULL before, gets the sum of slot
 * first + i with a hold of the caller's, or stays NULL where that is undefined. `outs` is NULL
 * where the caller names no arrays.
 *   true: the slots are empty
 *   false: nothing happened, and fan_buffer_take decides, or raises */
bool fan_plain_take(fan_buffer *b, fan_span span, const fan_take *options,
                    const fan_plain_outs *outs, void **results);

/* fan_plain_scales: whether sums of dtype d are scaled here. The general path reports what is wrong
 * with a scale. */
bool fan_plain_scales(const fan_take *options, fan_dtype d, fan_dtype acc);

/* fan_plain_sum: the sum of 2 to FAN_PLAIN_TERMS arrays of one kind into `out`, one of them or
 * apart from all, and counted. scale: NULL, or one that fits. Other threads of the frontend may run
 * meanwhile: the caller holds what the arrays belong to. */
void fan_plain_sum(const fan_frontend *f, const fan_plain_kind *kind, const char *const *src,
                   size_t n, const fan_scale *scale, char *out);

/* ---- for the verbs ---- */

/* fan_plain_claim: makes the slot this thread's: no other adds or takes. */
static inline void fan_plain_claim(fan_slot *s)
{
    fan_slot_make_busy(s);
    s->taking = true;
}
/* fan_plain_release: makes the slots of a span free, and wakes the threads that wait for them. */
static inline void fan_plain_release(fan_buffer *b, fan_span span)
{
    for (size_t i = span.first; i < span.end; i++)
        fan_slot_set_free(&b->slots[i]);
    if (atomic_load(&b->waiting))
        fan_slot_wake_all(b);
}

/* fan_plain_has_sum: the first entry of the slot's list is a running sum. */
static inline bool fan_plain_has_sum(const fan_slot *s)
{
    return s->list && s->list->summed;
}
/* fan_plain_stats_on_device: with stats: the statistics of the slot's last sum are on a device. */
static inline bool fan_plain_stats_on_device(const fan_buffer *b, size_t slot)
{
    if (!b->sum_stats)
        return false;
    return b->sum_stats[slot].device_words || b->sum_stats[slot].stream;
}
/* fan_plain_accum: the accumulation dtype of what waits in the slot. */
static inline fan_dtype fan_plain_accum(const fan_buffer *b, size_t slot)
{
    const fan_slot *s = &b->slots[slot];
    return fan_accum_dtype(s->list->kind.dtype, s->spec->accumulate);
}
/* fan_plain_scratch: bytes that a sum of n entries in dtype `acc` needs beside them. */
size_t fan_plain_scratch(const fan_list *list, size_t n, fan_dtype acc, bool stats);
/* fan_plain_unshared: A6: whether no code but the buffer can reach the memory of an entry that the
 * buffer did not make. */
bool fan_plain_unshared(const fan_buffer *b, const fan_entry *one, bool owned);
/* fan_plain_may_write: A6 of the first entry, as the target of a sum of n in dtype `acc`. */
fan_reuse_answer fan_plain_may_write(const fan_buffer *b, size_t slot, size_t n, fan_dtype acc);
/* fan_plain_place: returns the object that the sum of the first n entries is written into, and its
 * place in *data: the first entry, where `reuse` and A6 allow it, or a fresh one, whose hold is the
 * caller's. May call the library of the entries.
 *   NULL: out of memory, or the library refuses */
void *fan_plain_place(const fan_buffer *b, size_t slot, size_t n, fan_dtype acc, bool reuse,
                      char **data);
/* fan_plain_give_up: drops the hold on such an object (NULL: there is none), and what its library
 * raised: the general path reports it, if there is anything to report. */
void fan_plain_give_up(const fan_buffer *b, void *object);
/* fan_plain_has_value: whether the memory of an entry holds its value, and, where it is `handed`
 * out or written, needs no gradient. Calls the array library, which may run arbitrary code: after
 * the result is allocated and before fan_plain_unchanged. An array of ours is never passed to it:
 * it could keep a reference to memory that we write later. */
bool fan_plain_has_value(const fan_buffer *b, const fan_entry *one, bool handed);
/* fan_plain_has_values: the same of the first n entries, if the kind requires the check. `first`:
 * the first of them is handed out or written. */
static inline bool fan_plain_has_values(const fan_buffer *b, const fan_list *list, size_t n,
                                        bool first)
{
    for (size_t k = 0; list->kind.check_at_use && k < n; k++) {
        if (!fan_plain_has_value(b, &list->entries[k], first && k == 0))
            return false;
    }
    return true;
}
/* fan_plain_unchanged: whether an array is what it was when it was read first. Calls no library. */
static inline bool fan_plain_unchanged(const fan_buffer *b, void *object,
                                       const fan_plain_kind *kind, const char *data)
{
    return b->frontend->plain->is_unchanged(object, kind, data);
}
/* fan_plain_all_unchanged: the same of the first n entries. */
bool fan_plain_all_unchanged(const fan_buffer *b, const fan_list *list, size_t n);
/* fan_plain_fold: `out` becomes the left fold of the first n entries, scaled (NULL: not), with
 * statistics (NULL: none). out is the first of them or apart from all; up to FAN_PLAIN_TERMS any of
 * them. scratch: of fan_plain_scratch bytes. It allocates nothing and cannot fail. Other threads of
 * the frontend may run meanwhile: the slot is claimed. */
void fan_plain_fold(fan_buffer *b, const fan_list *list, size_t n, fan_dtype acc,
                    const fan_scale *scale, char *out, void *scratch, fan_stats *stats);
/* fan_plain_fold_wide: the same in the dtype `acc`, which is wider than the list's, for gap-free
 * runs: `out` is the first entry, if that is `wide`, or apart from all. */
void fan_plain_fold_wide(fan_buffer *b, const fan_list *list, size_t n, fan_dtype acc, char *out);
/* fan_plain_fold_weighted: of up to FAN_PLAIN_TERMS small gap-free entries, each times its weight,
 * where it has one; over a divisor, of fan_divisor_as (NULL: none), and then scaled (NULL: not). */
void fan_plain_fold_weighted(fan_buffer *b, size_t slot, size_t n, const char *divisor,
                             const fan_scale *scale, char *out);
/* fan_plain_sum_size: returns the bytes of a sum. */
uint64_t fan_plain_sum_size(const fan_list *list, bool wide);
/* fan_plain_count: counts a sum of the first n entries; `wide`: it was made so. */
void fan_plain_count(fan_buffer *b, const fan_list *list, size_t n, bool in_place, bool copied,
                     bool wide);

#endif
