/* The path: what lives on it, what dies, how it ends. */
#include "graph/part.h"

#include "base/fault.h"
#include "base/mem.h"
#include "base/trace.h"
#include "buffer/buffer.h"
#include "device/job.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>

void fan__tree_signature_free(fan_tree_signature *k)
{
    fan_free(k->words);
    fan_free(k->demoted);
    fan_free(k->written);
    fan_free(k->shown);
    fan_free(k);
}

void fan__tree_function_free(fan_tree_function *f)
{
    while (f->signatures) {
        fan_tree_signature *k = f->signatures;
        f->signatures = k->next;
        fan__tree_signature_free(k);
    }
    fan_free(f->name);
    fan_free(f->roles);
    fan_free(f->keep);
    fan_free(f);
}

#define ADOPTING 0x80000000u /* beside a process's number in `process`: one of its threads takes the tree over */

void fan__tree_after_fork(fan_tree *t)
{
    unsigned here = fan_process(), was = atomic_load(&t->owner_generation);
    while (was != here) {
        if (was == (here | ADOPTING)) { /* another thread is at it */
            (void)sched_yield();
            was = atomic_load(&t->owner_generation);
            continue;
        }
        if (!atomic_compare_exchange_strong(&t->owner_generation, &was, here | ADOPTING))
            continue;
        uint64_t holder = atomic_load(&t->thread);
        if (!holder || !fan_thread_survived(holder)) { /* else a function forked, and goes on in the child */
            t->fork_invalid |= !fan_mutex_adopt(&t->lock) && !FAN_FAULT(TREE_FORK_WHOLE);
            atomic_store(&t->thread, 0);
        }
        atomic_store(&t->owner_generation, here);
        was = here;
    }
}

fan_status fan__tree_check_fork(const fan_tree *t, fan_error *err)
{
    return t->fork_invalid
               ? fan_fail(err, FAN_ERR_STATE,
                          "another thread was in a call of this graph tree when the process was forked, and what "
                          "the tree knows is not whole in the child: make one here")
               : FAN_OK;
}

void fan__tree_node_free(fan_tree_node *n, const char *why)
{
    if (!n)
        return;
    if (n->signature && n->signature->function->last == n)
        n->signature->function->last = NULL;
    for (size_t i = 0; i < n->nout; i++)
        fan_array_drop(n->outputs[i].array);
    for (size_t i = 0; i < n->nblocks; i++)
        fan__tree_block_free(n->blocks[i], why);
    for (size_t i = 0; i < n->n; i++)
        fan_array_drop(n->operands[i].staged);
    for (size_t i = 0; i < n->nplaces; i++)
        fan_free(n->places[i].children);
    if (n->recording)
        n->signature->function->tree->recorder->drop(n->recording);
    fan_graph_ranges_fini(&n->block_table);
    fan_graph_ranges_fini(&n->used);
    fan_free(n->operands);
    fan_free(n->copied);
    fan_free(n->blocks);
    fan_free(n->outputs);
    fan_free(n->dead);
    fan_free(n->places);
    fan_free(n->copies);
    fan_free(n->copy_in);
    fan_free(n);
}

static void end_handle(const fan_tree *t, const fan_tree_node *n, fan_tree_block *b, const char *call_site)
{
    char why[256];
    snprintf(why, sizeof why,
             "this is an output of %s, made at %s in step %llu, which ended at %s: its memory may hold something else "
             "now; keep=True copies outputs out of the graph tree",
             n->signature->function->name, b->lease->made, (unsigned long long)t->path_step, call_site);
    fan__tree_block_end(b, why);
}

void fan__tree_step_ended(fan_tree *t, const char *call_site)
{
    for (fan_tree_node *n = t->current; n != &t->root; n = n->parent)
        for (size_t i = 0; i < n->nblocks; i++)
            if (fan__tree_block_lives(n->blocks[i]) && !FAN_FAULT(TREE_GENERATION_STAYS))
                end_handle(t, n, n->blocks[i], call_site);
}

bool fan__tree_all_dead(const fan_tree *t)
{
    for (const fan_tree_node *n = t->current; n != &t->root; n = n->parent)
        for (size_t i = 0; i < n->nblocks; i++)
            if (fan__tree_block_lives(n->blocks[i]))
                return false;
    return true;
}

/* ---- functions that are gone ---- */

fan_tree_children *fan__tree_place(fan_tree_node *n, const fan_tree_signature *signature)
{
    for (size_t i = 0; i < n->nplaces; i++)
        if (n->places[i].signature == signature)
            return &n->places[i];
    return NULL;
}

static bool function_gone(const fan_tree_function *f)
{
    return atomic_load(&f->refs) == 0 && !FAN_FAULT(TREE_GONE_STAYS);
}

static bool on_path(const fan_tree *t, const fan_tree_node *n)
{
    const fan_tree_node *p = t->current;
    while (p && p != n)
        p = p->parent;
    return p != NULL;
}

static bool has_children(const fan_tree_node *n)
{
    for (size_t i = 0; i < n->nplaces; i++)
        if (n->places[i].n)
            return true;
    return false;
}

static void leave_parent(const fan_tree_node *n)
{
    fan_tree_children *place = fan__tree_place(n->parent, n->signature);
    for (size_t i = 0; i < place->n; i++)
        if (place->children[i] == n)
            place->children[i] = place->children[--place->n];
}

/* is_gone: nothing can call it any more, nor what is behind it: its function has gone or its kind was evicted, or those
 * of a recording before it. */
static bool is_gone(const fan_tree_node *n)
{
    for (; n->signature; n = n->parent)
        if (n->signature->evicted || function_gone(n->signature->function))
            return true;
    return false;
}

static bool is_of(const fan_tree_signature *k, const fan_tree_function *f, const fan_tree_signature *signature)
{
    return signature ? k == signature : k->function == f;
}

/* forget_places: n knows nothing of the function (the kind, where that is not NULL) any more, which has no recording
 * behind it. */
static void forget_places(fan_tree_node *n, const fan_tree_function *f, const fan_tree_signature *signature)
{
    size_t kept = 0;
    for (size_t i = 0; i < n->nplaces; i++)
        if (is_of(n->places[i].signature, f, signature))
            fan_free(n->places[i].children);
        else
            n->places[kept++] = n->places[i];
    n->nplaces = kept;
}

/* forget: whether no recording of the function, or of the kind, is left; then no place is, either. */
static bool forget(fan_tree *t, const fan_tree_function *f, const fan_tree_signature *signature)
{
    for (const fan_tree_node *n = t->nodes; n; n = n->next)
        if (is_of(n->signature, f, signature))
            return false;
    for (const fan_tree_node *n = t->current; n != &t->root; n = n->parent)
        if (is_of(n->signature, f, signature))
            return false;
    forget_places(&t->root, f, signature);
    for (fan_tree_node *n = t->nodes; n; n = n->next)
        forget_places(n, f, signature);
    for (fan_tree_node *n = t->current; n != &t->root; n = n->parent)
        forget_places(n, f, signature);
    return true;
}

void fan__tree_evict(fan_tree_function *f)
{
    fan_tree *t = f->tree;
    fan_tree_signature **at = &f->signatures; /* the first is that of this call */
    for (fan_tree_signature **next = &f->signatures->next; *next; next = &(*next)->next)
        if (!f->last || f->last->signature != *next) /* which is used without being moved to the front */
            at = next;
    fan_tree_signature *k = *at;
    *at = k->next;
    f->nsignatures--;
    k->evicted = true;
    k->next = t->evicted;
    t->evicted = k;
}

void fan__tree_give_back(fan_tree *t)
{
    bool some = t->functions || t->evicted;
    while (some) { /* a recording that has lost the last one behind it may go, too */
        some = false;
        for (fan_tree_node **at = &t->nodes; *at;) {
            fan_tree_node *n = *at;
            if (has_children(n) || !is_gone(n) || on_path(t, n)) {
                at = &n->next;
                continue;
            }
            *at = n->next;
            leave_parent(n);
            n->signature->function->recordings--;
            fan__tree_node_free(n, "the recording of a graph tree that made this is gone");
            t->stats.nodes--;
            some = true;
        }
    }
    for (fan_tree_signature **at = &t->evicted; *at;) {
        fan_tree_signature *k = *at;
        if (!forget(t, NULL, k)) {
            at = &k->next;
            continue;
        }
        *at = k->next;
        fan__tree_signature_free(k);
    }
    for (fan_tree_function **at = &t->functions; *at;) {
        fan_tree_function *f = *at;
        if (!forget(t, f, NULL)) {
            at = &f->next;
            continue;
        }
        *at = f->next;
        fan__tree_function_free(f);
    }
}

/* leave_block: it leaves the path: who has it keeps a storage that is ended. */
static void leave_block(const fan_tree *t, const fan_tree_node *n, fan_tree_block *b)
{
    b->listed = false;
    if (!fan__tree_block_lives(b) || FAN_FAULT(TREE_GENERATION_STAYS))
        return;
    end_handle(t, n, b, "the beginning of the next");
    b->lease->block = NULL;
    fan_storage_drop(b->storage);
    b->storage = NULL;
    b->lease = NULL;
}

fan_status fan__tree_end_path(fan_tree *t, const fan_stream *caller, fan_error *err)
{
    fan_graph_ranges none = {0};
    for (fan_tree_node *n = t->current; n != &t->root; n = n->parent)
        for (size_t i = 0; i < n->nblocks; i++)
            if (n->blocks[i]->storage)
                FAN_TRY(fan_memory_wait_users(n->blocks[i]->storage, t->origin, caller, err));
    if (t->recorder->poison && t->reach && (t->recorder->always_poisons || fan_get_debug()))
        FAN_TRY(t->recorder->poison(t->device, t->origin, t->arena->data, (size_t)t->reach, err));
    (void)fan_graph_pool_restore(&t->pool, &none, NULL);
    while (t->current != &t->root) {
        fan_tree_node *n = t->current;
        t->current = n->parent;
        for (size_t i = 0; i < n->nblocks; i++)
            leave_block(t, n, n->blocks[i]);
        if (n->warm)
            fan__tree_node_free(n, "its path has ended");
    }
    t->path = FAN_TREE_NONE;
    t->reach = 0;
    fan__tree_give_back(t);
    return FAN_OK;
}

/* sweep_block: it lived when the current node had been recorded, and does no more. */
static fan_status sweep_block(fan_tree *t, fan_tree_block *b, const fan_stream *caller, fan_tree_node *node,
                              fan_error *err)
{
    if (node && fan_grow((void **)&node->dead, &node->dead_cap, node->ndead + 1, sizeof(fan_tree_block *)))
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a graph tree");
    if (b->storage)
        FAN_TRY(fan_memory_wait_users(b->storage, t->origin, caller, err));
    (void)fan_graph_pool_free(&t->pool, b->offset);
    b->listed = false;
    if (node)
        node->dead[node->ndead++] = b;
    return FAN_OK;
}

/* newer_at: whether a block behind b on the path begins where it does: then the block table means that one. */
static bool newer_at(const fan_tree *t, const fan_tree_block *b)
{
    for (const fan_tree_node *n = t->current; n != b->node; n = n->parent)
        for (size_t i = 0; i < n->nblocks; i++)
            if (n->blocks[i]->listed && n->blocks[i]->offset == b->offset)
                return true;
    return false;
}

void fan__tree_relist(fan_tree *t)
{
    for (fan_tree_node *n = t->current; n != &t->root; n = n->parent)
        for (size_t i = 0; i < n->nblocks; i++) {
            fan_tree_block *b = n->blocks[i];
            b->listed = fan_graph_pool_find(&t->pool, b->offset) == b->offset && !newer_at(t, b);
        }
}

fan_status fan__tree_sweep(fan_tree *t, bool restore, bool keep_dead, const fan_stream *caller, fan_tree_node *node,
                           fan_error *err)
{
    if (restore && !FAN_FAULT(TREE_NO_RESTORE)) {
        FAN_TRY(fan_graph_pool_restore(&t->pool, &t->current->block_table, err));
        t->stats.restored++;
    }
    if (restore)
        fan__tree_relist(t);
    for (fan_tree_node *n = t->current; n != &t->root && !keep_dead; n = n->parent)
        for (size_t i = 0; i < n->nblocks; i++) {
            fan_tree_block *b = n->blocks[i];
            if (b->listed && (!fan__tree_block_lives(b) || FAN_FAULT(TREE_DEAD_BIT)))
                FAN_TRY(sweep_block(t, b, caller, node, err));
        }
    return FAN_OK;
}

fan_status fan__tree_place_make(fan_tree_node *n, fan_tree_signature *signature, fan_tree_children **out,
                                fan_error *err)
{
    *out = fan__tree_place(n, signature);
    if (*out)
        return FAN_OK;
    if (fan_grow((void **)&n->places, &n->places_cap, n->nplaces + 1, sizeof *n->places))
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a graph tree");
    n->places[n->nplaces] = (fan_tree_children){.signature = signature};
    *out = &n->places[n->nplaces++];
    return FAN_OK;
}

fan_status fan__tree_launch(const fan_tree *t, const fan_tree_node *n, int number, fan_error *err)
{
    const fan_recorder *r = t->recorder;
    bool timed = fan_trace_on() && r->clock;
    double start = timed ? r->clock(t->device, t->origin) : -1;
    FAN_TRY(r->launch(n->recording, t->origin, err));
    if (!fan_trace_on())
        return FAN_OK;
    fan_trace_line line = {.kind = FAN_TRACE_KERNEL,
                           .device = (int16_t)t->device->index,
                           .slot = -1,
                           .key = -1,
                           .stream = t->origin ? t->origin->handle : 0,
                           .start_us = start,
                           .end_us = timed ? r->clock(t->device, t->origin) : -1};
    for (size_t i = 0; i < n->nblocks; i++)
        line.bytes += n->blocks[i]->bytes;
    snprintf(line.label, sizeof line.label, "replay of %.80s, recording %d", n->signature->function->name, number);
    fan_trace_put(&line);
    return FAN_OK;
}
