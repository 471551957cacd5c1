/* accum: what happens to two gradients that meet? (rules A, docs/rules.md)
 *
 *   old \ new   undefined   zero     dense                    sparse             object
 *   undefined   skip        hand     hand                     hand               hand
 *   zero        skip        skip A2  hand (A2)                hand (A2)          hand (A2)
 *   dense       skip        skip A2  into old A6 / fresh A7   into old A6 / A7   object
 *   sparse      skip        skip A2  into new A3 / fresh A4   merge A5 / COO A7  object
 *   object      skip        skip A2  object                   object             object
 *
 * "Into" needs the operand to be reusable: no other code can reach or still uses its memory.
 * fan_reusable returns that, and, if not, why. A worked case: the caller adds `g` and keeps it; `g`
 * is dense and writable, but neither made by us, nor donated, nor provably unshared: fresh (A7).
 * The sum is ours from then on and every later fold is in place (A6).
 *
 * What can go wrong: a held alias is written (z = x + y sends one array to two slots); a count of
 * one is trusted although another stream's kernel still reads; an array that overlaps itself or
 * another operand is written.
 *
 * Everything here is a pure function of its arguments: no allocation, no device call, no
 * lock. */
#ifndef FAN_BUFFER_ACCUM_H
#define FAN_BUFFER_ACCUM_H

#include "array/array.h"
#include "buffer/rules.h"

typedef enum fan_form {
    FAN_FORM_UNDEFINED,
    FAN_FORM_ZERO,
    FAN_FORM_DENSE,
    FAN_FORM_SPARSE,
    FAN_FORM_OBJECT,
    FAN_FORM_PARTIAL
} fan_form;

/* X(NAME, word) */
#define FAN_ACTION_LIST(X)                                                    \
    X(SKIP, "skip")           /* old stays; new adds nothing but its dtype */ \
    X(HAND, "hand")           /* new takes the slot */                        \
    X(INTO_OLD, "into old")   /* old += new */                                \
    X(INTO_NEW, "into new")   /* new += old */                                \
    X(FRESH, "fresh")         /* a fresh dense array */                       \
    X(MERGE, "merge")         /* merged sparse, of the same kind */           \
    X(MERGE_COO, "merge coo") /* two kinds of sparse: COO */                  \
    X(OBJECT, "object")       /* combine, or the operator */                  \
    X(EXACT, "exact")         /* fresh memory: summed in no order */          \
    X(OUT, "into out")        /* the taker's memory */

typedef enum fan_action {
#define X(NAME, word) FAN_ACTION_##NAME,
    FAN_ACTION_LIST(X)
#undef X
} fan_action;

const char *fan_action_word(fan_action a);

typedef struct fan_side {
    fan_form form;
    int format;    /* fan_format of a sparse one */
    bool reusable; /* of a dense one: fan_reusable returned yes */
} fan_side;

typedef struct fan_accum_plan {
    fan_action action;
    fan_form result;
    uint64_t rules;
} fan_accum_plan;

/* fan_accum_calls_out: whether a sum is made by the operators of its terms, of which some are
 * `objects` (A1, A8). */
static inline bool fan_accum_calls_out(bool recording, bool objects)
{
    return recording || objects;
}
/* fan_accum: A1-A8. recording: the pass records itself (A1). */
fan_accum_plan fan_accum(fan_side old, fan_side new_, bool recording);

/* The facts of *Reusable*; every one must hold. */
typedef struct fan_reuse {
    bool dense; /* any permutation of a gap-free layout: it cannot overlap itself */
    bool writable;
    /* its dtype is the accumulation dtype and its shape the sum's after this fold */
    bool same_dtype;
    bool disjoint; /* its bytes are disjoint from every other operand of the fold */
    bool owned;    /* the buffer made it .. */
    bool exposed;  /* .. and a snapshot, a target or a hook has shown it since */
    bool donated;
    bool unshared; /* provably: there is no other reference */
    bool host;     /* on a device without streams */
    /* the streams that used its memory are A alone, or A is made to wait for each of them */
    bool exclusive;
    bool read_later; /* with stats: its elements are read once more after the sum */
} fan_reuse;

/* X(NAME, words): why an operand is not reusable, for explain. */
#define FAN_REUSE_LIST(X)                             \
    X(YES, "it is reusable")                          \
    X(LAYOUT, "its memory is not a gap-free layout")  \
    X(READONLY, "it is read-only")                    \
    X(TYPE, "its dtype or shape is not the sum's")    \
    X(MEETS, "its memory may meet another operand's") \
    X(HELD, "someone else may hold it")               \
    X(USED, "another stream may still use it")        \
    X(READ, "its elements are still to be looked at")

typedef enum fan_reuse_answer {
#define X(NAME, words) FAN_REUSE_##NAME,
    FAN_REUSE_LIST(X)
#undef X
} fan_reuse_answer;

const char *fan_reuse_words(fan_reuse_answer a);
/* fan_reuse_free: whether no other code can reach its memory. */
static inline bool fan_reuse_free(const fan_reuse *f)
{
    bool own = f->owned && !f->exposed;
    bool alone = f->unshared && f->host;
    return own || f->donated || alone;
}
/* fan_reusable: whether it may be written. Inline, because most of the facts are constants where it
 * is called. */
static inline fan_reuse_answer fan_reusable(const fan_reuse *f)
{
    if (!f->dense)
        return FAN_REUSE_LAYOUT;
    if (!f->writable)
        return FAN_REUSE_READONLY;
    if (!f->same_dtype)
        return FAN_REUSE_TYPE;
    if (!f->disjoint)
        return FAN_REUSE_MEETS;
    if (!fan_reuse_free(f))
        return FAN_REUSE_HELD;
    if (!f->host && !f->exclusive)
        return FAN_REUSE_USED;
    if (f->read_later)
        return FAN_REUSE_READ;
    return FAN_REUSE_YES;
}

/* A10: the dtypes that took part, as a set: bit d for fan_dtype d, and above them the weak kinds.
 * The promotion of a set does not depend on order. */
typedef uint32_t fan_dtype_set;
#define FAN_WEAK_BOOL (1u << 28)
#define FAN_WEAK_INT (1u << 29)
#define FAN_WEAK_FLOAT (1u << 30)
#define FAN_WEAK_COMPLEX (1u << 31)
fan_dtype_set fan_dtype_set_add(fan_dtype_set s, fan_dtype d, bool weak);
/* fan_dtype_set_promote: NumPy's result_type of the set (D4, D5); FAN_DT_NONE for two kinds of
 * float8, or the empty set. */
fan_dtype fan_dtype_set_promote(fan_dtype_set s);

/* fan_accum_dtype: A11, D2: the accumulation dtype of a sum of dtype `d` with `accumulate=wish`
 * (FAN_DT_NONE: none); FAN_DT_NONE if wish cannot hold d. */
fan_dtype fan_accum_dtype(fan_dtype d, fan_dtype wish);
/* fan_accum_dtype_of: the same of a sum of what has these dtypes; FAN_DT_NONE where they have no
 * promotion. */
fan_dtype fan_accum_dtype_of(fan_dtype_set seen, fan_dtype wish);

/* How a contribution's dtype fits a slot (A10, A11). */
typedef enum fan_dtype_fit {
    FAN_DTYPE_FIT_EXACT,
    FAN_DTYPE_FIT_CAST,  /* it is cast to the declared one */
    FAN_DTYPE_FIT_NO,    /* .. which would lose values */
    FAN_DTYPE_FIT_WISH,  /* `accumulate=` cannot hold it */
    FAN_DTYPE_FIT_APART, /* it has no promotion with those before it */
} fan_dtype_fit;
/* fan_accum_dtype_fit: A10: of a slot with this declared dtype (FAN_DT_NONE: it declares none) and
 * this `accumulate=`. *seen: the dtypes of the contributions before it, and then of it, too. */
fan_dtype_fit fan_accum_dtype_fit(fan_dtype declared, fan_dtype wish, fan_dtype dtype, bool weak,
                                  fan_dtype_set *seen);

/* A12: how a contribution gets to the device of its slot. */
typedef enum fan_move {
    FAN_MOVE_NOT, /* it is there */
    FAN_MOVE_UPLOAD,
    FAN_MOVE_DOWNLOAD,
    FAN_MOVE_NO /* it may not */
} fan_move;
typedef struct fan_move_facts {
    bool here;    /* it is on the slot's device, or neither has one */
    bool dense;   /* .. otherwise: its form, */
    bool number;  /* a 0-d one of the host, */
    bool streams; /* the slot's device has streams, */
    bool to_host; /* and the slot declares the host */
} fan_move_facts;
static inline fan_move fan_accum_move(const fan_move_facts *f)
{
    if (f->here)
        return FAN_MOVE_NOT;
    if (f->dense && f->number && f->streams)
        return FAN_MOVE_UPLOAD;
    if (f->dense && f->to_host)
        return FAN_MOVE_DOWNLOAD;
    return FAN_MOVE_NO;
}

typedef enum fan_fit {
    FAN_FIT_EXACT,
    FAN_FIT_REDUCE,
    FAN_FIT_NO
} fan_fit;
/* fan_shape_same: whether two shapes are the same. */
static inline bool fan_shape_same(int ndim, const int64_t *shape, int other_ndim,
                                  const int64_t *other)
{
    if (ndim != other_ndim)
        return false;
    for (int i = 0; i < ndim; i++) {
        if (shape[i] != other[i])
            return false;
    }
    return true;
}
/* fan_accum_fit: A9: does `shape` fit the slot's, whose shape is declared or was fixed by its first
 * gradient? */
fan_fit fan_accum_fit(bool declared, int slot_ndim, const int64_t *slot_shape, int ndim,
                      const int64_t *shape);

#endif
