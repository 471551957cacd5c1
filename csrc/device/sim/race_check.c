#include "device/sim/race_check.h"

#include "base/mem.h"
#include "device/sim/history.h"
#include "device/sim/lanes.h"
#include "device/sim/runs.h"

#include <assert.h>
#include <string.h>

fan_race_check *fan_race_check_new(void)
{
    fan_race_check *o = fan_calloc(sizeof *o);
    if (!o)
        return NULL;
    o->free_read = o->free_op = FAN__NONE;
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
    o->free_read = o->free_op = FAN__NONE;
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

#ifdef FAN_TEST
void fan_race_check_reset(fan_race_check *o) { race_clear(o); }
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

static void race_fill(const fan_race_check *o, fan_race *race, uint32_t first, bool first_writes, const fan_op *second,
                      bool second_writes, const fan__range *r, uintptr_t lo, uintptr_t hi)
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

/* is_race: returns whether the access of op `second`, whose clock is `now`, races with the history of one range. */
static bool is_race(const fan_race_check *o, const fan__range *r, const fan_clock *now, const fan_op *second,
                    bool write, uintptr_t lo, uintptr_t hi, fan_race *race)
{
    if (r->op != FAN__NONE && (r->released || fan__count_in(now, r->lane) < r->count)) {
        race_fill(o, race, r->op, true, second, write, r, lo, hi);
        return true;
    }
    if (!write)
        return false;
    for (uint32_t at = r->reads; at != FAN__NONE; at = o->reads[at].next)
        if (fan__count_in(now, o->reads[at].lane) < o->reads[at].count) {
            race_fill(o, race, o->reads[at].op, false, second, true, r, lo, hi);
            return true;
        }
    return false;
}

/* race_touch: checks one run of bytes for races, then notes the access. May allocate. */
static fan_status race_touch(fan_race_check *o, uint32_t op, uintptr_t lo, uintptr_t hi, bool write, fan_race *race)
{
    const fan_op *acting = &o->ops[op].op;
    const fan_clock *now = &o->lanes[acting->lane].clock;
    bool raced = false;
    fan__place p = fan__history_find(o, lo);
    if (!fan__history_is_end(o, p) && fan__history_at(o, p)->lo == lo && fan__history_at(o, p)->hi == hi) {
        fan__range *r = fan__history_at(o, p);
        if (o->free_reads == 0 && fan__history_reserve(o, 0, 1, 0))
            return FAN_ERR_NOMEM;
        raced = is_race(o, r, now, acting, write, lo, hi, race);
        if (write)
            fan__history_set_write(o, r, op, false);
        else
            fan__history_add_read(o, r, now, op);
        return raced ? FAN_ERR_RACE : FAN_OK;
    }
    size_t ranges = 0, reads = 0, crossed = 0;
    fan__history_measure(o, lo, hi, &ranges, &reads, &crossed);
    if (fan__history_reserve(o, ranges, reads, crossed))
        return FAN_ERR_NOMEM;
    for (; !raced && !fan__history_is_end(o, p) && fan__history_at(o, p)->lo < hi; p = fan__history_after(o, p))
        raced = is_race(o, fan__history_at(o, p), now, acting, write, lo, hi, race);
    if (write)
        fan__history_note_write(o, op, lo, hi, false);
    else
        fan__history_note_read(o, op, now, lo, hi);
    return raced ? FAN_ERR_RACE : FAN_OK;
}

void fan_race_check_plan(fan_race_check *o, const fan_array *a)
{
    fan__runs r;
    fan__runs_of(a, &r);
    if (r.bytes)
        do
            fan__history_measure(o, r.base, r.base + r.bytes, &o->want_ranges, &o->want_reads, &o->want_crossed);
        while (fan__runs_next(&r));
}

fan_status fan_race_check_begin(fan_race_check *o, uint32_t at, uint32_t host, const char *name, const char *call_site,
                                uint64_t *op, fan_error *err)
{
    assert(at < o->nlanes && host < o->nlanes);
    fan__lane *l = &o->lanes[at];
    uint32_t new_ = l->open;
    /* An access may cut ranges that another access of the same operation then crosses: twice their sum is room enough
     * for all accesses that do not overlap themselves. */
    size_t ranges = 2 * o->want_ranges + 4, reads = 2 * o->want_reads + 4, crossed = 2 * o->want_crossed;
    o->want_ranges = o->want_reads = o->want_crossed = 0;
    if (fan__history_reserve(o, ranges, reads, crossed) || fan__lane_room(&l->clock, (size_t)at + 1) ||
        fan__lane_room_to_join(o, at, host))
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for the happens-before history");
    if (new_ == FAN__NONE || o->ops[new_].refs > 1) {
        if (fan__history_take_op(o, at, &new_))
            return fan_fail(err, FAN_ERR_NOMEM, "out of memory for the happens-before history");
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

void fan_race_check_over(fan_race_check *o, uint64_t op, bool awaited)
{
    assert(op < o->nops && o->lanes[o->ops[op].op.lane].open == op);
    o->ops[op].op.over = true;
    o->ops[op].op.awaited = awaited;
}

#ifdef FAN_TEST
fan_status fan_race_check_range(fan_race_check *o, uint64_t op, uintptr_t lo, uintptr_t hi, bool write, fan_race *race)
{
    assert(op < o->nops && o->lanes[o->ops[op].op.lane].open == op);
    return lo < hi ? race_touch(o, (uint32_t)op, lo, hi, write, race) : FAN_OK;
}
#endif

fan_status fan_race_check_access(fan_race_check *o, uint64_t op, const fan_array *a, bool write, fan_race *race)
{
    assert(op < o->nops && o->lanes[o->ops[op].op.lane].open == op);
    fan__runs r;
    fan__runs_of(a, &r);
    if (r.bytes == 0)
        return FAN_OK;
    fan_status worst = FAN_OK;
    do {
        fan_status status = race_touch(o, (uint32_t)op, r.base, r.base + r.bytes, write, worst == FAN_OK ? race : NULL);
        if (status == FAN_ERR_NOMEM)
            return status;
        if (status != FAN_OK)
            worst = status;
    } while (fan__runs_next(&r));
    return worst;
}

/* race_left_behind: returns whether this range has history that is not in `gate`. */
static bool race_left_behind(const fan_race_check *o, const fan__range *r, const fan_clock *gate, const fan_op *second,
                             uintptr_t lo, uintptr_t hi, fan_race *race)
{
    if (r->op != FAN__NONE && (r->released || (!o->ops[r->op].op.over && fan__count_in(gate, r->lane) < r->count))) {
        race_fill(o, race, r->op, true, second, true, r, lo, hi);
        return true;
    }
    for (uint32_t at = r->reads; at != FAN__NONE; at = o->reads[at].next) {
        const fan__reading *x = &o->reads[at];
        if (!o->ops[x->op].op.over && fan__count_in(gate, x->lane) < x->count) {
            race_fill(o, race, x->op, false, second, true, r, lo, hi);
            return true;
        }
    }
    return false;
}

fan_status fan_race_check_let_go(fan_race_check *o, uint32_t host, const uint32_t *lanes, size_t n, uintptr_t lo,
                                 uintptr_t hi, const char *call_site, fan_race *race)
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
    for (fan__place p = fan__history_find(o, lo);
         !raced && !fan__history_is_end(o, p) && fan__history_at(o, p)->lo < hi; p = fan__history_after(o, p))
        raced = race_left_behind(o, fan__history_at(o, p), &o->gate, &acting, lo, hi, race);
    if (raced && race)
        race->release = true;
    return raced ? FAN_ERR_RACE : FAN_OK;
}

fan_status fan_race_check_release(fan_race_check *o, uint32_t host, const uint32_t *lanes, size_t n, uintptr_t lo,
                                  uintptr_t hi, const char *call_site, fan_race *race)
{
    fan_status status = fan_race_check_let_go(o, host, lanes, n, lo, hi, call_site, race);
    if (lo >= hi)
        return FAN_OK;
    size_t ranges = 0, reads = 0, crossed = 0;
    uint64_t op;
    fan__history_measure(o, lo, hi, &ranges, &reads, &crossed);
    if (fan__history_reserve(o, ranges, reads, crossed) == 0 &&
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
    size_t ranges = 0, reads = 0, crossed = 0;
    fan__history_measure(o, lo, hi, &ranges, &reads, &crossed);
    if (fan__history_reserve(o, ranges, reads, crossed) == 0) {
        fan__history_cut(o, lo);
        fan__history_cut(o, hi);
    } /* without room to cut, the rest of the range is dropped, too: that can hide a race, but not invent one */
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
