/* Warm-ups and recordings: a function's body runs and allocates from the arena.
 *
 * Sections: the memory of a body; the checks of its result, and of what a recording reads and
 * writes; nodes; the run of a body; a warm-up; and a recording, which first stages operands. */
#include "graph/internal.h"

#include "array/overlap.h"
#include "base/fault.h"
#include "base/mem.h"
#include "device/job.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- the memory of a body ---- */

/* A call's own blocks, while its body runs. */
typedef struct fan_tree_scope {
    fan_memory_scope memory; /* first */
    fan_tree_run *run;
    fan_tree_block **blocks;
    size_t n;
    size_t cap;
    fan_graph_ranges used; /* all that it ever allocated */
    /* While recording: memory from the device, held until the launch, which is the first time that
     * the work runs. */
    fan_storage **outside;
    size_t noutside;
    size_t outside_cap;
} fan_tree_scope;

/* scope_free_dead: frees dead blocks that only `owner` used: its queue orders that use before the
 * next. Without streams any. */
static void scope_free_dead(fan_tree_scope *scope, const fan_stream *owner)
{
    fan_tree *tree = scope->run->tree;
    size_t kept = 0;
    if (!owner && tree->origin)
        return;
    for (size_t i = 0; i < scope->n; i++) {
        fan_tree_block *block = scope->blocks[i];
        if (fan__tree_block_lives(block) || !fan_memory_used_by(block->storage, owner)) {
            scope->blocks[kept++] = block;
            continue;
        }
        (void)fan_graph_pool_free(&tree->pool, block->offset);
        fan__tree_block_free(block, NULL);
    }
    scope->n = kept;
}

/* block_new: new memory of the arena, which `owner` uses first; it holds its storage. */
static fan_status block_new(fan_tree_run *run, fan_stream *owner, size_t bytes,
                            fan_tree_block **out, fan_error *err)
{
    fan_tree *tree = run->tree;
    fan_tree_block *block = fan_calloc(sizeof *block);
    if (!block)
        return fan__tree_no_memory(err);
    block->bytes = 1;
    if (bytes)
        block->bytes = bytes;
    block->listed = true;
    fan_status status = fan_graph_pool_alloc(&tree->pool, block->bytes, &block->offset, err);
    if (status == FAN_OK) {
        status = fan__tree_block_lend(tree, block, owner, run->args->call_site, err);
        if (status != FAN_OK)
            (void)fan_graph_pool_free(&tree->pool, block->offset);
    }
    if (status != FAN_OK) {
        fan_free(block);
        return status;
    }
    *out = block;
    return FAN_OK;
}

static fan_status scope_alloc(fan_memory_scope *memory, fan_stream *owner, size_t bytes,
                              fan_storage **out, fan_error *err)
{
    fan_tree_scope *scope = (fan_tree_scope *)memory;
    fan_graph_ranges *used = &scope->used;
    fan_tree_run *run = scope->run;
    fan_tree_block *block = NULL;
    scope_free_dead(scope, owner);
    if (fan_grow((void **)&scope->blocks, &scope->cap, scope->n + 1, sizeof *scope->blocks) ||
        fan_grow((void **)&used->at, &used->cap, used->n + 1, sizeof *used->at))
        return fan__tree_no_memory(err);
    fan_error why = {0};
    fan_status status = block_new(run, owner, bytes, &block, &why);
    if (status == FAN_ERR_DEVICE_NOMEM) {
        run->full[0] = '\0';
        fan_append(run->full, sizeof run->full,
                   "%s; delete outputs, end the step, or give the tree more (memory=)", why.text);
        return FAN_OK;
    }
    if (status != FAN_OK) {
        if (err)
            *err = why;
        return status;
    }
    uint64_t end = block->offset + block->bytes;
    scope->blocks[scope->n++] = block;
    used->at[used->n++] = (fan_graph_range){block->offset, end};
    if (end > run->tree->reach)
        run->tree->reach = end;
    *out = fan_storage_hold(block->storage);
    return FAN_OK;
}

/* While recording, memory that the body frees would be reused before the launch writes into it, so
 * it is held. On a device it is reclaimed after the tree's stream, which runs the launch. */
static fan_status scope_outside(fan_memory_scope *memory, fan_storage *made, fan_error *err)
{
    fan_tree_scope *scope = (fan_tree_scope *)memory;
    fan_stream *origin = scope->run->tree->origin;
    if (!memory->recording || FAN_FAULT(TREE_OUTSIDE_FREED))
        return FAN_OK;
    if (fan_grow((void **)&scope->outside, &scope->outside_cap, scope->noutside + 1,
                 sizeof *scope->outside))
        return fan__tree_no_memory(err);
    if (origin)
        FAN_TRY(fan_memory_record_stream(made, origin, err));
    scope->outside[scope->noutside++] = fan_storage_hold(made);
    return FAN_OK;
}

static fan_tree_scope scope_of(fan_tree_run *run)
{
    return (fan_tree_scope){.memory = {.device = run->tree->device,
                                       .alloc = scope_alloc,
                                       .outside = scope_outside,
                                       .who = run->function->name},
                            .run = run};
}

/* scope_fini: frees the remaining blocks; `listed`: in the block table, too. */
static void scope_fini(fan_tree_scope *scope, bool listed, const char *why)
{
    for (size_t i = 0; i < scope->n; i++) {
        if (listed)
            (void)fan_graph_pool_free(&scope->run->tree->pool, scope->blocks[i]->offset);
        fan__tree_block_free(scope->blocks[i], why);
    }
    fan_free(scope->blocks);
    fan_graph_ranges_fini(&scope->used);
    scope->blocks = NULL;
    scope->n = 0;
}

/* ---- check the result of a body ---- */

static fan_status check_form(const fan_tree_run *run, fan_error *err)
{
    const fan_tree_signature *signature = run->signature;
    const fan_tree_result *result = run->result;
    size_t nkeep = run->function->nkeep;
    if (nkeep && nkeep != SIZE_MAX && nkeep != result->n) {
        return fan_fail(
            err, FAN_ERR_VALUE,
            "%s returned %zu output%s, but keep= has %zu: give one for each, or one bool for all",
            run->function->name, result->n, FAN_PLURAL(result->n), nkeep);
    }
    bool same = signature->nout == result->n && signature->form == result->form;
    if (same || !signature->warm)
        return FAN_OK;
    return fan_fail(err, FAN_ERR_VALUE,
                    "%s returned %zu output%s, and %zu before with operands of the same dtypes and "
                    "shapes: a replay always returns the same number; pass what it depends on as "
                    "key=",
                    run->function->name, result->n, FAN_PLURAL(result->n), signature->nout);
}

/* check_own: an output is new memory of this call, or an operand. */
static fan_status check_own(const fan_tree_run *run, fan_array *const *given, fan_error *err)
{
    for (size_t i = 0; i < run->result->n; i++) {
        const fan_array *output = run->result->at[i];
        if (!output)
            continue;
        int operand = fan__tree_operand_of(run, output, given);
        if (operand < 0) {
            const fan_tree_block *block = fan__tree_block_of(run->tree, output);
            bool own = run->full[0]; /* some memory came from the device */
            if (block)
                own = !block->node;
            if (own)
                continue;
            return fan_fail(err, FAN_ERR_VALUE,
                            "%s: output %zu is not its own: the function did not allocate it in "
                            "this call, and it is no operand; pass the array as an operand",
                            run->function->name, i);
        }
        bool copied = run->operands[operand].placement == FAN_PLACE_COPY;
        if (copied && !fan_array_same_view(output, given[operand])) {
            return fan_fail(err, FAN_ERR_VALUE,
                            "%s: output %zu is a view of operand %d, which is copied: return a "
                            "copy, or give the operand the role static",
                            run->function->name, i, operand);
        }
    }
    return FAN_OK;
}

/* is_given: whether a block is that of an output, or of a staged operand to which only the scope
 * and the node have references. */
static bool is_given(const fan_tree_run *run, const fan_tree_node *node, const fan_storage *storage)
{
    for (size_t k = 0; k < node->n; k++) {
        const fan_array *staged = node->operands[k].staged;
        if (!staged || staged->storage != storage)
            continue;
        if (atomic_load(&staged->refs) == 1 && atomic_load(&storage->refs) == 2)
            return true;
    }
    for (size_t k = 0; k < run->result->n; k++) {
        const fan_array *output = run->result->at[k];
        if (output && output->storage == storage)
            return true;
    }
    return false;
}

/* escaped_block: a block with other references that is no output of the body; NULL: none. */
static const fan_tree_block *escaped_block(const fan_tree_scope *scope, const fan_tree_node *node)
{
    for (size_t i = 0; i < scope->n; i++) {
        const fan_tree_block *block = scope->blocks[i];
        if (fan__tree_block_lives(block) && !is_given(scope->run, node, block->storage))
            return block;
    }
    return NULL;
}

static fan_status check_escape(const fan_tree_scope *scope, const fan_tree_node *node,
                               fan_error *err)
{
    const fan_tree_run *run = scope->run;
    const fan_tree_body *body = &run->args->body;
    const fan_tree_block *block = escaped_block(scope, node);
    if (block && body->collect) {
        body->collect(body->ctx);
        block = escaped_block(scope, node);
    }
    if (!block || FAN_FAULT(TREE_ADOPTED))
        return FAN_OK;
    return fan_fail(err, FAN_ERR_STATE,
                    "%s: a reference keeps %llu byte%s that the function allocated and did not "
                    "return, or the copy of an operand that it was given, and the next replay "
                    "overwrites them: return the array, or add into an operand with the role "
                    "accumulate (a leaf without a gradient keeps the array: pass its gradient)",
                    run->function->name, (unsigned long long)block->bytes,
                    FAN_PLURAL(block->bytes));
}

/* ---- check what a recording reads and writes ---- */

typedef struct access_check {
    const fan_tree_scope *scope;
    const fan_tree_node *node;
    const char *foreign; /* the operation that uses other memory; NULL: none */
} access_check;

/* access_visit: false: the access is foreign, and ends the visits. */
static bool access_visit(void *ctx, const char *name, const void *data, size_t bytes, bool write)
{
    access_check *check = ctx;
    const fan_graph_ranges *used = &check->scope->used;
    fan_tree_run *run = check->scope->run;
    for (size_t i = 0; i < run->args->n; i++) {
        const fan_tree_operand *operand = &check->node->operands[i];
        const fan_array *a = operand->staged ? operand->staged : run->args->in[i];
        if (!a)
            continue;
        int64_t lo;
        int64_t hi;
        fan_array_reach(a, &lo, &hi);
        if (!fan_flat_within(data, bytes, a->data + lo, (uint64_t)(hi - lo)))
            continue;
        run->signature->facts[i].written |= write;
        run->wrote |= write && operand->staged;
        return true;
    }
    for (size_t i = 0; i < used->n; i++) {
        const fan_graph_range *range = &used->at[i];
        if (fan_flat_within(data, bytes, run->tree->arena->data + range->lo, range->hi - range->lo))
            return true;
    }
    if (run->full[0])
        return true; /* this recording is launched once */
    check->foreign = name;
    return false;
}

static fan_status check_accesses(const fan_tree_scope *scope, const fan_tree_node *node,
                                 fan_error *err)
{
    const fan_recorder *recorder = scope->run->tree->recorder;
    access_check check = {.scope = scope, .node = node};
    if (recorder->accesses)
        recorder->accesses(node->recording, access_visit, &check);
    if (!check.foreign)
        return FAN_OK;
    return fan_fail(err, FAN_ERR_CAPTURE, FAN_TREE_FOREIGN, scope->run->function->name,
                    check.foreign);
}

/* ---- nodes ---- */

/* array_unheld: an array with the address and layout of another one, which it does not hold. */
static fan_status array_unheld(const fan_array *a, fan_array **out, fan_error *err)
{
    fan_storage *storage = fan_storage_wrap(a->storage->data, a->storage->bytes, NULL, NULL);
    if (!storage)
        return fan__tree_no_memory(err);
    fan_status status = fan__tree_view(storage, a, out, err);
    fan_storage_drop(storage);
    return status;
}

static fan_status node_new(const fan_tree_run *run, fan_tree_node **out, fan_error *err)
{
    size_t n = run->args->n;
    size_t of_one = sizeof(fan_tree_operand) + sizeof(fan_job) + sizeof(fan_operand);
    fan_tree_node *node = fan_calloc(sizeof *node + n * of_one);
    *out = node;
    if (!node)
        return fan__tree_no_memory(err);
    node->operands = (fan_tree_operand *)(node + 1);
    node->copies = (fan_job *)(node->operands + n);
    node->copy_in = (fan_operand *)(node->copies + n);
    node->signature = run->signature;
    node->parent = run->tree->current;
    node->n = n;
    if (n)
        memcpy(node->operands, run->operands, n * sizeof *node->operands);
    return FAN_OK;
}

/* scope_remove: the scope lists a block no more. */
static void scope_remove(fan_tree_scope *scope, const fan_tree_block *block)
{
    size_t i = 0;
    while (scope->blocks[i] != block)
        i++;
    scope->blocks[i] = scope->blocks[--scope->n];
}

/* node_outputs: moves the outputs and their blocks to the node; the scope keeps the other
 * blocks. */
static fan_status node_outputs(fan_tree_scope *scope, fan_tree_node *node, fan_array *const *given,
                               fan_error *err)
{
    fan_tree_run *run = scope->run;
    const fan_tree_result *result = run->result;
    node->outputs = fan_calloc(result->n * sizeof *node->outputs);
    if (!node->outputs ||
        fan_grow((void **)&node->blocks, &node->blocks_cap, result->n, sizeof *node->blocks))
        return fan__tree_no_memory(err);
    node->nout = result->n;
    for (size_t k = 0; k < result->n; k++) {
        fan_tree_output *output = &node->outputs[k];
        fan_array *array = result->at[k];
        output->operand = -1;
        if (!array)
            continue;
        int operand = fan__tree_operand_of(run, array, given);
        output->operand = operand;
        output->keep = fan__tree_keeps(run->function, k);
        if (operand >= 0) {
            if (array == given[operand])
                continue;
            run->signature->facts[operand].shown |=
                run->operands[operand].placement != FAN_PLACE_COPY;
            FAN_TRY(array_unheld(array, &output->array, err));
            continue;
        }
        fan_tree_block *block = fan__tree_block_of(run->tree, array);
        output->array = fan_array_hold(array);
        output->block = block;
        output->keep &= block != NULL; /* else it is outside of the arena, which was full */
        if (!block || block->node)
            continue;
        block->node = node;
        node->blocks[node->nblocks++] = block;
        scope_remove(scope, block);
    }
    return FAN_OK;
}

/* ---- run a body ---- */

static const char failed_words[] =
    "this was made by a function of a graph tree in a call that failed";

static fan_status run_body(fan_tree_scope *scope, fan_array *const *given, fan_error *err)
{
    fan_tree_run *run = scope->run;
    fan_stream *origin = run->tree->origin;
    const fan_tree_body *body = &run->args->body;
    if (origin)
        FAN_TRY(fan_stream_push(origin, err));
    fan_memory_scope_begin(&scope->memory);
    run->ran = true;
    fan_status status = body->run(body->ctx, given, run->result, err);
    fan_memory_scope_end(&scope->memory);
    if (origin)
        fan_stream_pop(origin);
    return status;
}

/* wait_scope: the tree's stream waits for all users of what the body allocated. */
static fan_status wait_scope(const fan_tree_scope *scope, fan_error *err)
{
    for (size_t i = 0; i < scope->n; i++)
        FAN_TRY(fan__tree_wait_users(scope->run->tree, scope->blocks[i], NULL, err));
    return FAN_OK;
}

/* call_undo: after a failure: the tree is as before the call. `saved`: the block table of then. */
static void call_undo(fan_tree_scope *scope, fan_tree_node *node, fan_graph_ranges *saved)
{
    fan_tree_run *run = scope->run;
    (void)fan__tree_leave(run, NULL); /* before any memory that was used is released */
    fan_tree_result_clear(run->result);
    if (!scope->memory.recording)
        (void)wait_scope(scope, NULL);
    fan__tree_node_free(node, failed_words);
    scope_fini(scope, false, failed_words);
    fan_graph_pool_swap(&run->tree->pool, saved);
    fan__tree_relist(run->tree);
}

/* ---- a warm-up ---- */

void fan__tree_report_few(const fan_tree_run *run)
{
    const fan_tree_signature *signature = run->signature;
    fan_tree_report *report = run->report;
    snprintf(report->reason, sizeof report->reason,
             "its recording has %zu kernel%s, fewer than min_kernels=%zu", signature->kernels,
             FAN_PLURAL(signature->kernels), run->function->min_kernels);
}

/* commit_warm: the path continues with a node that ends with it. A call that did not fit into the
 * arena is warmed up again, so it runs eagerly until it fits; so does one with too few kernels,
 * from now on. */
static void commit_warm(const fan_tree_run *run, fan_tree_node *node)
{
    fan_tree *tree = run->tree;
    fan_tree_report *report = run->report;
    node->warm = true;
    node->number = -1;
    tree->current = node;
    tree->path = FAN_TREE_WARMUP;
    run->signature->warm = !run->full[0];
    if (!run->full[0] && !run->signature->few) {
        tree->stats.warmed++;
        return;
    }
    tree->stats.eager++;
    report->outcome = FAN_TREE_EAGER;
    report->handed = true;
    if (!run->full[0]) {
        fan__tree_report_few(run);
        return;
    }
    run->signature->full++;
    snprintf(report->reason, sizeof report->reason, "%s", run->full);
}

/* check_few: whether a recording has too few kernels to be kept. */
static void check_few(const fan_tree_run *run, const fan_tree_node *node)
{
    fan_tree_signature *signature = run->signature;
    signature->kernels = run->tree->recorder->kernels(node->recording);
    signature->few = signature->kernels < run->function->min_kernels;
}

fan_status fan__tree_warm_up(fan_tree_run *run, fan_error *err)
{
    fan_tree_scope scope = scope_of(run);
    fan_graph_ranges saved;
    fan_array *const *given = run->args->in;
    fan_tree_node *node = NULL;
    fan_status status;
    FAN_TRY(fan__tree_check_overlap(run, err));
    FAN_TRY(fan_graph_pool_checkpoint(&run->tree->pool, &saved, err));
    FAN_GO(node_new(run, &node, err));
    FAN_GO(fan__tree_sweep(run, node, err));
    FAN_GO(fan__tree_enter(run, err));
    FAN_GO(run_body(&scope, given, err));
    FAN_GO(check_form(run, err));
    FAN_GO(check_own(run, given, err));
    FAN_GO(check_escape(&scope, node, err));
    FAN_GO(wait_scope(&scope, err));
    FAN_GO(node_outputs(&scope, node, given, err));
    run->signature->nout = node->nout;
    run->signature->form = run->result->form;
    FAN_GO(fan__tree_hand_out(run, node, err));
    FAN_GO(fan__tree_leave(run, err));
    commit_warm(run, node);
    scope_fini(&scope, true, NULL);
done:
    if (status != FAN_OK)
        call_undo(&scope, node, &saved);
    fan_graph_ranges_fini(&saved);
    return status;
}

/* ---- a recording ---- */

/* staged_strides: the strides of an operand's copy. It keeps the order of axes, signs, zero strides
 * and gaps, since a library chooses the order of its sums by these; gaps shrink to one element. If
 * axes interleave, or strides are no multiples of the element size, the strides are the operand's
 * own. false: no gaps, and all strides positive. */
static bool staged_strides(const fan_array *a, int64_t *strides)
{
    int order[FAN_MAX_NDIM];
    int64_t item = (int64_t)fan_dtype_size(a->dtype);
    int64_t span = item;
    bool odd = false;
    bool own = false;
    /* the axes, the widest stride first; of equal ones the first axis */
    for (int k = 0; k < a->ndim; k++) {
        int64_t width = llabs(a->strides[k]);
        int at = k;
        for (; at > 0; at--) {
            int before = order[at - 1];
            if (llabs(a->strides[before]) >= width)
                break;
            order[at] = before;
        }
        order[at] = k;
    }
    /* from the back: the smallest stride first; of equal ones the last axis */
    for (int i = a->ndim - 1; i >= 0; i--) {
        int k = order[i];
        int64_t step = llabs(a->strides[k]);
        strides[k] = 0;
        if (step)
            strides[k] = span;
        if (a->shape[k] < 2)
            continue;
        own |= step && (step < span || step % item);
        odd |= step != span || a->strides[k] < 0;
        if (step > span)
            strides[k] += item;
        if (step)
            span = strides[k] * a->shape[k];
        if (a->strides[k] < 0)
            strides[k] = -strides[k];
    }
    if (own)
        memcpy(strides, a->strides, (size_t)a->ndim * sizeof *strides);
    return odd && a->size > 0;
}

/* stage_one: memory for the copy of an operand. */
static fan_status stage_one(const fan_tree *tree, const fan_array *a, fan_array **out,
                            fan_error *err)
{
    int64_t strides[FAN_MAX_NDIM];
    int64_t lo = 0;
    int64_t bytes = (int64_t)fan_dtype_size(a->dtype);
    fan_array *flat;
    if (!staged_strides(a, strides)) {
        return fan_device_array(tree->device, tree->origin, a->dtype, a->ndim, a->shape, a, out,
                                err);
    }
    for (int k = 0; k < a->ndim; k++) {
        int64_t reach = strides[k] * (a->shape[k] - 1);
        bytes += llabs(reach);
        if (reach < 0)
            lo += reach;
    }
    FAN_TRY(
        fan_device_array(tree->device, tree->origin, FAN_DT_UINT8, 1, &bytes, NULL, &flat, err));
    fan_status status = fan_array_view(flat->storage, flat->data - lo, a->dtype, a->ndim, a->shape,
                                       strides, true, out, err);
    fan_array_drop(flat);
    return status;
}

/* stage_new: memory for all copied operands; given: the arguments of the body. */
static fan_status stage_new(fan_tree_scope *scope, fan_tree_node *node, fan_array **given,
                            fan_error *err)
{
    fan_status status = FAN_OK;
    fan_memory_scope_begin(&scope->memory);
    for (size_t i = 0; i < node->n && status == FAN_OK; i++) {
        fan_tree_operand *operand = &node->operands[i];
        given[i] = scope->run->args->in[i];
        if (operand->placement != FAN_PLACE_COPY)
            continue;
        status = stage_one(scope->run->tree, given[i], &operand->staged, err);
        given[i] = operand->staged;
    }
    fan_memory_scope_end(&scope->memory);
    return status;
}

/* capture: records the body into node->recording. */
static fan_status capture(fan_tree_scope *scope, fan_tree_node *node, fan_array *const *given,
                          fan_error *err)
{
    const fan_tree *tree = scope->run->tree;
    const fan_recorder *recorder = tree->recorder;
    FAN_TRY(recorder->begin(tree->device, tree->origin, err));
    scope->memory.recording = true;
    fan_status status = run_body(scope, given, err);
    if (status != FAN_OK) {
        recorder->abort(tree->device, tree->origin);
        return status;
    }
    fan_error why = {0};
    status = recorder->end(tree->device, tree->origin, &node->recording, &why);
    if (status == FAN_ERR_CAPTURE) {
        return fan_fail_code(err, status, why.code, "%s cannot be recorded: %s",
                             scope->run->function->name, why.text);
    }
    if (err)
        *err = why;
    return status;
}

/* place_reserve: the place of the signature after the current node, with room for one more. */
static fan_status place_reserve(const fan_tree_run *run, fan_tree_children **out, fan_error *err)
{
    fan_tree_node *at = run->tree->current;
    fan_tree_children *place = fan__tree_place(at, run->signature);
    if (!place) {
        if (fan_grow((void **)&at->places, &at->places_cap, at->nplaces + 1, sizeof *at->places))
            return fan__tree_no_memory(err);
        place = &at->places[at->nplaces++];
        *place = (fan_tree_children){.signature = run->signature};
    }
    if (fan_grow((void **)&place->children, &place->cap, place->n + 1, sizeof *place->children))
        return fan__tree_no_memory(err);
    *out = place;
    return FAN_OK;
}

static void commit_recording(const fan_tree_run *run, fan_tree_node *node, fan_tree_children *place)
{
    fan_tree *tree = run->tree;
    place->children[place->n++] = node;
    run->function->recordings++;
    node->next = tree->nodes;
    tree->nodes = node;
    tree->numbers++;
    tree->stats.nodes++;
    tree->stats.recorded++;
    tree->current = node;
    tree->path = FAN_TREE_RECORDING;
    place->alive += run->plan.why == FAN_TREE_FIT_ALIVE;
    place->moved += run->plan.count;
    run->signature->full = 0;
    run->report->node = node->number;
}

fan_status fan__tree_record(fan_tree_run *run, fan_error *err)
{
    fan_tree *tree = run->tree;
    fan_tree_scope scope = scope_of(run);
    fan_graph_ranges saved;
    fan_tree_node *node = NULL;
    fan_tree_children *place = NULL;
    fan_status status;
    uint64_t reach = tree->reach;
    FAN_TRY(fan__tree_check_overlap(run, err));
    FAN_TRY(fan_graph_pool_checkpoint(&tree->pool, &saved, err));
    fan_array **given = fan_calloc(run->args->n * sizeof *given);
    if (!given)
        FAN_GO(fan__tree_no_memory(err));
    FAN_GO(place_reserve(run, &place, err));
    FAN_GO(node_new(run, &node, err));
    FAN_GO(fan__tree_sweep(run, node, err));
    tree->reach = 0;
    FAN_GO(stage_new(&scope, node, given, err));
    FAN_GO(fan__tree_enter(run, err));
    FAN_GO(capture(&scope, node, given, err));
    FAN_GO(check_form(run, err));
    FAN_GO(check_accesses(&scope, node, err));
    if (run->wrote)
        goto done;
    FAN_GO(fan__tree_check_overlap(run, err)); /* again: now the written operands are known */
    FAN_GO(check_own(run, given, err));
    FAN_GO(check_escape(&scope, node, err));
    FAN_GO(node_outputs(&scope, node, given, err));
    node->used = scope.used;
    scope.used = (fan_graph_ranges){0};
    scope_fini(&scope, true, NULL);
    FAN_GO(fan_graph_pool_checkpoint(&tree->pool, &node->block_table, err));
    node->reaches = tree->reach;
    node->number = tree->numbers;
    FAN_GO(fan__tree_carry_out(run, node, err));
    FAN_GO(fan__tree_leave(run, err));
    if (FAN_FAULT(TREE_FULL_REPLAYED))
        run->full[0] = '\0';
    if (!run->full[0])
        check_few(run, node);
    if (run->full[0] || run->signature->few)
        commit_warm(run, node);
    else
        commit_recording(run, node, place);
done:
    if (reach > tree->reach)
        tree->reach = reach;
    if (status != FAN_OK || run->wrote)
        call_undo(&scope, node, &saved);
    while (scope.noutside > 0)
        fan_storage_drop(scope.outside[--scope.noutside]);
    fan_free(scope.outside);
    fan_graph_ranges_fini(&saved);
    fan_free(given);
    return status;
}
