/* slot: the inside of a buffer, shared by buffer.c (who may enter when) and fold.c (how a sum is carried out). */
#ifndef FAN_BUFFER_SLOT_H
#define FAN_BUFFER_SLOT_H

#include "buffer/buffer.h"
#include "buffer/fast.h"
#include "base/fault.h"

/* One contribution. Owned by its slot from reservation on; only the slot's folder takes it away again. */
typedef struct fan_item {
    fan_value value;
    int64_t key;          /* -1: none */
    fan_stream *producer; /* held; where the value is ready. NULL on devices without streams */
    fan_event *event;     /* held; on P. NULL: nobody will wait for it */
    bool parked;          /* false while its add still carries out its plan */
    bool donated;
    bool ours;         /* a copy or conversion that the buffer made */
    bool lent;         /* .. and lent to its producer (target) */
    fan_dtype_set own; /* the dtype it came with (A10) */
    bool alone;        /* nobody but the buffer has it, as far as is known */
    uint64_t bytes;
    uint64_t hash; /* with debug: of its elements at add */
    bool hashed;
} fan_item;

/* What is known of a sum beside its value. On a device with streams it stands in the device's memory until somebody
 * asks. */
typedef struct fan_sum_stats {
    fan_stats stats;
    bool yes;
    bool bad;         /* some contribution had an inf or a NaN: */
    int64_t bad_key;  /* .. the first of them */
    fan_array *words; /* held; figures that tell all this, but for what follows; NULL: nothing to read */
    fan_stream *on;   /* held; once it has run so far */
    uint64_t times;   /* how many elements of the sum each element stands for (A13) */
    bool captured;    /* a part of the sum was made under capture: nothing is told */
} fan_sum_stats;

/* What an exact slot has summed so far: words of exact.h. It is larger than what it replaces where that is little, so a
 * fold waits until it is not. */
typedef struct fan_exact_state {
    fan_dtype dtype;
    int64_t size;
    uint8_t origin, rank; /* of the contribution whose kind the sum has (D15) */
    uint64_t words[];
} fan_exact_state;

/* What a slot holds during one pass, once something came that is not plain. Under the slot's lock; what is marked
 * (folder) is written only by the thread that made the slot busy. */
typedef struct fan_pass {
    int64_t *shape; /* fixed by the first gradient where undeclared */
    int ndim;
    bool shaped;
    fan_device *device;           /* held; NULL: not fixed */
    fan_stream *consumer, *accum; /* held; fixed by the first gradient on a device with streams */
    fan_stream *joins; /* held; A is a pooled stream that nobody else knows, and came into this one's capture (S11);
                          NULL: it is not */
    char how;          /* case letter of that gradient; 0: none */
    uint64_t rules;
    fan_dtype_set seen; /* of all contributions */
    bool has_weak_int;
    int64_t weak_lo, weak_hi; /* range of the weak ints among them */
    int keyed;                /* 0: no contribution yet, 1: with keys, -1: without */
    int64_t count;
    bool objects;     /* some contribution is, or was, an object: a sum may call others' code */
    fan_item **items; /* by key, or by arrival */
    size_t nitems, cap;
    fan_keys *unsorted; /* NULL: they are so; else keys came that far from their places that the items are by arrival
                           for now, and these are they */
    size_t arriving;    /* items whose add still carries out its plan */
    size_t ask;         /* with an automatic budget: from how many items on it is asked again who has them */
    fan_value value;    /* the sum so far (folder) */
    bool value_ours, value_lent, value_donated; /* (folder) */
    fan_dtype_set value_seen;                   /* of what is in it (folder) */
    bool value_hashed;                          /* with debug: it is a contribution still, and .. (folder) */
    uint64_t value_hash;                        /* .. of its elements at add */
    int64_t value_key;                          /* the key whose origin it has (folder) */
    int64_t next_key;                           /* first key that is not in it (folder) */
    fan_stream *ready;                          /* held (folder) */
    fan_event *ready_event;                     /* held (folder) */
    fan_exact_state *exact;                     /* NULL: none (folder) */
    fan_sum_stats known;                        /* with stats: of `value`, where it was summed (folder) */
    fan_error *poison;                          /* the first failed device call, NULL: none */
} fan_pass;

/* What a slot was declared to be. */
typedef struct fan_spec {
    int64_t *shape;
    int ndim;
    bool has_shape;
    fan_dtype dtype;    /* FAN_DT_NONE: undeclared */
    fan_device *device; /* held */
    fan_dtype accumulate;
    bool exact;    /* sums of floats are exact (A11) */
    void *combine; /* the frontend's, held */
    char *name;
} fan_spec;

/* An idle slot is small: what a pass needs is made when the pass begins. */
typedef struct fan_slot {
    fan_spec *spec; /* the buffer's own `undeclared` where nothing was declared */
    fan_pass *p;    /* never NULL: `fan_pass_none` before the first contribution that is no plain one. Read only then */
    fan_fast_list *plain;       /* NULL: none yet in this buffer's life */
    fan_target *targets;        /* that have begun and not ended */
    int64_t expected;           /* -1: none */
    atomic_uint_fast64_t owner; /* fan_thread_id of who made it busy; read unlocked to ask whether that is oneself */
    bool busy;                  /* someone folds, takes or copies */
    bool taking;                /* .. and it is a take: adds wait */
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

extern fan_pass fan_pass_none;

/* FAN_SHIFTED: what comes out of order moves so many at most; it is put behind all where that would be more. */
#define FAN_SHIFTED 64
/* fan_pass_has: locked: whether a key is among the items; *at: where it would go to. fan_pass_in_order: locked: they
 * are by key afterwards. */
bool fan_pass_has(const fan_pass *p, int64_t key, size_t *at);
void fan_pass_in_order(fan_pass *p);

#define FAN_LOCKS 16
#define FAN_INLINE_SLOTS 4

struct fan_buffer {
    const fan_frontend *frontend;
    uint64_t id;
    char *name;
    uint64_t budget;
    uint64_t least; /* parked bytes up to which nothing is due whoever has them: the budget, or the lesser one of .. */
    fan_auto_budget limits; /* where it is automatic */
    fan_stream *stream;     /* held */
    bool leaf, create_graph;
    fan_sum_stats *known; /* with stats: of each slot's last sum; else NULL */
    fan_spec undeclared;
    size_t nslots;
    fan_slot *slots;
    size_t nlocks;
    fan_mutex *locks; /* slot i has locks[i % nlocks] */
    fan_cond *changed;
    atomic_uint_fast64_t parked; /* bytes */
    uint64_t weighed;            /* bytes that scheduled threads have added, ever (fan_buffer_weigh) */
    atomic_uint_fast64_t alone;  /* of them, with an automatic budget: those that nobody else has, as far as is known */
    struct {
        const void *object; /* what the fast path parked last, once the budget was asked, where its maker still had it;
                               NULL: nothing. Not held, never followed */
        size_t slot, at;
    } newest;
    atomic_uint waiting; /* threads in wait_for_change */
    unsigned adopted;    /* fan_process() of who made or adopted it */
    unsigned process;    /* .. or FAN_LEFT: it was forked while another thread was in it, until clear() */
    struct {
#define X(name) atomic_uint_fast64_t name;
        FAN_COUNTER_LIST(X)
#undef X
    } n;
    fan_counters quick; /* what is counted by plain.c */
    bool small;         /* slots, locks and what is plain lie in the block of the buffer itself (fan_small) */
};

/* fan_over_budget: whether something is to be folded, were `coming` bytes that somebody else holds no longer parked. */
static inline bool fan_over_budget(const fan_buffer *b, uint64_t coming)
{
    uint64_t parked = atomic_load_explicit(&b->parked, memory_order_relaxed), alone;
    parked -= coming < parked ? coming : parked;
    if (b->budget != FAN_BUDGET_AUTO)
        return parked > b->budget;
    alone = atomic_load_explicit(&b->alone, memory_order_relaxed);
    return alone > b->limits.alone || (parked > alone && parked - alone > b->limits.held);
}

/* fan_ask_step: how many more there must be before n are asked again who has them: each is asked a few times at most.
 */
static inline size_t fan_ask_step(size_t n) { return n < 64 ? 1 + n / 8 : n / 2; }

/* fan_count: adds to a counter of the buffer and of the process. */
#define FAN_COUNTER_INDEX(name) offsetof(fan_counters, name)
void fan_count(fan_buffer *b, size_t counter_offset, uint64_t n);
#define FAN_COUNT(b, name, k) fan_count((b), offsetof(fan_counters, name), (k))

static inline fan_stream_id fan_stream_id_of(const fan_stream *s)
{
    return s ? (fan_stream_id){s->device->id, FAN_FAULT(STREAMS_BY_NUMBER) ? s->handle : s->id} : (fan_stream_id){0, 0};
}

/* fan_plan_record: an event on s, or, where the proof leaves out `bit`, an event that was never recorded. */
fan_status fan_plan_record(fan_buffer *b, fan_stream *s, uint64_t bit, fan_event **out, fan_error *err);
/* fan_plan_wait: s waits for e (NULL or never recorded: nothing), unless the proof leaves out `bit`. A refusal by S7
 * names the slot. */
fan_status fan_plan_wait(fan_buffer *b, size_t slot, fan_stream *s, fan_event *e, uint64_t bit, fan_error *err);
/* fan_plan_refused: S7: a refused wait, told of the node that it is for, with the remedy that only the buffer has. */
fan_status fan_plan_refused(const char *who, fan_error *err);
/* fan_plan_consumer: S7: who consumes what is ready on t (with event e, NULL: none yet) instead of s: t where it is
 * captured, s is in no capture and redirection is on; else s. No hold. Either may be NULL. */
fan_status fan_plan_consumer(fan_stream *s, fan_stream *t, const fan_event *e, fan_stream **out, fan_error *err);
fan_status fan_plan_mark(const fan_value *v, fan_stream *s, uint64_t bit, fan_error *err);

/* One term of a fold: the value so far or a contribution. Borrowed from the slot, which is busy. */
typedef struct fan_term {
    const fan_value *v;
    fan_stream *producer;
    fan_event *event;
    bool donated, ours, lent;
    bool is_value;
    int64_t key;        /* of a contribution, -1: none */
    fan_dtype own;      /* of a contribution: the dtype that an object would meet; FAN_DT_NONE: as it is */
    fan_dtype_set seen; /* of all up to and with this term */
} fan_term;

typedef struct fan_fold {
    fan_buffer *b;
    size_t slot;
    fan_term *terms; /* what adds something: no undefined, no zeros */
    size_t n;
    fan_dtype_set seen;   /* zeros too */
    fan_operand *scratch; /* room for n + 1 operands */
    int64_t *keys;        /* of the operands, where figures are written; else NULL */
    /* wishes */
    bool finish;  /* the result in the sum's own dtype, fresh; else in the accumulation dtype, perhaps in place */
    bool may_end; /* the user may end it (base/interrupt.h): of a take, as long as nothing would be lost */
    bool forbid_in_place;         /* snapshots */
    const fan_take *take;         /* scale; NULL: none */
    fan_dtype finish_dtype;       /* of a finished result; FAN_DT_NONE: the sum's own */
    const fan_value *out;         /* write here (all terms dense); NULL: none */
    const fan_exact_state *state; /* summed before these terms; NULL: nothing */
    fan_stream *taker;            /* S22 */
    /* answers */
    fan_value result; /* owned */
    bool ours, donated;
    fan_stream *ready;      /* held */
    fan_event *ready_event; /* held */
    uint64_t rules;
    fan_sum_stats known; /* with stats: of the result */
    /* between begin and end */
    fan_batch *batch;     /* the sum waits there; NULL: it was queued */
    size_t number;        /* .. as this one */
    fan_sync_slot before; /* what the plan of S15 to S17, S22 is made of */
    fan_event *early;     /* a planted fault's */
} fan_fold;

/* fan_fold_dtype: the sum's dtype; FAN_DT_NONE for objects. */
fan_dtype fan_fold_dtype(const fan_fold *f);
/* ---- with stats (known.c); without, nothing happens ---- */
/* fan_fold_figures: on a device with streams, before anything is queued: memory for the figures of the result,
 * f->known.words, unless only the result will tell how large it is (objects), or A is captured. */
fan_status fan_fold_figures(fan_fold *f, fan_error *err);
/* fan_fold_skip: how many terms are not held to blame for an inf or a NaN: the running sum, of which it is known who
 * spoiled it. */
size_t fan_fold_skip(const fan_fold *f);
/* fan_fold_learn: what the sum's own pass has not told: the result is read once more, and its terms where it is not
 * finite. Queued on A on a device with streams. */
fan_status fan_fold_learn(fan_fold *f, const fan_value *result, fan_error *err);
/* fan_fold_survey: of the only term, which is handed through as it is: A waits for it; then f->known tells of it, and
 * `*R` is A. */
fan_status fan_fold_survey(fan_fold *f, fan_stream **R, fan_error *err);
/* fan_slot_survey: of the running sum as it is now, whose last contribution has this key. The slot is busy; unlocked.
 */
fan_status fan_slot_survey(fan_buffer *b, size_t slot, int64_t key, fan_error *err);
/* fan_sum_stats_hold: another one that tells the same; fan_sum_stats_move leaves nothing behind. fan_sum_stats_drop:
 * unlocked. */
fan_sum_stats fan_sum_stats_hold(const fan_sum_stats *k);
fan_sum_stats fan_sum_stats_move(fan_sum_stats *k);
void fan_sum_stats_drop(fan_sum_stats *k);
/* fan_sum_stats_forget: locked: what is known of a slot's last sum is so no longer; the caller drops it, unlocked. */
fan_sum_stats fan_sum_stats_forget(fan_buffer *b, size_t slot);
/* fan_fold_exact: whether the sum is an exact one: of floats, in a slot that asks for it. */
bool fan_fold_exact(const fan_fold *f);
/* fan_fold_absorb: on the CPU: adds the terms to the slot's exact state, a new or a wider one where it must be.
 * FAN_ERR_NOMEM: nothing happened. */
fan_status fan_fold_absorb(fan_fold *f, const fan_value *like, fan_error *err);
/* fan_fold_run: sums f->n >= 2 terms (or finishes f->n == 1) on A. FAN_ERR_NOMEM and FAN_ERR_EXTERN leave all as it
 * was; after FAN_ERR_DEVICE, FAN_ERR_RACE and the like the slot must be poisoned. */
fan_status fan_fold_run(fan_fold *f, fan_error *err);
/* fan_fold_begin, _end: the two halves of it: up to the sum, which is put into `batch` (NULL: it is queued at once);
 * and from its flush on: whatever orders others after the sum. Between them the slot stays busy. A fold that began is
 * ended, or abandoned where its sum was not queued for another's failure (fan_fold_left). */
fan_status fan_fold_begin(fan_fold *f, fan_batch *batch, fan_error *err);
fan_status fan_fold_end(fan_fold *f, fan_error *err);
bool fan_fold_left(const fan_fold *f);
void fan_fold_abandon(fan_fold *f);
/* fan_fold_batches: whether the sum is one job on streams, which others may be queued with. */
bool fan_fold_batches(const fan_fold *f);
/* fan_fold_wait_terms: S12, S13: A waits for every term, and uses it. */
fan_status fan_fold_wait_terms(fan_fold *f, fan_error *err);
/* fan_fold_wait_taker: S22: `on`, A as a rule, waits for the taker's stream before it writes out. */
fan_status fan_fold_wait_taker(fan_fold *f, fan_stream *on, fan_error *err);
/* fan_fold_expanded: axes along which every term is expanded (A13); 0 unless all are dense. */
uint64_t fan_fold_expanded(const fan_fold *f);
/* fan_fold_reuse: whether the first term may be written (for explain). */
fan_reuse_answer fan_fold_reuse(const fan_fold *f);
fan_accum_plan fan_fold_plan(const fan_fold *f);

/* FAN_SLOT_SAID, FAN_SLOT_WHO: how a message about a slot begins, "grads: slot 2 (w1)", and what fills it in. */
#define FAN_SLOT_SAID "%s: slot %zu%s%s%s"
#define FAN_SLOT_WHO(b, i)                                                                                          \
    (b)->name, (i), (b)->slots[i].spec->name ? " (" : "", (b)->slots[i].spec->name ? (b)->slots[i].spec->name : "", \
        (b)->slots[i].spec->name ? ")" : ""

/* fan_buffer_weigh: a scheduled thread adds `bytes`: as long as all that such threads ever added fits the (smallest)
 * budget, no sum is due earlier or later because of another slot; from then on whoever adds decides by what all others
 * did. */
void fan_buffer_weigh(fan_buffer *b, uint64_t bytes);

/* --- entering a slot (buffer.c). "Locked": the caller holds the slot's lock. */

void fan_slot_lock(fan_buffer *b, size_t slot);
void fan_slot_unlock(fan_buffer *b, size_t slot);
fan_status fan_slot_check(fan_buffer *b, size_t slot, fan_error *err); /* S1; and fan_buffer_here */
/* fan_buffer_here: FAN_ERR_STATE in a forked child, where another thread was in the buffer at the fork. Asked before
 * any lock of the buffer is taken. fan_buffer_adopt: the same without a word: no lock or slot is held by a thread that
 * stayed behind. */
#define FAN_LEFT (~0u)
static inline bool fan_buffer_is_here(const fan_buffer *b) { return __builtin_expect(b->process == fan_process(), 1); }
fan_status fan_buffer_here(fan_buffer *b, fan_error *err);
void fan_buffer_adopt(fan_buffer *b);
fan_status fan_slot_poisoned(const fan_buffer *b, size_t slot, fan_error *err); /* locked */
/* fan_slot_enter: locked: waits while a take has the slot; what is plain has become items then, and the slot is not
 * poisoned. */
fan_status fan_slot_enter(fan_buffer *b, size_t slot, const char *what, fan_error *err);
/* fan_current_for: the stream that S4, S5 and S11 call current, of the device that c will be on; a hold, or NULL. */
fan_stream *fan_current_for(fan_buffer *b, size_t slot, const fan_contribution *c);
/* fan_slot_claim: locked; makes the slot busy. Waits for whoever has it, and, for a take, until every add has parked.
 */
fan_status fan_slot_claim(fan_buffer *b, size_t slot, bool taking, const char *what, fan_error *err);
/* fan_slot_claim_all: the same; what is plain has become items then. */
fan_status fan_slot_claim_all(fan_buffer *b, size_t slot, bool taking, const char *what, fan_error *err);
/* fan_slot_in_target: locked: FAN_ERR_STATE where this thread has begun a target of the slot and not ended it: what it
 * adds into would miss its pass. */
fan_status fan_slot_in_target(const fan_buffer *b, size_t slot, const char *what, fan_error *err);
void fan_slot_let_go(fan_buffer *b, size_t slot); /* locked */
/* fan_slot_changed: the error of a gradient that its giver changed: buffer, slot, key (-1: none). fan_slot_still: that
 * error, where memory of a value has moved. */
fan_status fan_slot_changed(const fan_buffer *b, size_t slot, int64_t key, fan_error *err);
fan_status fan_slot_still(const fan_buffer *b, size_t slot, const fan_value *v, int64_t key, fan_error *err);
/* fan_slot_poison: locked or owned: keeps the first failure of a device call. */
void fan_slot_poison(fan_slot *s, fan_status status, const fan_error *err);
/* fan_pass_cut: locked: the slot is empty afterwards; what it held, for fan_pass_free, which drops it, unlocked. */
fan_pass *fan_pass_cut(fan_slot *s);
void fan_pass_free(fan_buffer *b, fan_pass *p);

/* fan_slot_materialize: locked: what is plain becomes items of a pass. FAN_ERR_NOMEM: nothing happened. */
fan_status fan_slot_materialize(fan_buffer *b, size_t slot, fan_error *err);
/* fan_fast_drop: unlocked: drops what is plain in a slot. */
void fan_fast_drop(fan_buffer *b, size_t slot);
void fan_fast_list_init(fan_fast_list *p);
int64_t fan_fast_count(const fan_fast_list *p);    /* contributions, those summed already too; p may be NULL */
void fan_fast_list_fini(fan_slot *s, bool inside); /* `inside`: the block is the buffer's own */
extern fan_counters fan_fast_total;                /* of the process */
void fan_fast_counted(const fan_counters *quick, fan_counters *out); /* adds them to *out */

/* What a fold or a take has before it. */
typedef struct fan_gathered {
    fan_fold fold;
    fan_item **items; /* copies of the pointers */
    size_t nitems;
    const fan_value *zero; /* the first symbolic zero */
    const fan_value *like; /* whose kind the sum comes back as (D15) */
    int64_t like_key;
} fan_gathered;

/* fan_gather: the value and the first `m` parked items (SIZE_MAX: all) as terms. The slot is busy; takes its lock. */
fan_status fan_gather(fan_buffer *b, size_t slot, size_t m, fan_gathered *g, fan_error *err);
void fan_gathered_fini(fan_gathered *g);
/* fan_slot_promote: locked on entry and on return: where one contribution is all there is, it becomes the value now. */
fan_status fan_slot_promote(fan_buffer *b, size_t slot, fan_error *err);
/* fan_fold_commit: sums the gathered items into the slot's value and takes them off the list. The slot is busy. */
fan_status fan_fold_commit(fan_buffer *b, size_t slot, fan_gathered *g, fan_error *err);
/* fan_fold_commit_end: the same of a fold that began. */
fan_status fan_fold_commit_end(fan_buffer *b, size_t slot, fan_gathered *g, fan_error *err);

/* FAN_MANY_BYTES: results that may be under way in one batch: until it is flushed nothing of what they replace is let
 * go. */
#define FAN_MANY_BYTES (UINT64_C(64) << 20)
/* fan_many_fold: on devices: folds what is due in slots[order[0..n)], in ascending order, with as few launches as
 * possible. What it passes over, slots that others have among it, is left to a fold by itself. */
fan_status fan_many_fold(fan_buffer *b, const size_t *slots, const size_t *order, size_t n, fan_error *err);
/* fan_slot_due: locked: how many of its first items are to be folded now if `coming` bytes of other slots no longer
 * count as parked; 0: none. */
size_t fan_slot_due(fan_buffer *b, size_t slot, uint64_t coming);

#endif
