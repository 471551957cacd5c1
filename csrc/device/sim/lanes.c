#include "device/sim/lanes.h"

#include "base/mem.h"
#include "device/sim/history.h"

#include <assert.h>

int fan__lane_room(fan_clock *c, size_t n)
{
    if (n <= c->cap)
        return 0;
    uint32_t was = c->n;
    if (fan_clock_set(c, (uint32_t)n - 1, 1))
        return -1;
    c->n = was;
    return 0;
}

void fan__lane_join(fan_race_check *o, uint32_t to, uint32_t from)
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

int fan__lane_room_to_join(fan_race_check *o, uint32_t to, uint32_t from)
{
    return fan__lane_room(&o->lanes[to].clock, o->lanes[from].clock.n);
}

fan_status fan_race_check_lane(fan_race_check *o, uint32_t *out, fan_error *err)
{
    size_t n = o->nlanes + 1;
    bool fits = n < FAN__NONE && !fan_grow((void **)&o->lanes, &o->lanes_cap, n, sizeof *o->lanes) &&
                !fan__lane_room(&o->gate, n);
    /* A host's clock has room for every lane, so joining it cannot fail. The others grow. */
    for (size_t i = 0; fits && i < o->nlanes; i++)
        fits = !o->lanes[i].host || !fan__lane_room(&o->lanes[i].clock, n);
    if (!fits)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a lane of the happens-before checker");
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
size_t fan_race_check_lanes(const fan_race_check *o) { return o->nlanes; }
#endif

bool fan_race_check_reuse(fan_race_check *o, const fan_clock *seen, uint32_t *out)
{
    for (size_t i = 0; i < o->nlanes; i++) {
        fan__lane *l = &o->lanes[i];
        if (!l->left || (l->ops && fan__count_in(seen, (uint32_t)i) < l->count) ||
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
    uint32_t n = o->lanes[at].clock.n > o->lanes[host].clock.n ? o->lanes[at].clock.n : o->lanes[host].clock.n;
    if (fan__lane_room(event, n))
        return FAN_ERR_NOMEM;
    fan__lane_join(o, at, host);
    fan_clock_copy(event, &o->lanes[at].clock);
    return FAN_OK;
}

fan_status fan_race_check_wait(fan_race_check *o, uint32_t at, uint32_t host, const fan_clock *event)
{
    if (fan__lane_room_to_join(o, at, host) || fan__lane_room(&o->lanes[at].clock, event->n))
        return FAN_ERR_NOMEM;
    fan__lane_join(o, at, host);
    (void)fan_clock_join(&o->lanes[at].clock, event);
    return FAN_OK;
}

fan_status fan_race_check_sync(fan_race_check *o, uint32_t host, const fan_clock *with)
{
    return fan_clock_join(&o->lanes[host].clock, with) ? FAN_ERR_NOMEM : FAN_OK;
}

/* lock_place: returns the row of mutex `id`, or the free row for it. The table is never full. */
static fan__lock *lock_place(fan__lock *table, size_t cap, uint64_t id)
{
    size_t i = (size_t)(id * UINT64_C(0x9E3779B97F4A7C15) >> 20) & (cap - 1);
    while (table[i].id && table[i].id != id)
        i = (i + 1) & (cap - 1);
    return &table[i];
}

static int lock_widen(fan_race_check *o)
{
    size_t cap = o->mutexes_cap ? 2 * o->mutexes_cap : 16;
    fan__lock *table = fan_calloc(cap * sizeof *table);
    if (!table)
        return -1;
    for (size_t i = 0; i < cap; i++)
        fan_clock_init(&table[i].clock);
    for (size_t i = 0; i < o->mutexes_cap; i++)
        if (o->mutexes[i].id)
            *lock_place(table, cap, o->mutexes[i].id) = o->mutexes[i]; /* the clock moves with its heap */
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
    const fan__lock *m = lock_place(o->mutexes, o->mutexes_cap, id);
    return m->id && fan_clock_join(&o->lanes[host].clock, &m->clock) ? FAN_ERR_NOMEM : FAN_OK;
}

fan_status fan_race_check_unlocking(fan_race_check *o, uint32_t host, uint64_t id)
{
    if (2 * (o->nmutexes + 1) > o->mutexes_cap && lock_widen(o))
        return FAN_ERR_NOMEM;
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
