/* history: the last write of each byte and the reads since: the core of the happens-before checker.
 *
 * Ranges of equal history are in short sorted runs (chunks) under one sorted directory: an access to an existing range
 * costs two binary searches and no allocation. */
#ifndef FAN_DEVICE_SIM_HISTORY_H
#define FAN_DEVICE_SIM_HISTORY_H

#include "base/clock.h"
#include "device/sim/race.h"

#include <stddef.h>

#define FAN__NONE UINT32_MAX
#define FAN__CHUNK 32

/* One read since the last write; reads of a range are a list. */
typedef struct fan__reading {
    uint64_t count;
    uint32_t lane, op;
    uint32_t next; /* NONE ends the list; also links free ones */
} fan__reading;

/* A range of bytes with one history. */
typedef struct fan__range {
    uintptr_t lo, hi;
    uint64_t count;    /* of the last write; 0: none */
    uint32_t lane, op; /* of the last write; op NONE: none */
    uint32_t reads;
    bool released; /* the last write is a release */
} fan__range;

typedef struct fan__chunk {
    struct fan__chunk *next; /* the next free chunk */
    uint32_t n;              /* never 0 in the directory */
    fan__range r[FAN__CHUNK];
} fan__chunk;

/* The place of a range: the i-th of chunk c of the directory. */
typedef struct fan__place {
    size_t c;
    uint32_t i;
} fan__place;

typedef struct fan__op_slot {
    fan_op op;
    uint32_t refs; /* ranges and reads that refer to it, plus 1 while it is its lane's latest */
    uint32_t next; /* among the free ones */
} fan__op_slot;

typedef struct fan__lane {
    fan_clock clock;
    uint64_t owner;
    uint64_t count; /* of a retired lane: its clock is freed */
    size_t ops;     /* its operations that the history refers to */
    uint32_t open;  /* its latest operation, or NONE */
    bool host;
    bool left; /* may be reused for another stream or thread */
} fan__lane;

typedef struct fan__lock {
    uint64_t id; /* 0: a free place */
    fan_clock clock;
} fan__lock;

struct fan_race_check {
    fan__lane *lanes;
    size_t nlanes, lanes_cap;
    fan__chunk **dir; /* sorted by address */
    size_t ndir, dir_cap;
    fan__chunk *freelist;
    size_t nfree;
    fan__reading *reads;
    size_t nreads, reads_cap;
    uint32_t free_read;
    size_t free_reads; /* in the list and behind nreads */
    fan__op_slot *ops;
    size_t nops, ops_cap;
    uint32_t free_op;
    uint64_t number;                              /* operations so far */
    size_t want_ranges, want_reads, want_crossed; /* the room requested by fan_race_check_plan */
    fan__lock *mutexes;                           /* open addressing; a power of two */
    size_t nmutexes, mutexes_cap;
    fan_clock gate; /* the G of a release; kept for its memory */
};

typedef struct fan_race_check fan_race_check;

static inline uint64_t fan__count_in(const fan_clock *c, uint32_t at)
{
    return at < c->n ? (c->heap ? c->heap : c->lanes)[at] : 0;
}
static inline fan__range *fan__history_at(const fan_race_check *o, fan__place p) { return &o->dir[p.c]->r[p.i]; }
static inline bool fan__history_is_end(const fan_race_check *o, fan__place p) { return p.c >= o->ndir; }

void fan__history_free_chunk(fan_race_check *o, fan__chunk *c);
void fan__history_drop_op(fan_race_check *o, uint32_t at);
/* fan__history_take_op: takes a free one, for the lane `of`. */
int fan__history_take_op(fan_race_check *o, uint32_t of, uint32_t *out);
fan__place fan__history_after(const fan_race_check *o, fan__place p);
/* fan__history_find: returns the first range that ends after `x`. */
fan__place fan__history_find(const fan_race_check *o, uintptr_t x);
/* fan__history_erase: removes the ranges from p on that begin below `hi`, with their references. Returns the place that
 * follows them. */
fan__place fan__history_erase(fan_race_check *o, fan__place p, uintptr_t hi);
/* fan__history_cut: splits a range that has `x` strictly inside. Returns the first range that ends after x. The room
 * must exist. */
fan__place fan__history_cut(fan_race_check *o, uintptr_t x);
/* fan__history_reserve: makes room for `ranges` more ranges and `reads` more reads, for accesses that cross `crossed`
 * existing ranges. */
int fan__history_reserve(fan_race_check *o, size_t ranges, size_t reads, size_t crossed);
/* fan__history_measure: computes the most that noting [lo, hi) can take, read or write: two cuts, each copying a list
 * of reads; a read on every range and every gap. */
void fan__history_measure(const fan_race_check *o, uintptr_t lo, uintptr_t hi, size_t *ranges, size_t *reads,
                          size_t *crossed);
/* fan__history_add_read: notes a read and drops the reads that it covers. */
void fan__history_add_read(fan_race_check *o, fan__range *r, const fan_clock *now, uint32_t op);
void fan__history_set_write(fan_race_check *o, fan__range *r, uint32_t op, bool released);
/* fan__history_note_write: makes [lo, hi) one range. The room must exist. */
void fan__history_note_write(fan_race_check *o, uint32_t op, uintptr_t lo, uintptr_t hi, bool released);
/* fan__history_note_read: notes a read on every range in [lo, hi), and makes new ranges in the gaps. The room must
 * exist. */
void fan__history_note_read(fan_race_check *o, uint32_t op, const fan_clock *now, uintptr_t lo, uintptr_t hi);

#endif
