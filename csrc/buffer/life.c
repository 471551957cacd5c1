/* life: how a buffer is made, used again, cleared, and ended. */
#include "base/fault.h"
#include "base/mem.h"
#include "buffer/slot.h"
#include "buffer/stats.h"

#include <assert.h>
#include <string.h>

static atomic_uint_fast64_t next_buffer = 1;

static void slot_undeclare(fan_buffer *b, size_t i)
{
    fan_slot_spec *own = b->slots[i].spec;
    if (own == &b->undeclared)
        return;
    b->slots[i].spec = &b->undeclared;
    fan_device_drop(own->device);
    if (own->combine)
        b->frontend->drop(own->combine);
    fan_free(own);
}

fan_status fan_buffer_declare(fan_buffer *b, const fan_buffer_config *config, fan_error *err)
{
    for (size_t i = 0; config->specs && i < b->nslots; i++) {
        /* Of a slot that declares nothing yet. What is declared is one block, shape and name behind
         * it. */
        const fan_slot_spec *spec = &config->specs[i];
        fan_dtype accumulate = config->accumulate;
        bool exact = spec->exact || (spec->accumulate == FAN_DT_NONE && b->undeclared.exact);
        size_t shape = spec->has_shape ? (size_t)spec->ndim * sizeof *spec->shape : 0;
        size_t name = spec->name ? strlen(spec->name) + 1 : 0;
        fan_slot_spec *own;
        accumulate = exact                             ? FAN_DT_NONE
                     : spec->accumulate != FAN_DT_NONE ? spec->accumulate
                                                       : accumulate;
        if (spec->dtype != FAN_DT_NONE && fan_accum_dtype(spec->dtype, accumulate) == FAN_DT_NONE)
            return fan_fail_at(err, FAN_ERR_VALUE, 0, fan_slot_place(b, i, -1),
                               "accumulate=%s cannot hold a sum of dtype %s (A11)",
                               fan_dtype_name(accumulate), fan_dtype_name(spec->dtype));
        if (!(own = fan_alloc(sizeof *own + shape + name)))
            return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
        *own = (fan_slot_spec){.ndim = spec->has_shape ? spec->ndim : 0,
                               .has_shape = spec->has_shape,
                               .dtype = spec->dtype,
                               .accumulate = accumulate,
                               .exact = exact,
                               .device = spec->device ? fan_device_hold(spec->device) : NULL,
                               .combine = spec->combine};
        if (spec->has_shape)
            own->shape = shape ? memcpy(own + 1, spec->shape, shape) : (void *)(own + 1);
        if (name)
            own->name = memcpy((char *)(own + 1) + shape, spec->name, name);
        if (own->combine)
            b->frontend->hold(own->combine);
        b->slots[i].spec = own;
    }
    return FAN_OK;
}

/* A buffer of few slots is one block. */
typedef struct fan_small {
    fan_buffer b;
    fan_mutex locks[FAN_INLINE_SLOTS];
    fan_cond changed[FAN_INLINE_SLOTS];
    fan_slot slots[FAN_INLINE_SLOTS];
    fan_list lists[FAN_INLINE_SLOTS];
} fan_small;

static fan_status locks_make(fan_mutex *locks, fan_cond *changed, size_t n, size_t *made,
                             fan_error *err)
{
    for (*made = 0; *made < n; ++*made) {
        if (fan_mutex_init(&locks[*made]) != 0)
            return fan_fail(err, FAN_ERR_STATE, "a lock could not be made");
        if (fan_cond_init(&changed[*made]) != 0) {
            fan_mutex_fini(&locks[*made]);
            return fan_fail(err, FAN_ERR_STATE, "a condition could not be made");
        }
    }
    return FAN_OK;
}

static void locks_end(fan_mutex *locks, fan_cond *changed, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        fan_mutex_fini(&locks[i]);
        fan_cond_fini(&changed[i]);
    }
}

static fan_status small_new(size_t nslots, fan_buffer **out, fan_error *err)
{
    size_t made;
    fan_small *s = fan_alloc(sizeof *s);
    if (!s)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    fan_status status = locks_make(s->locks, s->changed, nslots ? nslots : 1, &made, err);
    if (status != FAN_OK) {
        locks_end(s->locks, s->changed, made);
        fan_free(s);
        return status;
    }
    memset(&s->b, 0, sizeof s->b);
    s->b.small = true;
    s->b.locks = s->locks;
    s->b.changed = s->changed;
    s->b.nlocks = made;
    s->b.slots = s->slots;
    for (size_t i = 0; i < nslots; i++) {
        s->slots[i].list = &s->lists[i];
        fan_list_init(&s->lists[i]);
    }
    *out = &s->b;
    return FAN_OK;
}

static fan_status large_new(size_t nslots, fan_buffer **out, fan_error *err)
{
    fan_status status;
    fan_buffer *b = fan_calloc(sizeof *b);
    if (!b)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    *out = b;
    b->slots = fan_calloc(nslots * sizeof *b->slots);
    b->locks = fan_calloc(FAN_LOCKS * sizeof *b->locks);
    b->changed = fan_calloc(FAN_LOCKS * sizeof *b->changed);
    if (!b->slots || !b->locks || !b->changed)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    status =
        locks_make(b->locks, b->changed, nslots < FAN_LOCKS ? nslots : FAN_LOCKS, &b->nlocks, err);
    return status;
}

static const char unnamed[] = "InputBuffer";

uint64_t fan_buffer_budget(const fan_buffer *b)
{
    return b->budget;
}

static void set_budget(fan_buffer *b, uint64_t budget)
{
    b->budget = budget;
    b->limits = fan_budget_auto();
    b->fold_threshold = budget != FAN_BUDGET_AUTO          ? budget
                        : b->limits.alone < b->limits.held ? b->limits.alone
                                                           : b->limits.held;
}

fan_status fan_buffer_new(const fan_buffer_config *config, fan_buffer **out, fan_error *err)
{
    fan_buffer *b = NULL;
    fan_status status =
        (config->slots <= FAN_INLINE_SLOTS ? small_new : large_new)(config->slots, &b, err);
    *out = NULL;
    if (!b)
        return status;
    b->frontend = config->frontend;
    b->total = config->total ? config->total : &fan_plain_total;
    b->owner_generation = b->fork_generation = fan_fork_generation();
    b->name = (char *)unnamed;
    set_budget(b, config->budget);
    b->undeclared.dtype = FAN_DT_NONE;
    b->undeclared.accumulate = config->accumulate;
    b->undeclared.exact = config->exact;
    if (status != FAN_OK)
        goto done;
    b->id = atomic_fetch_add(&next_buffer, 1);
    b->stream = config->stream ? fan_stream_hold(config->stream) : NULL;
    b->leaf = config->leaf;
    b->create_graph = config->create_graph;
    if (config->stats &&
        !(b->sum_stats = fan_calloc((config->slots ? config->slots : 1) * sizeof *b->sum_stats))) {
        status = fan_fail(err, FAN_ERR_NOMEM, "out of memory");
        goto done;
    }
    b->nslots = config->slots;
    for (size_t i = 0; i < config->slots; i++) {
        fan_slot *s = &b->slots[i];
        s->spec = &b->undeclared;
        s->state = &fan_slot_state_none;
        s->expected = -1;
        s->targets = NULL;
        fan_slot_set_owner(s, 0);
        s->busy = s->taking = false;
    }
    if (config->name) {
        size_t n = strlen(config->name) + 1;
        char *name = fan_alloc(n);
        if (name)
            memcpy(name, config->name, n);
        if (!name) {
            status = fan_fail(err, FAN_ERR_NOMEM, "out of memory");
            goto done;
        }
        b->name = name;
    }
    status = fan_buffer_declare(b, config, err);
done:
    if (status == FAN_OK)
        *out = b;
    else
        fan_buffer_free(b);
    return status;
}

/* Checks that an empty buffer counts nothing as parked, unless a planted fault makes it so. */
static void assert_nothing_parked(const fan_buffer *b)
{
#ifdef FAN_TEST
    assert(!FAN_FAULT_IS(FAN_FAULT_NONE) ||
           (atomic_load(&b->parked) == 0 && atomic_load(&b->alone) == 0));
#else
    (void)b;
#endif
}

/* list_free: of a slot that has dropped all: what it keeps for its next pass. */
static void list_free(const fan_buffer *b, fan_slot *s)
{
    if (s->list)
        fan_list_fini(s->list);
    if (!b->small)
        fan_free(s->list);
    s->list = NULL;
}

void fan_buffer_free(fan_buffer *b)
{
    if (!b)
        return;
    fan_buffer_adopt(b);
    for (size_t i = 0; i < b->nslots; i++) {
        fan_slot *s = &b->slots[i];
        fan_slot_state_free(b, fan_slot_cut(b, s));
        fan_slot_drop_plain(b, i);
        list_free(b, s);
        slot_undeclare(b, i);
    }
    assert_nothing_parked(b);
    for (size_t i = 0; b->sum_stats && i < b->nslots; i++)
        fan_sum_stats_drop(&b->sum_stats[i]);
    fan_free(b->sum_stats);
    fan_stream_drop(b->stream);
    if (b->name != unnamed)
        fan_free(b->name);
    locks_end(b->locks, b->changed, b->nlocks);
    if (!b->small) {
        fan_free(b->locks);
        fan_free(b->changed);
        fan_free(b->slots);
    }
    fan_free(b); /* a small one begins its block */
}

bool fan_buffer_reusable(const fan_buffer_config *c)
{
    return c->slots <= FAN_INLINE_SLOTS && !c->stats && !c->stream && !c->leaf &&
           !c->create_graph && !c->name && c->accumulate == FAN_DT_NONE && !c->exact;
}

bool fan_buffer_empty_for_reuse(fan_buffer *b)
{
    if (!b->small || b->sum_stats || b->stream || b->leaf || b->create_graph ||
        b->name != unnamed || b->undeclared.accumulate != FAN_DT_NONE || b->undeclared.exact)
        return false;
    fan_buffer_adopt(b);
    if (b->fork_generation == FAN_FORK_INVALID)
        return false;
    for (size_t i = 0; i < b->nslots; i++) {
        fan_slot *s = &b->slots[i];
        fan_slot_state *gone = fan_slot_cut(b, s);
        fan_slot_state_free(b, gone);
        fan_slot_drop_plain(b, i);
        s->expected = -1;
        if (s->spec != &b->undeclared) {
            slot_undeclare(b, i);
            fan_list_fini(s->list); /* its room was for what was declared */
            fan_list_init(s->list);
        }
    }
    return true;
}

void fan_buffer_reuse(fan_buffer *b, uint64_t budget)
{
    assert_nothing_parked(b);
    set_budget(b, budget);
    b->id = atomic_fetch_add(&next_buffer, 1);
    b->weighed = 0;
    b->last_parked.object = NULL;
    memset(&b->n, 0, sizeof b->n);
    memset(&b->plain, 0, sizeof b->plain);
    for (size_t i = 0; i < b->nlocks; i++)
        fan_mutex_renew(&b->locks[i]);
}

#ifdef FAN_TEST
size_t fan_buffer_blocks(const fan_buffer *b)
{
    size_t n = 1;
    for (size_t i = 0; i < b->nslots; i++)
        n += b->slots[i].list->entries != b->slots[i].list->inline_entries;
    return n;
}
#endif

size_t fan_buffer_slots(const fan_buffer *b)
{
    return b->nslots;
}
const char *fan_buffer_name(const fan_buffer *b)
{
    return b->name;
}

fan_status fan_buffer_clear(fan_buffer *b, fan_error *err)
{
    fan_buffer_adopt(b);
    for (size_t i = 0; i < b->nslots && b->fork_generation == FAN_FORK_INVALID; i++)
        if (fan_slot_has_state(&b->slots[i]))
            b->slots[i].state->arriving = 0; /* the thread that was bringing it is gone */
    b->fork_generation = b->owner_generation;
    for (size_t i = 0; i < b->nslots; i++) {
        fan_slot_lock(b, i);
        fan_status status = fan_slot_in_target(b, i, "clear", err);
        fan_slot_unlock(b, i);
        FAN_TRY(status);
    }
    for (size_t i = 0; i < b->nslots; i++) {
        fan_slot_state *gone = NULL;
        fan_slot_lock(b, i);
        fan_status status = fan_slot_claim(b, i, true, "clear", err);
        if (status == FAN_OK)
            gone = fan_slot_cut(b, &b->slots[i]);
        fan_slot_unlock(b, i);
        FAN_TRY(status);
        fan_slot_drop_plain(b, i);
        if (!b->small) /* else it costs nothing */
            list_free(b, &b->slots[i]);
        fan_slot_lock(b, i);
        fan_slot_let_go(b, i);
        fan_slot_unlock(b, i);
        fan_slot_state_free(b, gone);
    }
    return FAN_OK;
}

/* Garbage collection may run anywhere, also inside a turn of a scheduled thread, whose hooks must
 * not see these locks: the bare mutex is taken. No thread that holds it waits for the collector. */
int fan_buffer_visit(fan_buffer *b, int (*visit)(void *object, const fan_value *v, void *arg),
                     void *arg)
{
    int answer = 0;
    fan_buffer_adopt(b);
    for (size_t i = 0; i < b->nslots && !answer; i++) {
        fan_slot *s = &b->slots[i];
        pthread_mutex_t *bare = &b->locks[i % b->nlocks].m;
        pthread_mutex_lock(bare);
        if (s->spec->combine)
            answer = visit(s->spec->combine, NULL, arg);
        for (size_t k = 0; s->list && k < s->list->n && !answer; k++) {
            const fan_entry *one = &s->list->entries[k];
            if (!one->general && one->object)
                answer = visit(one->object, NULL, arg);
            else if (one->general && one->item->parked && one->item->value.object)
                answer = visit(one->item->value.object, &one->item->value, arg);
        }
        pthread_mutex_unlock(bare);
    }
    return answer;
}

void fan_buffer_abandon(fan_buffer *b)
{
    fan_buffer_adopt(b);
    for (size_t i = 0; i < b->nslots; i++) {
        fan_slot_state *gone = NULL;
        void *combine;
        fan_slot_lock(b, i);
        combine = b->slots[i].spec->combine;
        b->slots[i].spec->combine = NULL;
        bool idle = !b->slots[i].busy && !b->slots[i].state->arriving;
        if (idle)
            gone = fan_slot_cut(b, &b->slots[i]);
        fan_slot_unlock(b, i);
        if (idle)
            fan_slot_drop_plain(b, i);
        fan_slot_state_free(b, gone);
        if (combine)
            b->frontend->drop(combine);
    }
}
