/* Trees and functions: made, dropped, closed; then statistics and lists for pictures. */
#include "graph/internal.h"

#include "base/mem.h"

#include <stdio.h>
#include <string.h>

/* ---- trees ---- */

fan_status fan_tree_new(fan_device *device, const fan_tree_options *options, fan_tree **out,
                        fan_error *err)
{
    char text[32];
    fan_status status;
    *out = NULL;
    if (!device->backend->recorder) {
        return fan_fail(err, FAN_ERR_TYPE, "GraphTree: %s cannot record",
                        fan_device_text(device, text, sizeof text));
    }
    fan_tree *tree = fan_calloc(sizeof *tree);
    if (!tree)
        return fan__tree_no_memory(err);
    if (fan_mutex_init(&tree->lock) != 0) {
        fan_free(tree);
        return fan_fail(err, FAN_ERR_STATE, "a lock could not be made");
    }
    atomic_init(&tree->refs, 1);
    atomic_init(&tree->owner_generation, fan_fork_generation());
    tree->device = fan_device_hold(device);
    tree->recorder = device->backend->recorder;
    tree->options = *options;
    tree->root.number = -1;
    tree->current = &tree->root;
    fan_graph_pool_init(&tree->pool, options->memory);
    int64_t bytes = (int64_t)tree->pool.bytes;
    if (tree->recorder->origin)
        FAN_GO(tree->recorder->origin(device, &tree->origin, err));
    FAN_GO(
        fan_device_array(device, tree->origin, FAN_DT_UINT8, 1, &bytes, NULL, &tree->arena, err));
    *out = tree;
done:
    if (status != FAN_OK)
        fan_tree_drop(tree);
    return status;
}

/* close_all: with the lock: frees recordings and memory. */
static void close_all(fan_tree *tree, const char *why)
{
    fan_tree_at at = {.node = tree->current};
    for (fan_tree_block *block; (block = fan__tree_next(&at));)
        fan__tree_block_end(block, why);
    if (tree->arena && fan__tree_end_path(tree, NULL, NULL) != FAN_OK)
        fan__tree_leave_path(tree);
    while (tree->nodes) {
        fan_tree_node *node = tree->nodes;
        tree->nodes = node->next;
        fan__tree_node_free(node, why);
    }
    while (tree->evicted) {
        fan_tree_signature *signature = tree->evicted;
        tree->evicted = signature->next;
        fan__tree_signature_drop(signature);
    }
    for (size_t i = 0; i < tree->root.nplaces; i++)
        fan_free(tree->root.places[i].children);
    fan_free(tree->root.places);
    tree->root = (fan_tree_node){.number = -1};
    tree->stats.nodes = 0;
    fan_array_drop(tree->arena);
    tree->arena = NULL;
    fan_stream_drop(tree->origin);
    tree->origin = NULL;
    tree->closed = true;
}

void fan_tree_drop(fan_tree *tree)
{
    if (!tree || atomic_fetch_sub_explicit(&tree->refs, 1, memory_order_acq_rel) > 1)
        return;
    if (atomic_load(&tree->owner_generation) != fan_fork_generation())
        fan__tree_after_fork(tree);
    if (tree->fork_invalid)
        return; /* another thread's half-done work cannot be freed */
    close_all(tree, "this is memory of a graph tree that was freed");
    fan_graph_pool_fini(&tree->pool);
    fan_device_poll(tree->device);
    fan_device_drop(tree->device);
    fan_mutex_fini(&tree->lock);
    fan_free(tree->words);
    fan_free(tree->operands);
    fan_free(tree);
}

fan_status fan_tree_close(fan_tree *tree, const char *call_site, fan_error *err)
{
    char why[128];
    fan_status status = FAN_OK;
    if (fan__tree_is_mine(tree)) {
        return fan_fail(err, FAN_ERR_STATE,
                        "the graph tree cannot be closed while one of its functions runs");
    }
    snprintf(why, sizeof why, "this is memory of a graph tree that was closed at %s", call_site);
    bool locked = fan__tree_lock(tree);
    if (tree->fork_invalid)
        tree->closed = true; /* nothing can be freed */
    else if (tree->depth) {
        status =
            fan_fail(err, FAN_ERR_STATE, "the graph tree cannot be closed while a step is open");
    } else if (!tree->closed)
        close_all(tree, why);
    fan__tree_unlock(tree, locked);
    fan_device_poll(tree->device);
    return status;
}

/* ---- functions ---- */

fan_status fan_tree_function_new(fan_tree *tree, const char *name,
                                 const fan_tree_function_options *options, fan_tree_function **out,
                                 fan_error *err)
{
    size_t listed = options->nkeep;
    if (options->nkeep == SIZE_MAX)
        listed = 0;
    size_t given = 1;
    if (options->nroles)
        given = options->nroles;
    size_t name_bytes = strlen(name) + 1;
    size_t sizes = options->nonly * sizeof *options->only;
    fan_tree_function *function =
        fan_calloc(sizeof *function + sizes + given + listed + name_bytes);
    *out = function;
    if (!function)
        return fan__tree_no_memory(err);
    function->only = (int64_t *)(function + 1);
    function->roles = (uint8_t *)(function->only + options->nonly);
    function->keep = (bool *)(function->roles + given);
    function->name = (char *)(function->keep + listed);
    memcpy(function->roles, options->roles, given);
    if (sizes)
        memcpy(function->only, options->only, sizes);
    if (listed)
        memcpy(function->keep, options->keep, listed);
    memcpy(function->name, name, name_bytes);
    atomic_init(&function->refs, 1);
    function->nroles = options->nroles;
    function->nkeep = options->nkeep;
    function->nonly = options->nonly;
    function->min_kernels = options->min_kernels;
    atomic_fetch_add_explicit(&tree->refs, 1, memory_order_relaxed);
    function->tree = tree;
    return FAN_OK;
}

void fan_tree_function_drop(fan_tree_function *function)
{
    if (!function || atomic_fetch_sub_explicit(&function->refs, 1, memory_order_acq_rel) > 1)
        return;
    fan_tree *tree = function->tree;
    bool locked = fan__tree_lock(tree);
    /* another thread's half-done lists are left alone */
    while (function->nsignatures && !tree->fork_invalid)
        fan__tree_evict(function);
    if (!function->kept)
        fan_free(function);
    else if (locked && !tree->fork_invalid)
        fan__tree_give_back(tree);
    fan__tree_unlock(tree, locked);
    fan_tree_drop(tree);
}

/* ---- all recordings go ---- */

static fan_status warm_again_locked(fan_tree *tree, fan_error *err)
{
    FAN_TRY(fan__tree_check_fork(tree, err));
    if (tree->closed)
        return fan_fail(err, FAN_ERR_STATE, "the graph tree is closed");
    tree->warmings++;
    /* functions that have no recordings evict their signatures at their next call */
    for (const fan_tree_node *node = tree->nodes; node; node = node->next) {
        if (!node->signature->evicted)
            fan__tree_evict_old(node->signature->function);
    }
    fan__tree_give_back(tree);
    return FAN_OK;
}

fan_status fan_tree_warm_again(fan_tree *tree, fan_error *err)
{
    if (fan__tree_is_mine(tree)) {
        return fan_fail(err, FAN_ERR_STATE,
                        "warm_again: the recordings of a graph tree stay while one of its "
                        "functions runs: call it outside of functions");
    }
    bool locked = fan__tree_lock(tree);
    fan_status status = warm_again_locked(tree, err);
    fan__tree_unlock(tree, locked);
    return status;
}

/* ---- statistics ---- */

void fan_tree_function_get_stats(fan_tree_function *function, fan_tree_function_stats *out)
{
    bool locked = fan__tree_lock(function->tree);
    *out = function->stats;
    out->nodes = function->recordings;
    fan__tree_unlock(function->tree, locked);
}

/* listed_nodes: the recordings; none if a fork left their list incomplete. */
static const fan_tree_node *listed_nodes(const fan_tree *tree)
{
    if (tree->fork_invalid)
        return NULL;
    return tree->nodes;
}

/* alive_bytes: the memory of the path's outputs that are alive, as the block table counts it. */
static uint64_t alive_bytes(const fan_tree *tree)
{
    uint64_t bytes = 0;
    fan_tree_at at = {.node = tree->current};
    for (fan_tree_block *block; (block = fan__tree_next(&at));) {
        if (fan__tree_block_lives(block) && !fan_storage_ended(block->storage))
            bytes += (block->bytes + FAN_GRAPH_ALIGN - 1) & -(uint64_t)FAN_GRAPH_ALIGN;
    }
    return bytes;
}

void fan_tree_get_stats(fan_tree *tree, fan_tree_stats *out)
{
    bool locked = fan__tree_lock(tree);
    *out = tree->stats;
    out->bytes = 0;
    if (tree->arena)
        out->bytes = tree->pool.bytes;
    /* a replay does not update the block table */
    bool replayed = tree->path == FAN_TREE_EXECUTION && !tree->fork_invalid;
    out->in_use = replayed ? alive_bytes(tree) : fan_graph_pool_in_use(&tree->pool);
    out->high_water = tree->pool.high_water;
    out->closed = tree->closed;
    for (const fan_tree_node *node = listed_nodes(tree); node; node = node->next) {
        if (tree->recorder->bytes)
            out->driver_bytes += tree->recorder->bytes(node->recording);
    }
    fan__tree_unlock(tree, locked);
}

void fan_tree_visit(fan_tree *tree, void (*visit)(void *ctx, const fan_tree_recording_info *info),
                    void *ctx)
{
    bool locked = fan__tree_lock(tree);
    for (const fan_tree_node *node = listed_nodes(tree); node; node = node->next) {
        fan_tree_recording_info info = {.node = node->number,
                                        .parent = node->parent->number,
                                        .function = node->signature->function->name,
                                        .reaches = node->reaches,
                                        .replays = node->replays,
                                        .kernels = tree->recorder->kernels(node->recording),
                                        .current = fan__tree_on_path(tree, node)};
        for (size_t i = 0; i < node->nblocks; i++)
            info.owns += node->blocks[i]->bytes;
        visit(ctx, &info);
    }
    fan__tree_unlock(tree, locked);
}

void fan_tree_visit_memory(fan_tree *tree,
                           void (*visit)(void *ctx, int node, uint64_t lo, uint64_t hi, bool owns),
                           void *ctx)
{
    bool locked = fan__tree_lock(tree);
    for (const fan_tree_node *node = listed_nodes(tree); node; node = node->next) {
        for (size_t i = 0; i < node->used.n; i++) {
            const fan_graph_range *range = &node->used.at[i];
            bool owns = false;
            for (size_t k = 0; k < node->nblocks; k++)
                owns |= node->blocks[k]->offset == range->lo;
            visit(ctx, node->number, range->lo, range->hi, owns);
        }
    }
    fan__tree_unlock(tree, locked);
}
