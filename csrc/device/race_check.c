#include "device/race_check.h"

#include "base/mem.h"

#include <assert.h>
#include <string.h>

#define NONE UINT32_MAX
#define CHUNK 32

/* One read since the last write; reads of a range are a list. */
typedef struct reading {
    uint64_t count;
    uint32_t lane, op;
    uint32_t next; /* NONE ends the list; also links what is free */
} reading;

/* A range of bytes with one history. */
typedef struct range {
    uintptr_t lo, hi;
    uint64_t count;    /* of the last write; 0: none */
    uint32_t lane, op; /* of the last write; op NONE: none */
    uint32_t reads;
    bool released; /* the last write is a release */
} range;

typedef struct chunk {
    struct chunk *next; /* among the spare ones */
    uint32_t n;         /* never 0 in the directory */
    range r[CHUNK];
} chunk;

/* Where a range stands: chunk c of the directory, its i-th. */
typedef struct place {
    size_t c;
    uint32_t i;
} place;

typedef struct op_slot {
    fan_op op;
    uint32_t refs; /* ranges and reads that name it, and 1 while it is its lane's latest */
    uint32_t next; /* among the free ones */
} op_slot;

typedef struct lane {
    fan_clock clock;
    uint64_t who;
    uint64_t count; /* of one that was left: its clock is given back */
    size_t ops;     /* operations of it that the history names */
    uint32_t open;  /* its latest operation, or NONE */
    bool host;
    bool left; /* another may have it */
} lane;

typedef struct mutex {
    uint64_t id; /* 0: a free place */
    fan_clock clock;
} mutex;

struct fan_race_check {
    lane *lanes;
    size_t nlanes, lanes_cap;
    chunk **dir; /* sorted by address */
    size_t ndir, dir_cap;
    chunk *spare;
    size_t nspare;
    reading *reads;
    size_t nreads, reads_cap;
    uint32_t free_read;
    size_t free_reads; /* in the list and behind nreads */
    op_slot *ops;
    size_t nops, ops_cap;
    uint32_t free_op;
    uint64_t number;                              /* operations so far */
    size_t want_ranges, want_reads, want_crossed; /* what fan_race_check_plan has asked for */
    mutex *mutexes;                               /* open addressing; a power of two */
    size_t nmutexes, mutexes_cap;
    fan_clock gate; /* the G of a release; kept for its room */
};

static uint64_t count_in(const fan_clock *c, uint32_t at) { return at < c->n ? (c->heap ? c->heap : c->lanes)[at] : 0; }

/* ---- making and clearing ---- */

fan_race_check *fan_race_check_new(void)
{
    fan_race_check *o = fan_calloc(sizeof *o);
    if (!o)
        return NULL;
    o->free_read = o->free_op = NONE;
    fan_clock_init(&o->gate);
    return o;
}

void fan_race_check_free(fan_race_check *o)
{
    if (!o)
        return;
    fan_race_check_reset(o);
    for (size_t i = 0; i < o->nlanes; i++)
        fan_clock_fini(&o->lanes[i].clock);
    for (chunk *c = o->spare, *next; c; c = next) {
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

static void spare(fan_race_check *o, chunk *c)
{
    c->next = o->spare;
    o->spare = c;
    o->nspare++;
}

void fan_race_check_reset(fan_race_check *o)
{
    for (size_t i = 0; i < o->nlanes; i++) {
        o->lanes[i].clock.n = 0; /* its room stays */
        o->lanes[i].open = NONE;
        o->lanes[i].ops = 0;
        o->lanes[i].count = 0;
    }
    for (size_t i = 0; i < o->ndir; i++)
        spare(o, o->dir[i]);
    o->ndir = 0;
    o->free_read = o->free_op = NONE;
    o->free_reads = o->reads_cap;
    o->nreads = o->nops = 0;
    o->number = 0;
    o->want_ranges = o->want_reads = o->want_crossed = 0;
    if (o->nmutexes)
        for (size_t i = 0; i < o->mutexes_cap; i++) {
            o->mutexes[i].id = 0;
            o->mutexes[i].clock.n = 0;
        }
    o->nmutexes = 0;
}

/* room_for: lets the clock count `n` lanes without growing again. Its counts stay. */
static int room_for(fan_clock *c, size_t n)
{
    if (n <= c->cap)
        return 0;
    uint32_t was = c->n;
    if (fan_clock_set(c, (uint32_t)n - 1, 1))
        return -1;
    c->n = was;
    return 0;
}

fan_status fan_race_check_lane(fan_race_check *o, uint32_t *out, fan_error *err)
{
    size_t n = o->nlanes + 1;
    bool fits = n < NONE && !fan_grow((void **)&o->lanes, &o->lanes_cap, n, sizeof *o->lanes) && !room_for(&o->gate, n);
    /* A host's clock can hold every lane: what it learns it learns. The others grow with what they know. */
    for (size_t i = 0; fits && i < o->nlanes; i++)
        fits = !o->lanes[i].host || !room_for(&o->lanes[i].clock, n);
    if (!fits)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a lane of the happens-before checker");
    lane *l = &o->lanes[o->nlanes];
    *l = (lane){.open = NONE};
    fan_clock_init(&l->clock);
    *out = (uint32_t)o->nlanes++;
    return FAN_OK;
}

fan_status fan_race_check_host(fan_race_check *o, uint32_t at)
{
    assert(at < o->nlanes);
    if (room_for(&o->lanes[at].clock, o->nlanes))
        return FAN_ERR_NOMEM;
    o->lanes[at].host = true;
    return FAN_OK;
}

void fan_race_check_name(fan_race_check *o, uint32_t at, uint64_t who)
{
    assert(at < o->nlanes);
    o->lanes[at].who = who;
}

uint64_t fan_race_check_who(const fan_race_check *o, uint32_t at)
{
    assert(at < o->nlanes);
    return o->lanes[at].who;
}

size_t fan_race_check_lanes(const fan_race_check *o) { return o->nlanes; }

bool fan_race_check_reuse(fan_race_check *o, const fan_clock *seen, uint32_t *out)
{
    for (size_t i = 0; i < o->nlanes; i++) {
        lane *l = &o->lanes[i];
        if (!l->left || (l->ops && count_in(seen, (uint32_t)i) < l->count) ||
            fan_clock_set(&l->clock, (uint32_t)i, l->count))
            continue;
        l->left = false;
        *out = (uint32_t)i;
        return true;
    }
    return false;
}

fan_clock *fan_race_check_clock(fan_race_check *o, uint32_t at)
{
    assert(at < o->nlanes);
    return &o->lanes[at].clock;
}

/* see: lane `to` comes after all that lane `from` knows. There is room (room_to_see). */
static void see(fan_race_check *o, uint32_t to, uint32_t from)
{
    if (to == from)
        return;
    fan_clock *a = &o->lanes[to].clock;
    const fan_clock *b = &o->lanes[from].clock;
    uint64_t *mine = a->heap ? a->heap : a->lanes;
    const uint64_t *theirs = b->heap ? b->heap : b->lanes;
    while (a->n < b->n)
        mine[a->n++] = 0;
    for (uint32_t i = 0; i < b->n; i++)
        mine[i] = mine[i] < theirs[i] ? theirs[i] : mine[i];
}

static int room_to_see(fan_race_check *o, uint32_t to, uint32_t from)
{
    return room_for(&o->lanes[to].clock, o->lanes[from].clock.n);
}

/* ---- operations: a pool with counts ---- */

static void op_drop(fan_race_check *o, uint32_t at)
{
    if (at == NONE || --o->ops[at].refs)
        return;
    o->lanes[o->ops[at].op.lane].ops--;
    o->ops[at].next = o->free_op;
    o->free_op = at;
}

void fan_race_check_leave(fan_race_check *o, uint32_t at)
{
    lane *l = &o->lanes[at];
    assert(at < o->nlanes && !l->left && !l->host);
    op_drop(o, l->open);
    l->open = NONE;
    l->left = true;
    l->count = count_in(&l->clock, at);
    fan_clock_fini(&l->clock);
}

/* op_take: a free one, for the lane `of`. */
static int op_take(fan_race_check *o, uint32_t of, uint32_t *out)
{
    if (o->free_op != NONE) {
        *out = o->free_op;
        o->free_op = o->ops[*out].next;
    } else {
        if (o->nops + 1 >= NONE || fan_grow((void **)&o->ops, &o->ops_cap, o->nops + 1, sizeof *o->ops))
            return -1;
        *out = (uint32_t)o->nops++;
    }
    o->ops[*out].refs = 1;
    o->ops[*out].op.lane = of;
    o->lanes[of].ops++;
    return 0;
}

static void put_text(char *to, size_t size, const char *from)
{
    size_t n = 0;
    if (from)
        while (n + 1 < size && from[n]) {
            to[n] = from[n];
            n++;
        }
    to[n] = '\0';
}

/* ---- reads: a pool of lists ---- */

static uint32_t read_take(fan_race_check *o)
{
    assert(o->free_reads > 0);
    o->free_reads--;
    uint32_t at = o->free_read;
    if (at == NONE)
        return (uint32_t)o->nreads++;
    o->free_read = o->reads[at].next;
    return at;
}

static void read_give(fan_race_check *o, uint32_t at)
{
    op_drop(o, o->reads[at].op);
    o->reads[at].next = o->free_read;
    o->free_read = at;
    o->free_reads++;
}

static void reads_clear(fan_race_check *o, range *r)
{
    for (uint32_t at = r->reads, next; at != NONE; at = next) {
        next = o->reads[at].next;
        read_give(o, at);
    }
    r->reads = NONE;
}

static size_t reads_count(const fan_race_check *o, const range *r)
{
    size_t n = 0;
    for (uint32_t at = r->reads; at != NONE; at = o->reads[at].next)
        n++;
    return n;
}

/* ---- ranges: chunks under a directory ---- */

static range *range_at(const fan_race_check *o, place p) { return &o->dir[p.c]->r[p.i]; }

static bool at_end(const fan_race_check *o, place p) { return p.c >= o->ndir; }

static place after(const fan_race_check *o, place p)
{
    if (++p.i >= o->dir[p.c]->n) {
        p.c++;
        p.i = 0;
    }
    return p;
}

/* find: the first range that ends behind `x`. */
static place find(const fan_race_check *o, uintptr_t x)
{
    place p = {0, 0};
    size_t end = o->ndir;
    while (p.c < end) {
        size_t mid = p.c + (end - p.c) / 2;
        const chunk *c = o->dir[mid];
        if (c->r[c->n - 1].hi > x)
            end = mid;
        else
            p.c = mid + 1;
    }
    if (at_end(o, p))
        return p;
    const chunk *c = o->dir[p.c];
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

/* dir_open: makes place c of the directory free for a spare chunk. The room is there. */
static chunk *dir_open(fan_race_check *o, size_t c)
{
    assert(o->spare && o->ndir < o->dir_cap);
    memmove(&o->dir[c + 1], &o->dir[c], (o->ndir - c) * sizeof *o->dir);
    o->ndir++;
    chunk *new_ = o->dir[c] = o->spare;
    o->spare = new_->next;
    o->nspare--;
    new_->n = 0;
    return new_;
}

/* insert: puts *r before p (which may be the end) and returns where it now stands. The room is there. */
static place insert(fan_race_check *o, place p, const range *r)
{
    if (at_end(o, p)) {
        p.c = o->ndir ? o->ndir - 1 : 0;
        if (o->ndir == 0)
            dir_open(o, 0);
        p.i = o->dir[p.c]->n;
    }
    chunk *c = o->dir[p.c];
    if (c->n == CHUNK) {
        chunk *right = dir_open(o, p.c + 1);
        uint32_t keep = p.i == CHUNK ? CHUNK : CHUNK / 2; /* what grows at its end fills its chunks */
        right->n = CHUNK - keep;
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

/* erase: takes out the ranges from p on that begin below `hi`; what they name is let go. Returns what then stands at p.
 */
static place erase(fan_race_check *o, place p, uintptr_t hi)
{
    size_t empty = 0, first_empty = 0;
    place q = p;
    while (!at_end(o, q)) {
        chunk *c = o->dir[q.c];
        uint32_t end = q.i;
        while (end < c->n && c->r[end].lo < hi) {
            reads_clear(o, &c->r[end]);
            op_drop(o, c->r[end].op);
            end++;
        }
        bool more = end == c->n;
        memmove(&c->r[q.i], &c->r[end], (c->n - end) * sizeof c->r[0]);
        c->n -= end - q.i;
        if (c->n == 0) {
            if (empty++ == 0)
                first_empty = q.c;
            spare(o, c);
        }
        if (!more)
            break;
        q.c++;
        q.i = 0;
    }
    if (empty) {
        memmove(&o->dir[first_empty], &o->dir[first_empty + empty], (o->ndir - first_empty - empty) * sizeof *o->dir);
        o->ndir -= empty;
        if (first_empty == p.c)
            return (place){p.c, 0};
    }
    if (!at_end(o, p) && p.i >= o->dir[p.c]->n)
        return (place){p.c + 1, 0};
    return p;
}

/* cut: no range has `x` strictly inside. Returns the first range that ends behind x. The room is there. */
static place cut(fan_race_check *o, uintptr_t x)
{
    place p = find(o, x);
    if (at_end(o, p) || range_at(o, p)->lo >= x)
        return p;
    range left = *range_at(o, p);
    left.hi = x;
    if (left.op != NONE)
        o->ops[left.op].refs++;
    left.reads = NONE;
    for (uint32_t at = range_at(o, p)->reads; at != NONE; at = o->reads[at].next) {
        uint32_t copy = read_take(o);
        o->reads[copy] = o->reads[at];
        o->reads[copy].next = left.reads;
        left.reads = copy;
        o->ops[o->reads[at].op].refs++;
    }
    range_at(o, p)->lo = x;
    return after(o, insert(o, p, &left));
}

/* ---- room ---- */

/* reserve: room for `ranges` more ranges and `reads` more reads, where the accesses cross `crossed` ranges that are
 * there. */
static int reserve(fan_race_check *o, size_t ranges, size_t reads, size_t crossed)
{
    /* Every full chunk that is crossed may be split once; the halves then take CHUNK/2 each. */
    size_t chunks = crossed / CHUNK + ranges / (CHUNK / 2) + 4;
    if (chunks > ranges + 1)
        chunks = ranges + 1;
    if (o->ndir + chunks > o->dir_cap && fan_grow((void **)&o->dir, &o->dir_cap, o->ndir + chunks, sizeof *o->dir))
        return -1;
    while (o->nspare < chunks) {
        chunk *c = fan_alloc(sizeof *c);
        if (!c)
            return -1;
        spare(o, c);
    }
    if (o->free_reads < reads) {
        size_t was = o->reads_cap, want = o->reads_cap + (reads - o->free_reads);
        if (want >= NONE || fan_grow((void **)&o->reads, &o->reads_cap, want, sizeof *o->reads))
            return -1;
        o->free_reads += o->reads_cap - was;
    }
    return 0;
}

/* measure: what noting [lo, hi) can take at most, read or write: two cuts, each copying a list of reads; a read on
 * every range and every gap. */
static void measure(const fan_race_check *o, uintptr_t lo, uintptr_t hi, size_t *ranges, size_t *reads, size_t *crossed)
{
    size_t k = 0, copies = 0;
    place p = find(o, lo);
    for (; !at_end(o, p); p = after(o, p)) {
        const range *r = range_at(o, p);
        if (r->lo >= hi)
            break;
        k++;
        if (r->lo < lo)
            copies += reads_count(o, r);
        if (r->hi > hi)
            copies += reads_count(o, r) + 1;
    }
    *ranges += k + 3;
    *reads += 2 * k + 1 + copies;
    *crossed += k;
}

/* ---- the check ---- */

static void fill(const fan_race_check *o, fan_race *race, uint32_t first, bool first_writes, const fan_op *second,
                 bool second_writes, const range *r, uintptr_t lo, uintptr_t hi)
{
    if (!race)
        return;
    *race = (fan_race){.first = o->ops[first].op,
                       .second = *second,
                       .first_writes = first_writes,
                       .second_writes = second_writes,
                       .released = first_writes && r->released};
    race->lo = lo > r->lo ? lo : r->lo;
    race->hi = hi < r->hi ? hi : r->hi;
}

/* meets: the access of op `second`, whose clock is `now`, against one range. True: a race. */
static bool meets(const fan_race_check *o, const range *r, const fan_clock *now, const fan_op *second, bool write,
                  uintptr_t lo, uintptr_t hi, fan_race *race)
{
    if (r->op != NONE && (r->released || count_in(now, r->lane) < r->count)) {
        fill(o, race, r->op, true, second, write, r, lo, hi);
        return true;
    }
    if (!write)
        return false;
    for (uint32_t at = r->reads; at != NONE; at = o->reads[at].next)
        if (count_in(now, o->reads[at].lane) < o->reads[at].count) {
            fill(o, race, o->reads[at].op, false, second, true, r, lo, hi);
            return true;
        }
    return false;
}

/* add_read: notes a read; reads that it covers go. */
static void add_read(fan_race_check *o, range *r, const fan_clock *now, uint32_t op)
{
    const fan_op *who = &o->ops[op].op;
    uint32_t *link = &r->reads;
    while (*link != NONE) {
        reading *old = &o->reads[*link];
        if (old->op == op)
            return;
        if (count_in(now, old->lane) >= old->count) {
            uint32_t gone = *link;
            *link = old->next;
            read_give(o, gone);
        } else {
            link = &old->next;
        }
    }
    uint32_t at = read_take(o);
    o->reads[at] = (reading){.count = who->count, .lane = who->lane, .op = op, .next = r->reads};
    r->reads = at;
    o->ops[op].refs++;
}

static void set_write(fan_race_check *o, range *r, uint32_t op, bool released)
{
    reads_clear(o, r);
    if (r->op != op) {
        o->ops[op].refs++;
        op_drop(o, r->op);
    }
    r->op = op;
    r->lane = o->ops[op].op.lane;
    r->count = o->ops[op].op.count;
    r->released = released;
}

static range bare(uintptr_t lo, uintptr_t hi) { return (range){.lo = lo, .hi = hi, .op = NONE, .reads = NONE}; }

/* note_write: [lo, hi) becomes one range. The room is there. */
static void note_write(fan_race_check *o, uint32_t op, uintptr_t lo, uintptr_t hi, bool released)
{
    place p = cut(o, lo);
    cut(o, hi);
    p = find(o, lo);
    if (!at_end(o, p) && range_at(o, p)->lo < hi) {
        range *r = range_at(o, p);
        r->lo = lo;
        bool whole = r->hi == hi;
        r->hi = hi;
        set_write(o, r, op, released);
        if (!whole)
            erase(o, after(o, p), hi);
        return;
    }
    range r = bare(lo, hi);
    set_write(o, &r, op, released);
    insert(o, p, &r);
}

/* note_read: a read on every range in [lo, hi), and new ranges in the gaps. The room is there. */
static void note_read(fan_race_check *o, uint32_t op, const fan_clock *now, uintptr_t lo, uintptr_t hi)
{
    cut(o, lo);
    cut(o, hi);
    place p = find(o, lo);
    for (uintptr_t x = lo; x < hi;) {
        uintptr_t next = at_end(o, p) || range_at(o, p)->lo > hi ? hi : range_at(o, p)->lo;
        if (next > x) {
            range gap = bare(x, next);
            add_read(o, &gap, now, op);
            p = insert(o, p, &gap);
        } else {
            add_read(o, range_at(o, p), now, op);
        }
        x = range_at(o, p)->hi;
        p = after(o, p);
    }
}

/* touch: one run of bytes. Races are looked for first, then history is updated. The room may have to be made. */
static fan_status touch(fan_race_check *o, uint32_t op, uintptr_t lo, uintptr_t hi, bool write, fan_race *race)
{
    const fan_op *who = &o->ops[op].op;
    const fan_clock *now = &o->lanes[who->lane].clock;
    bool raced = false;
    place p = find(o, lo);
    if (!at_end(o, p) && range_at(o, p)->lo == lo && range_at(o, p)->hi == hi) {
        range *r = range_at(o, p);
        if (o->free_reads == 0 && reserve(o, 0, 1, 0))
            return FAN_ERR_NOMEM;
        raced = meets(o, r, now, who, write, lo, hi, race);
        if (write)
            set_write(o, r, op, false);
        else
            add_read(o, r, now, op);
        return raced ? FAN_ERR_RACE : FAN_OK;
    }
    size_t ranges = 0, reads = 0, crossed = 0;
    measure(o, lo, hi, &ranges, &reads, &crossed);
    if (reserve(o, ranges, reads, crossed))
        return FAN_ERR_NOMEM;
    for (; !raced && !at_end(o, p) && range_at(o, p)->lo < hi; p = after(o, p))
        raced = meets(o, range_at(o, p), now, who, write, lo, hi, race);
    if (write)
        note_write(o, op, lo, hi, false);
    else
        note_read(o, op, now, lo, hi);
    return raced ? FAN_ERR_RACE : FAN_OK;
}

/* ---- views as runs of bytes ---- */

/* The runs of a view: `bytes` at a time, at base + every combination of the axes, the widest stride outermost. */
typedef struct runs {
    uintptr_t base;
    uintptr_t bytes; /* 0: the view is empty */
    int n;           /* axes left */
    int64_t extent[FAN_MAX_NDIM], stride[FAN_MAX_NDIM], at[FAN_MAX_NDIM];
} runs;

static void runs_of(const fan_array *a, runs *out)
{
    out->base = (uintptr_t)a->data;
    out->bytes = fan_dtype_size(a->dtype);
    out->n = 0;
    /* Axes with a width, strides made positive, narrowest first. */
    for (int i = 0; i < a->ndim; i++) {
        int64_t extent = a->shape[i], stride = a->strides[i];
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
    /* An axis whose step is no wider than the run only makes the run longer. */
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

/* step: to the next run; false behind the last. */
static bool step(runs *r)
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

/* ---- what callers see ---- */

void fan_race_check_plan(fan_race_check *o, const fan_array *a)
{
    runs r;
    runs_of(a, &r);
    if (r.bytes)
        do
            measure(o, r.base, r.base + r.bytes, &o->want_ranges, &o->want_reads, &o->want_crossed);
        while (step(&r));
}

fan_status fan_race_check_begin(fan_race_check *o, uint32_t at, uint32_t host, const char *name, const char *site,
                                uint64_t *op, fan_error *err)
{
    assert(at < o->nlanes && host < o->nlanes);
    lane *l = &o->lanes[at];
    uint32_t new_ = l->open;
    /* Accesses of one operation may cut what its others then cross: twice the sum is enough for any that do not overlap
     * themselves. */
    size_t ranges = 2 * o->want_ranges + 4, reads = 2 * o->want_reads + 4, crossed = 2 * o->want_crossed;
    o->want_ranges = o->want_reads = o->want_crossed = 0;
    if (reserve(o, ranges, reads, crossed) || room_for(&l->clock, (size_t)at + 1) || room_to_see(o, at, host))
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for the happens-before history");
    if (new_ == NONE || o->ops[new_].refs > 1) {
        if (op_take(o, at, &new_))
            return fan_fail(err, FAN_ERR_NOMEM, "out of memory for the happens-before history");
        op_drop(o, l->open);
        l->open = new_;
    }
    see(o, at, host);
    fan_op *who = &o->ops[new_].op;
    who->number = o->number++;
    who->lane = at;
    who->host = host;
    who->who = l->who;
    who->over = l->host;
    who->awaited = false;
    who->count = count_in(&l->clock, at) + 1;
    fan_clock_set(&l->clock, at, who->count); /* cannot fail: there is room */
    put_text(who->name, sizeof who->name, name);
    put_text(who->site, sizeof who->site, site);
    *op = new_;
    return FAN_OK;
}

void fan_race_check_over(fan_race_check *o, uint64_t op, bool awaited)
{
    assert(op < o->nops && o->lanes[o->ops[op].op.lane].open == op);
    o->ops[op].op.over = true;
    o->ops[op].op.awaited = awaited;
}

fan_status fan_race_check_range(fan_race_check *o, uint64_t op, uintptr_t lo, uintptr_t hi, bool write, fan_race *race)
{
    assert(op < o->nops && o->lanes[o->ops[op].op.lane].open == op);
    return lo < hi ? touch(o, (uint32_t)op, lo, hi, write, race) : FAN_OK;
}

fan_status fan_race_check_access(fan_race_check *o, uint64_t op, const fan_array *a, bool write, fan_race *race)
{
    assert(op < o->nops && o->lanes[o->ops[op].op.lane].open == op);
    runs r;
    runs_of(a, &r);
    if (r.bytes == 0)
        return FAN_OK;
    fan_status worst = FAN_OK;
    do {
        fan_status status = touch(o, (uint32_t)op, r.base, r.base + r.bytes, write, worst == FAN_OK ? race : NULL);
        if (status == FAN_ERR_NOMEM)
            return status;
        if (status != FAN_OK)
            worst = status;
    } while (step(&r));
    return worst;
}

/* left_behind: a range whose history is not all in `gate`. */
static bool left_behind(const fan_race_check *o, const range *r, const fan_clock *gate, const fan_op *second,
                        uintptr_t lo, uintptr_t hi, fan_race *race)
{
    if (r->op != NONE && (r->released || (!o->ops[r->op].op.over && count_in(gate, r->lane) < r->count))) {
        fill(o, race, r->op, true, second, true, r, lo, hi);
        return true;
    }
    for (uint32_t at = r->reads; at != NONE; at = o->reads[at].next) {
        const reading *x = &o->reads[at];
        if (!o->ops[x->op].op.over && count_in(gate, x->lane) < x->count) {
            fill(o, race, x->op, false, second, true, r, lo, hi);
            return true;
        }
    }
    return false;
}

fan_status fan_race_check_let_go(fan_race_check *o, uint32_t host, const uint32_t *lanes, size_t n, uintptr_t lo,
                                 uintptr_t hi, const char *site, fan_race *race)
{
    if (lo >= hi)
        return FAN_OK;
    /* The gate has room for every lane: none of this fails. */
    fan_clock_copy(&o->gate, &o->lanes[host].clock);
    for (size_t i = 0; i < n; i++)
        fan_clock_join(&o->gate, &o->lanes[lanes[i]].clock);

    fan_op who = {.number = o->number,
                  .lane = host,
                  .host = host,
                  .who = o->lanes[host].who,
                  .count = count_in(&o->gate, host) + 1};
    put_text(who.name, sizeof who.name, "release");
    put_text(who.site, sizeof who.site, site);
    bool raced = false;
    for (place p = find(o, lo); !raced && !at_end(o, p) && range_at(o, p)->lo < hi; p = after(o, p))
        raced = left_behind(o, range_at(o, p), &o->gate, &who, lo, hi, race);
    if (raced && race)
        race->release = true;
    return raced ? FAN_ERR_RACE : FAN_OK;
}

fan_status fan_race_check_release(fan_race_check *o, uint32_t host, const uint32_t *lanes, size_t n, uintptr_t lo,
                                  uintptr_t hi, const char *site, fan_race *race)
{
    fan_status status = fan_race_check_let_go(o, host, lanes, n, lo, hi, site, race);
    if (lo >= hi)
        return FAN_OK;
    size_t ranges = 0, reads = 0, crossed = 0;
    uint64_t op;
    measure(o, lo, hi, &ranges, &reads, &crossed);
    if (reserve(o, ranges, reads, crossed) == 0 &&
        fan_race_check_begin(o, host, host, "release", site, &op, NULL) == FAN_OK)
        note_write(o, (uint32_t)op, lo, hi, true);
    return status;
}

void fan_race_check_forget(fan_race_check *o, uintptr_t lo, uintptr_t hi)
{
    if (lo >= hi)
        return;
    place p = find(o, lo);
    if (at_end(o, p) || range_at(o, p)->lo >= hi)
        return;
    size_t ranges = 0, reads = 0, crossed = 0;
    measure(o, lo, hi, &ranges, &reads, &crossed);
    if (reserve(o, ranges, reads, crossed) == 0) {
        cut(o, lo);
        cut(o, hi);
    } /* no room to cut: what sticks out is forgotten as well, which can hide a race but never invent one */
    p = find(o, lo);
    if (!at_end(o, p))
        erase(o, p, hi);
}

fan_status fan_race_check_record(fan_race_check *o, uint32_t at, uint32_t host, fan_clock *event)
{
    if (room_to_see(o, at, host))
        return FAN_ERR_NOMEM;
    uint32_t n = o->lanes[at].clock.n > o->lanes[host].clock.n ? o->lanes[at].clock.n : o->lanes[host].clock.n;
    if (room_for(event, n))
        return FAN_ERR_NOMEM;
    see(o, at, host);
    fan_clock_copy(event, &o->lanes[at].clock);
    return FAN_OK;
}

fan_status fan_race_check_wait(fan_race_check *o, uint32_t at, uint32_t host, const fan_clock *event)
{
    if (room_to_see(o, at, host) || room_for(&o->lanes[at].clock, event->n))
        return FAN_ERR_NOMEM;
    see(o, at, host);
    (void)fan_clock_join(&o->lanes[at].clock, event);
    return FAN_OK;
}

fan_status fan_race_check_sync(fan_race_check *o, uint32_t host, const fan_clock *with)
{
    return fan_clock_join(&o->lanes[host].clock, with) ? FAN_ERR_NOMEM : FAN_OK;
}

/* ---- locks ---- */

/* slot_of: where mutex `id` is, or the free place where it would be. The table is never full. */
static mutex *slot_of(mutex *table, size_t cap, uint64_t id)
{
    size_t i = (size_t)(id * UINT64_C(0x9E3779B97F4A7C15) >> 20) & (cap - 1);
    while (table[i].id && table[i].id != id)
        i = (i + 1) & (cap - 1);
    return &table[i];
}

static int widen(fan_race_check *o)
{
    size_t cap = o->mutexes_cap ? 2 * o->mutexes_cap : 16;
    mutex *table = fan_calloc(cap * sizeof *table);
    if (!table)
        return -1;
    for (size_t i = 0; i < cap; i++)
        fan_clock_init(&table[i].clock);
    for (size_t i = 0; i < o->mutexes_cap; i++)
        if (o->mutexes[i].id)
            *slot_of(table, cap, o->mutexes[i].id) = o->mutexes[i]; /* the clock moves with its heap */
        else
            fan_clock_fini(&o->mutexes[i].clock);
    fan_free(o->mutexes);
    o->mutexes = table;
    o->mutexes_cap = cap;
    return 0;
}

fan_status fan_race_check_locked(fan_race_check *o, uint32_t host, uint64_t id)
{
    if (o->nmutexes == 0)
        return FAN_OK;
    const mutex *m = slot_of(o->mutexes, o->mutexes_cap, id);
    return m->id && fan_clock_join(&o->lanes[host].clock, &m->clock) ? FAN_ERR_NOMEM : FAN_OK;
}

fan_status fan_race_check_unlocking(fan_race_check *o, uint32_t host, uint64_t id)
{
    if (2 * (o->nmutexes + 1) > o->mutexes_cap && widen(o))
        return FAN_ERR_NOMEM;
    mutex *m = slot_of(o->mutexes, o->mutexes_cap, id);
    if (room_for(&m->clock, o->lanes[host].clock.n))
        return FAN_ERR_NOMEM;
    if (m->id == 0) {
        m->id = id;
        o->nmutexes++;
    }
    fan_clock_copy(&m->clock, &o->lanes[host].clock);
    return FAN_OK;
}

size_t fan_race_check_ranges(const fan_race_check *o)
{
    size_t n = 0;
    for (size_t i = 0; i < o->ndir; i++)
        n += o->dir[i]->n;
    return n;
}
