/* call: what does a call of a tree's function do? (rules T, docs/graph-trees.md)
 *
 *   path \ the function   not warmed up      a child fits    none fits
 *   none                  warm up      T9    replay   T11    record                 T16
 *   warm-up               warm up      T10   warm up  T10    warm up                T10
 *   recording             warm up      T9    replay   T11    record                 T16
 *   execution             warm up*     T8    replay   T11    at the root T12, else record*   T15, T16
 *
 *   * the block table of the pool is put back first: a replay does not keep it (pool.h, Checkpoints)
 *
 * Before that, in any state: a path of an earlier step has ended (T1, T4, T12), and so has one of which nothing lives
 * (T2, T4); a function that writes into an operand that is neither static nor to be added to runs as it is (T6), as
 * does one that was recorded too often behind one node although nothing is left to demote, or too often altogether
 * (T7).
 *
 * A worked case: A and B were recorded one behind the other, then a step begins with A, which is replayed, and C is
 * called: C was never recorded behind A. The block table still says what was so after B: it is put back to the end of
 * A's recording, less what died since, and C is recorded there, where B was: the memory of both is that of the longer.
 *
 * What can go wrong: what lives is given to the next recording (a restore left out); a replay writes into memory that
 * somebody holds (a fit by too little); a function is recorded again at every call (no limit).
 *
 * Everything here is a pure function of its arguments. */
#ifndef FAN_GRAPH_CALL_H
#define FAN_GRAPH_CALL_H

#include <stdbool.h>
#include <stdint.h>

#define FAN_TREE_RULES 20
#define FAN_T(n) (UINT32_C(1) << ((n) - 1))

typedef enum fan_tree_path {
    FAN_TREE_NONE,      /* nothing lives that must be respected */
    FAN_TREE_WARMUP,    /* the last call was a warm-up: the block table is right, addresses are not final */
    FAN_TREE_RECORDING, /* the last call recorded: the block table is right */
    FAN_TREE_EXECUTION  /* the last call was a replay: the block table is of another time */
} fan_tree_path;

/* Does a recording fit what it is called with? X(NAME, words): the words are the reason of a new recording. */
#define FAN_TREE_FIT_LIST(X)                                         \
    X(NEVER, "it was never recorded here")                           \
    X(FITS, "a recording fits")                                      \
    X(OPERAND, "an operand that lies in the pool lies elsewhere")    \
    X(ALIVE, "an output lives that was gone when this was recorded") \
    X(STATIC, "a static operand lies elsewhere")                     \
    X(HELD, "somebody holds an operand that is overwritten once it has been read")

typedef enum fan_tree_fit {
#define X(NAME, words) FAN_TREE_FIT_##NAME,
    FAN_TREE_FIT_LIST(X)
#undef X
} fan_tree_fit;

const char *fan_tree_fit_words(fan_tree_fit fit);

/* What is known of a function behind one node, or at the root. */
typedef struct fan_tree_place {
    bool known;       /* .. whether it writes into operands: else nobody has been warned yet (T5) */
    bool writes;      /* it writes into an operand that is copied in this call */
    bool over_limit;  /* it was recorded here as often as is allowed, for operands that moved */
    bool can_demote;  /* the operand that moved may become one that is copied */
    fan_tree_fit fit; /* of the recording that fits best */
} fan_tree_place;

typedef struct fan_tree_call {
    fan_tree_path path;
    bool new_step;             /* the path is of a step that has ended */
    bool all_dead;             /* nobody holds any of the path's outputs */
    bool warm;                 /* the function need not be warmed up (any more) */
    bool strict;               /* static operands must not move */
    bool full;                 /* the function has as many recordings as it may have */
    bool repeats;              /* the function stands twice behind one and the same on this path .. */
    bool warned;               /* .. of which its owner was warned */
    fan_tree_place here, root; /* `here`: behind the path's last node; not read where the path is none */
} fan_tree_call;

typedef enum fan_tree_outcome {
    FAN_TREE_WARM,
    FAN_TREE_RECORD,
    FAN_TREE_REPLAY,
    FAN_TREE_EAGER, /* as it is, outside of the pool */
    FAN_TREE_FAIL
} fan_tree_outcome;

/* What is done, in this order. */
typedef struct fan_tree_plan {
    bool end_path;    /* the path's outputs go stale, their memory is free; what follows begins at the root */
    bool restore;     /* the block table is put back to the end of the current node */
    bool warn_writes; /* once for a function: it writes into operands */
    bool warn_repeats;
    bool count;  /* one recording more for an operand that moved */
    bool demote; /* the operand that moved is copied from now on */
    fan_tree_outcome outcome;
    fan_tree_fit why; /* of a recording; else of the replay */
    uint32_t rules;   /* FAN_T bits */
} fan_tree_plan;

fan_tree_plan fan_tree_decide(const fan_tree_call *call);

#endif
