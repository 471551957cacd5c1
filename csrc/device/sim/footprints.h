/* footprints: the state of a search, and the accesses of its steps: which of them commute (explore.h, Sleep sets,
 * Persistent sets of one). */
#ifndef FAN_DEVICE_SIM_FOOTPRINTS_H
#define FAN_DEVICE_SIM_FOOTPRINTS_H

#include "base/status.h"
#include "base/thread.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FAN__FOOTPRINT_ACTORS 32 /* FAN_EXPLORE_ACTORS, which is defined higher */
#define FAN__FOOTPRINT_BIT(how) (1u << (how))

typedef struct fan_explore fan_explore;

typedef struct fan__footprint_item {
    uint64_t object;
    unsigned how; /* bits: 1 << fan_touch */
} fan__footprint_item;

/* The accesses of one step. Owned by the node at which it ran; deeper nodes borrow it. */
typedef struct fan__footprint {
    struct fan__footprint *next; /* among the free ones */
    size_t n, cap;
    fan__footprint_item *items;
} fan__footprint;

/* All accesses of each actor to one object so far (Persistent sets of one). */
typedef struct fan__footprint_known {
    uint64_t object;
    bool used;
    unsigned char how[FAN__FOOTPRINT_ACTORS];
} fan__footprint_known;

/* A node of the search: the orders that share their first steps. */
typedef struct fan__explore_node {
    uint32_t enabled;
    uint32_t asleep; /* the actors asleep when it was reached */
    uint32_t done;   /* the actors whose orders from here have all been run; they sleep from then on */
    int chosen;      /* the actor that is being run from here */
    /* the choice is the answer to a query inside the step before; `enabled` are the answers */
    bool answer;
    fan__footprint *of[FAN__FOOTPRINT_ACTORS]; /* footprint of the step of each actor asleep, done or chosen */
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
    fan__footprint *free_footprints;
    unsigned char *order; /* the choices of this run */
    size_t order_cap;
    char *script;      /* of a replay */
    uint64_t *decided; /* objects by whose number some step decides */
    size_t ndecided, decided_cap;
    fan__footprint_known *known_footprints; /* a hash table */
    size_t nknown, known_cap;               /* a power of 2 */
    bool prune;                             /* Persistent sets of one */
    bool pruned;                            /* an order was left out for a persistent set of one */
    bool again;                             /* an order may have been left out wrongly */
    uint64_t anew;                          /* how often the search started again */
    uint64_t spent;                         /* runs of all searches */
    uint64_t vain;                          /* .. and those that were abandoned */
    size_t longest;                         /* run so far */
    uint64_t random;
    uint32_t rank[FAN__FOOTPRINT_ACTORS]; /* of an odd sample; 0 chooses evenly */
    size_t change[4];
    uint32_t lowest;
};

fan__footprint *fan__footprint_take(fan_explore *x);
void fan__footprint_give(fan_explore *x, fan__footprint *f);
bool fan__footprint_independent(const fan_explore *x, const fan__footprint *a, const fan__footprint *b);
/* fan__footprint_note: notes an actor's access to an object. If it is the first to conflict with a step that was a
 * persistent set, orders may have been left out wrongly. */
fan_status fan__footprint_note(fan_explore *x, uint64_t object, int actor, unsigned how);
/* fan__footprint_alone: returns whether all known accesses of other actors commute with the step. */
bool fan__footprint_alone(const fan_explore *x, int actor, const fan__footprint *f);
fan_status fan__footprint_decide(fan_explore *x, uint64_t object);

#endif
