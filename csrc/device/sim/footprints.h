/* footprints: the state of a search, and what its steps touched: which of them commute (explore.h, Sleep sets, All
 * alone).
 */
#ifndef FAN_DEVICE_SIM_FOOTPRINTS_H
#define FAN_DEVICE_SIM_FOOTPRINTS_H

#include "base/status.h"
#include "base/thread.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FAN__PRINT_ACTORS 32 /* FAN_EXPLORE_ACTORS, which stands higher */
#define FAN__PRINT_BIT(how) (1u << (how))

typedef struct fan_explore fan_explore;

typedef struct fan__print_touch {
    uint64_t object;
    unsigned how; /* bits: 1 << fan_touch */
} fan__print_touch;

/* What one step touched. Owned by the node at which it was run; deeper nodes borrow it. */
typedef struct fan__print {
    struct fan__print *next; /* among the free ones */
    size_t n, cap;
    fan__print_touch *items;
} fan__print;

/* What each actor was ever seen to do to one object (All alone). */
typedef struct fan__print_known {
    uint64_t object;
    bool used;
    unsigned char how[FAN__PRINT_ACTORS];
} fan__print_known;

/* A point of the search: the orders that share their first steps. */
typedef struct fan__explore_node {
    uint32_t enabled;
    uint32_t asleep; /* the actors asleep when it was reached */
    uint32_t done;   /* the actors whose orders from here have all been run; they sleep for the rest */
    int chosen;      /* the actor that is being run from here now */
    /* the choice is no actor but the answer to a query inside the step before; `enabled` are the answers */
    bool answer;
    fan__print *of[FAN__PRINT_ACTORS]; /* of the step of each actor asleep, done or chosen */
} fan__explore_node;

typedef enum mode { SEARCH, REPLAY, SAMPLE } mode;

struct fan_explore {
    bool reduce, started, exhausted, strayed, redundant;
    mode now, next;
    fan_status status;
    uint64_t limit, runs, abandoned, searched;
    fan__explore_node *nodes;
    size_t n, cap; /* the path of the current or last run of the search */
    size_t depth;  /* steps of this run */
    fan__print *free_prints;
    unsigned char *order; /* the choices of this run */
    size_t order_cap;
    char *script;      /* of a replay */
    uint64_t *weighed; /* objects by which somebody decided */
    size_t nweighed, weighed_cap;
    fan__print_known *known_prints; /* a hash table */
    size_t nknown, known_cap;       /* a power of 2 */
    bool prune;                     /* All alone */
    bool pruned;                    /* something was left out because its actor was all alone */
    bool again;                     /* what was left out before may have been left out wrongly */
    uint64_t anew;                  /* how often it was begun again */
    uint64_t spent;                 /* runs of all beginnings */
    uint64_t vain;                  /* .. and those that were abandoned */
    size_t longest;                 /* run so far */
    uint64_t random;
    uint32_t rank[FAN__PRINT_ACTORS]; /* of an odd sample; 0 chooses evenly */
    size_t change[4];
    uint32_t lowest;
};

fan__print *fan__print_take(fan_explore *x);
void fan__print_give(fan_explore *x, fan__print *f);
bool fan__print_independent(const fan_explore *x, const fan__print *a, const fan__print *b);
/* fan__print_learn: notes what an actor did to an object. If it is the first to meet a step that was taken to be alone,
 * orders may have been left out wrongly. */
fan_status fan__print_learn(fan_explore *x, uint64_t object, int actor, unsigned how);
/* fan__print_alone: whether no other actor was ever seen to do anything that does not commute with the step. */
bool fan__print_alone(const fan_explore *x, int actor, const fan__print *f);
fan_status fan__print_weigh(fan_explore *x, uint64_t object);

#endif
