/* leaf: what becomes of a leaf's `.grad`? (rules L, docs/rules.md)
 *
 * The question: a pass brings the sum g to a leaf that has, or has not, a gradient from earlier passes. Is that changed
 * in place, is g taken over, or copied?
 *
 *   `.grad`     g                                         action    rule
 *   absent      reusable, laid out like the leaf          STEAL     L2
 *   absent      sparse, its parts unshared                STEAL     L3
 *   absent      otherwise                                 COPY      L4
 *   dense       dense                                     ADD       L5   in place: the object stays
 *   sparse      any, or g sparse and `.grad` no array     REPLACE   L5   a new object
 *   a number, or an object that sums by its own +         REPLACE   L5
 *   anywhere    the owner of the memory takes it himself  CALL
 *   wide        summed over passes in another dtype       WIDE
 *
 * A worked case. Two nodes give a leaf one array each: their sum is memory of the buffer's own, that nobody has seen:
 * it becomes `.grad` (L2). With one node, that forwarded through what its caller still holds: a copy (L4), for a later
 * pass will write into it.
 *
 * What can go wrong: memory that somebody else sees is written by the next pass (L7: it is asked for other holders of
 * the memory, not of the object alone); `.grad` becomes another object, and an optimizer goes on with the old one (L5).
 *
 * Two passes may bring sums at once (E15): a leaf is claimed while its gradient changes. The claim is no lock: who has
 * it may run Python, and a pass inside that one to the same leaf is an error, on whatever worker. So is a wait in a
 * circle: what has one leaf waits for another, and what has that for the first. It is looked for by whoever begins to
 * wait, among those who wait already: the last one of a circle sees all of it.
 */
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

typedef enum fan_leaf_form { FAN_LEAF_ABSENT, FAN_LEAF_DENSE, FAN_LEAF_SPARSE, FAN_LEAF_OTHER } fan_leaf_form;

typedef struct fan_leaf_facts {
    fan_leaf_form grad, sum; /* OTHER: numbers, objects. `sum` ABSENT: undefined */
    bool recording;          /* L6 */
    bool unshared;           /* the sum's memory: nobody else has it, and nobody will overwrite it (L7, L8) */
    bool same_layout;        /* the sum is laid out as the leaf is, and of its kind */
    bool calls;              /* the owner takes the sum himself */
    bool wide;
} fan_leaf_facts;

typedef struct fan_leaf_plan {
    fan_leaf_action action;
    unsigned rule; /* the number of the L-rule; 0: none */
} fan_leaf_plan;

/* fan_plan_leaf: a pure function. */
fan_leaf_plan fan_plan_leaf(const fan_leaf_facts *facts);

/* Who has a leaf now. */
typedef struct fan_leaf_claim {
    fan_mutex lock; /* of all that follows; never held while others are called */
    fan_cond changed;
    uint64_t thread;           /* 0: nobody */
    uint64_t number;           /* of all claims since the process began, this one */
    unsigned owner_generation; /* fan_process() of who claimed it last */
    const fan_node *leaf;      /* what messages call it; NULL: nothing is known */
} fan_leaf_claim;

/* For whom a thread runs nodes: who called that pass, and the newest claim then: what he had by then he does not let go
 * before the pass has ended. */
typedef struct fan_leaf_caller {
    uint64_t thread, claim;
    const struct fan_leaf_caller *outer; /* for whom he does */
} fan_leaf_caller;

fan_status fan_leaf_claim_init(fan_leaf_claim *c, fan_error *err);
void fan_leaf_claim_fini(fan_leaf_claim *c); /* of a zeroed one, too */
/* fan_leaf_claim_begin: waits until nobody has it, and leaves the interpreter meanwhile. FAN_ERR_STATE where this
 * thread has it, or who has it waits for this one in the end. fan_leaf_claim_end: lets it go. */
fan_status fan_leaf_claim_begin(fan_leaf_claim *c, const fan_frontend *f, fan_error *err);
void fan_leaf_claim_end(fan_leaf_claim *c);
/* fan_leaf_caller_here: of a pass that this thread begins. fan_leaf_work_for: this thread runs nodes for him, who lives
 * until it says NULL. */
fan_leaf_caller fan_leaf_caller_here(void);
void fan_leaf_work_for(const fan_leaf_caller *caller);
/* fan_leaf_touch: to the search of host orders (base/thread.h): the leaf's gradient is read or written now. */
void fan_leaf_touch(const fan_leaf_claim *c, fan_touch how);

#endif
