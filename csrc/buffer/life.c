/* life: how a buffer is made, used again, cleared, and ended. */
#include "base/fault.h"
#include "base/mem.h"
#include "buffer/slot.h"
#include "buffer/stats.h"
#include "buffer/weights.h"

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

/* The declaration of a slot, in one block, with its shape and name at the end. Holds what it names.
 * NULL: no memory. */
static fan_slot_spec *slot_spec_copy(const fan_frontend *frontend, const fan_slot_spec *spec,
                                     fan_dtype accumulate, bool exact)
{
    size_t shape = 0;
    size_t name = 0;
    if (spec->has_shape)
        shape = (size_t)spec->ndim * sizeof *spec->shape;
    if (spec->name)
        name = strlen(spec->name) + 1;
    fan_slot_spec *own = fan_alloc(sizeof *own + shape + name);
    if (!own)
        return NULL;
    char *behind = (char *)(own + 1);
    *own = *spec;
    own->accumulate = accumulate;
    own->exact = exact;
    own->ndim = 0;
    own->shape = NULL;
    if (spec->has_shape) {
        own->ndim = spec->ndim;
        own->shape = (int64_t *)(void *)behind;
    }
    if (shape)
        memcpy(behind, spec->shape, shape);
    if (name)
        own->name = memcpy(behind + shape, spec->name, name);
    if (own->device)
        fan_device_hold(own->device);
    if (own->combine)
        frontend->hold(own->combine);
    return own;
}

fan_status fan_buffer_declare(fan_buffer *b, const fan_buffer_config *config, fan_error *err)
{
    if (!config->specs)
        return FAN_OK;
    for (size_t i = 0; i < b->nslots; i++) {
        /* a slot that declares nothing yet */
        const fan_slot_spec *spec = &config->specs[i];
        fan_dtype accumulate = spec->accumulate;
        bool exact = spec->exact;
        if (accumulate == FAN_DT_NONE) {
            exact = exact || b->undeclared.exact;
            accumulate = config->accumulate;
        }
        if (exact)
            accumulate = FAN_DT_NONE;
        if (spec->dtype != FAN_DT_NONE && fan_accum_dtype(spec->dtype, accumulate) == FAN_DT_NONE) {
            return fan_fail_value(err, fan_slot_place(b, i, -1),
                                  "accumulate=%s cannot hold a sum of dtype %s (A11)",
                                  fan_dtype_name(accumulate), fan_dtype_name(spec->dtype));
        }
        fan_slot_spec *own = slot_spec_copy(b->frontend, spec, accumulate, exact);
        if (!own)
            return fan_fail_memory(err);
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
        return fan_fail_memory(err);
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
    size_t nlocks = FAN_LOCKS;
    if (nslots < FAN_LOCKS)
        nlocks = nslots;
    fan_buffer *b = fan_calloc(sizeof *b);
    if (!b)
        return fan_fail_memory(err);
    *out = b;
    b->slots = fan_calloc(nslots * sizeof *b->slots);
    b->locks = fan_calloc(FAN_LOCKS * sizeof *b->locks);
    b->changed = fan_calloc(FAN_LOCKS * sizeof *b->changed);
    if (!b->slots || !b->locks || !b->changed)
        return fan_fail_memory(err);
    return locks_make(b->locks, b->changed, nlocks, &b->nlocks, err);
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
    b->fold_threshold = budget;
    if (budget == FAN_BUDGET_AUTO) {
        bool alone = b->limits.alone < b->limits.held;
        b->fold_threshold = b->limits.held;
        if (alone)
            b->fold_threshold = b->limits.alone;
    }
}

/* A slot as it is before its first pass. A large buffer's is zeroed, a small one's is not. */
static void slot_init(fan_buffer *b, fan_slot *s)
{
    s->spec = &b->undeclared;
    s->state = &fan_slot_state_none;
    s->expected = -1;
    s->targets = NULL;
    s->weights = NULL;
    fan_slot_set_free(s);
}

static fan_status buffer_name(fan_buffer *b, const char *given, fan_error *err)
{
    if (!given)
        return FAN_OK;
    size_t n = strlen(given) + 1;
    char *name = fan_alloc(n);
    if (!name)
        return fan_fail_memory(err);
    b->name = memcpy(name, given, n);
    return FAN_OK;
}

/* Initializes the rest of a buffer that has its locks and slots. */
static fan_status buffer_init(fan_buffer *b, const fan_buffer_config *config, fan_error *err)
{
    b->id = atomic_fetch_add(&next_buffer, 1);
    b->stream = fan_stream_hold(config->stream);
    b->leaf = config->leaf;
    b->create_graph = config->create_graph;
    b->hides_slots = config->hides_slots;
    b->of_node = config->of_node;
    if (config->stats) {
        b->sum_stats = fan_calloc((config->slots + 1) * sizeof *b->sum_stats);
        if (!b->sum_stats)
            return fan_fail_memory(err);
    }
    b->nslots = config->slots;
    for (size_t i = 0; i < config->slots; i++)
        slot_init(b, &b->slots[i]);
    FAN_TRY(buffer_name(b, config->name, err));
    return fan_buffer_declare(b, config, err);
}

fan_status fan_buffer_new(const fan_buffer_config *config, fan_buffer **out, fan_error *err)
{
    fan_buffer *b = NULL;
    fan_status status;
    if (config->slots <= FAN_INLINE_SLOTS)
        status = small_new(config->slots, &b, err);
    else
        status = large_new(config->slots, &b, err);
    *out = NULL;
    if (!b)
        return status;
    b->frontend = config->frontend;
    b->reusable = fan_buffer_reusable(config);
    fan_counters_begin(b);
    b->owner_generation = fan_fork_generation();
    b->fork_generation = b->owner_generation;
    b->name = (char *)unnamed;
    set_budget(b, config->budget);
    b->undeclared.dtype = FAN_DT_NONE;
    b->undeclared.accumulate = config->accumulate;
    b->undeclared.exact = config->exact;
    if (status == FAN_OK)
        status = buffer_init(b, config, err);
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
    bool nothing = atomic_load(&b->parked) == 0 && atomic_load(&b->alone) == 0;
    assert(nothing || !FAN_FAULT_IS(FAN_FAULT_NONE));
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
    fan_slot_weights_free(s);
}

/* Of a buffer that no other thread is in. */
static void slot_drop_all(fan_buffer *b, size_t i)
{
    fan_slot_state_free(b, fan_slot_cut(b, &b->slots[i]));
    fan_slot_drop_plain(b, i);
}

void fan_buffer_free(fan_buffer *b)
{
    if (!b)
        return;
    fan_buffer_adopt(b);
    for (size_t i = 0; i < b->nslots; i++) {
        fan_slot *s = &b->slots[i];
        slot_drop_all(b, i);
        list_free(b, s);
        slot_undeclare(b, i);
        if (b->sum_stats)
            fan_sum_stats_drop(&b->sum_stats[i]);
    }
    assert_nothing_parked(b);
    fan_counters_end(b, true);
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

bool fan_buffer_reusable(const fan_buffer_config *config)
{
    if (config->slots > FAN_INLINE_SLOTS || config->name || config->hides_slots)
        return false;
    if (config->stats || config->stream)
        return false;
    if (config->leaf || config->create_graph)
        return false;
    return config->accumulate == FAN_DT_NONE && !config->exact;
}

bool fan_buffer_empty_for_reuse(fan_buffer *b)
{
    if (!b->reusable)
        return false;
    fan_buffer_adopt(b);
    if (b->fork_generation == FAN_FORK_INVALID)
        return false;
    for (size_t i = 0; i < b->nslots; i++) {
        fan_slot *s = &b->slots[i];
        slot_drop_all(b, i);
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
    fan_counters_end(b, false);
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
int64_t fan_buffer_shown_slot(const fan_buffer *b, size_t slot)
{
    return fan_slot_place(b, slot, -1).slot;
}

/* Leaves the slot empty and free for the next use. */
static fan_status slot_clear(fan_buffer *b, size_t slot, fan_error *err)
{
    fan_slot *s = &b->slots[slot];
    fan_slot_state *gone = NULL;
    fan_slot_lock(b, slot);
    fan_status status = fan_slot_claim(b, slot, true, "clear", err);
    if (status == FAN_OK)
        gone = fan_slot_cut(b, s);
    fan_slot_unlock(b, slot);
    FAN_TRY(status);
    fan_slot_drop_plain(b, slot);
    if (!b->small) /* else it costs nothing */
        list_free(b, s);
    fan_slot_lock(b, slot);
    fan_slot_let_go(b, slot);
    fan_slot_unlock(b, slot);
    fan_slot_state_free(b, gone);
    return FAN_OK;
}

fan_status fan_buffer_clear(fan_buffer *b, fan_error *err)
{
    fan_buffer_adopt(b);
    bool inherited = b->fork_generation == FAN_FORK_INVALID;
    for (size_t i = 0; inherited && i < b->nslots; i++) {
        if (fan_slot_has_state(&b->slots[i]))
            b->slots[i].state->arriving = 0; /* the thread that was bringing it is gone */
    }
    b->fork_generation = b->owner_generation;
    for (size_t i = 0; i < b->nslots; i++) {
        fan_slot_lock(b, i);
        fan_status status = fan_slot_in_target(b, i, "clear", err);
        fan_slot_unlock(b, i);
        FAN_TRY(status);
    }
    for (size_t i = 0; i < b->nslots; i++)
        FAN_TRY(slot_clear(b, i, err));
    return FAN_OK;
}

/* Garbage collection may run anywhere, also inside a turn of a scheduled thread, whose hooks must
 * not see these locks: the bare mutex is taken. No thread that holds it waits for the collector. */
static int slot_visit(const fan_slot *s, int (*visit)(void *object, const fan_value *v, void *arg),
                      void *arg)
{
    int answer = 0;
    if (s->spec->combine)
        answer = visit(s->spec->combine, NULL, arg);
    for (size_t k = 0; k < fan_slot_entries(s) && !answer; k++) {
        const fan_entry *one = &s->list->entries[k];
        if (!one->object)
            continue;
        if (!one->general) {
            answer = visit(one->object, NULL, arg);
            continue;
        }
        const fan_value *value = &one->item->value;
        if (one->item->parked && value->object)
            answer = visit(value->object, value, arg);
    }
    return answer;
}

/* Garbage collection may run anywhere, also inside a turn of a scheduled thread, whose hooks must
 * not see these locks: the bare mutex is taken. No thread that holds it waits for the collector. */
int fan_buffer_visit(fan_buffer *b, int (*visit)(void *object, const fan_value *v, void *arg),
                     void *arg)
{
    int answer = 0;
    fan_buffer_adopt(b);
    for (size_t i = 0; i < b->nslots && !answer; i++) {
        pthread_mutex_t *bare = &b->locks[i % b->nlocks].m;
        pthread_mutex_lock(bare);
        answer = slot_visit(&b->slots[i], visit, arg);
        pthread_mutex_unlock(bare);
    }
    return answer;
}

void fan_buffer_abandon(fan_buffer *b)
{
    fan_buffer_adopt(b);
    for (size_t i = 0; i < b->nslots; i++) {
        fan_slot *s = &b->slots[i];
        fan_slot_state *gone = NULL;
        fan_slot_lock(b, i);
        void *combine = s->spec->combine;
        s->spec->combine = NULL;
        bool idle = !s->busy && !s->state->arriving;
        if (idle)
            gone = fan_slot_cut(b, s);
        fan_slot_unlock(b, i);
        if (idle)
            fan_slot_drop_plain(b, i);
        fan_slot_state_free(b, gone);
        if (combine)
            b->frontend->drop(combine);
    }
}
