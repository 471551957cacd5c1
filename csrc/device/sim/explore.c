/* The search of orders: in each run, which thread acts next, and which answer a query gets.
 *
 *   footprints   what each step accessed; which steps are independent
 *   choose       by a script, at random, or depth first through the orders that may differ
 *   access, end  what a step accessed; the next order */
#include "device/sim/explore.h"

#include "base/mem.h"
#include "base/rng.h"
#include "base/status.h"
#include "base/thread.h"

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* footprints: the state of a search, and the accesses of its steps: which of them commute
 * (explore.h, Sleep sets, Persistent sets of one). */
#define FAN__FOOTPRINT_ACTORS 32 /* FAN_EXPLORE_ACTORS, which is defined higher */
#define FAN__FOOTPRINT_BIT(mode) (1u << (mode))

typedef struct fan_explore fan_explore;

typedef struct fan__footprint_item {
    uint64_t object;
    unsigned modes; /* bits: 1 << fan_sched_mode */
} fan__footprint_item;

/* The accesses of one step. Owned by the node at which it ran; deeper nodes borrow it. */
typedef struct fan__footprint {
    struct fan__footprint *next; /* among the free ones */
    size_t n;
    size_t cap;
    fan__footprint_item *items;
} fan__footprint;

/* All accesses of each actor to one object so far (Persistent sets of one). */
typedef struct fan__footprint_known {
    uint64_t object;
    bool used;
    unsigned char modes[FAN__FOOTPRINT_ACTORS];
} fan__footprint_known;

/* A node of the search: the orders that share their first steps. */
typedef struct fan__explore_node {
    uint32_t enabled;
    uint32_t asleep; /* the actors asleep when it was reached */
    /* the actors whose orders from here have all been run; they sleep from then on */
    uint32_t done;
    int chosen; /* the actor that is being run from here */
    /* the choice is the answer to a query inside the step before; `enabled` are the answers */
    bool answer;
    /* footprint of the step of each actor asleep, done or chosen */
    fan__footprint *of[FAN__FOOTPRINT_ACTORS];
} fan__explore_node;

typedef enum mode {
    SEARCH,
    REPLAY,
    SAMPLE
} mode;

struct fan_explore {
    bool reduce;
    bool started;
    bool exhausted;
    bool strayed;
    bool redundant;
    mode now;
    mode next;
    fan_status status;
    uint64_t limit;
    uint64_t runs;
    uint64_t abandoned;
    uint64_t searched;
    fan__explore_node *nodes;
    /* the path of the current or last run of the search */
    size_t n;
    size_t cap;
    size_t depth; /* steps of this run */
    fan__footprint *free_footprints;
    unsigned char *order; /* the choices of this run */
    size_t order_cap;
    char *script;      /* of a replay */
    uint64_t *decided; /* objects by whose number some step decides */
    size_t ndecided;
    size_t decided_cap;
    fan__footprint_known *known_footprints; /* a hash table */
    /* a power of 2 */
    size_t nknown;
    size_t known_cap;
    bool prune;     /* Persistent sets of one */
    bool pruned;    /* an order was left out for a persistent set of one */
    bool again;     /* an order may have been left out wrongly */
    uint64_t anew;  /* how often the search started again */
    uint64_t spent; /* runs of all searches */
    uint64_t vain;  /* .. and those that were abandoned */
    size_t longest; /* run so far */
    uint64_t random;
    uint32_t rank[FAN__FOOTPRINT_ACTORS]; /* of an odd sample; 0 chooses evenly */
    size_t change[4];
    uint32_t lowest;
};

static fan__footprint *fan__footprint_take(fan_explore *search)
{
    fan__footprint *f = search->free_footprints;
    if (f) {
        search->free_footprints = f->next;
        f->n = 0;
        return f;
    }
    return fan_calloc(sizeof *f);
}

static void fan__footprint_give(fan_explore *search, fan__footprint *f)
{
    f->next = search->free_footprints;
    search->free_footprints = f;
}

/* node_end: gives back the footprints of a node, but for those that it borrows. */
static void node_end(fan_explore *search, const fan__explore_node *node)
{
    for (int a = 0; a < FAN_EXPLORE_ACTORS; a++) {
        if (node->of[a] && !(node->asleep >> a & 1))
            fan__footprint_give(search, node->of[a]);
    }
}

static bool footprint_decides(const fan_explore *search, uint64_t object)
{
    for (size_t i = 0; i < search->ndecided; i++) {
        if (search->decided[i] == object)
            return true;
    }
    return false;
}

/* footprint_commute: returns whether two steps' accesses to one object commute: reads do; counts
 * do, if no step decides by the number; others do not. */
static bool footprint_commute(const fan_explore *search, uint64_t object, unsigned a, unsigned b)
{
    unsigned either = a | b;
    if (!(either & (FAN__FOOTPRINT_BIT(FAN_SCHED_WRITE) | FAN__FOOTPRINT_BIT(FAN_SCHED_COUNT))))
        return true;
    return either == FAN__FOOTPRINT_BIT(FAN_SCHED_COUNT) && !footprint_decides(search, object);
}

static bool fan__footprint_independent(const fan_explore *search, const fan__footprint *a,
                                       const fan__footprint *b)
{
    for (size_t i = 0; i < a->n; i++) {
        const fan__footprint_item *one = &a->items[i];
        for (size_t j = 0; j < b->n; j++) {
            const fan__footprint_item *two = &b->items[j];
            if (one->object == two->object &&
                !footprint_commute(search, one->object, one->modes, two->modes))
                return false;
        }
    }
    return true;
}

/* footprint_place: returns the object's row, or the free row for it. */
static fan__footprint_known *footprint_place(fan__footprint_known *table, size_t cap,
                                             uint64_t object)
{
    size_t i = (size_t)(object * UINT64_C(0x9E3779B97F4A7C15) >> 32) & (cap - 1);
    while (table[i].used && table[i].object != object)
        i = (i + 1) & (cap - 1);
    return &table[i];
}

static bool conflicts_with(const fan_explore *search, const fan__footprint_known *row, int actor,
                           unsigned modes)
{
    for (int a = 0; a < FAN__FOOTPRINT_ACTORS; a++) {
        if (a != actor && row->modes[a] &&
            !footprint_commute(search, row->object, modes, row->modes[a]))
            return true;
    }
    return false;
}

/* fan__footprint_alone: returns whether all known accesses of other actors commute with the
 * step. */
static bool fan__footprint_alone(const fan_explore *search, int actor, const fan__footprint *f)
{
    for (size_t i = 0; i < f->n; i++) {
        const fan__footprint_item *item = &f->items[i];
        const fan__footprint_known *row =
            footprint_place(search->known_footprints, search->known_cap, item->object);
        if (conflicts_with(search, row, actor, item->modes))
            return false;
    }
    return true;
}

_Static_assert(FAN__FOOTPRINT_ACTORS == FAN_EXPLORE_ACTORS, "rows have a place for every actor");

fan_explore *fan_explore_new(bool reduce, uint64_t limit)
{
    fan_explore *search = fan_calloc(sizeof *search);
    if (!search)
        return NULL;
    search->reduce = reduce;
    search->limit = limit;
    return search;
}

void fan_explore_prune(fan_explore *search)
{
    search->prune = true;
}

void fan_explore_free(fan_explore *search)
{
    if (!search)
        return;
    for (size_t i = 0; i < search->n; i++)
        node_end(search, &search->nodes[i]);
    for (fan__footprint *f = search->free_footprints, *next; f; f = next) {
        next = f->next;
        fan_free(f->items);
        fan_free(f);
    }
    fan_free(search->nodes);
    fan_free(search->order);
    fan_free(search->script);
    fan_free(search->decided);
    fan_free(search->known_footprints);
    fan_free(search);
}

static int lowest_bit(uint32_t mask)
{
    return __builtin_ctz(mask);
}

/* the characters of actors in a schedule */
static const char actors[] = "0123456789abcdefghijklmnopqrstuv";

fan_status fan_explore_replay(fan_explore *search, const char *schedule)
{
    size_t n = strlen(schedule);
    for (size_t i = 0; i < n; i++) {
        if (!strchr(actors, schedule[i]) && !strchr(FAN_ANSWERS, schedule[i]))
            return FAN_ERR_VALUE;
    }
    char *copy = fan_alloc(n + 1);
    if (!copy)
        return FAN_ERR_NOMEM;
    memcpy(copy, schedule, n + 1);
    fan_free(search->script);
    search->script = copy;
    search->next = REPLAY;
    return FAN_OK;
}

void fan_explore_sample(fan_explore *search, uint64_t seed)
{
    search->next = SAMPLE;
    search->random = seed;
    search->rank[0] = 0;
    if (seed % 2 == 0)
        return;
    for (int a = 0; a < FAN_EXPLORE_ACTORS; a++)
        search->rank[a] = (uint32_t)(fan_rng(&search->random) >> 33) + 1024;
    search->lowest = 1023;
    size_t length = search->longest ? search->longest : 32;
    size_t changes = (size_t)(fan_rng(&search->random) % 5);
    for (size_t i = 0; i < 4; i++) {
        search->change[i] = SIZE_MAX;
        if (i < changes)
            search->change[i] = (size_t)(fan_rng(&search->random) % length);
    }
}

/* explore_is_over: the search has run all orders, or as many as it may. */
static bool explore_is_over(const fan_explore *search)
{
    if (!search->started)
        return false;
    if (search->exhausted)
        return true;
    if (search->limit == 0)
        return false;
    return search->spent >= search->limit || search->vain >= 10 * search->limit;
}

bool fan_explore_begin(fan_explore *search)
{
    if (search->status != FAN_OK)
        return false;
    search->now = search->next;
    if (search->now == SEARCH) {
        if (explore_is_over(search))
            return false;
        search->started = true;
    }
    search->next = SEARCH;
    search->depth = 0;
    search->redundant = false;
    return true;
}

/* explore_note: appends the choice to the schedule. */
static int explore_note(fan_explore *search, int actor)
{
    if (fan_grow((void **)&search->order, &search->order_cap, search->depth + 1, 1)) {
        search->status = FAN_ERR_NOMEM;
        return FAN_EXPLORE_NONE;
    }
    search->order[search->depth++] = (unsigned char)actor;
    return actor;
}

static int explore_follow(fan_explore *search, uint32_t enabled)
{
    size_t n = strlen(search->script);
    if (search->depth >= n)
        return lowest_bit(enabled);
    const char *choice = strchr(actors, search->script[search->depth]);
    if (choice) {
        int actor = (int)(choice - actors);
        if (enabled >> actor & 1)
            return actor;
    }
    search->strayed = true;
    return lowest_bit(enabled);
}

static int explore_sample(fan_explore *search, uint32_t enabled)
{
    if (search->rank[0] == 0) {
        int skip = (int)(fan_rng(&search->random) % (uint64_t)__builtin_popcount(enabled));
        while (skip-- > 0)
            enabled &= enabled - 1;
        return lowest_bit(enabled);
    }
    int best = lowest_bit(enabled);
    for (int a = best + 1; a < FAN_EXPLORE_ACTORS; a++) {
        if (enabled >> a & 1 && search->rank[a] > search->rank[best])
            best = a;
    }
    for (size_t i = 0; i < 4; i++) {
        if (search->change[i] == search->depth)
            search->rank[best] = search->lowest--; /* acts once more, then has the lowest rank */
    }
    return best;
}

/* explore_last_step: returns the node at which the current step was chosen, or NULL. */
static fan__explore_node *explore_last_step(fan_explore *search)
{
    size_t i = search->n;
    while (i > 0 && search->nodes[i - 1].answer)
        i--;
    if (i == 0)
        return NULL;
    return &search->nodes[i - 1];
}

int fan_explore_choose(fan_explore *search, uint32_t enabled)
{
    assert(enabled);
    if (search->status != FAN_OK)
        return FAN_EXPLORE_NONE;
    if (search->now == REPLAY)
        return explore_note(search, explore_follow(search, enabled));
    if (search->now == SAMPLE)
        return explore_note(search, explore_sample(search, enabled));
    if (search->depth < search->n) {
        const fan__explore_node *at = &search->nodes[search->depth];
        bool same = at->enabled == enabled && !at->answer;
        search->strayed |= !same;
        if (same || enabled >> at->chosen & 1)
            return explore_note(search, at->chosen);
        return explore_note(search, lowest_bit(enabled));
    }
    fan__footprint *f = NULL;
    if (fan_grow((void **)&search->nodes, &search->cap, search->n + 1, sizeof *search->nodes) == 0)
        f = fan__footprint_take(search);
    if (!f) {
        search->status = FAN_ERR_NOMEM;
        return FAN_EXPLORE_NONE;
    }
    fan__explore_node *at = &search->nodes[search->n];
    *at = (fan__explore_node){.enabled = enabled};
    /* Actors asleep or done at the last node stay asleep unless its last step conflicts with
     * theirs. */
    const fan__explore_node *last = NULL;
    uint32_t sleepers = 0;
    if (search->reduce)
        last = explore_last_step(search);
    if (last)
        sleepers = last->asleep | last->done;
    for (int a = 0; a < FAN_EXPLORE_ACTORS; a++) {
        if (!(sleepers >> a & 1))
            continue;
        if (!fan__footprint_independent(search, last->of[a], last->of[last->chosen]))
            continue;
        at->asleep |= UINT32_C(1) << a;
        at->of[a] = last->of[a];
    }
    uint32_t awake = enabled & ~at->asleep;
    if (!awake) {
        fan__footprint_give(search, f);
        search->redundant = true;
        return FAN_EXPLORE_NONE;
    }
    at->chosen = lowest_bit(awake);
    at->of[at->chosen] = f;
    search->n++;
    return explore_note(search, at->chosen);
}

int fan_explore_pick(fan_explore *search, int n)
{
    int answer = 0;
    if (search->status != FAN_OK)
        return FAN_EXPLORE_NONE;
    if (search->now == REPLAY) {
        const char *at = NULL;
        if (search->depth < strlen(search->script))
            at = strchr(FAN_ANSWERS, search->script[search->depth]);
        if (at)
            answer = (int)(at - FAN_ANSWERS);
        search->strayed |= !at || answer >= n;
        if (answer >= n)
            answer = 0;
    } else if (search->now == SAMPLE) {
        answer = (int)(fan_rng(&search->random) % (uint64_t)n);
    } else if (search->depth < search->n) {
        const fan__explore_node *at = &search->nodes[search->depth];
        if (at->answer)
            answer = at->chosen;
        else
            search->strayed = true;
    } else if (fan_grow((void **)&search->nodes, &search->cap, search->n + 1,
                        sizeof *search->nodes)) {
        search->status = FAN_ERR_NOMEM;
        return FAN_EXPLORE_NONE;
    } else {
        search->nodes[search->n++] = (fan__explore_node){
            .enabled = (UINT32_C(1) << n) - 1,
            .answer = true,
        };
    }
    if (explore_note(search, FAN_ANSWER + answer) < 0)
        return FAN_EXPLORE_NONE;
    return answer;
}

static fan_status explore_no_memory(fan_explore *search)
{
    search->status = FAN_ERR_NOMEM;
    return FAN_ERR_NOMEM;
}

fan_status fan_explore_access(fan_explore *search, uint64_t object, fan_sched_mode access)
{
    if (search->redundant) /* what an abandoned run still does is no step */
        return FAN_OK;
    if (access == FAN_SCHED_DECIDE && search->now == SEARCH && !footprint_decides(search, object)) {
        if (fan_grow((void **)&search->decided, &search->decided_cap, search->ndecided + 1,
                     sizeof *search->decided))
            return explore_no_memory(search);
        search->decided[search->ndecided++] = object;
        search->again |= search->searched > 0; /* in the first run nothing has been left out yet */
    }
    /* Only the last step of the path is new; earlier ones had the same accesses when they first
     * ran. */
    if (search->now != SEARCH)
        return FAN_OK;
    if (search->depth == 0)
        return FAN_OK;
    if (search->depth != search->n)
        return FAN_OK;
    const fan__explore_node *at = explore_last_step(search);
    if (!at) /* before the first step no other actor runs */
        return FAN_OK;
    fan__footprint *f = at->of[at->chosen];
    unsigned bit = FAN__FOOTPRINT_BIT(access);
    if (2 * (search->nknown + 1) > search->known_cap) {
        size_t cap = search->known_cap ? 2 * search->known_cap : 64;
        fan__footprint_known *more = fan_calloc(cap * sizeof *more);
        if (!more)
            return explore_no_memory(search);
        for (size_t i = 0; i < search->known_cap; i++) {
            const fan__footprint_known *known = &search->known_footprints[i];
            if (known->used)
                *footprint_place(more, cap, known->object) = *known;
        }
        fan_free(search->known_footprints);
        search->known_footprints = more;
        search->known_cap = cap;
    }
    fan__footprint_known *row =
        footprint_place(search->known_footprints, search->known_cap, object);
    search->nknown += !row->used;
    row->used = true;
    row->object = object;
    if (!(row->modes[at->chosen] & bit)) {
        /* The first to conflict with a step that was a persistent set: orders may have been left
         * out wrongly. */
        search->again |= search->pruned && conflicts_with(search, row, at->chosen, bit);
        row->modes[at->chosen] |= (unsigned char)bit;
    }
    for (size_t i = 0; i < f->n; i++) {
        if (f->items[i].object == object) {
            f->items[i].modes |= bit;
            return FAN_OK;
        }
    }
    if (fan_grow((void **)&f->items, &f->cap, f->n + 1, sizeof *f->items))
        return explore_no_memory(search);
    f->items[f->n++] = (fan__footprint_item){object, bit};
    return FAN_OK;
}

/* node_next: chooses the next actor, or answer, at the last node of the path.
 * false: none is left to be tried. */
static bool node_next(fan_explore *search, fan__explore_node *last)
{
    last->done |= UINT32_C(1) << last->chosen;
    uint32_t left = last->enabled & ~last->asleep & ~last->done;
    bool may_prune = search->prune && search->reduce && !last->answer;
    if (!left)
        return false;
    if (may_prune && fan__footprint_alone(search, last->chosen, last->of[last->chosen])) {
        search->pruned = true;
        return false;
    }
    int next = lowest_bit(left);
    /* With another answer the same step continues: its accesses are added to the earlier ones. */
    if (!last->answer) {
        last->of[next] = fan__footprint_take(search);
        if (!last->of[next]) {
            search->status = FAN_ERR_NOMEM;
            return true;
        }
    }
    last->chosen = next;
    return true;
}

void fan_explore_end(fan_explore *search)
{
    if (search->depth > search->longest)
        search->longest = search->depth;
    if (search->status != FAN_OK)
        return;
    if (search->now != SEARCH) {
        search->runs++;
        return;
    }
    search->searched++;
    if (search->redundant) {
        search->abandoned++;
        search->vain++;
    } else {
        search->runs++;
        search->spent++;
    }
    /* Back to the last node with an untried actor; to the very first if all must be searched
     * again. */
    if (search->again) {
        for (size_t i = 0; i < search->n; i++)
            node_end(search, &search->nodes[i]);
        search->n = 0;
        search->pruned = false;
        search->runs = 0;
        search->abandoned = 0;
        search->anew++;
    }
    while (search->n > 0) {
        fan__explore_node *last = &search->nodes[search->n - 1];
        if (node_next(search, last))
            return;
        node_end(search, last);
        search->n--;
    }
    search->exhausted = !search->again;
    search->again = false;
}

bool fan_explore_complete(const fan_explore *search)
{
    return search->exhausted && search->status == FAN_OK && !search->strayed;
}

uint64_t fan_explore_runs(const fan_explore *search)
{
    return search->runs;
}

uint64_t fan_explore_anew(const fan_explore *search)
{
    return search->anew;
}

uint64_t fan_explore_abandoned(const fan_explore *search)
{
    return search->abandoned;
}

bool fan_explore_strayed(const fan_explore *search)
{
    return search->strayed;
}

fan_status fan_explore_status(const fan_explore *search)
{
    return search->status;
}

void fan_explore_write(const unsigned char *choices, size_t n, char *buf, size_t size)
{
    if (size == 0)
        return;
    if (n > size - 1)
        n = size - 1;
    for (size_t i = 0; i < n; i++) {
        if (choices[i] >= FAN_ANSWER)
            buf[i] = FAN_ANSWERS[choices[i] - FAN_ANSWER];
        else
            buf[i] = actors[choices[i]];
    }
    buf[n] = '\0';
}

void fan_explore_schedule(const fan_explore *search, char *buf, size_t size)
{
    fan_explore_write(search->order, search->depth, buf, size);
}
