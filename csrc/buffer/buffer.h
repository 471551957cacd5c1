/* buffer: the input buffer. Slots take contributions; each is parked, folded, and taken
 * (docs/rules.md, Park and fold).
 *
 *   add     checked and decided (the slot is locked), carried out (unlocked), parked (locked);
 *           perhaps a fold
 *   fold    makes the slot busy, unlocks, sums the ready prefix on A, locks, commits
 *   take    makes every slot busy in order, finishes its sum, empties all at the end
 *
 * Every function may be called from any thread. No lock is held across a callback, a device call or
 * a wait (rules.md, Locks). */
#ifndef FAN_BUFFER_BUFFER_H
#define FAN_BUFFER_BUFFER_H

#include "base/thread.h"
#include "buffer/plan.h"
#include "buffer/value.h"

typedef struct fan_buffer fan_buffer;

/* The declaration of a slot. The first gradient of each pass fixes what is not declared. */
typedef struct fan_slot_spec {
    bool has_shape;
    int ndim;
    const int64_t *shape; /* copied */
    fan_dtype dtype;      /* FAN_DT_NONE: undeclared */
    fan_device *device;   /* NULL: undeclared; held */
    fan_dtype accumulate; /* FAN_DT_NONE: A11's own choice */
    bool exact;           /* A11: the exact sum, rounded once; where `accumulate` is none */
    bool partial;         /* P3: its taker takes a lone partial gradient as it is */
    void *combine;        /* the frontend's; held */
    const char *name;     /* copied; NULL: none */
} fan_slot_spec;

/* fan_slot_takes: A9, A10, A12: whether a slot takes an array of the host as it is: it declares no
 * other dtype, shape or device. */
static inline bool fan_slot_takes(const fan_slot_spec *spec, fan_dtype dtype, int ndim,
                                  const int64_t *shape)
{
    fan_dtype_set seen;
    fan_move_facts facts = {.here = !spec->device || spec->device == fan_cpu()};
    if (fan_accum_move(&facts) != FAN_MOVE_NOT)
        return false;
    if (spec->dtype != FAN_DT_NONE) {
        if (fan_accum_dtype_fit(spec->dtype, spec->accumulate, dtype, false, &seen) !=
            FAN_DTYPE_FIT_EXACT)
            return false;
    }
    if (!spec->has_shape)
        return true;
    return fan_accum_fit(true, spec->ndim, spec->shape, ndim, shape) == FAN_FIT_EXACT;
}

/* The bytes of parked contributions from which on a fold is due. 0: each arrival is folded at once.
 * UINT64_MAX: folds wait until take(). FAN_BUDGET_AUTO has two limits (fan_budget_auto):
 *
 *   alone   what only the buffer still keeps alive, since its producer dropped it. The limit is a
 *           part of the second-level cache, so that it is summed while it is warm and its memory
 *           goes back
 *   held    what other references hold as well. It costs no memory; the limit is 64 MiB
 *
 * The frontend is called for the holders of a contribution when the next one comes: until then the
 * frame of the caller mostly still holds it. */
#define FAN_BUDGET_AUTO (UINT64_MAX - 1)
typedef struct fan_auto_budget {
    /* bytes */
    uint64_t alone;
    uint64_t held;
    /* `alone` of slots whose sums the general path makes, to which a sum costs more */
    uint64_t general;
} fan_auto_budget;
fan_auto_budget fan_budget_auto(void);
#ifdef FAN_TEST
/* fan_buffer_blocks: of memory, which an empty buffer of few slots has. */
size_t fan_buffer_blocks(const fan_buffer *b);
/* of buffers made from now on; NULL: as it was */
void fan_budget_auto_set(const fan_auto_budget *to);
#endif

typedef struct fan_buffer_config {
    size_t slots;
    const fan_slot_spec *specs; /* one per slot; NULL: none declared */
    uint64_t budget;            /* bytes, or FAN_BUDGET_AUTO */
    fan_dtype accumulate;       /* of slots that declare none; */
    bool exact;                 /* .. and this */
    /* the consumer's; NULL: current stream when a slot gets its first gradient */
    fan_stream *stream;
    bool leaf;
    bool create_graph;
    bool stats;       /* fan_buffer_stats may be called */
    const char *name; /* NULL: "InputBuffer" */
    /* of a call that makes one sum and has no slots for its user: messages name none */
    bool hides_slots;
    bool of_node; /* the engine's own: passes write the digests of what it gets */
    const fan_frontend *frontend;
} fan_buffer_config;

/* X(name): the counters. */
#define FAN_COUNTER_LIST(X)                                                        \
    X(adds)     /* contributions added, undefined ones too */                      \
    X(copies)   /* contributions or results that were copied or converted */       \
    X(in_place) /* terms summed into an operand's memory */                        \
    X(folds)    /* sums run */                                                     \
    X(passes)   /* passes over memory: jobs run */                                 \
    X(bytes_read)                                                                  \
    X(bytes_written)                                                               \
    X(events)       /* events recorded */                                          \
    X(waits)        /* waits queued */                                             \
    X(waits_elided) /* waits left out because they were known to hold */           \
    X(mismatches)   /* S6: leaf consumers on another stream than the producer's */ \
    X(peak_parked_bytes)

typedef struct fan_counters {
#define X(name) uint64_t name;
    FAN_COUNTER_LIST(X)
#undef X
} fan_counters;

fan_status fan_buffer_new(const fan_buffer_config *config, fan_buffer **out, fan_error *err);
/* fan_buffer_seen: for the search of host orders (base/thread.h): records what a call that takes no
 * lock does to a slot (SIZE_MAX: to all; out of range: to none). */
void fan_buffer_seen(const fan_buffer *b, size_t slot, fan_sched_mode mode);
/* fan_buffer_seen_counters: it reads the counters. */
void fan_buffer_seen_counters(const fan_buffer *b);
/* fan_buffer_seen_parked: it reads the parked bytes of all slots. */
void fan_buffer_seen_parked(const fan_buffer *b);
/* fan_buffer_free: drops all that is parked. No other thread may be inside. */
void fan_buffer_free(fan_buffer *b);
/* fan_buffer_reusable: whether a buffer of this config, without references, may serve again as a
 * new one with as many slots, but for what its slots declare. */
bool fan_buffer_reusable(const fan_buffer_config *c);
/* fan_buffer_empty_for_reuse: empties a buffer that may serve again; false, and nothing happened:
 * it may not. */
bool fan_buffer_empty_for_reuse(fan_buffer *b);
/* fan_buffer_reuse: begins its next life, as of a buffer whose only option is its budget. */
void fan_buffer_reuse(fan_buffer *b, uint64_t budget);
/* fan_buffer_declare: adds what the slots declare, before anything else. Where it fails the buffer
 * is to be emptied again or freed. */
fan_status fan_buffer_declare(fan_buffer *b, const fan_buffer_config *config, fan_error *err);
size_t fan_buffer_slots(const fan_buffer *b);
const char *fan_buffer_name(const fan_buffer *b);
/* fan_buffer_shown_slot: the slot's number in messages; -1: they name none. */
int64_t fan_buffer_shown_slot(const fan_buffer *b, size_t slot);
uint64_t fan_buffer_budget(const fan_buffer *b);

typedef struct fan_contribution {
    /* add takes it when it succeeds (and leaves it undefined here); else it stays the caller's */
    fan_value value;
    int64_t key;        /* -1: none */
    fan_stream *stream; /* the producer's; NULL: S4 */
    bool donate;
    bool copy;
    fan_weight weight; /* W1; finite; not on: none was given */
    bool alone;  /* only the call itself holds it: once the call returns it is the buffer's alone */
    bool summed; /* of a target: it is in the slot's accumulation dtype, and stays so */
} fan_contribution;

/* fan_buffer_add: adds to `slot` (S1, S2, A8-A16, S3-S11). On failure everything is as before;
 * after a failed device call the slot is poisoned. */
fan_status fan_buffer_add(fan_buffer *b, size_t slot, fan_contribution *c, fan_error *err);
/* fan_buffer_add_many: adds c[i] to slots[i], n of them: all or none, but for what a failed device
 * call, or others' code that runs during a sum, leaves behind. `order`: the indices sorted by slot,
 * those of one slot in the order of the call. A fold that fails after all are parked fails alone:
 * the contributions stay. */
fan_status fan_buffer_add_many(fan_buffer *b, fan_contribution *c, const size_t *slots,
                               const size_t *order, size_t n, fan_error *err);
/* A target: an array that the producer itself adds into. It is the running sum where that is safe,
 * else scratch. */
typedef struct fan_target {
    size_t slot;
    int64_t key;
    fan_array *array;     /* held; in the accumulation dtype */
    fan_device *device;   /* held */
    fan_stream *producer; /* held; NULL without streams */
    fan_weight weight;    /* multiplies what was added (W1) */
    bool direct;          /* it is the running sum itself; the slot is busy until the end */
    struct fan_item *sum; /* .. where the slot has it */
    uint64_t thread;      /* the thread that began it */
    /* the next target of the slot that has begun: *t must not move until its end */
    struct fan_target *next;
} fan_target;
/* fan_buffer_target: begins one, for a slot that declares shape and dtype; `undeclared`: the dtype
 * of the sum of a slot that declares its shape alone, or FAN_DT_NONE; `weight`: NULL is none. The
 * running sum is lent if it is the buffer's own or donated, and complete up to `key`, the
 * producer's stream is A, and the weight is 1; else zeros. */
fan_status fan_buffer_target(fan_buffer *b, size_t slot, int64_t key, fan_stream *stream,
                             fan_dtype undeclared, const fan_weight *weight, fan_target *t,
                             fan_error *err);
/* fan_buffer_target_end: `good` makes it a contribution; otherwise scratch is dropped, and a slot
 * whose running sum was lent is poisoned. Both times *t is done with. */
fan_status fan_buffer_target_end(fan_buffer *b, fan_target *t, bool good, uint8_t origin,
                                 fan_error *err);
/* fan_buffer_target_cancel: ends a target into which nothing was written, as if it had never
 * begun. */
void fan_buffer_target_cancel(fan_buffer *b, fan_target *t);

typedef struct fan_take {
    bool one; /* only `slot`: the others stay as they are; results and out are its alone */
    size_t slot;
    fan_stream *stream;   /* the stream that will use the sums; NULL: the buffer's */
    const fan_value *out; /* per slot that is taken, dense or undefined; NULL: none */
    fan_scale scale;      /* re, im and i all filled in by the caller; `integral`: i is exact */
    /* of scale; what is integral is real */
    bool integral;
    bool real;
    bool mean; /* W3: the sums are divided by the sum of their weights */
    /* of a mean: numbers whose exact sum divides instead of the weights' sum; NULL: none. At most
     * FAN_DIVISOR_PARTS */
    const double *over;
    size_t nover;
    /* W5: weights of contributions that still wait, by key; without keys by place of arrival.
     * Sorted by key. NULL: none. */
    struct fan_late_weight *late;
    size_t nlate;
    bool late_places; /* keys of late are places in the order of arrival */
    bool writable;
    /* show: called with each sum once it is made and its consumer is ordered, before any `out` is
     * written and any reference is dropped. sum NULL: the sum of this slot will be written into its
     * `out`. `slot`: 0 where `one` is set. If it fails, the take fails and no sum is lost. May run
     * code of the user. NULL: no call. */
    fan_status (*show)(void *ctx, size_t slot, const fan_value *sum, fan_error *err);
    void *ctx;
} fan_take;

/* A weight that a take is given. */
typedef struct fan_late_weight {
    int64_t key; /* or the place of arrival */
    fan_weight weight;
    bool used; /* some contribution has it; set by the take */
} fan_late_weight;

fan_status fan_buffer_expect(fan_buffer *b, size_t slot, int64_t n, fan_error *err);
/* fan_buffer_ready: FAN_ERR_VALUE without expect. */
fan_status fan_buffer_ready(fan_buffer *b, size_t slot, bool *ready, fan_error *err);
/* fan_buffer_snapshot: D17; the caller owns *out's holds. */
fan_status fan_buffer_snapshot(fan_buffer *b, size_t slot, fan_stream *consumer, fan_value *out,
                               fan_error *err);

/* fan_buffer_take: all sums into results[slots]; the caller owns their holds; the buffer is empty
 * afterwards. With `one` that holds of this slot, and results[0]. */
fan_status fan_buffer_take(fan_buffer *b, const fan_take *options, fan_value *results,
                           fan_error *err);
/* fan_buffer_stats: of the sum that the last take gave for `slot`, until something is added to it.
 * FAN_ERR_VALUE where there is none; *some: whether that sum was defined (and no object); *bad_key:
 * the first key that brought an inf or NaN (-1: it has no key), where *bad. On a device with
 * streams the first call waits for the stream that summed: FAN_ERR_CAPTURE while that is captured,
 * or where it was then. */
fan_status fan_buffer_stats(fan_buffer *b, size_t slot, bool *some, fan_stats *out, bool *bad,
                            int64_t *bad_key, fan_error *err);
fan_status fan_buffer_clear(fan_buffer *b, fan_error *err);
void fan_buffer_counters(const fan_buffer *b, fan_counters *out);
void fan_counters_total(fan_counters *out); /* of the process */

/* fan_buffer_visit: calls `visit` for every object that the buffer holds (garbage collection);
 * stops at the first non-zero answer. v: the value that it is held as; NULL: as a plain entry, or
 * as a `combine`. */
int fan_buffer_visit(fan_buffer *b, int (*visit)(void *object, const fan_value *v, void *arg),
                     void *arg);
/* fan_buffer_abandon: garbage collection: drops every object; the buffer is empty. */
void fan_buffer_abandon(fan_buffer *b);

/* The present state of a slot, for explain. Pointers live until the next call on the buffer. */
typedef struct fan_item_view {
    int64_t key;
    fan_form form;
    fan_dtype dtype;
    uint64_t producer; /* handle of its producer's stream, 0: none */
    bool event;
    bool donated;
    bool ready;
} fan_item_view;

typedef struct fan_slot_view {
    char how;
    uint64_t rules;
    /* handles, 0: unset */
    uint64_t consumer;
    uint64_t accum;
    uint64_t ready;
    bool event;
    bool has_value;
    bool value_owned;
    const char *poisoned; /* why; NULL: it is not */
    fan_form value_form;
    /* of the sum so far */
    fan_dtype dtype;
    fan_dtype accumulate;
    int64_t count;
    int64_t expected; /* -1: none */
    int64_t next_key; /* -1: no keys, or none is left */
    /* what the next sum will do; all zero: there is nothing to sum */
    fan_fold_plan next;
    size_t items; /* parked */
    /* of the buffer; bytes */
    uint64_t budget;
    uint64_t parked;
    uint64_t alone;
    fan_auto_budget limits; /* where the budget is FAN_BUDGET_AUTO */
} fan_slot_view;

fan_status fan_buffer_look(fan_buffer *b, size_t slot, fan_slot_view *out, fan_item_view *items,
                           size_t cap, fan_error *err);

/* fan_buffer_sketch: how much is in all slots: `parked` contributions of `bytes`, `sums` that have
 * begun, slots that are poisoned. */
typedef struct fan_sketch {
    size_t parked;
    size_t sums;
    size_t poisoned;
    uint64_t bytes;
} fan_sketch;
void fan_buffer_sketch(fan_buffer *b, fan_sketch *out);

/* fan_stream_join: S20: `caller` waits for each of `streams`, and `values` are used on it. */
fan_status fan_stream_join(fan_stream *caller, fan_stream *const *streams, size_t n,
                           const fan_value *values, size_t nvalues, fan_error *err);

/* Process-wide switches. */
void fan_set_debug(bool on); /* detect arrays that were changed after they were added */
bool fan_get_debug(void);
void fan_set_warn_mismatch(bool on); /* S6 */
bool fan_get_warn_mismatch(void);
void fan_set_capture_redirect(bool on); /* S7 */
bool fan_get_capture_redirect(void);

#endif
