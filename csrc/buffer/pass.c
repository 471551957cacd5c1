#include "buffer/pass.h"

#include "base/mem.h"
#include "buffer/options.h"
#include "buffer/stats.h"

#include <stdlib.h>

fan_pass fan_pass_none;

void fan_item_free(fan_buffer *b, fan_item *it)
{
    if (!it)
        return;
    fan_value_drop(b->frontend, &it->value);
    fan_event_drop(it->event);
    fan_stream_drop(it->producer);
    fan_free(it);
}

/* It no longer counts against the budget. */
void fan_item_unpark(fan_buffer *b, fan_item *it)
{
    if (!it->parked)
        return;
    atomic_fetch_sub_explicit(&b->parked, it->bytes, memory_order_relaxed);
    if (it->alone)
        atomic_fetch_sub_explicit(&b->alone, it->bytes, memory_order_relaxed);
    it->alone = false;
}

/* S11: nobody else can join a pooled stream back to the capture that it came into, or the capture could not end. What
 * fails here, its end tells. */
static void join_pooled(const fan_pass *p)
{
    uint64_t id = 0;
    fan_event *e = NULL;
    if (p->capture_origin && p->accum && fan_stream_capture(p->accum, &id, NULL) == FAN_OK && id &&
        fan_event_record(p->accum, &e, NULL) == FAN_OK)
        (void)fan_stream_wait(p->capture_origin, e, NULL, NULL);
    fan_event_drop(e);
}

/* By arrival from now on. False: out of memory, and nothing happened. */
bool fan_pass_by_arrival(fan_pass *p)
{
    bool good = (p->unsorted = fan_calloc(sizeof *p->unsorted)) != NULL;
    for (size_t i = 0; i < p->nitems && good; i++)
        good = fan_keys_put(p->unsorted, p->items[i]->key) > 0;
    if (!good)
        fan_keys_free(&p->unsorted);
    return good;
}

bool fan_pass_has(const fan_pass *p, int64_t key, size_t *at)
{
    size_t lo = 0, hi = p->nitems;
    *at = p->nitems;
    if (p->unsorted)
        return fan_keys_has(p->unsorted, key);
    if (!hi || p->items[hi - 1]->key < key)
        return false;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (p->items[mid]->key < key)
            lo = mid + 1;
        else
            hi = mid;
    }
    *at = lo;
    return p->items[lo]->key == key;
}

static int by_key(const void *a, const void *b)
{
    const fan_item *const *x = a, *const *y = b;
    return ((*x)->key > (*y)->key) - ((*x)->key < (*y)->key);
}

void fan_pass_in_order(fan_pass *p)
{
    if (!p->unsorted)
        return;
    int64_t *keys = fan_alloc(p->nitems * sizeof *keys);
    uint32_t *at = fan_alloc(p->nitems * sizeof *at);
    fan_item **items = fan_alloc(p->cap * sizeof *items);
    for (size_t i = 0; keys && i < p->nitems; i++)
        keys[i] = p->items[i]->key;
    if (keys && at && items && fan_keys_order(keys, sizeof *keys, p->nitems, at)) {
        for (size_t i = 0; i < p->nitems; i++)
            items[i] = p->items[at[i]];
        fan_free(p->items);
        p->items = items;
    } else {
        qsort(p->items, p->nitems, sizeof *p->items, by_key);
        fan_free(items);
    }
    fan_free(keys);
    fan_free(at);
    fan_keys_free(&p->unsorted);
}

/* Drops all that a pass held. Unlocked. */
void fan_pass_free(fan_buffer *b, fan_pass *p)
{
    if (!p || p == &fan_pass_none)
        return;
    fan_touch_budget(b, FAN_SCHED_COUNT);
    for (size_t i = 0; i < p->nitems; i++) {
        fan_item_unpark(b, p->items[i]);
        fan_item_free(b, p->items[i]);
    }
    fan_free(p->items);
    fan_keys_free(&p->unsorted);
    fan_value_drop(b->frontend, &p->value);
    fan_sum_stats_drop(&p->sum_stats);
    fan_free(p->shape);
    join_pooled(p);
    fan_stream_drop(p->capture_origin);
    fan_stream_drop(p->consumer);
    fan_stream_drop(p->accum);
    fan_stream_drop(p->ready);
    fan_event_drop(p->ready_event);
    fan_device_drop(p->device);
    fan_free(p->poison);
    fan_free(p->exact);
    fan_free(p);
}

/* Locked. */
fan_pass *fan_pass_cut(fan_slot *s)
{
    fan_pass *gone = s->p;
    s->p = &fan_pass_none;
    return gone;
}

bool fan_status_poisons(fan_status s)
{
    return s == FAN_ERR_DEVICE || s == FAN_ERR_RACE || s == FAN_ERR_DEADLOCK || s == FAN_ERR_CAPTURE;
}

/* Locked or owned: the first failure is kept. */
void fan_slot_poison(fan_slot *s, fan_status status, const fan_error *err)
{
    if (s->p == &fan_pass_none || s->p->poison || !fan_status_poisons(status))
        return;
    s->p->poison = fan_calloc(sizeof *s->p->poison);
    if (s->p->poison && err)
        *s->p->poison = *err;
}

fan_status fan_slot_poisoned(const fan_buffer *b, size_t slot, fan_error *err)
{
    const fan_error *first = b->slots[slot].p->poison;
    if (!first)
        return FAN_OK;
    return fan_fail(err, FAN_ERR_STATE, FAN_SLOT_SAID " is poisoned until clear(): %s", FAN_SLOT_WHO(b, slot),
                    first->text);
}

/* Locked: parked items that a fold may sum now: keys without a gap, or all that have arrived in order. */
size_t fan_pass_ready_prefix(fan_pass *p)
{
    size_t m = 0;
    if (p->unsorted && (uint64_t)p->unsorted->least > p->next_key)
        return 0;
    fan_pass_in_order(p);
    while (m < p->nitems && p->items[m]->parked && (p->keyed < 0 || (uint64_t)p->items[m]->key == p->next_key + m))
        m++;
    return m;
}

fan_dtype_set fan_item_seen(fan_dtype_set seen, const fan_slot *s, const fan_item *it)
{
    if (!it->own)
        return seen;
    return s->spec->dtype != FAN_DT_NONE ? it->own : seen | it->own;
}
