/* Memory of the arena, as storages that are lent. */
#include "graph/part.h"

#include "base/fault.h"
#include "base/mem.h"

#include <stdio.h>
#include <string.h>

static void lease_release(void *ctx)
{
    fan_tree_lease *l = ctx;
    fan_storage_drop(l->arena);
    fan_free(l);
}

fan_status fan__tree_block_lend(fan_tree *t, fan_tree_block *b, fan_stream *owner, const char *call_site,
                                fan_error *err)
{
    fan_tree_lease *l = fan_calloc(sizeof *l);
    if (!l)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a graph tree");
    fan_status status = fan_memory_lend(t->device, owner, t->arena->data + b->offset, (size_t)b->bytes, lease_release,
                                        l, &b->storage, err);
    if (status != FAN_OK) {
        fan_free(l);
        return status;
    }
    l->arena = fan_storage_hold(t->arena->storage);
    l->tree = t;
    l->block = b;
    snprintf(l->made, sizeof l->made, "%s", call_site);
    b->lease = l;
    return FAN_OK;
}

/* block_new: fresh memory of the arena, listed, for `owner` to use first; one hold on its storage. */
static fan_status block_new(fan_tree *t, fan_stream *owner, size_t bytes, const char *call_site, fan_tree_block **out,
                            fan_error *err)
{
    fan_tree_block *b = fan_calloc(sizeof *b);
    if (!b)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a graph tree");
    b->bytes = bytes ? bytes : 1;
    fan_status status = fan_graph_pool_alloc(&t->pool, b->bytes, &b->offset, err);
    if (status != FAN_OK) {
        fan_free(b);
        return status;
    }
    b->listed = true;
    status = fan__tree_block_lend(t, b, owner, call_site, err);
    if (status != FAN_OK) {
        (void)fan_graph_pool_free(&t->pool, b->offset);
        fan_free(b);
        return status;
    }
    *out = b;
    return FAN_OK;
}

void fan__tree_block_end(fan_tree_block *b, const char *why)
{
    if (!b->storage || atomic_load_explicit(&b->storage->ended, memory_order_relaxed))
        return;
    snprintf(b->lease->why, sizeof b->lease->why, "%s", why);
    atomic_store_explicit(&b->storage->ended, b->lease->why, memory_order_release);
}

void fan__tree_block_free(fan_tree_block *b, const char *why)
{
    if (b && b->storage) {
        if (why)
            fan__tree_block_end(b, why);
        b->lease->block = NULL;
        fan_storage_drop(b->storage);
    }
    fan_free(b);
}

bool fan__tree_block_lives(const fan_tree_block *b)
{
    size_t ours = 1;
    if (!b->storage)
        return false;
    for (size_t i = 0; b->node && i < b->node->nout; i++) {
        const fan_tree_output *o = &b->node->outputs[i];
        if (o->block != b || !o->array)
            continue;
        ours++;
        if (atomic_load_explicit(&o->array->refs, memory_order_acquire) > 1)
            return true;
    }
    return atomic_load_explicit(&b->storage->refs, memory_order_acquire) > ours;
}

fan_tree_block *fan__tree_block_of(const fan_tree *t, const fan_array *a)
{
    const fan_tree_lease *l = fan_memory_wrapped(a->storage, lease_release);
    return l && l->tree == t ? l->block : NULL;
}

fan_storage *fan_tree_memory_under(const fan_array *a)
{
    const fan_tree_lease *l = fan_memory_wrapped(a->storage, lease_release);
    return l ? l->arena : NULL;
}

/* ---- the memory of a body ---- */

/* scope_reuse: what nobody has any more, and only `owner` used: that comes before whatever it does next. Without
 * streams everything does. */
static void scope_reuse(fan_tree_scope *s, const fan_stream *owner)
{
    size_t n = 0;
    for (size_t i = 0; i < s->n; i++) {
        fan_tree_block *b = s->blocks[i];
        if ((!owner && s->tree->origin) || fan__tree_block_lives(b) || !fan_memory_used_by(b->storage, owner)) {
            s->blocks[n++] = b;
            continue;
        }
        (void)fan_graph_pool_free(&s->tree->pool, b->offset);
        fan__tree_block_free(b, NULL);
    }
    s->n = n;
}

fan_status fan__tree_scope_alloc(fan_memory_scope *scope, fan_stream *owner, size_t bytes, fan_storage **out,
                                 fan_error *err)
{
    fan_tree_scope *s = (fan_tree_scope *)scope;
    fan_tree_block *b = NULL;
    scope_reuse(s, owner);
    if (fan_grow((void **)&s->blocks, &s->cap, s->n + 1, sizeof(fan_tree_block *)) ||
        fan_grow((void **)&s->used.at, &s->used.cap, s->used.n + 1, sizeof *s->used.at))
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a graph tree");
    fan_error why = {0};
    fan_status status = block_new(s->tree, owner, bytes, s->call_site, &b, &why);
    if (status == FAN_ERR_DEVICE_NOMEM) {
        s->full[0] = '\0';
        fan_append(s->full, sizeof s->full, "%s; let go of outputs, end the step, or give the tree more (memory=)",
                   why.text);
        return FAN_OK;
    }
    if (status != FAN_OK) {
        if (err)
            *err = why;
        return status;
    }
    s->blocks[s->n++] = b;
    s->used.at[s->used.n++] = (fan_graph_range){b->offset, b->offset + b->bytes};
    if (b->offset + b->bytes > s->tree->reach)
        s->tree->reach = b->offset + b->bytes;
    *out = fan_storage_hold(b->storage);
    return FAN_OK;
}

/* A storage that the body frees would be given to others before the launch writes into it. On a device its memory goes
 * back behind the tree's stream, on which the launch runs. */
fan_status fan__tree_scope_outside(fan_memory_scope *scope, fan_storage *made, fan_error *err)
{
    fan_tree_scope *s = (fan_tree_scope *)scope;
    if (!scope->recording || FAN_FAULT(TREE_OUTSIDE_FREED))
        return FAN_OK;
    if (fan_grow((void **)&s->outside, &s->outside_cap, s->noutside + 1, sizeof *s->outside))
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a graph tree");
    if (s->tree->origin)
        FAN_TRY(fan_memory_record_stream(made, s->tree->origin, err));
    s->outside[s->noutside++] = fan_storage_hold(made);
    return FAN_OK;
}

void fan__tree_scope_drop_outside(fan_tree_scope *s)
{
    while (s->noutside > 0)
        fan_storage_drop(s->outside[--s->noutside]);
    fan_free(s->outside);
    s->outside = NULL;
    s->outside_cap = 0;
}

void fan__tree_scope_fini(fan_tree_scope *s, bool listed, const char *why)
{
    for (size_t i = 0; i < s->n; i++) {
        if (listed)
            (void)fan_graph_pool_free(&s->tree->pool, s->blocks[i]->offset);
        fan__tree_block_free(s->blocks[i], why);
    }
    fan_free(s->blocks);
    fan_graph_ranges_fini(&s->used);
    s->blocks = NULL;
    s->n = s->cap = 0;
}
