#include "device/sim/history.h"

#include "base/mem.h"

#include <assert.h>
#include <string.h>

void fan__history_free_chunk(fan_race_check *o, fan__chunk *c)
{
    c->next = o->freelist;
    o->freelist = c;
    o->nfree++;
}

void fan__history_drop_op(fan_race_check *o, uint32_t at)
{
    if (at == FAN__NONE || --o->ops[at].refs)
        return;
    o->lanes[o->ops[at].op.lane].ops--;
    o->ops[at].next = o->free_op;
    o->free_op = at;
}

int fan__history_take_op(fan_race_check *o, uint32_t of, uint32_t *out)
{
    if (o->free_op != FAN__NONE) {
        *out = o->free_op;
        o->free_op = o->ops[*out].next;
    } else {
        if (o->nops + 1 >= FAN__NONE || fan_grow((void **)&o->ops, &o->ops_cap, o->nops + 1, sizeof *o->ops))
            return -1;
        *out = (uint32_t)o->nops++;
    }
    o->ops[*out].refs = 1;
    o->ops[*out].op.lane = of;
    o->lanes[of].ops++;
    return 0;
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

fan__place fan__history_after(const fan_race_check *o, fan__place p)
{
    if (++p.i >= o->dir[p.c]->n) {
        p.c++;
        p.i = 0;
    }
    return p;
}

fan__place fan__history_find(const fan_race_check *o, uintptr_t x)
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
    fan__chunk *new_ = o->dir[c] = o->freelist;
    o->freelist = new_->next;
    o->nfree--;
    new_->n = 0;
    return new_;
}

/* history_insert: inserts *r before p (which may be the end) and returns its place. The room must exist. */
static fan__place history_insert(fan_race_check *o, fan__place p, const fan__range *r)
{
    if (fan__history_is_end(o, p)) {
        p.c = o->ndir ? o->ndir - 1 : 0;
        if (o->ndir == 0)
            history_open_chunk(o, 0);
        p.i = o->dir[p.c]->n;
    }
    fan__chunk *c = o->dir[p.c];
    if (c->n == FAN__CHUNK) {
        fan__chunk *right = history_open_chunk(o, p.c + 1);
        uint32_t keep =
            p.i == FAN__CHUNK ? FAN__CHUNK : FAN__CHUNK / 2; /* ranges appended at the end fill their chunks */
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

fan__place fan__history_erase(fan_race_check *o, fan__place p, uintptr_t hi)
{
    size_t empty = 0, first_empty = 0;
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
        memmove(&o->dir[first_empty], &o->dir[first_empty + empty], (o->ndir - first_empty - empty) * sizeof *o->dir);
        o->ndir -= empty;
        if (first_empty == p.c)
            return (fan__place){p.c, 0};
    }
    if (!fan__history_is_end(o, p) && p.i >= o->dir[p.c]->n)
        return (fan__place){p.c + 1, 0};
    return p;
}

fan__place fan__history_cut(fan_race_check *o, uintptr_t x)
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

int fan__history_reserve(fan_race_check *o, size_t ranges, size_t reads, size_t crossed)
{
    /* Every full chunk that is crossed may be split once; the halves then take CHUNK/2 each. */
    size_t chunks = crossed / FAN__CHUNK + ranges / (FAN__CHUNK / 2) + 4;
    if (chunks > ranges + 1)
        chunks = ranges + 1;
    if (o->ndir + chunks > o->dir_cap && fan_grow((void **)&o->dir, &o->dir_cap, o->ndir + chunks, sizeof *o->dir))
        return -1;
    while (o->nfree < chunks) {
        fan__chunk *c = fan_alloc(sizeof *c);
        if (!c)
            return -1;
        fan__history_free_chunk(o, c);
    }
    if (o->free_reads < reads) {
        size_t was = o->reads_cap, want = o->reads_cap + (reads - o->free_reads);
        if (want >= FAN__NONE || fan_grow((void **)&o->reads, &o->reads_cap, want, sizeof *o->reads))
            return -1;
        o->free_reads += o->reads_cap - was;
    }
    return 0;
}

void fan__history_measure(const fan_race_check *o, uintptr_t lo, uintptr_t hi, size_t *ranges, size_t *reads,
                          size_t *crossed)
{
    size_t k = 0, copies = 0;
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

void fan__history_add_read(fan_race_check *o, fan__range *r, const fan_clock *now, uint32_t op)
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
    o->reads[at] = (fan__reading){.count = acting->count, .lane = acting->lane, .op = op, .next = r->reads};
    r->reads = at;
    o->ops[op].refs++;
}

void fan__history_set_write(fan_race_check *o, fan__range *r, uint32_t op, bool released)
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

static fan__range history_bare_range(uintptr_t lo, uintptr_t hi)
{
    return (fan__range){.lo = lo, .hi = hi, .op = FAN__NONE, .reads = FAN__NONE};
}

void fan__history_note_write(fan_race_check *o, uint32_t op, uintptr_t lo, uintptr_t hi, bool released)
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
    fan__range r = history_bare_range(lo, hi);
    fan__history_set_write(o, &r, op, released);
    history_insert(o, p, &r);
}

void fan__history_note_read(fan_race_check *o, uint32_t op, const fan_clock *now, uintptr_t lo, uintptr_t hi)
{
    fan__history_cut(o, lo);
    fan__history_cut(o, hi);
    fan__place p = fan__history_find(o, lo);
    for (uintptr_t x = lo; x < hi;) {
        uintptr_t next = fan__history_is_end(o, p) || fan__history_at(o, p)->lo > hi ? hi : fan__history_at(o, p)->lo;
        if (next > x) {
            fan__range gap = history_bare_range(x, next);
            fan__history_add_read(o, &gap, now, op);
            p = history_insert(o, p, &gap);
        } else {
            fan__history_add_read(o, fan__history_at(o, p), now, op);
        }
        x = fan__history_at(o, p)->hi;
        p = fan__history_after(o, p);
    }
}
