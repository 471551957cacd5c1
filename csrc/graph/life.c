/* Trees and functions: made, dropped, closed; statistics and lists for pictures. */
#include "graph/internal.h"

#include "base/mem.h"

#include <stdio.h>
#include <string.h>

/* ---- trees and functions ---- */

fan_status fan_tree_new(fan_device *d, const fan_tree_options *options, fan_tree **out,
                        fan_error *err)
{
    char text[32];
    fan_status status;
    *out = NULL;
    if (!d->backend->recorder)
        return fan_fail(err, FAN_ERR_TYPE, "GraphTree: %s cannot record",
                        fan_device_text(d, text, sizeof text));
    fan_tree *t = fan_calloc(sizeof *t);
    if (!t)
        return fan__tree_no_memory(err);
    if (fan_mutex_init(&t->lock) != 0) {
        fan_free(t);
        return fan_fail(err, FAN_ERR_STATE, "a lock could not be made");
    }
    atomic_init(&t->refs, 1);
    atomic_init(&t->owner_generation, fan_fork_generation());
    t->device = fan_device_hold(d);
    t->recorder = d->backend->recorder;
    t->options = *options;
    t->root.number = -1;
    t->current = &t->root;
    fan_graph_pool_init(&t->pool, options->memory);
    int64_t bytes = (int64_t)t->pool.bytes;
    if (t->recorder->origin)
        FAN_GO(t->recorder->origin(d, &t->origin, err));
    FAN_GO(fan_device_array(d, t->origin, FAN_DT_UINT8, 1, &bytes, NULL, &t->arena, err));
    *out = t;
done:
    if (status != FAN_OK)
        fan_tree_drop(t);
    return status;
}

/* close_all: with the lock: frees recordings and memory. */
static void close_all(fan_tree *t, const char *why)
{
    for (fan_tree_node *n = t->current; n != &t->root; n = n->parent)
        for (size_t i = 0; i < n->nblocks; i++)
            fan__tree_block_end(n->blocks[i], why);
    if (t->arena)
        (void)fan__tree_end_path(t, NULL, NULL);
    while (t->current != &t->root) { /* fan__tree_end_path failed */
        fan_tree_node *n = t->current;
        t->current = n->parent;
        if (n->warm)
            fan__tree_node_free(n, why);
    }
    while (t->nodes) {
        fan_tree_node *n = t->nodes;
        t->nodes = n->next;
        fan__tree_node_free(n, why);
    }
    while (t->evicted) {
        fan_tree_signature *k = t->evicted;
        t->evicted = k->next;
        fan__tree_signature_drop(k);
    }
    for (size_t i = 0; i < t->root.nplaces; i++)
        fan_free(t->root.places[i].children);
    fan_free(t->root.places);
    t->root = (fan_tree_node){.number = -1};
    t->stats.nodes = 0;
    t->path = FAN_TREE_NONE;
    fan_array_drop(t->arena);
    t->arena = NULL;
    fan_stream_drop(t->origin);
    t->origin = NULL;
    t->closed = true;
}

void fan_tree_drop(fan_tree *t)
{
    if (!t || atomic_fetch_sub_explicit(&t->refs, 1, memory_order_acq_rel) > 1)
        return;
    if (atomic_load(&t->owner_generation) != fan_fork_generation())
        fan__tree_after_fork(t);
    if (t->fork_invalid)
        return; /* another thread's half-done work cannot be freed */
    close_all(t, "this is memory of a graph tree that was freed");
    fan_graph_pool_fini(&t->pool);
    fan_device_poll(t->device);
    fan_device_drop(t->device);
    fan_mutex_fini(&t->lock);
    fan_free(t->words);
    fan_free(t->operands);
    fan_free(t);
}

fan_status fan_tree_close(fan_tree *t, const char *call_site, fan_error *err)
{
    char why[128];
    fan_status status = FAN_OK;
    if (fan__tree_is_mine(t))
        return fan_fail(err, FAN_ERR_STATE,
                        "the graph tree cannot be closed while one of its functions runs");
    snprintf(why, sizeof why, "this is memory of a graph tree that was closed at %s", call_site);
    bool locked = fan__tree_lock(t);
    if (t->fork_invalid)
        t->closed = true; /* nothing can be freed */
    else if (t->depth)
        status =
            fan_fail(err, FAN_ERR_STATE, "the graph tree cannot be closed while a step is open");
    else if (!t->closed)
        close_all(t, why);
    fan__tree_unlock(t, locked);
    fan_device_poll(t->device);
    return status;
}

fan_status fan_tree_function_new(fan_tree *t, const char *name, const uint8_t *roles, size_t nroles,
                                 const bool *keep, size_t nkeep, fan_tree_function **out,
                                 fan_error *err)
{
    fan_tree_function *f = fan_calloc(sizeof *f);
    size_t some = nkeep == SIZE_MAX ? 0 : nkeep;
    *out = NULL;
    if (!f || !(f->name = fan_alloc(strlen(name) + 1)) || !(f->roles = fan_alloc(nroles + 1)) ||
        !(f->keep = fan_alloc((some + 1) * sizeof *f->keep))) {
        if (f)
            fan__tree_function_free(f);
        return fan__tree_no_memory(err);
    }
    atomic_init(&f->refs, 1);
    memcpy(f->name, name, strlen(name) + 1);
    memcpy(f->roles, roles, nroles ? nroles : 1);
    if (some)
        memcpy(f->keep, keep, some * sizeof *keep);
    f->nroles = nroles;
    f->nkeep = nkeep;
    atomic_fetch_add_explicit(&t->refs, 1, memory_order_relaxed);
    f->tree = t;
    *out = f;
    return FAN_OK;
}

void fan_tree_function_drop(fan_tree_function *f)
{
    if (!f || atomic_fetch_sub_explicit(&f->refs, 1, memory_order_acq_rel) > 1)
        return;
    fan_tree *t = f->tree;
    bool locked = fan__tree_lock(t);
    while (f->nsignatures && !t->fork_invalid) /* another thread's half-done lists are left alone */
        fan__tree_evict(f);
    if (!f->kept)
        fan__tree_function_free(f);
    else if (locked && !t->fork_invalid)
        fan__tree_give_back(t);
    fan__tree_unlock(t, locked);
    fan_tree_drop(t);
}

/* ---- statistics ---- */

void fan_tree_get_stats(fan_tree *t, fan_tree_stats *out)
{
    bool locked = fan__tree_lock(t);
    *out = t->stats;
    out->bytes = t->arena ? t->pool.bytes : 0;
    /* which does not update the block table */
    bool replayed = t->path == FAN_TREE_EXECUTION && !t->fork_invalid;
    out->in_use = replayed ? 0 : t->pool.in_use;
    for (const fan_tree_node *n = t->current; replayed && n != &t->root; n = n->parent)
        for (size_t i = 0; i < n->nblocks; i++) {
            const fan_tree_block *b = n->blocks[i];
            if (fan__tree_block_lives(b) && !fan_storage_ended(b->storage))
                out->in_use += (b->bytes + FAN_GRAPH_ALIGN - 1) / FAN_GRAPH_ALIGN * FAN_GRAPH_ALIGN;
        }
    out->high_water = t->pool.high_water;
    out->closed = t->closed;
    for (const fan_tree_node *n = t->fork_invalid ? NULL : t->nodes; n && t->recorder->bytes;
         n = n->next)
        out->driver_bytes += t->recorder->bytes(n->recording);
    fan__tree_unlock(t, locked);
}

void fan_tree_visit(fan_tree *t, void (*visit)(void *ctx, const fan_tree_recording_info *s),
                    void *ctx)
{
    bool locked = fan__tree_lock(t);
    for (int number = 0; number < t->numbers && !t->fork_invalid; number++)
        for (const fan_tree_node *n = t->nodes; n; n = n->next) {
            if (n->number != number)
                continue;
            fan_tree_recording_info s = {.node = n->number,
                                         .parent = n->parent->number,
                                         .function = n->signature->function->name,
                                         .reaches = n->reaches,
                                         .replays = n->replays};
            for (size_t i = 0; i < n->nblocks; i++)
                s.owns += n->blocks[i]->bytes;
            for (const fan_tree_node *p = t->current; p && !s.current; p = p->parent)
                s.current = p == n;
            visit(ctx, &s);
        }
    fan__tree_unlock(t, locked);
}

void fan_tree_visit_memory(fan_tree *t,
                           void (*visit)(void *ctx, int node, uint64_t lo, uint64_t hi, bool owns),
                           void *ctx)
{
    bool locked = fan__tree_lock(t);
    for (const fan_tree_node *n = t->fork_invalid ? NULL : t->nodes; n; n = n->next)
        for (size_t i = 0; i < n->used.n; i++) {
            bool owns = false;
            for (size_t k = 0; k < n->nblocks; k++)
                owns |= n->blocks[k]->offset == n->used.at[i].lo;
            visit(ctx, n->number, n->used.at[i].lo, n->used.at[i].hi, owns);
        }
    fan__tree_unlock(t, locked);
}
