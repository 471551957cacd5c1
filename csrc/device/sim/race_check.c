/* The happens-before checker: every byte's last write and the reads since, and the clocks of the
 * lanes that made them.
 *
 *   runs       the runs of bytes of a view
 *   history    the last write and reads of each range of bytes
 *   lanes      clocks of streams and threads; events, waits, locks
 *   accesses   check a run of bytes against the history, then note it; releases of memory */
#include "device/sim/race_check.h"

#include "base/clock.h"
#include "base/mem.h"

#include <assert.h>
#include <stddef.h>
#include <string.h>

/* The runs of a view: `bytes` at a time, at base + every combination of the axes, the widest stride
 * outermost. */
typedef struct fan__runs {
    uintptr_t base;
    uintptr_t bytes; /* 0: the view is empty */
    int n;           /* axes left */
    int64_t extent[FAN_MAX_NDIM];
    int64_t stride[FAN_MAX_NDIM];
    int64_t at[FAN_MAX_NDIM];
} fan__runs;

/* history: the last write of each byte and the reads since: the core of the happens-before checker.
 *
 * Ranges of equal history are in short sorted runs (chunks) under one sorted directory: an access
 * to an existing range costs two binary searches and no allocation. */
#define FAN__NONE UINT32_MAX
#define FAN__CHUNK 32

/* One read since the last write; reads of a range are a list. */
typedef struct fan__reading {
    uint64_t count;
    uint32_t lane;
    uint32_t op;
    uint32_t next; /* NONE ends the list; also links free ones */
} fan__reading;

/* A range of bytes with one history. */
typedef struct fan__range {
    uintptr_t lo;
    uintptr_t hi;
    uint64_t count; /* of the last write; 0: none */
    /* of the last write; op NONE: none */
    uint32_t lane;
    uint32_t op;
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

/* Room in the history: for so many more ranges and reads, of accesses that cross `crossed` existing
 * ranges. */
typedef struct history_room {
    size_t ranges;
    size_t reads;
    size_t crossed;
} history_room;

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
    size_t nlanes;
    size_t lanes_cap;
    fan__chunk **dir; /* sorted by address */
    size_t ndir;
    size_t dir_cap;
    fan__chunk *freelist;
    size_t nfree;
    fan__reading *reads;
    size_t nreads;
    size_t reads_cap;
    uint32_t free_read;
    size_t free_reads; /* in the list, and from nreads on */
    fan__op_slot *ops;
    size_t nops;
    size_t ops_cap;
    uint32_t free_op;
    uint64_t number;    /* operations so far */
    history_room want;  /* requested by fan_race_check_plan */
    fan__lock *mutexes; /* open addressing; a power of two */
    size_t nmutexes;
    size_t mutexes_cap;
    fan_clock gate; /* the G of a release; kept for its memory */
};

static void fan__runs_of(const fan_array *a, fan__runs *out)
{
    out->base = (uintptr_t)a->data;
    out->bytes = fan_dtype_size(a->dtype);
    out->n = 0;
    /* Axes with a width, strides made positive, narrowest first. */
    for (int i = 0; i < a->ndim; i++) {
        int64_t extent = a->shape[i];
        int64_t stride = a->strides[i];
        if (extent == 0) {
            out->bytes = 0;
            return;
        }
        if (extent == 1 || stride == 0)
            continue;
        if (stride < 0) {
            out->base -= (uintptr_t)(-stride) * (uintptr_t)(extent - 1);
            stride = -stride;
        }
        int k = out->n++;
        for (; k > 0 && out->stride[k - 1] > stride; k--) {
            out->stride[k] = out->stride[k - 1];
            out->extent[k] = out->extent[k - 1];
        }
        out->stride[k] = stride;
        out->extent[k] = extent;
    }
    /* An axis whose step is no wider than the run makes the run longer. */
    int kept = 0;
    for (int i = 0; i < out->n; i++) {
        if (kept == 0 && (uintptr_t)out->stride[i] <= out->bytes) {
            out->bytes += (uintptr_t)out->stride[i] * (uintptr_t)(out->extent[i] - 1);
            continue;
        }
        out->stride[kept] = out->stride[i];
        out->extent[kept] = out->extent[i];
        kept++;
    }
    out->n = kept;
    for (int i = 0; i < kept; i++)
        out->at[i] = 0;
}

/* fan__runs_next: moves to the next run; false: there is none. */
static bool fan__runs_next(fan__runs *r)
{
    for (int i = 0; i < r->n; i++) {
        if (++r->at[i] < r->extent[i]) {
            r->base += (uintptr_t)r->stride[i];
            return true;
        }
        r->base -= (uintptr_t)r->stride[i] * (uintptr_t)(r->extent[i] - 1);
        r->at[i] = 0;
    }
    return false;
}

static inline uint64_t fan__count_in(const fan_clock *clock, uint32_t at)
{
    if (at >= clock->n)
        return 0;
    if (clock->heap)
        return clock->heap[at];
    return clock->lanes[at];
}

/* history_below: returns the range at p if it begins below `hi`.
 * NULL: it does not, or p is the end. */
static inline fan__range *history_below(const fan_race_check *check, fan__place p, uintptr_t hi)
{
    if (p.c >= check->ndir)
        return NULL;
    fan__range *r = &check->dir[p.c]->r[p.i];
    if (r->lo >= hi)
        return NULL;
    return r;
}

static void fan__history_free_chunk(fan_race_check *check, fan__chunk *c)
{
    c->next = check->freelist;
    check->freelist = c;
    check->nfree++;
}

static void fan__history_drop_op(fan_race_check *check, uint32_t at)
{
    if (at == FAN__NONE || --check->ops[at].refs)
        return;
    check->lanes[check->ops[at].op.lane].ops--;
    check->ops[at].next = check->free_op;
    check->free_op = at;
}

static uint32_t history_take_read(fan_race_check *check)
{
    assert(check->free_reads > 0);
    check->free_reads--;
    uint32_t at = check->free_read;
    if (at == FAN__NONE)
        return (uint32_t)check->nreads++;
    check->free_read = check->reads[at].next;
    return at;
}

static void history_give_read(fan_race_check *check, uint32_t at)
{
    fan__history_drop_op(check, check->reads[at].op);
    check->reads[at].next = check->free_read;
    check->free_read = at;
    check->free_reads++;
}

static void history_clear_reads(fan_race_check *check, fan__range *r)
{
    for (uint32_t at = r->reads, next; at != FAN__NONE; at = next) {
        next = check->reads[at].next;
        history_give_read(check, at);
    }
    r->reads = FAN__NONE;
}

static size_t history_count_reads(const fan_race_check *check, const fan__range *r)
{
    size_t n = 0;
    for (uint32_t at = r->reads; at != FAN__NONE; at = check->reads[at].next)
        n++;
    return n;
}

static fan__place fan__history_after(const fan_race_check *check, fan__place p)
{
    if (++p.i >= check->dir[p.c]->n) {
        p.c++;
        p.i = 0;
    }
    return p;
}

/* history_next: moves *p to the next range and returns it, as history_below does. */
static fan__range *history_next(const fan_race_check *check, fan__place *p, uintptr_t hi)
{
    *p = fan__history_after(check, *p);
    return history_below(check, *p, hi);
}

/* fan__history_find: returns the first range that ends after `x`. */
static fan__place fan__history_find(const fan_race_check *check, uintptr_t x)
{
    fan__place p = {0, 0};
    size_t end = check->ndir;
    while (p.c < end) {
        size_t mid = p.c + (end - p.c) / 2;
        const fan__chunk *c = check->dir[mid];
        if (c->r[c->n - 1].hi > x)
            end = mid;
        else
            p.c = mid + 1;
    }
    if (p.c == check->ndir)
        return p;
    const fan__chunk *c = check->dir[p.c];
    uint32_t last = c->n - 1;
    while (p.i < last) {
        uint32_t mid = p.i + (last - p.i) / 2;
        if (c->r[mid].hi > x)
            last = mid;
        else
            p.i = mid + 1;
    }
    return p;
}

/* history_open_chunk: inserts a spare chunk at index c of the directory. The room must exist. */
static fan__chunk *history_open_chunk(fan_race_check *check, size_t c)
{
    assert(check->freelist && check->ndir < check->dir_cap);
    memmove(&check->dir[c + 1], &check->dir[c], (check->ndir - c) * sizeof *check->dir);
    check->ndir++;
    fan__chunk *opened = check->freelist;
    check->freelist = opened->next;
    check->nfree--;
    check->dir[c] = opened;
    opened->n = 0;
    return opened;
}

/* history_insert: inserts *r before p (which may be the end) and returns its place. The room must
 * exist. */
static fan__place history_insert(fan_race_check *check, fan__place p, const fan__range *r)
{
    if (p.c == check->ndir) {
        if (check->ndir == 0)
            history_open_chunk(check, 0);
        p.c = check->ndir - 1;
        p.i = check->dir[p.c]->n;
    }
    fan__chunk *c = check->dir[p.c];
    if (c->n == FAN__CHUNK) {
        fan__chunk *right = history_open_chunk(check, p.c + 1);
        uint32_t keep = FAN__CHUNK / 2;
        if (p.i == FAN__CHUNK) /* ranges appended at the end fill their chunks */
            keep = FAN__CHUNK;
        right->n = FAN__CHUNK - keep;
        memcpy(right->r, c->r + keep, right->n * sizeof *r);
        c->n = keep;
        if (p.i >= keep) {
            p.c++;
            p.i -= keep;
            c = right;
        }
    }
    memmove(&c->r[p.i + 1], &c->r[p.i], (c->n - p.i) * sizeof *r);
    c->r[p.i] = *r;
    c->n++;
    return p;
}

/* fan__history_erase: removes the ranges from p on that begin below `hi`, with their references.
 * Returns the place that follows them. */
static fan__place fan__history_erase(fan_race_check *check, fan__place p, uintptr_t hi)
{
    size_t kept = p.c; /* the next place of the directory for a chunk that keeps ranges */
    size_t at = p.c;
    uint32_t from = p.i;
    bool more = true;
    for (; more && at < check->ndir; at++) {
        fan__chunk *c = check->dir[at];
        uint32_t end = from;
        while (end < c->n && c->r[end].lo < hi) {
            history_clear_reads(check, &c->r[end]);
            fan__history_drop_op(check, c->r[end].op);
            end++;
        }
        more = end == c->n;
        memmove(&c->r[from], &c->r[end], (c->n - end) * sizeof c->r[0]);
        c->n -= end - from;
        if (c->n)
            check->dir[kept++] = c;
        else
            fan__history_free_chunk(check, c);
        from = 0;
    }
    memmove(&check->dir[kept], &check->dir[at], (check->ndir - at) * sizeof *check->dir);
    check->ndir -= at - kept;
    if (p.c < check->ndir && p.i >= check->dir[p.c]->n)
        return (fan__place){p.c + 1, 0};
    return p;
}

/* fan__history_cut: splits a range that has `x` strictly inside. Returns the first range that ends
 * after x. The room must exist. */
static fan__place fan__history_cut(fan_race_check *check, uintptr_t x)
{
    fan__place p = fan__history_find(check, x);
    fan__range *r = history_below(check, p, x);
    if (!r)
        return p;
    fan__range left = *r;
    left.hi = x;
    if (left.op != FAN__NONE)
        check->ops[left.op].refs++;
    left.reads = FAN__NONE;
    for (uint32_t at = r->reads; at != FAN__NONE; at = check->reads[at].next) {
        uint32_t copy = history_take_read(check);
        check->reads[copy] = check->reads[at];
        check->reads[copy].next = left.reads;
        left.reads = copy;
        check->ops[check->reads[at].op].refs++;
    }
    r->lo = x;
    return fan__history_after(check, history_insert(check, p, &left));
}

/* fan__history_reserve: makes room. -1: out of memory. */
static int fan__history_reserve(fan_race_check *check, history_room room)
{
    /* Every full chunk that is crossed may be split once; the halves then take CHUNK/2 each. */
    size_t chunks = room.crossed / FAN__CHUNK + room.ranges / (FAN__CHUNK / 2) + 4;
    if (chunks > room.ranges + 1)
        chunks = room.ranges + 1;
    if (fan_grow((void **)&check->dir, &check->dir_cap, check->ndir + chunks, sizeof *check->dir))
        return -1;
    while (check->nfree < chunks) {
        fan__chunk *c = fan_alloc(sizeof *c);
        if (!c)
            return -1;
        fan__history_free_chunk(check, c);
    }
    if (check->free_reads < room.reads) {
        size_t was = check->reads_cap;
        size_t want = was + (room.reads - check->free_reads);
        if (want >= FAN__NONE)
            return -1;
        if (fan_grow((void **)&check->reads, &check->reads_cap, want, sizeof *check->reads))
            return -1;
        check->free_reads += check->reads_cap - was;
    }
    return 0;
}

/* fan__history_measure: adds to *room the most that noting [lo, hi) can take, read or write: two
 * cuts, each copying a list of reads; a read on every range and every gap. */
static void fan__history_measure(const fan_race_check *check, uintptr_t lo, uintptr_t hi,
                                 history_room *room)
{
    fan__place p = fan__history_find(check, lo);
    room->ranges += 3;
    room->reads++;
    for (const fan__range *r = history_below(check, p, hi); r; r = history_next(check, &p, hi)) {
        room->ranges++;
        room->reads += 2;
        room->crossed++;
        if (r->lo < lo)
            room->reads += history_count_reads(check, r);
        if (r->hi > hi)
            room->reads += history_count_reads(check, r) + 1;
    }
}

/* history_make_room: for one access to [lo, hi). */
static int history_make_room(fan_race_check *check, uintptr_t lo, uintptr_t hi)
{
    history_room room = {0};
    fan__history_measure(check, lo, hi, &room);
    return fan__history_reserve(check, room);
}

/* fan__history_add_read: notes a read and drops the reads that it covers. */
static void fan__history_add_read(fan_race_check *check, fan__range *r, const fan_clock *now,
                                  uint32_t op)
{
    const fan_op *acting = &check->ops[op].op;
    uint32_t *link = &r->reads;
    while (*link != FAN__NONE) {
        fan__reading *old = &check->reads[*link];
        if (old->op == op)
            return;
        if (fan__count_in(now, old->lane) >= old->count) {
            uint32_t gone = *link;
            *link = old->next;
            history_give_read(check, gone);
        } else {
            link = &old->next;
        }
    }
    uint32_t at = history_take_read(check);
    check->reads[at] = (fan__reading){
        .count = acting->count,
        .lane = acting->lane,
        .op = op,
        .next = r->reads,
    };
    r->reads = at;
    check->ops[op].refs++;
}

static void fan__history_set_write(fan_race_check *check, fan__range *r, uint32_t op, bool released)
{
    history_clear_reads(check, r);
    if (r->op != op) {
        check->ops[op].refs++;
        fan__history_drop_op(check, r->op);
    }
    r->op = op;
    r->lane = check->ops[op].op.lane;
    r->count = check->ops[op].op.count;
    r->released = released;
}

/* fan__history_note_write: makes [lo, hi) one range. The room must exist. */
static void fan__history_note_write(fan_race_check *check, uint32_t op, uintptr_t lo, uintptr_t hi,
                                    bool released)
{
    fan__history_cut(check, lo);
    fan__history_cut(check, hi);
    fan__place p = fan__history_find(check, lo);
    fan__range *first = history_below(check, p, hi);
    if (!first) {
        fan__range r = {
            .lo = lo,
            .hi = hi,
            .op = FAN__NONE,
            .reads = FAN__NONE,
        };
        fan__history_set_write(check, &r, op, released);
        history_insert(check, p, &r);
        return;
    }
    bool whole = first->hi == hi;
    first->lo = lo;
    first->hi = hi;
    fan__history_set_write(check, first, op, released);
    if (!whole)
        fan__history_erase(check, fan__history_after(check, p), hi);
}

/* fan__lane_room: makes room for `n` lanes in the clock. Its counts stay. */
static int fan__lane_room(fan_clock *c, size_t n)
{
    if (n <= c->cap)
        return 0;
    uint32_t was = c->n;
    if (fan_clock_set(c, (uint32_t)n - 1, 1))
        return -1;
    c->n = was;
    return 0;
}

/* fan__lane_join: joins lane `from`'s clock to lane `to`'s. There must be room
 * (fan__lane_room_to_join). */
static void fan__lane_join(fan_race_check *check, uint32_t to, uint32_t from)
{
    (void)fan_clock_join(fan_race_check_clock(check, to), fan_race_check_clock(check, from));
}

static int fan__lane_room_to_join(fan_race_check *check, uint32_t to, uint32_t from)
{
    return fan__lane_room(fan_race_check_clock(check, to), check->lanes[from].clock.n);
}

fan_status fan_race_check_lane(fan_race_check *check, uint64_t owner, uint32_t *out, fan_error *err)
{
    size_t n = check->nlanes + 1;
    bool fits = n < FAN__NONE &&
                !fan_grow((void **)&check->lanes, &check->lanes_cap, n, sizeof *check->lanes) &&
                !fan__lane_room(&check->gate, n);
    /* A host's clock has room for every lane, so joining it cannot fail. The others grow. */
    for (size_t i = 0; fits && i < check->nlanes; i++)
        fits = !check->lanes[i].host || !fan__lane_room(&check->lanes[i].clock, n);
    if (!fits) {
        return fan_fail(err, FAN_ERR_NOMEM,
                        "out of memory for a lane of the happens-before checker");
    }
    fan__lane *l = &check->lanes[check->nlanes];
    *l = (fan__lane){
        .owner = owner,
        .open = FAN__NONE,
    };
    fan_clock_init(&l->clock);
    *out = (uint32_t)check->nlanes++;
    return FAN_OK;
}

fan_status fan_race_check_host(fan_race_check *check, uint32_t at)
{
    assert(at < check->nlanes);
    if (fan__lane_room(fan_race_check_clock(check, at), check->nlanes))
        return FAN_ERR_NOMEM;
    check->lanes[at].host = true;
    return FAN_OK;
}

uint64_t fan_race_check_owner(const fan_race_check *check, uint32_t at)
{
    assert(at < check->nlanes);
    return check->lanes[at].owner;
}

#ifdef FAN_TEST
size_t fan_race_check_lanes(const fan_race_check *check)
{
    return check->nlanes;
}
#endif

bool fan_race_check_reuse(fan_race_check *check, const fan_clock *seen, uint64_t owner,
                          uint32_t *out)
{
    for (size_t i = 0; i < check->nlanes; i++) {
        fan__lane *lane = &check->lanes[i];
        uint32_t at = (uint32_t)i;
        if (!lane->left)
            continue;
        if (lane->ops && fan__count_in(seen, at) < lane->count)
            continue;
        if (fan_clock_set(&lane->clock, at, lane->count))
            continue;
        lane->left = false;
        lane->owner = owner;
        *out = at;
        return true;
    }
    return false;
}

fan_clock *fan_race_check_clock(fan_race_check *check, uint32_t at)
{
    assert(at < check->nlanes);
    return &check->lanes[at].clock;
}

void fan_race_check_leave(fan_race_check *check, uint32_t at)
{
    fan__lane *l = &check->lanes[at];
    assert(at < check->nlanes && !l->left && !l->host);
    fan__history_drop_op(check, l->open);
    l->open = FAN__NONE;
    l->left = true;
    l->count = fan__count_in(&l->clock, at);
    fan_clock_fini(&l->clock);
}

fan_status fan_race_check_record(fan_race_check *check, uint32_t at, uint32_t host,
                                 fan_clock *event)
{
    if (fan__lane_room_to_join(check, at, host))
        return FAN_ERR_NOMEM;
    uint32_t n = check->lanes[at].clock.n;
    if (n < check->lanes[host].clock.n)
        n = check->lanes[host].clock.n;
    if (fan__lane_room(event, n))
        return FAN_ERR_NOMEM;
    fan__lane_join(check, at, host);
    fan_clock_copy(event, fan_race_check_clock(check, at));
    return FAN_OK;
}

fan_status fan_race_check_wait(fan_race_check *check, uint32_t at, uint32_t host,
                               const fan_clock *event)
{
    if (fan__lane_room_to_join(check, at, host))
        return FAN_ERR_NOMEM;
    if (fan__lane_room(fan_race_check_clock(check, at), event->n))
        return FAN_ERR_NOMEM;
    fan__lane_join(check, at, host);
    (void)fan_clock_join(fan_race_check_clock(check, at), event);
    return FAN_OK;
}

fan_status fan_race_check_sync(fan_race_check *check, uint32_t host, const fan_clock *with)
{
    if (fan_clock_join(fan_race_check_clock(check, host), with))
        return FAN_ERR_NOMEM;
    return FAN_OK;
}

/* lock_place: returns the row of mutex `id`, or the free row for it. The table is never full. */
static fan__lock *lock_place(fan__lock *table, size_t cap, uint64_t id)
{
    size_t i = (size_t)(id * UINT64_C(0x9E3779B97F4A7C15) >> 20) & (cap - 1);
    while (table[i].id && table[i].id != id)
        i = (i + 1) & (cap - 1);
    return &table[i];
}

fan_status fan_race_check_locked(fan_race_check *check, uint32_t host, uint64_t id)
{
    if (check->nmutexes == 0)
        return FAN_OK;
    const fan__lock *m = lock_place(check->mutexes, check->mutexes_cap, id);
    if (m->id == 0)
        return FAN_OK;
    return fan_race_check_sync(check, host, &m->clock);
}

fan_status fan_race_check_unlocking(fan_race_check *check, uint32_t host, uint64_t id)
{
    if (2 * (check->nmutexes + 1) > check->mutexes_cap) {
        size_t cap = check->mutexes_cap ? 2 * check->mutexes_cap : 16;
        fan__lock *table = fan_calloc(cap * sizeof *table);
        if (!table)
            return FAN_ERR_NOMEM;
        for (size_t i = 0; i < cap; i++)
            fan_clock_init(&table[i].clock);
        for (size_t i = 0; i < check->mutexes_cap; i++) {
            fan__lock *old = &check->mutexes[i];
            if (old->id)
                *lock_place(table, cap, old->id) = *old; /* the clock moves with its heap */
            else
                fan_clock_fini(&old->clock);
        }
        fan_free(check->mutexes);
        check->mutexes = table;
        check->mutexes_cap = cap;
    }
    fan__lock *m = lock_place(check->mutexes, check->mutexes_cap, id);
    if (fan__lane_room(&m->clock, check->lanes[host].clock.n))
        return FAN_ERR_NOMEM;
    if (m->id == 0) {
        m->id = id;
        check->nmutexes++;
    }
    fan_clock_copy(&m->clock, fan_race_check_clock(check, host));
    return FAN_OK;
}

fan_race_check *fan_race_check_new(void)
{
    fan_race_check *check = fan_calloc(sizeof *check);
    if (!check)
        return NULL;
    check->free_read = FAN__NONE;
    check->free_op = FAN__NONE;
    fan_clock_init(&check->gate);
    return check;
}

/* race_clear: drops all history; lanes and memory stay. */
static void race_clear(fan_race_check *check)
{
    for (size_t i = 0; i < check->nlanes; i++) {
        fan__lane *lane = &check->lanes[i];
        lane->clock.n = 0; /* keeps its memory */
        lane->open = FAN__NONE;
        lane->ops = 0;
        lane->count = 0;
    }
    for (size_t i = 0; i < check->ndir; i++)
        fan__history_free_chunk(check, check->dir[i]);
    check->ndir = 0;
    check->free_read = FAN__NONE;
    check->free_op = FAN__NONE;
    check->free_reads = check->reads_cap;
    check->nreads = 0;
    check->nops = 0;
    check->number = 0;
    check->want = (history_room){0};
    for (size_t i = 0; check->nmutexes && i < check->mutexes_cap; i++) {
        check->mutexes[i].id = 0;
        check->mutexes[i].clock.n = 0;
    }
    check->nmutexes = 0;
}

#ifdef FAN_TEST
void fan_race_check_reset(fan_race_check *check)
{
    race_clear(check);
}
#endif

void fan_race_check_free(fan_race_check *check)
{
    if (!check)
        return;
    race_clear(check);
    for (size_t i = 0; i < check->nlanes; i++)
        fan_clock_fini(&check->lanes[i].clock);
    for (fan__chunk *c = check->freelist, *next; c; c = next) {
        next = c->next;
        fan_free(c);
    }
    for (size_t i = 0; i < check->mutexes_cap; i++)
        fan_clock_fini(&check->mutexes[i].clock);
    fan_clock_fini(&check->gate);
    fan_free(check->lanes);
    fan_free(check->dir);
    fan_free(check->reads);
    fan_free(check->ops);
    fan_free(check->mutexes);
    fan_free(check);
}

static void race_put_text(char *to, size_t size, const char *from)
{
    size_t n = 0;
    for (; from && n + 1 < size && from[n]; n++)
        to[n] = from[n];
    to[n] = '\0';
}

/* An access of the run [lo, hi), or its release, which an operation makes. */
typedef struct race_access {
    const fan_op *acting;
    const fan_clock *now; /* of the operation; of a release: the gate */
    bool writes;
    bool releases;
    uintptr_t lo;
    uintptr_t hi;
    fan_race *race; /* filled in; NULL: not wanted */
} race_access;

/* race_is_ordered: returns whether `op`, the count-th operation of its lane, comes before the
 * access. A release need not wait for an operation that is over. */
static bool race_is_ordered(const fan_race_check *check, const race_access *access, uint32_t op,
                            uint32_t lane, uint64_t count)
{
    if (access->releases && check->ops[op].op.over)
        return true;
    return fan__count_in(access->now, lane) >= count;
}

/* is_race: returns whether the access races with the history of one range. */
static bool is_race(const fan_race_check *check, const fan__range *r, const race_access *access)
{
    uint32_t first = FAN__NONE; /* the operation that nothing orders before the access */
    bool wrote = r->op != FAN__NONE;
    if (wrote && (r->released || !race_is_ordered(check, access, r->op, r->lane, r->count)))
        first = r->op;
    uint32_t at = FAN__NONE;
    if (access->writes && first == FAN__NONE)
        at = r->reads;
    for (; at != FAN__NONE && first == FAN__NONE; at = check->reads[at].next) {
        const fan__reading *read = &check->reads[at];
        wrote = false;
        if (!race_is_ordered(check, access, read->op, read->lane, read->count))
            first = read->op;
    }
    fan_race *race = access->race;
    if (first == FAN__NONE || !race)
        return first != FAN__NONE;
    *race = (fan_race){
        .first = check->ops[first].op,
        .second = *access->acting,
        .first_writes = wrote,
        .second_writes = access->writes,
        .release = access->releases,
        .released = wrote && r->released,
        .lo = access->lo,
        .hi = access->hi,
    };
    if (race->lo < r->lo)
        race->lo = r->lo;
    if (race->hi > r->hi)
        race->hi = r->hi;
    return true;
}

/* races_from: the same for all ranges from p on that begin below the run's end. */
static fan_status races_from(const fan_race_check *check, fan__place p, const race_access *access)
{
    const fan__range *r = history_below(check, p, access->hi);
    for (; r; r = history_next(check, &p, access->hi)) {
        if (is_race(check, r, access))
            return FAN_ERR_RACE;
    }
    return FAN_OK;
}

/* race_note_read: on every range in [lo, hi); the gaps become new ranges. There must be room. */
static void race_note_read(fan_race_check *check, uint32_t op, const fan_clock *now, uintptr_t lo,
                           uintptr_t hi)
{
    fan__history_cut(check, lo);
    fan__history_cut(check, hi);
    fan__place p = fan__history_find(check, lo);
    while (lo < hi) {
        fan__range gap = {
            .lo = lo,
            .hi = hi,
            .op = FAN__NONE,
            .reads = FAN__NONE,
        };
        fan__range *r = history_below(check, p, hi);
        if (r)
            gap.hi = r->lo;
        if (gap.hi > lo) {
            fan__history_add_read(check, &gap, now, op);
            p = history_insert(check, p, &gap);
            lo = gap.hi;
        } else {
            fan__history_add_read(check, r, now, op);
            lo = r->hi;
        }
        p = fan__history_after(check, p);
    }
}

/* race_make_room: makes room for noting an access; exact: one range has exactly its bytes. */
static int race_make_room(fan_race_check *check, const race_access *access, bool exact)
{
    if (!exact)
        return history_make_room(check, access->lo, access->hi);
    if (check->free_reads > 0)
        return 0;
    return fan__history_reserve(check, (history_room){.reads = 1});
}

/* race_touch: checks the access of an operation for races, then notes it. May allocate. */
static fan_status race_touch(fan_race_check *check, uint32_t op, race_access *access)
{
    uintptr_t lo = access->lo;
    uintptr_t hi = access->hi;
    access->acting = &check->ops[op].op;
    access->now = fan_race_check_clock(check, access->acting->lane);
    fan__place p = fan__history_find(check, lo);
    fan__range *r = history_below(check, p, hi);
    bool exact = r && r->lo == lo && r->hi == hi;
    if (race_make_room(check, access, exact))
        return FAN_ERR_NOMEM;
    fan_status status = races_from(check, p, access);
    if (exact && access->writes)
        fan__history_set_write(check, r, op, false);
    else if (exact)
        fan__history_add_read(check, r, access->now, op);
    else if (access->writes)
        fan__history_note_write(check, op, lo, hi, false);
    else
        race_note_read(check, op, access->now, lo, hi);
    return status;
}

void fan_race_check_plan(fan_race_check *check, const fan_array *a)
{
    fan__runs r;
    fan__runs_of(a, &r);
    if (r.bytes == 0)
        return;
    do {
        fan__history_measure(check, r.base, r.base + r.bytes, &check->want);
    } while (fan__runs_next(&r));
}

/* race_open_op: makes a new operation the latest of a lane. -1: out of memory. */
static int race_open_op(fan_race_check *check, uint32_t at)
{
    fan__lane *l = &check->lanes[at];
    /* of an operation that the history does not refer to, the place is used again */
    if (l->open != FAN__NONE && check->ops[l->open].refs == 1)
        return 0;
    uint32_t new_ = check->free_op;
    if (new_ == FAN__NONE) {
        size_t n = check->nops + 1;
        if (n >= FAN__NONE ||
            fan_grow((void **)&check->ops, &check->ops_cap, n, sizeof *check->ops))
            return -1;
        new_ = (uint32_t)check->nops++;
    } else {
        check->free_op = check->ops[new_].next;
    }
    check->ops[new_].refs = 1;
    check->ops[new_].op.lane = at;
    l->ops++;
    fan__history_drop_op(check, l->open);
    l->open = new_;
    return 0;
}

fan_status fan_race_check_begin(fan_race_check *check, uint32_t at, uint32_t host, const char *name,
                                const char *call_site, uint64_t *op, fan_error *err)
{
    assert(at < check->nlanes && host < check->nlanes);
    fan__lane *l = &check->lanes[at];
    /* An access may cut ranges that another access of the same operation then crosses: twice their
     * sum is room enough for all accesses that do not overlap themselves. */
    history_room *want = &check->want;
    history_room room = {2 * want->ranges + 4, 2 * want->reads + 4, 2 * want->crossed};
    *want = (history_room){0};
    bool fits = !fan__history_reserve(check, room) && !fan__lane_room(&l->clock, (size_t)at + 1);
    fits = fits && !fan__lane_room_to_join(check, at, host);
    if (!fits || race_open_op(check, at))
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for the happens-before history");
    fan__lane_join(check, at, host);
    fan_op *acting = &check->ops[l->open].op;
    *acting = (fan_op){
        .number = check->number++,
        .lane = at,
        .host = host,
        .owner = l->owner,
        .over = l->host,
        .count = fan__count_in(&l->clock, at) + 1,
    };
    fan_clock_set(&l->clock, at, acting->count); /* there is room */
    race_put_text(acting->name, sizeof acting->name, name);
    race_put_text(acting->call_site, sizeof acting->call_site, call_site);
    *op = l->open;
    return FAN_OK;
}

const fan_op *fan_race_check_op(const fan_race_check *check, uint64_t op)
{
    return &check->ops[op].op;
}

#ifndef NDEBUG
/* op_is_open: returns whether `op` is the latest operation of its lane. */
static bool op_is_open(const fan_race_check *check, uint64_t op)
{
    return op < check->nops && check->lanes[check->ops[op].op.lane].open == op;
}
#endif

void fan_race_check_over(fan_race_check *check, uint64_t op, bool awaited)
{
    assert(op_is_open(check, op));
    check->ops[op].op.over = true;
    check->ops[op].op.awaited = awaited;
}

#ifdef FAN_TEST
fan_status fan_race_check_range(fan_race_check *check, uint64_t op, uintptr_t lo, uintptr_t hi,
                                bool write, fan_race *race)
{
    assert(op_is_open(check, op));
    if (lo >= hi)
        return FAN_OK;
    race_access access = {
        .writes = write,
        .lo = lo,
        .hi = hi,
        .race = race,
    };
    return race_touch(check, (uint32_t)op, &access);
}
#endif

fan_status fan_race_check_access(fan_race_check *check, uint64_t op, const fan_array *a, bool write,
                                 fan_race *race)
{
    assert(op_is_open(check, op));
    fan__runs r;
    fan__runs_of(a, &r);
    if (r.bytes == 0)
        return FAN_OK;
    race_access access = {.writes = write, .race = race};
    fan_status worst = FAN_OK;
    do {
        access.lo = r.base;
        access.hi = r.base + r.bytes;
        fan_status status = race_touch(check, (uint32_t)op, &access);
        if (status == FAN_ERR_NOMEM)
            return status;
        if (status == FAN_OK)
            continue;
        worst = status;
        access.race = NULL; /* the first is reported */
    } while (fan__runs_next(&r));
    return worst;
}

fan_status fan_race_check_let_go(fan_race_check *check, uint32_t host, const uint32_t *lanes,
                                 size_t n, uintptr_t lo, uintptr_t hi, const char *call_site,
                                 fan_race *race)
{
    if (lo >= hi)
        return FAN_OK;
    /* The gate has room for every lane, so this cannot fail. */
    fan_clock_copy(&check->gate, fan_race_check_clock(check, host));
    for (size_t i = 0; i < n; i++)
        fan_clock_join(&check->gate, &check->lanes[lanes[i]].clock);

    fan_op acting = {
        .number = check->number,
        .lane = host,
        .host = host,
        .owner = check->lanes[host].owner,
        .count = fan__count_in(&check->gate, host) + 1,
    };
    race_put_text(acting.name, sizeof acting.name, "release");
    race_put_text(acting.call_site, sizeof acting.call_site, call_site);
    race_access access = {
        .acting = &acting,
        .now = &check->gate,
        .writes = true,
        .releases = true,
        .lo = lo,
        .hi = hi,
        .race = race,
    };
    return races_from(check, fan__history_find(check, lo), &access);
}

fan_status fan_race_check_release(fan_race_check *check, uint32_t host, const uint32_t *lanes,
                                  size_t n, uintptr_t lo, uintptr_t hi, const char *call_site,
                                  fan_race *race)
{
    fan_status status = fan_race_check_let_go(check, host, lanes, n, lo, hi, call_site, race);
    if (lo >= hi)
        return FAN_OK;
    uint64_t op;
    if (history_make_room(check, lo, hi) == 0 &&
        fan_race_check_begin(check, host, host, "release", call_site, &op, NULL) == FAN_OK)
        fan__history_note_write(check, (uint32_t)op, lo, hi, true);
    return status;
}

void fan_race_check_forget(fan_race_check *check, uintptr_t lo, uintptr_t hi)
{
    if (lo >= hi)
        return;
    if (!history_below(check, fan__history_find(check, lo), hi))
        return;
    if (history_make_room(check, lo, hi) == 0) {
        fan__history_cut(check, lo);
        fan__history_cut(check, hi);
        /* without room to cut, the rest of the range is dropped, too: that can hide a race, but not
         * invent one */
    }
    fan__history_erase(check, fan__history_find(check, lo), hi);
}

#ifdef FAN_TEST
size_t fan_race_check_ranges(const fan_race_check *check)
{
    size_t n = 0;
    for (size_t i = 0; i < check->ndir; i++)
        n += check->dir[i]->n;
    return n;
}
#endif
