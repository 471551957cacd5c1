/* leaf: how does a leaf accumulate a sum into `.grad`? (rules L, docs/rules.md)
 *
 * The question: a pass has the sum g for a leaf, which may have a gradient of earlier passes. Is
 * that one changed in place, is g stolen, or is it copied?
 *
 *   `.grad`     g                                         action    rule
 *   absent      reusable, laid out like the leaf          STEAL     L2
 *   absent      sparse, its parts unshared                STEAL     L3
 *   absent      otherwise                                 COPY      L4
 *   dense       dense                                     ADD       L5   in place: the object stays
 *   sparse      any, or g sparse and `.grad` no array     REPLACE   L5   a new object
 *   a number, or an object that sums by its own +         REPLACE   L5
 *   any         the owner's function accumulates          CALL
 *   wide        summed over passes in another dtype       WIDE
 *
 * A worked case. Two nodes deliver one array each: the buffer sums them into memory of its own,
 * which nothing else references: it becomes `.grad` (L2). One node hands through an array that its
 * caller still holds: `.grad` is a copy (L4), because a later pass writes into it.
 *
 * What can go wrong: the next pass writes into memory that has other users (so L7 checks references
 * to the memory, not only to the object); `.grad` becomes another object while an optimizer keeps
 * the old one (L5).
 *
 * Two passes may have sums for a leaf at once (E15): each claims the leaf while its gradient
 * changes. The claim is no lock: its holder may run Python, and a pass inside that to the same leaf
 * is an error, on every worker. So is a circle of waits: the holder of one leaf waits for another,
 * whose holder waits for the first. Each thread that begins to wait searches the waits that exist;
 * the last one of a circle finds it. */
#ifndef FAN_ENGINE_LEAF_H
#define FAN_ENGINE_LEAF_H

#include "base/thread.h"
#include "buffer/value.h"
#include "engine/node.h"

typedef enum fan_leaf_action {
    FAN_LEAF_NOTHING,
    FAN_LEAF_STEAL,
    FAN_LEAF_COPY,
    FAN_LEAF_ADD,
    FAN_LEAF_REPLACE,
    FAN_LEAF_CALL,
    FAN_LEAF_WIDE
} fan_leaf_action;

typedef enum fan_leaf_form {
    FAN_LEAF_ABSENT,
    FAN_LEAF_DENSE,
    FAN_LEAF_SPARSE,
    FAN_LEAF_OTHER
} fan_leaf_form;

typedef struct fan_leaf_facts {
    /* OTHER: numbers, objects. `sum` ABSENT: undefined */
    fan_leaf_form grad;
    fan_leaf_form sum;
    bool recording; /* L6 */
    /* the sum's memory has no other user, and will not be overwritten (L7, L8) */
    bool unshared;
    bool same_layout; /* the sum has the leaf's type and layout */
    bool calls;       /* the owner has a function that accumulates */
    bool wide;
} fan_leaf_facts;

typedef struct fan_leaf_plan {
    fan_leaf_action action;
    unsigned rule; /* the number of the L-rule; 0: none */
} fan_leaf_plan;

/* fan_plan_leaf: returns the plan. A pure function. */
fan_leaf_plan fan_plan_leaf(const fan_leaf_facts *facts);

/* The holder of a leaf. */
typedef struct fan_leaf_claim {
    fan_mutex lock; /* of all that follows; never held during a call out of the engine */
    fan_cond changed;
    uint64_t thread;           /* 0: not claimed */
    uint64_t number;           /* counts all claims of the process */
    unsigned owner_generation; /* 1 + fan_fork_generation() of the last claim; 0: not initialized */
    const fan_node *leaf;      /* for messages; NULL: unknown */
} fan_leaf_claim;

/* The thread that a worker runs nodes for, which called the pass, and the newest claim then: the
 * caller keeps the claims that it had by then until the pass has ended. */
typedef struct fan_leaf_caller {
    uint64_t thread;
    uint64_t claim;
    const struct fan_leaf_caller *outer; /* the one that the caller runs nodes for */
} fan_leaf_caller;

/* fan__leaf_lock_init: makes a lock, of a leaf or of a pass, and its condition. FAN_ERR_STATE. */
fan_status fan__leaf_lock_init(fan_mutex *lock, fan_cond *changed, fan_error *err);
fan_status fan_leaf_claim_init(fan_leaf_claim *claim, fan_error *err);
/* fan_leaf_claim_fini: ends it; accepts a zeroed one. */
void fan_leaf_claim_fini(fan_leaf_claim *claim);
/* fan_leaf_claim_begin: waits, outside of the interpreter, until no thread has the leaf.
 * FAN_ERR_STATE: this thread has it, or its holder waits for this thread, directly or not. */
fan_status fan_leaf_claim_begin(fan_leaf_claim *claim, const fan_frontend *frontend,
                                fan_error *err);
/* fan_leaf_claim_end: releases the leaf. */
void fan_leaf_claim_end(fan_leaf_claim *claim);
/* fan_leaf_caller_here: returns the caller of a pass that this thread begins. */
fan_leaf_caller fan_leaf_caller_here(void);
/* fan_leaf_work_for: from now on this thread runs nodes for `caller`, which must live until a call
 * with NULL. */
void fan_leaf_work_for(const fan_leaf_caller *caller);
/* fan_leaf_touch: reports a read or write of the leaf's gradient to the search of host orders
 * (base/thread.h). */
void fan_leaf_touch(const fan_leaf_claim *claim, fan_sched_mode access);

#endif
