/* internal: the inside of a buffer: what a slot holds, and what it was declared to be. */
#ifndef FAN_BUFFER_INTERNAL_H
#define FAN_BUFFER_INTERNAL_H

#include "array/window.h"
#include "base/fault.h"
#include "buffer/buffer.h"
#include "buffer/list.h"

/* The statistics of a sum. On a device with streams they are in the device's memory until stats()
 * reads them. */
typedef struct fan_sum_stats {
    fan_stats stats;
    bool valid;            /* false: nothing is known yet */
    bool has_nonfinite;    /* some contribution had an inf or a NaN: */
    int64_t nonfinite_key; /* .. the first of them; -1: it has no key */
    /* Device memory with the fields above, not yet copied to the host (a hold). NULL: they are on
     * the host. */
    fan_array *device_words;
    fan_stream *stream;    /* the stream that writes it (a hold) */
    uint64_t multiplicity; /* how many elements of the sum each element represents (A13) */
    bool captured;         /* a part of the sum was made under capture: there are no statistics */
} fan_sum_stats;

/* fan_sum_stats_blame: D35: a contribution with this key has an inf or a NaN; the first is kept. */
static inline void fan_sum_stats_blame(fan_sum_stats *sum_stats, int64_t key)
{
    if (sum_stats->has_nonfinite)
        return;
    sum_stats->has_nonfinite = true;
    sum_stats->nonfinite_key = key;
}

/* The contribution whose kind the sum comes back as (D15): that of the lowest rank, the lowest key
 * among equals. */
typedef struct fan_like {
    bool some;
    uint8_t origin;
    uint8_t rank;
    int64_t key;
} fan_like;

/* The sum so far of a slot with accumulate="exact". A fold waits until the contributions take more
 * memory than its window. */
typedef struct fan_exact_state {
    fan_window *sum;
    fan_like like;
    /* A13: axes along which all terms are: `sum` has one element along each */
    uint64_t expanded;
    int64_t strides[FAN_MAX_NDIM]; /* of the first term, whose axis order the result has (D16) */
} fan_exact_state;

/* The state of a slot in a pass, made once something came to it that is no plain entry (list.h).
 * Under the slot's lock; what is marked (folder) is written only by the thread that made the slot
 * busy. */
typedef struct fan_slot_state {
    int64_t *shape; /* fixed by the first gradient where undeclared */
    int ndim;
    bool shaped;
    fan_device *device; /* held; NULL: not fixed */
    /* C and A: held; fixed by the first gradient on a device with streams */
    fan_stream *consumer;
    fan_stream *accum;
    /* Set if `accum` is a stream of our own that was pulled into a capture: the stream it must be
     * joined back to before the capture ends (S11). A hold. */
    fan_stream *capture_origin;
    fan_sync_case stream_case; /* the case of that gradient */
    uint64_t rules;
    fan_dtype_set seen; /* of all contributions */
    bool has_weak_int;  /* a Python int is, or was, among them */
    int keyed;          /* 1: contributions have keys, -1: they have none, 0: there is none yet */
    int64_t count;
    bool objects;    /* some contribution is, or was, an object: a sum may run others' code */
    size_t arriving; /* items whose add still carries out its plan */
    /* with an automatic budget: the number of items from which on their holders are checked
     * again */
    size_t recheck_at;
    fan_detached left; /* the list of a slot that was emptied, for fan_slot_state_free */
    /* of the sum so far: the first entry of the list where list->summed is not 0, and `exact` */
    fan_dtype_set summed_seen; /* the dtypes of what is in it, zeros too (folder) */
    /* .. up to its last term: zeros after a lone one widen it only when a second term is added
     * (folder) */
    fan_dtype_set value_seen;
    /* the range of the Python ints in it, and 0 (folder) */
    int64_t summed_lo;
    int64_t summed_hi;
    /* the key of the contribution whose kind it comes back as (folder) */
    int64_t like_key;
    uint64_t next_key;       /* the lowest key that is not in it (folder); up to 2**63 */
    fan_exact_state *exact;  /* NULL: none (folder) */
    fan_sum_stats sum_stats; /* with stats: of a sum of several (folder) */
    fan_error *poison;       /* the first failed device call, NULL: none */
} fan_slot_state;

/* An idle slot is small: what a pass needs is made when the pass begins. */
typedef struct fan_slot {
    fan_slot_spec *spec; /* the buffer's own `undeclared` where nothing was declared */
    /* Never NULL. `fan_slot_state_none`, which is only read, until a contribution comes that is no
     * plain entry. */
    fan_slot_state *state;
    /* the contributions that wait; NULL: none yet in the life of this buffer */
    fan_list *list;
    fan_target *targets;              /* that have begun and not ended */
    struct fan_slot_weights *weights; /* NULL: none yet in the life of this buffer (weights.h) */
    int64_t expected;                 /* -1: none */
    /* fan_thread_id of the thread that made it busy; a thread compares it with its own without the
     * lock */
    atomic_uint_fast64_t owner;
    bool busy;   /* a thread folds, takes or copies it */
    bool taking; /* .. and it is a take: adds wait */
} fan_slot;
_Static_assert(sizeof(fan_slot) <= 96, "an idle slot takes at most 96 bytes");

static inline void fan_slot_set_owner(fan_slot *s, uint64_t thread)
{
    atomic_store_explicit(&s->owner, thread, memory_order_relaxed);
}
static inline bool fan_slot_owned_by(fan_slot *s, uint64_t thread)
{
    return atomic_load_explicit(&s->owner, memory_order_relaxed) == thread;
}

/* fan_slot_set_free: no thread has it; the caller wakes those that wait. */
static inline void fan_slot_set_free(fan_slot *s)
{
    s->busy = false;
    s->taking = false;
    fan_slot_set_owner(s, 0);
}

extern fan_slot_state fan_slot_state_none;

#define FAN_LOCKS 16
#define FAN_INLINE_SLOTS 4

/* The counters of one buffer. Read while other threads count. */
typedef struct fan_counter_store {
#define X(name) atomic_uint_fast64_t name;
    FAN_COUNTER_LIST(X)
#undef X
} fan_counter_store;

struct fan_buffer {
    const fan_frontend *frontend;
    uint64_t id;
    char *name;
    uint64_t budget;
    /* parked bytes up to which no fold is due, whatever holds them: the budget, or the lesser of
     * `limits` */
    uint64_t fold_threshold;
    fan_auto_budget limits; /* where it is automatic */
    fan_stream *stream;     /* held */
    bool leaf;
    bool create_graph;
    bool hides_slots;
    bool of_node;
    fan_sum_stats *sum_stats; /* with stats: of each slot's last sum; else NULL */
    fan_slot_spec undeclared;
    size_t nslots;
    fan_slot *slots;
    size_t nlocks;
    fan_mutex *locks; /* slot i has locks[i % nlocks] */
    fan_cond *changed;
    atomic_uint_fast64_t parked; /* bytes */
    /* bytes that threads of Machine.spawn have ever added (fan_buffer_weigh) */
    uint64_t weighed;
    /* with an automatic budget: the part of `parked` that only the buffer holds, as far as is
     * known */
    atomic_uint_fast64_t alone;
    struct {
        /* Set when the budget was checked: the object that was parked last, if its maker still held
         * it then. NULL: nothing is to be checked again. An address to compare: neither held nor
         * followed. */
        const void *object;
        size_t slot;
        size_t index;
    } last_parked;
    /* Threads in slot_wait_for_change. Sequentially consistent, and not enough by itself: a waiter
     * counts itself with the slot's lock and the frontend's, and fan_plain_release reads it with
     * the frontend's. */
    atomic_uint waiting;
    unsigned owner_generation; /* fan_fork_generation() of the process that made or adopted it */
    /* .. or FAN_FORK_INVALID until clear(): it was inherited by a fork while a thread of the parent
     * was in it */
    unsigned fork_generation;
    fan_counter_store counters;
    /* of all buffers of the process (options.c) */
    fan_buffer *newer;
    fan_buffer *older;
    /* slots, locks and lists lie in the block of the buffer itself (fan_small) */
    bool small;
    bool reusable; /* fan_buffer_reusable, but for what its slots declare */
};

/* fan_budget_near: whether a fold may be due while so many bytes are parked.
 *   false: none is, whatever holds them */
static inline bool fan_budget_near(const fan_buffer *b, uint64_t parked)
{
    return parked > b->fold_threshold;
}
/* fan_budget_exceeded: whether a fold is due. `pending`: parked bytes, held by others, that are
 * about to be folded anyway. `general`: the general path makes the sum. */
static inline bool fan_budget_exceeded(const fan_buffer *b, uint64_t pending, bool general)
{
    uint64_t parked = atomic_load_explicit(&b->parked, memory_order_relaxed);
    if (pending > parked)
        pending = parked;
    parked -= pending;
    if (b->budget != FAN_BUDGET_AUTO)
        return fan_budget_near(b, parked);
    uint64_t alone = atomic_load_explicit(&b->alone, memory_order_relaxed);
    uint64_t limit = general ? b->limits.general : b->limits.alone;
    if (alone > limit)
        return true;
    return parked > alone && parked - alone > b->limits.held;
}

/* fan_recheck_interval: after the holders of n were checked: how many more must come before the
 * next check. So each is checked a few times at most. */
static inline size_t fan_recheck_interval(size_t n)
{
    if (n < 64)
        return 1 + n / 8;
    return n / 2;
}

/* fan_is_lent: calls fan_frontend.lent, where the frontend lends memory. */
static inline bool fan_is_lent(const fan_buffer *b, const void *object, const fan_value *v)
{
    return b->frontend->lent && b->frontend->lent(object, v);
}

#define FAN_FORK_INVALID (~0u)
/* fan_buffer_is_usable: whether it was made, or adopted, in this process (fan_buffer_check_fork).
 */
static inline bool fan_buffer_is_usable(const fan_buffer *b)
{
    return __builtin_expect(b->fork_generation == fan_fork_generation(), 1);
}

/* fan_slot_place: what a message about a slot is about; key: -1: none. */
static inline fan_place fan_slot_place(const fan_buffer *b, size_t slot, int64_t key)
{
    return (fan_place){.object = b->name,
                       .slot = b->hides_slots ? -1 : (int64_t)slot,
                       .slot_name = b->slots[slot].spec->name,
                       .key = key};
}

/* fan_buffer_place: what a message about the buffer is about. */
static inline fan_place fan_buffer_place(const fan_buffer *b)
{
    return (fan_place){.object = b->name, .slot = -1, .key = -1};
}

/* ---- switches of the process, counters, and what scheduled threads share (options.c) ---- */

/* fan_count: adds to a counter of the buffer. */
void fan_count(const fan_buffer *b, atomic_uint_fast64_t *counter, uint64_t n);
#define FAN_COUNT(b, name, k) fan_count((b), &(b)->counters.name, (k))
extern fan_counter_store fan_counters_of_sums; /* fan_plain_sum: without a buffer */
/* fan_counters_begin: a new buffer counts. */
void fan_counters_begin(fan_buffer *b);
/* fan_counters_end: what it has counted moves to the process; `gone`: it counts no more, else from
 * 0 on. */
void fan_counters_end(fan_buffer *b, bool gone);
/* fan_count_parked: `bytes` more are parked; the peaks. */
void fan_count_parked(fan_buffer *b, uint64_t bytes);
/* fan_warn_mismatch_now: S6: whether it is to be warned of now: once per process, while the warning
 * is on. */
bool fan_warn_mismatch_now(void);

/* fan_touch_budget: to the search of host orders (base/thread.h): a sum may be due, or what waits
 * may become less. */
void fan_touch_budget(const fan_buffer *b, fan_sched_mode mode);
/* fan_buffer_weigh: for the search of host orders: a scheduled thread adds `bytes`. As long as all
 * that such threads ever added fits the (smallest) budget, a fold is due or not whatever the other
 * slots do; from then on whether one is due depends on the order of all adds. */
void fan_buffer_weigh(fan_buffer *b, uint64_t bytes);

#endif
