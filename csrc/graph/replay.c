/* A replay, and what every call does around a function.
 *
 * Sections: operands that overlap; the order of the caller's stream and the tree's; staging, which
 * copies operands into the arena; the launch; the results, which are handed out; and the replay
 * itself, fan__tree_replay. */
#include "graph/internal.h"

#include "array/overlap.h"
#include "base/fault.h"
#include "base/mem.h"
#include "base/trace.h"
#include "device/event.h"
#include "device/job.h"

#include <stdio.h>
#include <string.h>

/* ---- overlap ---- */

/* check_pair: operand i is added into, or written in place; k is another. */
static fan_status check_pair(const fan_tree_run *run, size_t i, size_t k, fan_error *err)
{
    fan_array *const *in = run->args->in;
    const char *name = run->function->name;
    bool added = run->operands[i].placement == FAN_PLACE_ADD;
    if (!added && run->operands[k].placement != FAN_PLACE_COPY)
        return FAN_OK;
    if (k == i || !in[k] || fan_array_disjoint(in[i], in[k]))
        return FAN_OK;
    if (added) {
        return fan_fail(err, FAN_ERR_VALUE,
                        "%s: operands %zu and %zu share memory, and operand %zu is added into "
                        "(accumulate): pass a copy of operand %zu",
                        name, i, k, i, k);
    }
    return fan_fail(err, FAN_ERR_VALUE,
                    "%s: operands %zu and %zu share memory; the function writes into operand %zu, "
                    "but operand %zu is a copy made before it runs: give operand %zu the role "
                    "static, or pass a copy of it",
                    name, i, k, i, k, k);
}

/* is_written: whether operand i is added into, or written in place. */
static bool is_written(const fan_tree_run *run, size_t i)
{
    fan_tree_placement placement = run->operands[i].placement;
    if (placement == FAN_PLACE_ADD)
        return true;
    return placement > FAN_PLACE_COPY && run->signature->facts[i].written;
}

fan_status fan__tree_check_overlap(const fan_tree_run *run, fan_error *err)
{
    for (size_t i = 0; i < run->args->n; i++) {
        for (size_t k = 0; k < run->args->n && is_written(run, i); k++)
            FAN_TRY(check_pair(run, i, k, err));
    }
    return FAN_OK;
}

/* check_moved: as fan__tree_check_overlap for a recording that was checked before: only copied
 * operands can have moved since. */
static fan_status check_moved(const fan_tree_run *run, fan_tree_node *node, fan_error *err)
{
    for (size_t k = 0; k < node->n; k++) {
        fan_tree_operand *operand = &node->operands[k];
        if (!operand->staged || operand->checked == run->args->in[k]->data)
            continue;
        for (size_t i = 0; i < node->n; i++) {
            if (is_written(run, i))
                FAN_TRY(check_pair(run, i, k, err));
        }
        operand->checked = run->args->in[k]->data;
    }
    return FAN_OK;
}

/* ---- streams ---- */

fan_status fan__tree_enter(fan_tree_run *run, fan_error *err)
{
    fan_stream *origin = run->tree->origin;
    if (!origin || run->caller == origin)
        return FAN_OK;
    if (run->entered || FAN_FAULT(TREE_NO_JOIN))
        return FAN_OK;
    FAN_TRY(fan_stream_follow(origin, run->caller, err)); /* neither stream is captured */
    run->entered = true;
    return FAN_OK;
}

/* use_on: records a stream as a user of the operands and outputs. */
static fan_status use_on(const fan_tree_run *run, fan_stream *stream, fan_error *err)
{
    const fan_tree_result *result = run->result;
    FAN_TRY(fan_memory_record_stream_all(run->args->in, run->args->n, stream, err));
    return fan_memory_record_stream_all(result->at, result->n, stream, err);
}

/* caller_follows: the caller's stream waits for the tree's. A body may have started a capture of
 * the caller's stream: then an event carries the order, which checks it. */
static fan_status caller_follows(const fan_tree_run *run, fan_error *err)
{
    fan_stream *origin = run->tree->origin;
    if (run->caller == origin)
        return FAN_OK;
    if (!run->ran)
        return fan_stream_follow(run->caller, origin, err);
    fan_event *event = NULL;
    FAN_TRY(fan_event_record(origin, &event, err));
    fan_status status = fan_stream_wait(run->caller, event, NULL, err);
    fan_event_drop(event);
    return status;
}

/* The caller's stream waits for the tree's, and it, not the tree's, is recorded as a user of the
 * memory: freeing memory records events on its users, on any thread, and another call may be
 * capturing the tree's stream just then. */
fan_status fan__tree_leave(const fan_tree_run *run, fan_error *err)
{
    fan_stream *origin = run->tree->origin;
    if (!origin)
        return FAN_OK; /* without streams the work is done */
    fan_status status = caller_follows(run, err);
    if (status == FAN_OK)
        status = use_on(run, run->caller, err);
    if (status != FAN_OK)
        (void)use_on(run, origin, NULL);
    return status;
}

/* ---- staging ---- */

fan_status fan__tree_copy(const fan_tree *tree, fan_stream *stream, const fan_array *from,
                          const fan_array *to, const char *label, fan_error *err)
{
    fan_operand in = {.array = from, .acc = from->dtype};
    fan_job job = {
        .kind = FAN_JOB_COPY,
        .out = to,
        .in = &in,
        .n = 1,
        .label = label,
    };
    return fan_device_run(tree->device, stream, &job, err);
}

/* array_repeats: whether an array has more elements than its memory has room for, as broadcast ones
 * and windows. */
static bool array_repeats(const fan_array *a)
{
    int64_t lo;
    int64_t hi;
    fan_array_reach(a, &lo, &hi);
    return a->size > 1 && (hi - lo) / (int64_t)fan_dtype_size(a->dtype) < a->size;
}

/* view_once: a view of an array that repeats itself, without the repetitions: of axes with a stride
 * of 0 one element, or, where the repetitions have another form, the bytes. `like`: the array that
 * decides. */
static fan_status view_once(const fan_array *a, const fan_array *like, fan_array **out,
                            fan_error *err)
{
    int64_t shape[FAN_MAX_NDIM];
    int64_t lo;
    int64_t hi;
    int64_t step = 1;
    int64_t count = 1;
    for (int k = 0; k < like->ndim; k++) {
        shape[k] = 1;
        if (like->strides[k])
            shape[k] = like->shape[k];
        count *= shape[k];
    }
    fan_array_reach(like, &lo, &hi);
    int64_t bytes = hi - lo;
    if (bytes / (int64_t)fan_dtype_size(like->dtype) < count) {
        return fan_array_view(a->storage, a->data + lo, FAN_DT_UINT8, 1, &bytes, &step, a->writable,
                              out, err);
    }
    return fan_array_view(a->storage, a->data, a->dtype, a->ndim, shape, a->strides, a->writable,
                          out, err);
}

/* stage_once: copies an operand that repeats itself. Its copy has the same strides where
 * view_once() takes the bytes. */
static fan_status stage_once(const fan_tree_run *run, const fan_array *a, const fan_array *staged,
                             fan_error *err)
{
    fan_array *from = NULL;
    fan_array *to = NULL;
    fan_status status;
    FAN_GO(view_once(a, a, &from, err));
    FAN_GO(view_once(staged, a, &to, err));
    FAN_GO(fan__tree_copy(run->tree, run->tree->origin, from, to, "stage", err));
done:
    fan_array_drop(from);
    fan_array_drop(to);
    return status;
}

/* stage_batch: queues at most FAN_STAGE_MANY copies, in one launch where the backend has one. */
static fan_status stage_batch(const fan_tree *tree, fan_job *copies, size_t n, fan_error *err)
{
    fan_device *device = tree->device;
    fan_job_state states[FAN_STAGE_MANY];
    bool batched = n > 1 && device->backend->run_many;
    for (size_t k = 0; k < n; k++) {
        states[k] = FAN_JOB_PENDING;
        copies[k].kind = batched ? FAN_JOB_SUM : FAN_JOB_COPY; /* a sum of one: the same bits */
    }
    if (batched)
        FAN_TRY(device->backend->run_many(device, tree->origin, copies, n, states, err));
    for (size_t k = 0; k < n; k++) {
        if (states[k] == FAN_JOB_PENDING)
            FAN_TRY(fan_device_run(device, tree->origin, &copies[k], err));
    }
    return FAN_OK;
}

/* stage: copies operands into the arena. */
static fan_status stage(const fan_tree_run *run, fan_tree_node *node, fan_error *err)
{
    size_t count = 0;
    for (size_t i = 0; i < node->n; i++) {
        const fan_array *a = run->args->in[i];
        const fan_array *staged = node->operands[i].staged;
        if (!staged)
            continue;
        if (array_repeats(a)) {
            FAN_TRY(stage_once(run, a, staged, err));
            continue;
        }
        fan_operand *in = &node->copy_in[count];
        *in = (fan_operand){.array = a, .acc = a->dtype};
        node->copies[count++] = (fan_job){
            .out = staged,
            .in = in,
            .n = 1,
            .label = "stage",
        };
    }
    for (size_t i = 0; i < count; i += FAN_STAGE_MANY) {
        size_t left = count - i;
        size_t n = FAN_STAGE_MANY;
        if (left < FAN_STAGE_MANY)
            n = left;
        FAN_TRY(stage_batch(run->tree, node->copies + i, n, err));
    }
    return FAN_OK;
}

/* ---- the launch ---- */

static double device_time(const fan_tree *tree)
{
    if (!tree->recorder->clock)
        return -1;
    return tree->recorder->clock(tree->device, tree->origin);
}

/* launch: replays the node's recording, with a line in the traces. */
static fan_status launch(const fan_tree *tree, const fan_tree_node *node, fan_error *err)
{
    bool traced = atomic_load_explicit(&fan_traces, memory_order_relaxed) && fan_trace_on();
    if (!traced)
        return tree->recorder->launch(node->recording, tree->origin, err);
    fan_trace_line line = {.kind = FAN_TRACE_KERNEL,
                           .device = (int16_t)tree->device->index,
                           .slot = -1,
                           .key = -1,
                           .start_us = device_time(tree)};
    if (tree->origin)
        line.stream = tree->origin->handle;
    FAN_TRY(tree->recorder->launch(node->recording, tree->origin, err));
    line.end_us = device_time(tree);
    for (size_t i = 0; i < node->nblocks; i++)
        line.bytes += node->blocks[i]->bytes;
    snprintf(line.label, sizeof line.label, "replay of %.80s, recording %d",
             node->signature->function->name, node->number);
    fan_trace_put(&line);
    return FAN_OK;
}

/* ---- the results ---- */

void fan_tree_result_clear(fan_tree_result *result)
{
    while (result->n > 0)
        fan_array_drop(result->at[--result->n]);
}

void fan_tree_result_fini(fan_tree_result *result)
{
    fan_tree_result_clear(result);
    fan_free(result->at);
    *result = (fan_tree_result){0};
}

/* keep_copy: a copy of an output in its own memory, made on `stream`. */
static fan_status keep_copy(const fan_tree_run *run, fan_stream *stream, const fan_array *a,
                            fan_array **out, fan_error *err)
{
    fan_tree *tree = run->tree;
    FAN_TRY(fan_device_array(tree->device, run->caller, a->dtype, a->ndim, a->shape, a, out, err));
    fan_status status = fan__tree_copy(tree, stream, a, *out, "keep", err);
    if (status != FAN_OK) {
        fan_array_drop(*out);
        *out = NULL;
    }
    return status;
}

fan_status fan_tree_copied(fan_tree *tree, fan_array *a, fan_array **out, fan_error *err)
{
    *out = NULL;
    FAN_TRY(fan_storage_check(a->storage, err));
    if (!fan_tree_memory_under(a)) {
        *out = fan_array_hold(a);
        return FAN_OK;
    }
    if (fan__tree_is_mine(tree)) {
        return fan_fail(err, FAN_ERR_STATE,
                        "an output of a graph tree cannot be copied while one of its functions "
                        "runs: end the step outside of functions");
    }
    fan_stream *caller = fan_stream_current(tree->device);
    uint64_t capture = 0;
    fan_status status = FAN_OK;
    if (caller)
        FAN_GO(fan_stream_capture(caller, &capture, err));
    else if (tree->device->backend->has_streams)
        FAN_GO(fan_fail(err, FAN_ERR_NOMEM, "out of memory for a stream"));
    if (capture) {
        FAN_GO(fan_fail(err, FAN_ERR_CAPTURE,
                        "an output of a graph tree cannot be copied while the current stream is "
                        "captured: end the step before the capture begins"));
    }
    fan_tree_run run = {.tree = tree, .caller = caller};
    FAN_GO(keep_copy(&run, caller, a, out, err));
    if (caller)
        status = fan_memory_record_stream_all(&a, 1, caller, err);
done:
    if (status != FAN_OK) {
        fan_array_drop(*out);
        *out = NULL;
    }
    fan_stream_drop(caller);
    return status;
}

fan_status fan__tree_keep_operands(const fan_tree_run *run, fan_error *err)
{
    const fan_tree_result *result = run->result;
    for (size_t k = 0; k < result->n; k++) {
        fan_array *made;
        fan_array *output = result->at[k];
        if (!output || !fan__tree_keeps(run->function, k))
            continue;
        if (fan__tree_operand_of(run, output, run->args->in) < 0)
            continue;
        FAN_TRY(keep_copy(run, run->caller, output, &made, err));
        fan_array_drop(output);
        result->at[k] = made;
    }
    return FAN_OK;
}

/* view_operand: an output that is an operand, or a view of one, of this call. */
static fan_status view_operand(const fan_tree_run *run, const fan_tree_output *output,
                               fan_array **out, fan_error *err)
{
    fan_array *in = run->args->in[output->operand];
    const fan_array *like = output->array;
    if (!like) {
        *out = fan_array_hold(in);
        return FAN_OK;
    }
    /* check_own allows no other view of a copy */
    if (run->operands[output->operand].placement == FAN_PLACE_COPY)
        like = in;
    return fan__tree_view(in->storage, like, out, err);
}

/* output_of: a hold on one output; NULL: None. */
static fan_status output_of(const fan_tree_run *run, const fan_tree_output *output, fan_array **out,
                            fan_error *err)
{
    *out = NULL;
    if (output->operand >= 0)
        FAN_TRY(view_operand(run, output, out, err));
    else if (output->array)
        *out = fan_array_hold(output->array);
    if (!output->keep || !*out)
        return FAN_OK;
    fan_array *ours = *out;
    fan_status status = keep_copy(run, run->tree->origin, ours, out, err);
    fan_array_drop(ours);
    return status;
}

fan_status fan__tree_hand_out(fan_tree_run *run, fan_tree_node *node, fan_error *err)
{
    fan_tree_result *result = run->result;
    if (fan_grow((void **)&result->at, &result->cap, node->nout, sizeof *result->at))
        return fan__tree_no_memory(err);
    fan_tree_result_clear(result);
    result->form = node->signature->form;
    for (size_t i = 0; i < node->nblocks; i++)
        memcpy(node->blocks[i]->lease->made, run->call_site, sizeof run->call_site);
    for (; result->n < node->nout; result->n++)
        FAN_TRY(output_of(run, &node->outputs[result->n], &result->at[result->n], err));
    return FAN_OK;
}

/* ---- the replay ---- */

/* block_renew: a block whose storage ended with references to it gets a new one, and its outputs
 * new arrays. */
static fan_status block_renew(fan_tree_run *run, fan_tree_node *node, fan_tree_block *block,
                              fan_error *err)
{
    if (block->storage)
        return FAN_OK;
    FAN_TRY(fan__tree_block_lend(run->tree, block, run->tree->origin, run->args->call_site, err));
    for (size_t i = 0; i < node->nout; i++) {
        fan_tree_output *output = &node->outputs[i];
        fan_array *made;
        if (output->block != block)
            continue;
        fan_status status = fan__tree_view(block->storage, output->array, &made, err);
        if (status != FAN_OK) {
            fan__tree_block_leave(block);
            return status;
        }
        fan_array_drop(output->array);
        output->array = made;
    }
    return FAN_OK;
}

fan_status fan__tree_carry_out(fan_tree_run *run, fan_tree_node *node, fan_error *err)
{
    FAN_TRY(fan__tree_enter(run, err));
    FAN_TRY(stage(run, node, err));
    FAN_TRY(launch(run->tree, node, err));
    return fan__tree_hand_out(run, node, err);
}

fan_status fan__tree_replay(fan_tree_run *run, fan_tree_node *node, fan_error *err)
{
    fan_tree *tree = run->tree;
    FAN_TRY(check_moved(run, node, err));
    for (size_t i = 0; i < node->ndead; i++)
        FAN_TRY(fan__tree_wait_users(tree, node->dead[i], run->caller, err));
    /* The storages are valid again; those that ended with references are replaced: no other thread
     * reads `ended` of these. */
    for (size_t i = 0; i < node->nblocks; i++) {
        fan_tree_block *block = node->blocks[i];
        FAN_TRY(block_renew(run, node, block, err));
        atomic_store_explicit(&block->storage->ended, NULL, memory_order_relaxed);
    }
    fan_status status = fan__tree_carry_out(run, node, err);
    node->replays++;
    if (status != FAN_OK) {
        (void)fan__tree_leave(run, NULL); /* some work may be queued */
        return status;
    }
    FAN_TRY(fan__tree_leave(run, err));
    if (node->reaches > tree->reach)
        tree->reach = node->reaches;
    return FAN_OK;
}
