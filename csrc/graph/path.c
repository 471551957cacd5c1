/* The memory of a tree, and the life of its recordings.
 *
 * Sections: blocks of the arena, which are lent as storages; signatures, functions and nodes, and
 * how they are freed; a lock that a fork left; the end of a step; evicted signatures, whose
 * recordings no call finds any more; the end of a path; and the block table, from which dead blocks
 * are removed before the path continues. */
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
    fan_tree_lease *lease = ctx;
    fan_storage_drop(lease->arena);
    fan_free(lease);
}

fan_status fan__tree_block_lend(fan_tree *tree, fan_tree_block *block, fan_stream *owner,
                                const char *call_site, fan_error *err)
{
    fan_tree_lease *lease = fan_calloc(sizeof *lease);
    if (!lease)
        return fan__tree_no_memory(err);
    fan_status status =
        fan_memory_lend(tree->device, owner, tree->arena->data + block->offset,
                        (size_t)block->bytes, lease_release, lease, &block->storage, err);
    if (status != FAN_OK) {
        fan_free(lease);
        return status;
    }
    lease->arena = fan_storage_hold(tree->arena->storage);
    lease->tree = tree;
    lease->block = block;
    snprintf(lease->made, sizeof lease->made, "%s", call_site);
    block->lease = lease;
    return FAN_OK;
}

fan_status fan__tree_view(fan_storage *storage, const fan_array *like, fan_array **out,
                          fan_error *err)
{
    return fan_array_view(storage, like->data, like->dtype, like->ndim, like->shape, like->strides,
                          like->writable, out, err);
}

void fan__tree_block_end(fan_tree_block *block, const char *why)
{
    if (!block->storage || atomic_load_explicit(&block->storage->ended, memory_order_relaxed))
        return;
    char *text = block->lease->why;
    snprintf(text, sizeof block->lease->why, "%s", why);
    /* Release: fan_storage_ended (acquire) reads the text on any thread. */
    atomic_store_explicit(&block->storage->ended, text, memory_order_release);
}

void fan__tree_block_leave(fan_tree_block *block)
{
    if (!block->storage)
        return;
    block->lease->block = NULL;
    block->lease = NULL;
    fan_storage_drop(block->storage);
    block->storage = NULL;
}

void fan__tree_block_free(fan_tree_block *block, const char *why)
{
    if (why)
        fan__tree_block_end(block, why);
    fan__tree_block_leave(block);
    fan_free(block);
}

bool fan__tree_block_lives(const fan_tree_block *block)
{
    const fan_tree_node *node = block->node;
    size_t ours = 1;
    if (!block->storage)
        return false;
    for (size_t i = 0; node && i < node->nout; i++) {
        const fan_tree_output *output = &node->outputs[i];
        if (output->block != block || !output->array)
            continue;
        ours++;
        if (atomic_load_explicit(&output->array->refs, memory_order_acquire) > 1)
            return true;
    }
    return atomic_load_explicit(&block->storage->refs, memory_order_acquire) > ours;
}

fan_tree_block *fan__tree_block_of(const fan_tree *tree, const fan_array *array)
{
    const fan_storage *storage = array->storage;
    if (!storage || !fan_flat_within(storage->data, 1, tree->arena->data, tree->pool.bytes))
        return NULL;
    const fan_tree_lease *lease = fan_memory_wrapped(array->storage, lease_release);
    if (lease && lease->tree == tree)
        return lease->block;
    return NULL;
}

fan_storage *fan_tree_memory_under(const fan_array *array)
{
    const fan_tree_lease *lease = fan_memory_wrapped(array->storage, lease_release);
    if (lease)
        return lease->arena;
    return NULL;
}

/* ---- signatures, functions, nodes ---- */

void fan__tree_signature_drop(fan_tree_signature *signature)
{
    fan_tree_function *function = signature->function;
    fan_free(signature);
    if (--function->kept == 0 && atomic_load(&function->refs) == 0)
        fan_free(function);
}

void fan__tree_node_free(fan_tree_node *node, const char *why)
{
    if (!node)
        return;
    for (size_t i = 0; i < node->nout; i++)
        fan_array_drop(node->outputs[i].array);
    for (size_t i = 0; i < node->nblocks; i++)
        fan__tree_block_free(node->blocks[i], why);
    for (size_t i = 0; i < node->n; i++)
        fan_array_drop(node->operands[i].staged);
    for (size_t i = 0; i < node->nplaces; i++)
        fan_free(node->places[i].children);
    if (node->recording)
        node->signature->function->tree->recorder->drop(node->recording);
    fan_graph_ranges_fini(&node->block_table);
    fan_graph_ranges_fini(&node->used);
    fan_free(node->blocks);
    fan_free(node->outputs);
    fan_free(node->dead);
    fan_free(node->places);
    fan_free(node);
}

fan_tree_block *fan__tree_next(fan_tree_at *at)
{
    while (at->node && at->i == at->node->nblocks)
        *at = (fan_tree_at){.node = at->node->parent};
    if (at->node)
        return at->node->blocks[at->i++];
    return NULL;
}

bool fan__tree_on_path(const fan_tree *tree, const fan_tree_node *node)
{
    const fan_tree_node *at = tree->current;
    while (at && at != node)
        at = at->parent;
    return at != NULL;
}

/* ---- a fork ---- */

/* added to owner_generation while one thread of the child remakes the lock */
#define TAKEOVER 0x80000000u

void fan__tree_after_fork(fan_tree *tree)
{
    unsigned here = fan_fork_generation();
    unsigned was = atomic_load(&tree->owner_generation);
    while (was != here) {
        if (was == (here | TAKEOVER)) { /* by another thread */
            (void)sched_yield();
            was = atomic_load(&tree->owner_generation);
            continue;
        }
        if (!atomic_compare_exchange_strong(&tree->owner_generation, &was, here | TAKEOVER))
            continue;
        uint64_t holder = atomic_load(&tree->thread);
        /* else a function forked, and continues in the child */
        if (!holder || !fan_thread_survived(holder)) {
            tree->fork_invalid |= !fan_mutex_adopt(&tree->lock) && !FAN_FAULT(TREE_FORK_WHOLE);
            atomic_store(&tree->thread, 0);
        }
        atomic_store(&tree->owner_generation, here);
        was = here;
    }
}

fan_status fan__tree_check_fork(const fan_tree *tree, fan_error *err)
{
    if (!tree->fork_invalid)
        return FAN_OK;
    return fan_fail(err, FAN_ERR_STATE,
                    "another thread was in a call of this graph tree when the process was forked, "
                    "so the tree's state is incomplete in the child: make a new GraphTree here");
}

/* ---- the end of a step ---- */

/* end_handle: if an output of the path lives, it ends: later uses are errors. */
static bool end_handle(const fan_tree *tree, fan_tree_block *block, const char *call_site)
{
    if (!fan__tree_block_lives(block) || FAN_FAULT(TREE_GENERATION_STAYS))
        return false;
    char why[256];
    snprintf(why, sizeof why,
             "this is an output of %s, made at %s in step %llu, which ended at %s: its memory may "
             "have other contents now; keep=True copies outputs out of the graph tree",
             block->node->signature->function->name, block->lease->made,
             (unsigned long long)tree->path_step, call_site);
    fan__tree_block_end(block, why);
    return true;
}

void fan__tree_step_ended(fan_tree *tree, const char *call_site)
{
    fan_tree_at at = {.node = tree->current};
    for (fan_tree_block *block; (block = fan__tree_next(&at));)
        (void)end_handle(tree, block, call_site);
}

/* ---- evicted signatures ---- */

fan_tree_children *fan__tree_place(fan_tree_node *node, const fan_tree_signature *signature)
{
    for (size_t i = 0; i < node->nplaces; i++) {
        if (node->places[i].signature == signature)
            return &node->places[i];
    }
    return NULL;
}

/* place_remove: removes the place of a signature, which has no recording after the node. */
static void place_remove(fan_tree_node *node, const fan_tree_signature *signature)
{
    fan_tree_children *place = fan__tree_place(node, signature);
    if (!place)
        return;
    fan_free(place->children);
    *place = node->places[--node->nplaces];
}

/* signature_forget: true if no recording of the signature is left; then removes its places. */
static bool signature_forget(fan_tree *tree, const fan_tree_signature *signature)
{
    for (const fan_tree_node *node = tree->nodes; node; node = node->next) {
        if (node->signature == signature)
            return false;
    }
    for (const fan_tree_node *node = tree->current; node; node = node->parent) {
        if (node->signature == signature)
            return false;
    }
    for (fan_tree_node *node = tree->nodes; node; node = node->next)
        place_remove(node, signature);
    for (fan_tree_node *node = tree->current; node; node = node->parent)
        place_remove(node, signature);
    return true;
}

void fan__tree_evict(fan_tree_function *function)
{
    fan_tree *tree = function->tree;
    fan_tree_signature **at = &function->signatures;
    while ((*at)->next)
        at = &(*at)->next;
    fan_tree_signature *signature = *at;
    *at = NULL;
    function->nsignatures--;
    signature->evicted = true;
    signature->next = tree->evicted;
    tree->evicted = signature;
}

void fan__tree_evict_old(fan_tree_function *function)
{
    while (function->signatures && function->signatures->warmings != function->tree->warmings)
        fan__tree_evict(function);
}

/* is_needed: whether a recording stays: a call finds it, others follow it, or the path has it. */
static bool is_needed(const fan_tree *tree, const fan_tree_node *node)
{
    /* an evicted signature, its own or of one before it: no call finds it */
    const fan_tree_node *gone = node;
    while (gone->signature && !gone->signature->evicted)
        gone = gone->parent;
    if (!gone->signature || FAN_FAULT(TREE_GONE_STAYS))
        return true;
    for (size_t i = 0; i < node->nplaces; i++) {
        if (node->places[i].n)
            return true;
    }
    return fan__tree_on_path(tree, node);
}

/* node_remove: frees a recording, which tree->nodes lists no more. */
static void node_remove(fan_tree *tree, fan_tree_node *node)
{
    fan_tree_children *place = fan__tree_place(node->parent, node->signature);
    size_t i = 0;
    while (place->children[i] != node)
        i++;
    place->children[i] = place->children[--place->n];
    node->signature->function->recordings--;
    fan__tree_node_free(node, "the recording of a graph tree that made this was freed");
    tree->stats.nodes--;
}

void fan__tree_give_back(fan_tree *tree)
{
    bool removed = tree->evicted != NULL;
    while (removed) { /* freeing a recording may leave its parent without children */
        removed = false;
        for (fan_tree_node **at = &tree->nodes; *at;) {
            fan_tree_node *node = *at;
            if (is_needed(tree, node)) {
                at = &node->next;
                continue;
            }
            *at = node->next;
            node_remove(tree, node);
            removed = true;
        }
    }
    for (fan_tree_signature **at = &tree->evicted; *at;) {
        fan_tree_signature *signature = *at;
        if (!signature_forget(tree, signature)) {
            at = &signature->next;
            continue;
        }
        *at = signature->next;
        fan__tree_signature_drop(signature);
    }
}

/* ---- the end of a path ---- */

fan_status fan__tree_wait_users(const fan_tree *tree, const fan_tree_block *block,
                                const fan_stream *caller, fan_error *err)
{
    if (!block->storage || !tree->origin)
        return FAN_OK;
    return fan_memory_wait_users(block->storage, tree->origin, caller, err);
}

fan_status fan__tree_end_path(fan_tree *tree, const fan_stream *caller, fan_error *err)
{
    const fan_recorder *recorder = tree->recorder;
    fan_tree_at at = {.node = tree->current};
    for (fan_tree_block *block; (block = fan__tree_next(&at));)
        FAN_TRY(fan__tree_wait_users(tree, block, caller, err));
    bool poisons = recorder->poison && (recorder->always_poisons || fan_get_debug());
    if (poisons && tree->reach) {
        FAN_TRY(recorder->poison(tree->device, tree->origin, tree->arena->data, (size_t)tree->reach,
                                 err));
    }
    fan__tree_leave_path(tree);
    return FAN_OK;
}

void fan__tree_leave_path(fan_tree *tree)
{
    while (tree->current != &tree->root) {
        fan_tree_node *node = tree->current;
        tree->current = node->parent;
        for (size_t i = 0; i < node->nblocks; i++) {
            node->blocks[i]->listed = false;
            /* If a block has other references, they keep a storage that is ended. */
            if (end_handle(tree, node->blocks[i], "the beginning of the next"))
                fan__tree_block_leave(node->blocks[i]);
        }
        if (node->warm)
            fan__tree_node_free(node, "its path has ended");
    }
    tree->pool.taken.n = 0;
    tree->path = FAN_TREE_NONE;
    tree->reach = 0;
    fan__tree_give_back(tree);
}

/* ---- the block table ---- */

/* newer_at: whether a later block of the path begins at the same offset: then the block table lists
 * that one. */
static bool newer_at(const fan_tree *tree, const fan_tree_block *block)
{
    fan_tree_at at = {.node = tree->current};
    for (fan_tree_block *newer; (newer = fan__tree_next(&at)) && newer->node != block->node;) {
        if (newer->listed && newer->offset == block->offset)
            return true;
    }
    return false;
}

void fan__tree_relist(fan_tree *tree)
{
    fan_tree_at at = {.node = tree->current};
    for (fan_tree_block *block; (block = fan__tree_next(&at));) {
        bool taken = fan_graph_pool_find(&tree->pool, block->offset) == block->offset;
        block->listed = taken && !newer_at(tree, block);
    }
}

fan_status fan__tree_sweep(const fan_tree_run *run, fan_tree_node *next, fan_error *err)
{
    fan_tree *tree = run->tree;
    if (run->plan.restore && !FAN_FAULT(TREE_NO_RESTORE)) {
        FAN_TRY(fan_graph_pool_restore(&tree->pool, &tree->current->block_table, err));
        tree->stats.restored++;
    }
    if (run->plan.restore)
        fan__tree_relist(tree);
    if (run->keep_dead)
        return FAN_OK;
    fan_tree_at at = {.node = tree->current};
    for (fan_tree_block *block; (block = fan__tree_next(&at));) {
        bool lives = fan__tree_block_lives(block) && !FAN_FAULT(TREE_DEAD_BIT);
        if (!block->listed || lives)
            continue;
        if (fan_grow((void **)&next->dead, &next->dead_cap, next->ndead + 1, sizeof *next->dead))
            return fan__tree_no_memory(err);
        FAN_TRY(fan__tree_wait_users(tree, block, run->caller, err));
        (void)fan_graph_pool_free(&tree->pool, block->offset);
        block->listed = false;
        next->dead[next->ndead++] = block;
    }
    return FAN_OK;
}
