/* The memory of a tree: blocks of the arena that are lent as storages; on the path some live and
 * some die; a path ends, and recordings that cannot be called any more are freed. */
#include "graph/internal.h"

#include "base/fault.h"
#include "base/mem.h"
#include "base/trace.h"
#include "buffer/buffer.h"
#include "device/job.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>

/* ---- blocks ---- */

static void lease_release(void *ctx)
{
    fan_tree_lease *l = ctx;
    fan_storage_drop(l->arena);
    fan_free(l);
}

fan_status fan__tree_block_lend(fan_tree *t, fan_tree_block *b, fan_stream *owner,
                                const char *call_site, fan_error *err)
{
    fan_tree_lease *l = fan_calloc(sizeof *l);
    if (!l)
        return fan__tree_no_memory(err);
    fan_status status = fan_memory_lend(t->device, owner, t->arena->data + b->offset,
                                        (size_t)b->bytes, lease_release, l, &b->storage, err);
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

void fan__tree_block_end(fan_tree_block *b, const char *why)
{
    if (!b->storage || atomic_load_explicit(&b->storage->ended, memory_order_relaxed))
        return;
    /* Release: fan_storage_ended (acquire) reads the text on any thread. */
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

/* ---- nodes, functions, and a fork ---- */

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
    fan_free(f->name);
    fan_free(f->roles);
    fan_free(f->keep);
    fan_free(f);
}

void fan__tree_signature_drop(fan_tree_signature *k)
{
    fan_tree_function *f = k->function;
    fan__tree_signature_free(k);
    if (--f->kept == 0 && atomic_load(&f->refs) == 0)
        fan__tree_function_free(f);
}

/* added to owner_generation while one thread of the child remakes the lock */
#define TAKEOVER 0x80000000u

void fan__tree_after_fork(fan_tree *t)
{
    unsigned here = fan_fork_generation(), was = atomic_load(&t->owner_generation);
    while (was != here) {
        if (was == (here | TAKEOVER)) { /* by another thread */
            (void)sched_yield();
            was = atomic_load(&t->owner_generation);
            continue;
        }
        if (!atomic_compare_exchange_strong(&t->owner_generation, &was, here | TAKEOVER))
            continue;
        uint64_t holder = atomic_load(&t->thread);
        /* else a function forked, and continues in the child */
        if (!holder || !fan_thread_survived(holder)) {
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
               ? fan_fail(
                     err, FAN_ERR_STATE,
                     "another thread was in a call of this graph tree when the process was forked, "
                     "so the tree's state is incomplete in the child: make a new GraphTree here")
               : FAN_OK;
}

void fan__tree_node_free(fan_tree_node *n, const char *why)
{
    if (!n)
        return;
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

static void end_handle(const fan_tree *t, const fan_tree_node *n, fan_tree_block *b,
                       const char *call_site)
{
    char why[256];
    snprintf(why, sizeof why,
             "this is an output of %s, made at %s in step %llu, which ended at %s: its memory may "
             "have other contents now; keep=True copies outputs out of the graph tree",
             n->signature->function->name, b->lease->made, (unsigned long long)t->path_step,
             call_site);
    fan__tree_block_end(b, why);
}

void fan__tree_step_ended(fan_tree *t, const char *call_site)
{
    for (fan_tree_node *n = t->current; n != &t->root; n = n->parent)
        for (size_t i = 0; i < n->nblocks; i++)
            if (fan__tree_block_lives(n->blocks[i]) && !FAN_FAULT(TREE_GENERATION_STAYS))
                end_handle(t, n, n->blocks[i], call_site);
}

/* ---- evicted signatures ---- */

fan_tree_children *fan__tree_place(fan_tree_node *n, const fan_tree_signature *signature)
{
    for (size_t i = 0; i < n->nplaces; i++)
        if (n->places[i].signature == signature)
            return &n->places[i];
    return NULL;
}

/* forget_place: removes the place of a signature, which has no recording after n. */
static void forget_place(fan_tree_node *n, const fan_tree_signature *signature)
{
    fan_tree_children *place = fan__tree_place(n, signature);
    if (!place)
        return;
    fan_free(place->children);
    *place = n->places[--n->nplaces];
}

/* forget: true if no recording of the signature is left; then removes its places. */
static bool forget(fan_tree *t, const fan_tree_signature *signature)
{
    for (const fan_tree_node *n = t->nodes; n; n = n->next)
        if (n->signature == signature)
            return false;
    for (const fan_tree_node *n = t->current; n != &t->root; n = n->parent)
        if (n->signature == signature)
            return false;
    forget_place(&t->root, signature);
    for (fan_tree_node *n = t->nodes; n; n = n->next)
        forget_place(n, signature);
    for (fan_tree_node *n = t->current; n != &t->root; n = n->parent)
        forget_place(n, signature);
    return true;
}

void fan__tree_evict(fan_tree_function *f)
{
    fan_tree *t = f->tree;
    fan_tree_signature **at = &f->signatures;
    for (fan_tree_signature **next = &f->signatures->next; *next; next = &(*next)->next)
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
    bool some = t->evicted != NULL;
    while (some) { /* freeing a recording may leave its parent without children */
        some = false;
        for (fan_tree_node **at = &t->nodes; *at;) {
            fan_tree_node *n = *at;
            /* an evicted signature, its own or of one before it: no call finds it */
            const fan_tree_node *gone = n;
            while (gone->signature && !gone->signature->evicted)
                gone = gone->parent;
            bool stays = !gone->signature || FAN_FAULT(TREE_GONE_STAYS);
            for (const fan_tree_node *p = t->current; p && !stays; p = p->parent)
                stays = p == n;
            for (size_t i = 0; i < n->nplaces && !stays; i++)
                stays = n->places[i].n != 0;
            if (stays) {
                at = &n->next;
                continue;
            }
            *at = n->next;
            fan_tree_children *place = fan__tree_place(n->parent, n->signature);
            for (size_t i = 0; i < place->n; i++)
                if (place->children[i] == n)
                    place->children[i] = place->children[--place->n];
            n->signature->function->recordings--;
            fan__tree_node_free(n, "the recording of a graph tree that made this was freed");
            t->stats.nodes--;
            some = true;
        }
    }
    for (fan_tree_signature **at = &t->evicted; *at;) {
        fan_tree_signature *k = *at;
        if (!forget(t, k)) {
            at = &k->next;
            continue;
        }
        *at = k->next;
        fan__tree_signature_drop(k);
    }
}

fan_status fan__tree_end_path(fan_tree *t, const fan_stream *caller, fan_error *err)
{
    for (fan_tree_node *n = t->current; n != &t->root && t->origin; n = n->parent)
        for (size_t i = 0; i < n->nblocks; i++)
            if (n->blocks[i]->storage)
                FAN_TRY(fan_memory_wait_users(n->blocks[i]->storage, t->origin, caller, err));
    if (t->recorder->poison && t->reach && (t->recorder->always_poisons || fan_get_debug()))
        FAN_TRY(t->recorder->poison(t->device, t->origin, t->arena->data, (size_t)t->reach, err));
    t->pool.taken.n = t->pool.in_use = 0;
    while (t->current != &t->root) {
        fan_tree_node *n = t->current;
        t->current = n->parent;
        for (size_t i = 0; i < n->nblocks; i++) {
            /* If a block has other references, they keep a storage that is ended. */
            n->blocks[i]->listed = false;
            if (!(!fan__tree_block_lives(n->blocks[i]) || FAN_FAULT(TREE_GENERATION_STAYS))) {
                end_handle(t, n, n->blocks[i], "the beginning of the next");
                n->blocks[i]->lease->block = NULL;
                fan_storage_drop(n->blocks[i]->storage);
                n->blocks[i]->storage = NULL;
                n->blocks[i]->lease = NULL;
            }
        }
        if (n->warm)
            fan__tree_node_free(n, "its path has ended");
    }
    t->path = FAN_TREE_NONE;
    t->reach = 0;
    fan__tree_give_back(t);
    return FAN_OK;
}

/* newer_at: whether a later block of the path begins at the same offset: then the block table lists
 * that one. */
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

fan_status fan__tree_sweep(fan_tree *t, bool restore, bool keep_dead, const fan_stream *caller,
                           fan_tree_node *node, fan_error *err)
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
            if (b->listed && (!fan__tree_block_lives(b) || FAN_FAULT(TREE_DEAD_BIT))) {
                if (node && fan_grow((void **)&node->dead, &node->dead_cap, node->ndead + 1,
                                     sizeof(fan_tree_block *)))
                    return fan__tree_no_memory(err);
                if (b->storage)
                    FAN_TRY(fan_memory_wait_users(b->storage, t->origin, caller, err));
                (void)fan_graph_pool_free(&t->pool, b->offset);
                b->listed = false;
                if (node)
                    node->dead[node->ndead++] = b;
            }
        }
    return FAN_OK;
}
