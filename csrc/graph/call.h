/* call: what does a call of a tree's function do? (rules T, docs/graph-trees.md)
 *
 *   path \ the function   not warmed up      a child fits    none fits
 *   none                  warm up      T9    replay   T11    record                 T16
 *   warm-up               warm up      T10   warm up  T10    warm up                T10
 *   recording             warm up      T9    replay   T11    record                 T16
 *   execution             warm up*     T8    replay   T11    from root, or record*  T12, T15, T16
 *
 *   from root: the path ends, if it can, and the call continues at the root
 *   * the pool's block table is put back first, because a replay does not update it (pool.h,
 *     Checkpoints)
 *
 * Before that, in any state: a path of an earlier step has ended (T1, T4, T12), and so has one
 * without live outputs (T2, T4). A function runs eagerly if it writes into an operand that is
 * neither static nor added to (T6), if it was recorded too often after one node and no operand can
 * be demoted, or too often altogether (T7).
 *
 * A worked case: A and B were recorded one after the other; the next step begins with A, which is
 * replayed, then C is called, which was never recorded after A. The block table is still that of
 * the end of B: it is put back to the end of A's recording, without what died since, and C is
 * recorded at B's place: both together need the memory of the longer.
 *
 * What can go wrong: live memory is given to the next recording (without the restore); a replay
 * writes into memory that has references (the fit checks too little); a function is recorded again
 * at every call (without the limit).
 *
 * Everything here is a pure function of its arguments. */
#ifndef FAN_GRAPH_CALL_H
#define FAN_GRAPH_CALL_H

#include <stdbool.h>
#include <stdint.h>

#define FAN_TREE_RULES 19
#define FAN_T(n) (UINT32_C(1) << ((n) - 1))

typedef enum fan_tree_path {
    FAN_TREE_NONE, /* empty */
    /* the last call was a warm-up: the block table is accurate, addresses are not final */
    FAN_TREE_WARMUP,
    FAN_TREE_RECORDING, /* the last call recorded: the block table is accurate */
    FAN_TREE_EXECUTION  /* the last call was a replay: the block table is older */
} fan_tree_path;

/* Does a recording fit a call? X(NAME, words): the words are the reason of a new recording. */
#define FAN_TREE_FIT_LIST(X)                                         \
    X(NEVER, "it was never recorded here")                           \
    X(FITS, "a recording fits")                                      \
    X(OPERAND, "an operand that lies in the pool lies elsewhere")    \
    X(ALIVE, "an output lives that was gone when this was recorded") \
    X(STATIC, "a static operand lies elsewhere")

typedef enum fan_tree_fit {
#define X(NAME, words) FAN_TREE_FIT_##NAME,
    FAN_TREE_FIT_LIST(X)
#undef X
} fan_tree_fit;

const char *fan_tree_fit_words(fan_tree_fit fit);
/* fan_tree_fit_moved: whether an operand lies elsewhere. */
static inline bool fan_tree_fit_moved(fan_tree_fit fit)
{
    return fit == FAN_TREE_FIT_OPERAND || fit == FAN_TREE_FIT_STATIC;
}

/* The facts of a function after one node, or at the root. */
typedef struct fan_tree_place {
    /* whether its writes are known; else its owner was not warned of them yet (T5) */
    bool known;
    bool writes;      /* it writes into an operand that this call copies */
    bool over_limit;  /* it has the maximum of recordings here for operands that moved */
    bool can_demote;  /* the operand that moved may be copied from now on */
    fan_tree_fit fit; /* of the recording that fits best */
} fan_tree_place;

typedef struct fan_tree_call {
    fan_tree_path path;
    bool new_step; /* the path is of a step that has ended */
    bool all_dead; /* none of the path's outputs is alive */
    bool warm;     /* the function was warmed up */
    bool strict;   /* static operands must not move */
    bool full;     /* the function has the maximum of recordings */
    bool repeats;  /* this path has the function twice after the same function .. */
    bool warned;   /* .. and its owner was warned */
    /* `here`: after the path's last node; not read if the path is empty */
    fan_tree_place here;
    fan_tree_place root;
} fan_tree_call;

typedef enum fan_tree_outcome {
    FAN_TREE_WARM,
    FAN_TREE_RECORD,
    FAN_TREE_REPLAY,
    FAN_TREE_EAGER, /* without a recording, outside of the arena; "raw" for users */
    FAN_TREE_FAIL
} fan_tree_outcome;

/* The steps of a call, in this order. */
typedef struct fan_tree_plan {
    bool end_path;    /* end the path's outputs, free their memory, and continue at the root */
    bool restore;     /* put the block table back to the end of the current node */
    bool warn_writes; /* warn, once per function, that it writes into operands */
    bool warn_repeats;
    bool count;  /* count one more recording for an operand that moved */
    bool demote; /* copy the operand that moved from now on */
    fan_tree_outcome outcome;
    fan_tree_fit why; /* of a recording; else of the replay */
    uint32_t rules;   /* FAN_T bits */
} fan_tree_plan;

fan_tree_plan fan_tree_decide(const fan_tree_call *call);

#endif
