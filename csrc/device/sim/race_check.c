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
    int64_t extent[FAN_MAX_NDIM], stride[FAN_MAX_NDIM], at[FAN_MAX_NDIM];
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

static inline fan__range *fan__history_at(const fan_race_check *o, fan__place p)
{
    return &o->dir[p.c]->r[p.i];
}
static inline bool fan__history_is_end(const fan_race_check *o, fan__place p)
{
    return p.c >= o->ndir;
}

static void fan__history_free_chunk(fan_race_check *o, fan__chunk *c)
{
    c->next = o->freelist;
    o->freelist = c;
    o->nfree++;
}

static void fan__history_drop_op(fan_race_check *o, uint32_t at)
{
    if (at == FAN__NONE || --o->ops[at].refs)
        return;
    o->lanes[o->ops[at].op.lane].ops--;
    o->ops[at].next = o->free_op;
    o->free_op = at;
}

static uint32_t history_take_read(fan_race_check *o)
{
    assert(o->free_reads > 0);
    o->free_reads--;
    uint32_t at = o->free_read;
    if (at == FAN__NONE)
        return (uint32_t)o->nreads++;
    o->free_read = o->reads[at].next;
    return at;
}

static void history_give_read(fan_race_check *o, uint32_t at)
{
    fan__history_drop_op(o, o->reads[at].op);
    o->reads[at].next = o->free_read;
    o->free_read = at;
    o->free_reads++;
}

static void history_clear_reads(fan_race_check *o, fan__range *r)
{
    for (uint32_t at = r->reads, next; at != FAN__NONE; at = next) {
        next = o->reads[at].next;
        history_give_read(o, at);
    }
    r->reads = FAN__NONE;
}

static size_t history_count_reads(const fan_race_check *o, const fan__range *r)
{
    size_t n = 0;
    for (uint32_t at = r->reads; at != FAN__NONE; at = o->reads[at].next)
        n++;
    return n;
}

static fan__place fan__history_after(const fan_race_check *o, fan__place p)
{
    if (++p.i >= o->dir[p.c]->n) {
        p.c++;
        p.i = 0;
    }
    return p;
}

/* fan__history_find: returns the first range that ends after `x`. */
static fan__place fan__history_find(const fan_race_check *o, uintptr_t x)
{
    fan__place p = {0, 0};
    size_t end = o->ndir;
    while (p.c < end) {
        size_t mid = p.c + (end - p.c) / 2;
        const fan__chunk *c = o->dir[mid];
        if (c->r[c->n - 1].hi > x)
            end = mid;
        else
            p.c = mid + 1;
    }
    if (fan__history_is_end(o, p))
        return p;
    const fan__chunk *c = o->dir[p.c];
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
static fan__chunk *history_open_chunk(fan_race_check *o, size_t c)
{
    assert(o->freelist && o->ndir < o->dir_cap);
    memmove(&o->dir[c + 1], &o->dir[c], (o->ndir - c) * sizeof *o->dir);
    o->ndir++;
    fan__chunk *opened = o->freelist;
    o->freelist = opened->next;
    o->nfree--;
    o->dir[c] = opened;
    opened->n = 0;
    return opened;
}

/* history_insert: inserts *r before p (which may be the end) and returns its place. The room must
 * exist. */
static fan__place history_insert(fan_race_check *o, fan__place p, const fan__range *r)
{
    if (fan__history_is_end(o, p)) {
        if (o->ndir == 0)
            history_open_chunk(o, 0);
        p.c = o->ndir - 1;
        p.i = o->dir[p.c]->n;
    }
    fan__chunk *c = o->dir[p.c];
    if (c->n == FAN__CHUNK) {
        fan__chunk *right = history_open_chunk(o, p.c + 1);
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
static fan__place fan__history_erase(fan_race_check *o, fan__place p, uintptr_t hi)
{
    size_t empty = 0;
    size_t first_empty = 0;
    fan__place q = p;
    while (!fan__history_is_end(o, q)) {
        fan__chunk *c = o->dir[q.c];
        uint32_t end = q.i;
        while (end < c->n && c->r[end].lo < hi) {
            history_clear_reads(o, &c->r[end]);
            fan__history_drop_op(o, c->r[end].op);
            end++;
        }
        bool more = end == c->n;
        memmove(&c->r[q.i], &c->r[end], (c->n - end) * sizeof c->r[0]);
        c->n -= end - q.i;
        if (c->n == 0) {
            if (empty++ == 0)
                first_empty = q.c;
            fan__history_free_chunk(o, c);
        }
        if (!more)
            break;
        q.c++;
        q.i = 0;
    }
    if (empty) {
        memmove(&o->dir[first_empty], &o->dir[first_empty + empty],
                (o->ndir - first_empty - empty) * sizeof *o->dir);
        o->ndir -= empty;
        if (first_empty == p.c)
            return (fan__place){p.c, 0};
    }
    if (!fan__history_is_end(o, p) && p.i >= o->dir[p.c]->n)
        return (fan__place){p.c + 1, 0};
    return p;
}

/* fan__history_cut: splits a range that has `x` strictly inside. Returns the first range that ends
 * after x. The room must exist. */
static fan__place fan__history_cut(fan_race_check *o, uintptr_t x)
{
    fan__place p = fan__history_find(o, x);
    if (fan__history_is_end(o, p) || fan__history_at(o, p)->lo >= x)
        return p;
    fan__range left = *fan__history_at(o, p);
    left.hi = x;
    if (left.op != FAN__NONE)
        o->ops[left.op].refs++;
    left.reads = FAN__NONE;
    for (uint32_t at = fan__history_at(o, p)->reads; at != FAN__NONE; at = o->reads[at].next) {
        uint32_t copy = history_take_read(o);
        o->reads[copy] = o->reads[at];
        o->reads[copy].next = left.reads;
        left.reads = copy;
        o->ops[o->reads[at].op].refs++;
    }
    fan__history_at(o, p)->lo = x;
    return fan__history_after(o, history_insert(o, p, &left));
}

/* fan__history_reserve: makes room for `ranges` more ranges and `reads` more reads, for accesses
 * that cross `crossed` existing ranges. */
static int fan__history_reserve(fan_race_check *o, size_t ranges, size_t reads, size_t crossed)
{
    /* Every full chunk that is crossed may be split once; the halves then take CHUNK/2 each. */
    size_t chunks = crossed / FAN__CHUNK + ranges / (FAN__CHUNK / 2) + 4;
    if (chunks > ranges + 1)
        chunks = ranges + 1;
    if (o->ndir + chunks > o->dir_cap &&
        fan_grow((void **)&o->dir, &o->dir_cap, o->ndir + chunks, sizeof *o->dir))
        return -1;
    while (o->nfree < chunks) {
        fan__chunk *c = fan_alloc(sizeof *c);
        if (!c)
            return -1;
        fan__history_free_chunk(o, c);
    }
    if (o->free_reads < reads) {
        size_t was = o->reads_cap;
        size_t want = was + (reads - o->free_reads);
        if (want >= FAN__NONE ||
            fan_grow((void **)&o->reads, &o->reads_cap, want, sizeof *o->reads))
            return -1;
        o->free_reads += o->reads_cap - was;
    }
    return 0;
}

/* fan__history_measure: computes the most that noting [lo, hi) can take, read or write: two cuts,
 * each copying a list of reads; a read on every range and every gap. */
static void fan__history_measure(const fan_race_check *o, uintptr_t lo, uintptr_t hi,
                                 size_t *ranges, size_t *reads, size_t *crossed)
{
    size_t k = 0;
    size_t copies = 0;
    fan__place p = fan__history_find(o, lo);
    for (; !fan__history_is_end(o, p); p = fan__history_after(o, p)) {
        const fan__range *r = fan__history_at(o, p);
        if (r->lo >= hi)
            break;
        k++;
        if (r->lo < lo)
            copies += history_count_reads(o, r);
        if (r->hi > hi)
            copies += history_count_reads(o, r) + 1;
    }
    *ranges += k + 3;
    *reads += 2 * k + 1 + copies;
    *crossed += k;
}

/* history_make_room: for one access to [lo, hi). */
static int history_make_room(fan_race_check *o, uintptr_t lo, uintptr_t hi)
{
    size_t ranges = 0;
    size_t reads = 0;
    size_t crossed = 0;
    fan__history_measure(o, lo, hi, &ranges, &reads, &crossed);
    return fan__history_reserve(o, ranges, reads, crossed);
}

/* fan__history_add_read: notes a read and drops the reads that it covers. */
static void fan__history_add_read(fan_race_check *o, fan__range *r, const fan_clock *now,
                                  uint32_t op)
{
    const fan_op *acting = &o->ops[op].op;
    uint32_t *link = &r->reads;
    while (*link != FAN__NONE) {
        fan__reading *old = &o->reads[*link];
        if (old->op == op)
            return;
        if (fan__count_in(now, old->lane) >= old->count) {
            uint32_t gone = *link;
            *link = old->next;
            history_give_read(o, gone);
        } else {
            link = &old->next;
        }
    }
    uint32_t at = history_take_read(o);
    o->reads[at] =
        (fan__reading){.count = acting->count, .lane = acting->lane, .op = op, .next = r->reads};
    r->reads = at;
    o->ops[op].refs++;
}

static void fan__history_set_write(fan_race_check *o, fan__range *r, uint32_t op, bool released)
{
    history_clear_reads(o, r);
    if (r->op != op) {
        o->ops[op].refs++;
        fan__history_drop_op(o, r->op);
    }
    r->op = op;
    r->lane = o->ops[op].op.lane;
    r->count = o->ops[op].op.count;
    r->released = released;
}

/* fan__history_note_write: makes [lo, hi) one range. The room must exist. */
static void fan__history_note_write(fan_race_check *o, uint32_t op, uintptr_t lo, uintptr_t hi,
                                    bool released)
{
    fan__place p = fan__history_cut(o, lo);
    fan__history_cut(o, hi);
    p = fan__history_find(o, lo);
    if (!fan__history_is_end(o, p) && fan__history_at(o, p)->lo < hi) {
        fan__range *r = fan__history_at(o, p);
        r->lo = lo;
        bool whole = r->hi == hi;
        r->hi = hi;
        fan__history_set_write(o, r, op, released);
        if (!whole)
            fan__history_erase(o, fan__history_after(o, p), hi);
        return;
    }
    fan__range r = {.lo = lo, .hi = hi, .op = FAN__NONE, .reads = FAN__NONE};
    fan__history_set_write(o, &r, op, released);
    history_insert(o, p, &r);
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
static void fan__lane_join(fan_race_check *o, uint32_t to, uint32_t from)
{
    if (to == from)
        return;
    fan_clock *clock = &o->lanes[to].clock;
    const fan_clock *other = &o->lanes[from].clock;
    uint64_t *mine = clock->heap ? clock->heap : clock->lanes;
    const uint64_t *theirs = other->heap ? other->heap : other->lanes;
    while (clock->n < other->n)
        mine[clock->n++] = 0;
    for (uint32_t i = 0; i < other->n; i++) {
        if (mine[i] < theirs[i])
            mine[i] = theirs[i];
    }
}

static int fan__lane_room_to_join(fan_race_check *o, uint32_t to, uint32_t from)
{
    return fan__lane_room(&o->lanes[to].clock, o->lanes[from].clock.n);
}

fan_status fan_race_check_lane(fan_race_check *o, uint32_t *out, fan_error *err)
{
    size_t n = o->nlanes + 1;
    bool fits = n < FAN__NONE &&
                !fan_grow((void **)&o->lanes, &o->lanes_cap, n, sizeof *o->lanes) &&
                !fan__lane_room(&o->gate, n);
    /* A host's clock has room for every lane, so joining it cannot fail. The others grow. */
    for (size_t i = 0; fits && i < o->nlanes; i++)
        fits = !o->lanes[i].host || !fan__lane_room(&o->lanes[i].clock, n);
    if (!fits)
        return fan_fail(err, FAN_ERR_NOMEM,
                        "out of memory for a lane of the happens-before checker");
    fan__lane *l = &o->lanes[o->nlanes];
    *l = (fan__lane){.open = FAN__NONE};
    fan_clock_init(&l->clock);
    *out = (uint32_t)o->nlanes++;
    return FAN_OK;
}

fan_status fan_race_check_host(fan_race_check *o, uint32_t at)
{
    assert(at < o->nlanes);
    if (fan__lane_room(&o->lanes[at].clock, o->nlanes))
        return FAN_ERR_NOMEM;
    o->lanes[at].host = true;
    return FAN_OK;
}

void fan_race_check_name(fan_race_check *o, uint32_t at, uint64_t owner)
{
    assert(at < o->nlanes);
    o->lanes[at].owner = owner;
}

uint64_t fan_race_check_owner(const fan_race_check *o, uint32_t at)
{
    assert(at < o->nlanes);
    return o->lanes[at].owner;
}

#ifdef FAN_TEST
size_t fan_race_check_lanes(const fan_race_check *o)
{
    return o->nlanes;
}
#endif

bool fan_race_check_reuse(fan_race_check *o, const fan_clock *seen, uint32_t *out)
{
    for (size_t i = 0; i < o->nlanes; i++) {
        fan__lane *lane = &o->lanes[i];
        uint32_t at = (uint32_t)i;
        if (!lane->left)
            continue;
        if (lane->ops && fan__count_in(seen, at) < lane->count)
            continue;
        if (fan_clock_set(&lane->clock, at, lane->count))
            continue;
        lane->left = false;
        *out = at;
        return true;
    }
    return false;
}

fan_clock *fan_race_check_clock(fan_race_check *o, uint32_t at)
{
    assert(at < o->nlanes);
    return &o->lanes[at].clock;
}

void fan_race_check_leave(fan_race_check *o, uint32_t at)
{
    fan__lane *l = &o->lanes[at];
    assert(at < o->nlanes && !l->left && !l->host);
    fan__history_drop_op(o, l->open);
    l->open = FAN__NONE;
    l->left = true;
    l->count = fan__count_in(&l->clock, at);
    fan_clock_fini(&l->clock);
}

fan_status fan_race_check_record(fan_race_check *o, uint32_t at, uint32_t host, fan_clock *event)
{
    if (fan__lane_room_to_join(o, at, host))
        return FAN_ERR_NOMEM;
    uint32_t n = o->lanes[at].clock.n;
    if (n < o->lanes[host].clock.n)
        n = o->lanes[host].clock.n;
    if (fan__lane_room(event, n))
        return FAN_ERR_NOMEM;
    fan__lane_join(o, at, host);
    fan_clock_copy(event, &o->lanes[at].clock);
    return FAN_OK;
}

fan_status fan_race_check_wait(fan_race_check *o, uint32_t at, uint32_t host,
                               const fan_clock *event)
{
    if (fan__lane_room_to_join(o, at, host) || fan__lane_room(&o->lanes[at].clock, event->n))
        return FAN_ERR_NOMEM;
    fan__lane_join(o, at, host);
    (void)fan_clock_join(&o->lanes[at].clock, event);
    return FAN_OK;
}

fan_status fan_race_check_sync(fan_race_check *o, uint32_t host, const fan_clock *with)
{
    if (fan_clock_join(&o->lanes[host].clock, with))
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

fan_status fan_race_check_locked(fan_race_check *o, uint32_t host, uint64_t id)
{
    if (o->nmutexes == 0)
        return FAN_OK;
    const fan__lock *m = lock_place(o->mutexes, o->mutexes_cap, id);
    if (m->id == 0)
        return FAN_OK;
    return fan_race_check_sync(o, host, &m->clock);
}

fan_status fan_race_check_unlocking(fan_race_check *o, uint32_t host, uint64_t id)
{
    if (2 * (o->nmutexes + 1) > o->mutexes_cap) {
        size_t cap = o->mutexes_cap ? 2 * o->mutexes_cap : 16;
        fan__lock *table = fan_calloc(cap * sizeof *table);
        if (!table)
            return FAN_ERR_NOMEM;
        for (size_t i = 0; i < cap; i++)
            fan_clock_init(&table[i].clock);
        for (size_t i = 0; i < o->mutexes_cap; i++) {
            fan__lock *old = &o->mutexes[i];
            if (old->id)
                *lock_place(table, cap, old->id) = *old; /* the clock moves with its heap */
            else
                fan_clock_fini(&old->clock);
        }
        fan_free(o->mutexes);
        o->mutexes = table;
        o->mutexes_cap = cap;
    }
    fan__lock *m = lock_place(o->mutexes, o->mutexes_cap, id);
    if (fan__lane_room(&m->clock, o->lanes[host].clock.n))
        return FAN_ERR_NOMEM;
    if (m->id == 0) {
        m->id = id;
        o->nmutexes++;
    }
    fan_clock_copy(&m->clock, &o->lanes[host].clock);
    return FAN_OK;
}

fan_race_check *fan_race_check_new(void)
{
    fan_race_check *o = fan_calloc(sizeof *o);
    if (!o)
        return NULL;
    o->free_read = FAN__NONE;
    o->free_op = FAN__NONE;
    fan_clock_init(&o->gate);
    return o;
}

/* race_clear: drops all history; lanes and memory stay. */
static void race_clear(fan_race_check *o)
{
    for (size_t i = 0; i < o->nlanes; i++) {
        o->lanes[i].clock.n = 0; /* keeps its memory */
        o->lanes[i].open = FAN__NONE;
        o->lanes[i].ops = 0;
        o->lanes[i].count = 0;
    }
    for (size_t i = 0; i < o->ndir; i++)
        fan__history_free_chunk(o, o->dir[i]);
    o->ndir = 0;
    o->free_read = FAN__NONE;
    o->free_op = FAN__NONE;
    o->free_reads = o->reads_cap;
    o->nreads = 0;
    o->nops = 0;
    o->number = 0;
    o->want_ranges = 0;
    o->want_reads = 0;
    o->want_crossed = 0;
    if (o->nmutexes)
        for (size_t i = 0; i < o->mutexes_cap; i++) {
            o->mutexes[i].id = 0;
            o->mutexes[i].clock.n = 0;
        }
    o->nmutexes = 0;
}

#ifdef FAN_TEST
void fan_race_check_reset(fan_race_check *o)
{
    race_clear(o);
}
#endif

void fan_race_check_free(fan_race_check *o)
{
    if (!o)
        return;
    race_clear(o);
    for (size_t i = 0; i < o->nlanes; i++)
        fan_clock_fini(&o->lanes[i].clock);
    for (fan__chunk *c = o->freelist, *next; c; c = next) {
        next = c->next;
        fan_free(c);
    }
    for (size_t i = 0; i < o->mutexes_cap; i++)
        fan_clock_fini(&o->mutexes[i].clock);
    fan_clock_fini(&o->gate);
    fan_free(o->lanes);
    fan_free(o->dir);
    fan_free(o->reads);
    fan_free(o->ops);
    fan_free(o->mutexes);
    fan_free(o);
}

static void race_put_text(char *to, size_t size, const char *from)
{
    size_t n = 0;
    if (from)
        while (n + 1 < size && from[n]) {
            to[n] = from[n];
            n++;
        }
    to[n] = '\0';
}

static void race_fill(const fan_race_check *o, fan_race *race, uint32_t first, bool first_writes,
                      const fan_op *second, bool second_writes, const fan__range *r, uintptr_t lo,
                      uintptr_t hi)
{
    if (!race)
        return;
    *race = (fan_race){.first = o->ops[first].op,
                       .second = *second,
                       .first_writes = first_writes,
                       .second_writes = second_writes,
                       .released = first_writes && r->released,
                       .lo = lo,
                       .hi = hi};
    if (race->lo < r->lo)
        race->lo = r->lo;
    if (race->hi > r->hi)
        race->hi = r->hi;
}

/* is_race: returns whether the access of op `second`, whose clock is `now`, races with the history
 * of one range. */
static bool is_race(const fan_race_check *o, const fan__range *r, const fan_clock *now,
                    const fan_op *second, bool write, uintptr_t lo, uintptr_t hi, fan_race *race)
{
    if (r->op != FAN__NONE && (r->released || fan__count_in(now, r->lane) < r->count)) {
        race_fill(o, race, r->op, true, second, write, r, lo, hi);
        return true;
    }
    if (!write)
        return false;
    for (uint32_t at = r->reads; at != FAN__NONE; at = o->reads[at].next) {
        const fan__reading *read = &o->reads[at];
        if (fan__count_in(now, read->lane) < read->count) {
            race_fill(o, race, read->op, false, second, true, r, lo, hi);
            return true;
        }
    }
    return false;
}

/* race_note_read: on every range in [lo, hi); the gaps become new ranges. There must be room. */
static void race_note_read(fan_race_check *o, uint32_t op, const fan_clock *now, uintptr_t lo,
                           uintptr_t hi)
{
    fan__history_cut(o, lo);
    fan__history_cut(o, hi);
    fan__place p = fan__history_find(o, lo);
    while (lo < hi) {
        uintptr_t next = hi;
        if (!fan__history_is_end(o, p) && fan__history_at(o, p)->lo < hi)
            next = fan__history_at(o, p)->lo;
        if (next > lo) {
            fan__range gap = {.lo = lo, .hi = next, .op = FAN__NONE, .reads = FAN__NONE};
            fan__history_add_read(o, &gap, now, op);
            p = history_insert(o, p, &gap);
        } else {
            fan__history_add_read(o, fan__history_at(o, p), now, op);
        }
        lo = fan__history_at(o, p)->hi;
        p = fan__history_after(o, p);
    }
}

/* race_touch: checks one run of bytes for races, then notes the access. May allocate. */
static fan_status race_touch(fan_race_check *o, uint32_t op, uintptr_t lo, uintptr_t hi, bool write,
                             fan_race *race)
{
    const fan_op *acting = &o->ops[op].op;
    const fan_clock *now = &o->lanes[acting->lane].clock;
    bool raced = false;
    fan__place p = fan__history_find(o, lo);
    fan__range *r = NULL;
    if (!fan__history_is_end(o, p))
        r = fan__history_at(o, p);
    if (r && r->lo == lo && r->hi == hi) {
        if (o->free_reads == 0 && fan__history_reserve(o, 0, 1, 0))
            return FAN_ERR_NOMEM;
        raced = is_race(o, r, now, acting, write, lo, hi, race);
        if (write)
            fan__history_set_write(o, r, op, false);
        else
            fan__history_add_read(o, r, now, op);
        return raced ? FAN_ERR_RACE : FAN_OK;
    }
    if (history_make_room(o, lo, hi))
        return FAN_ERR_NOMEM;
    for (; !raced && !fan__history_is_end(o, p); p = fan__history_after(o, p)) {
        r = fan__history_at(o, p);
        if (r->lo >= hi)
            break;
        raced = is_race(o, r, now, acting, write, lo, hi, race);
    }
    if (write)
        fan__history_note_write(o, op, lo, hi, false);
    else
        race_note_read(o, op, now, lo, hi);
    return raced ? FAN_ERR_RACE : FAN_OK;
}

void fan_race_check_plan(fan_race_check *o, const fan_array *a)
{
    fan__runs r;
    fan__runs_of(a, &r);
    if (r.bytes == 0)
        return;
    do {
        fan__history_measure(o, r.base, r.base + r.bytes, &o->want_ranges, &o->want_reads,
                             &o->want_crossed);
    } while (fan__runs_next(&r));
}

fan_status fan_race_check_begin(fan_race_check *o, uint32_t at, uint32_t host, const char *name,
                                const char *call_site, uint64_t *op, fan_error *err)
{
    assert(at < o->nlanes && host < o->nlanes);
    fan__lane *l = &o->lanes[at];
    uint32_t new_ = l->open;
    /* An access may cut ranges that another access of the same operation then crosses: twice their
     * sum is room enough for all accesses that do not overlap themselves. */
    size_t ranges = 2 * o->want_ranges + 4;
    size_t reads = 2 * o->want_reads + 4;
    size_t crossed = 2 * o->want_crossed;
    o->want_ranges = 0;
    o->want_reads = 0;
    o->want_crossed = 0;
    if (fan__history_reserve(o, ranges, reads, crossed) ||
        fan__lane_room(&l->clock, (size_t)at + 1) || fan__lane_room_to_join(o, at, host))
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for the happens-before history");
    if (new_ == FAN__NONE || o->ops[new_].refs > 1) {
        if (o->free_op != FAN__NONE) {
            new_ = o->free_op;
            o->free_op = o->ops[new_].next;
        } else {
            if (o->nops + 1 >= FAN__NONE ||
                fan_grow((void **)&o->ops, &o->ops_cap, o->nops + 1, sizeof *o->ops))
                return fan_fail(err, FAN_ERR_NOMEM, "out of memory for the happens-before history");
            new_ = (uint32_t)o->nops++;
        }
        o->ops[new_].refs = 1;
        o->ops[new_].op.lane = at;
        l->ops++;
        fan__history_drop_op(o, l->open);
        l->open = new_;
    }
    fan__lane_join(o, at, host);
    fan_op *acting = &o->ops[new_].op;
    acting->number = o->number++;
    acting->lane = at;
    acting->host = host;
    acting->owner = l->owner;
    acting->over = l->host;
    acting->awaited = false;
    acting->count = fan__count_in(&l->clock, at) + 1;
    fan_clock_set(&l->clock, at, acting->count); /* there is room */
    race_put_text(acting->name, sizeof acting->name, name);
    race_put_text(acting->call_site, sizeof acting->call_site, call_site);
    *op = new_;
    return FAN_OK;
}

const fan_op *fan_race_check_op(const fan_race_check *o, uint64_t op)
{
    return &o->ops[op].op;
}

void fan_race_check_over(fan_race_check *o, uint64_t op, bool awaited)
{
    assert(op < o->nops && o->lanes[o->ops[op].op.lane].open == op);
    o->ops[op].op.over = true;
    o->ops[op].op.awaited = awaited;
}

#ifdef FAN_TEST
fan_status fan_race_check_range(fan_race_check *o, uint64_t op, uintptr_t lo, uintptr_t hi,
                                bool write, fan_race *race)
{
    assert(op < o->nops && o->lanes[o->ops[op].op.lane].open == op);
    if (lo >= hi)
        return FAN_OK;
    return race_touch(o, (uint32_t)op, lo, hi, write, race);
}
#endif

fan_status fan_race_check_access(fan_race_check *o, uint64_t op, const fan_array *a, bool write,
                                 fan_race *race)
{
    assert(op < o->nops && o->lanes[o->ops[op].op.lane].open == op);
    fan__runs r;
    fan__runs_of(a, &r);
    if (r.bytes == 0)
        return FAN_OK;
    fan_status worst = FAN_OK;
    do {
        fan_race *first = worst == FAN_OK ? race : NULL;
        fan_status status = race_touch(o, (uint32_t)op, r.base, r.base + r.bytes, write, first);
        if (status == FAN_ERR_NOMEM)
            return status;
        if (status != FAN_OK)
            worst = status;
    } while (fan__runs_next(&r));
    return worst;
}

/* race_is_open: returns whether operation `op`, the count-th of its lane, is neither over nor in
 * `gate`. */
static bool race_is_open(const fan_race_check *o, const fan_clock *gate, uint32_t op, uint32_t lane,
                         uint64_t count)
{
    return !o->ops[op].op.over && fan__count_in(gate, lane) < count;
}

/* race_left_behind: returns whether this range has history that is not in `gate`. */
static bool race_left_behind(const fan_race_check *o, const fan__range *r, const fan_clock *gate,
                             const fan_op *second, uintptr_t lo, uintptr_t hi, fan_race *race)
{
    bool written = r->op != FAN__NONE;
    if (written && (r->released || race_is_open(o, gate, r->op, r->lane, r->count))) {
        race_fill(o, race, r->op, true, second, true, r, lo, hi);
        return true;
    }
    for (uint32_t at = r->reads; at != FAN__NONE; at = o->reads[at].next) {
        const fan__reading *read = &o->reads[at];
        if (race_is_open(o, gate, read->op, read->lane, read->count)) {
            race_fill(o, race, read->op, false, second, true, r, lo, hi);
            return true;
        }
    }
    return false;
}

fan_status fan_race_check_let_go(fan_race_check *o, uint32_t host, const uint32_t *lanes, size_t n,
                                 uintptr_t lo, uintptr_t hi, const char *call_site, fan_race *race)
{
    if (lo >= hi)
        return FAN_OK;
    /* The gate has room for every lane, so this cannot fail. */
    fan_clock_copy(&o->gate, &o->lanes[host].clock);
    for (size_t i = 0; i < n; i++)
        fan_clock_join(&o->gate, &o->lanes[lanes[i]].clock);

    fan_op acting = {.number = o->number,
                     .lane = host,
                     .host = host,
                     .owner = o->lanes[host].owner,
                     .count = fan__count_in(&o->gate, host) + 1};
    race_put_text(acting.name, sizeof acting.name, "release");
    race_put_text(acting.call_site, sizeof acting.call_site, call_site);
    bool raced = false;
    fan__place p = fan__history_find(o, lo);
    for (; !raced && !fan__history_is_end(o, p); p = fan__history_after(o, p)) {
        const fan__range *r = fan__history_at(o, p);
        if (r->lo >= hi)
            break;
        raced = race_left_behind(o, r, &o->gate, &acting, lo, hi, race);
    }
    if (raced && race)
        race->release = true;
    return raced ? FAN_ERR_RACE : FAN_OK;
}

fan_status fan_race_check_release(fan_race_check *o, uint32_t host, const uint32_t *lanes, size_t n,
                                  uintptr_t lo, uintptr_t hi, const char *call_site, fan_race *race)
{
    fan_status status = fan_race_check_let_go(o, host, lanes, n, lo, hi, call_site, race);
    if (lo >= hi)
        return FAN_OK;
    uint64_t op;
    if (history_make_room(o, lo, hi) == 0 &&
        fan_race_check_begin(o, host, host, "release", call_site, &op, NULL) == FAN_OK)
        fan__history_note_write(o, (uint32_t)op, lo, hi, true);
    return status;
}

void fan_race_check_forget(fan_race_check *o, uintptr_t lo, uintptr_t hi)
{
    if (lo >= hi)
        return;
    fan__place p = fan__history_find(o, lo);
    if (fan__history_is_end(o, p) || fan__history_at(o, p)->lo >= hi)
        return;
    if (history_make_room(o, lo, hi) == 0) {
        fan__history_cut(o, lo);
        fan__history_cut(o, hi);
        /* without room to cut, the rest of the range is dropped, too: that can hide a race, but not
         * invent one */
    }
    p = fan__history_find(o, lo);
    if (!fan__history_is_end(o, p))
        fan__history_erase(o, p, hi);
}

#ifdef FAN_TEST
size_t fan_race_check_ranges(const fan_race_check *o)
{
    size_t n = 0;
    for (size_t i = 0; i < o->ndir; i++)
        n += o->dir[i]->n;
    return n;
}
#endif
