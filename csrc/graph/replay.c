/* A replay, and what every call does around a function: overlap checks, stream order, staging,
 * handing out. */
#include "graph/internal.h"

#include "array/overlap.h"
#include "base/fault.h"
#include "base/mem.h"
#include "base/trace.h"
#include "device/event.h"
#include "device/job.h"

#include <stdio.h>
#include <string.h>

/* check_pair: operand i is added into, or written in place; k is another. */
static fan_status check_pair(const fan_tree_run *r, size_t i, size_t k, fan_error *err)
{
    fan_array *const *in = r->args->in;
    bool added = r->operands[i].placement == FAN_PLACE_ADD;
    if (k == i || !in[k] || (!added && r->operands[k].placement != FAN_PLACE_COPY) ||
        fan_array_disjoint(in[i], in[k]))
        return FAN_OK;
    if (added)
        return fan_fail(err, FAN_ERR_VALUE,
                        "%s: operands %zu and %zu share memory, and operand %zu is added into "
                        "(accumulate): pass a copy of operand %zu",
                        r->function->name, i, k, i, k);
    return fan_fail(
        err, FAN_ERR_VALUE,
        "%s: operands %zu and %zu share memory; the function writes into operand %zu, but operand "
        "%zu is a copy made before it runs: give operand %zu the role static, or pass a copy of it",
        r->function->name, i, k, i, k, k);
}

/* is_written: whether operand i is added into, or written in place. */
static bool is_written(const fan_tree_run *r, size_t i)
{
    fan_tree_placement placement = r->operands[i].placement;
    return placement == FAN_PLACE_ADD || (placement > FAN_PLACE_COPY && r->signature->written[i]);
}

fan_status fan__tree_check_overlap(const fan_tree_run *r, fan_error *err)
{
    for (size_t i = 0; i < r->args->n; i++)
        for (size_t k = 0; k < r->args->n && is_written(r, i); k++)
            FAN_TRY(check_pair(r, i, k, err));
    return FAN_OK;
}

fan_status fan__tree_enter(fan_tree_run *r, fan_error *err)
{
    fan_tree *t = r->tree;
    if (r->entered || FAN_FAULT(TREE_NO_JOIN) || !t->origin || r->caller == t->origin)
        return FAN_OK;
    FAN_TRY(fan_stream_follow(t->origin, r->caller, err)); /* neither stream is captured */
    r->entered = true;
    return FAN_OK;
}

/* use_on: records s as a user of the operands and outputs. */
static fan_status use_on(const fan_tree_run *r, fan_stream *s, fan_error *err)
{
    FAN_TRY(fan_memory_record_stream_all(r->args->in, r->args->n, s, err));
    return fan_memory_record_stream_all(r->result->at, r->result->n, s, err);
}

static fan_status follow(fan_stream *s, fan_stream *other, fan_error *err)
{
    fan_event *e = NULL;
    if (!s || !other || s == other)
        return FAN_OK;
    FAN_TRY(fan_event_record(other, &e, err));
    fan_status status = fan_stream_wait(s, e, NULL, err);
    fan_event_drop(e);
    return status;
}

/* The caller's stream waits for the tree's, and it, not the tree's, is recorded as a user of the
 * memory: freeing memory records events on its users, on any thread, and another call may be
 * capturing the tree's stream just then. */
fan_status fan__tree_leave(const fan_tree_run *r, fan_error *err)
{
    fan_stream *origin = r->tree->origin;
    if (!origin)
        return FAN_OK; /* without streams the work is done */
    /* a body may have started a capture of the caller's stream */
    bool known = !r->ran && r->caller != origin;
    fan_status status =
        known ? fan_stream_follow(r->caller, origin, err) : follow(r->caller, origin, err);
    if (status == FAN_OK)
        status = use_on(r, r->caller, err);
    if (status != FAN_OK)
        (void)use_on(r, r->tree->origin, NULL);
    return status;
}

/* repeats: whether an array has more elements than its memory has room for, as broadcast ones and
 * windows. */
static bool repeats(const fan_array *a)
{
    int64_t lo, hi;
    fan_array_reach(a, &lo, &hi);
    return a->size > 1 && (hi - lo) / (int64_t)fan_dtype_size(a->dtype) < a->size;
}

/* once: a view of an array that repeats itself, without the repetitions: of axes with a stride of 0
 * one element, or, where the repetitions have another form, the bytes. `like`: the array that
 * decides. */
static fan_status once(const fan_array *a, const fan_array *like, fan_array **out, fan_error *err)
{
    int64_t shape[FAN_MAX_NDIM], lo, hi, step = 1;
    int64_t count = 1;
    for (int k = 0; k < like->ndim; k++) {
        shape[k] = like->strides[k] ? like->shape[k] : 1;
        count *= shape[k];
    }
    fan_array_reach(like, &lo, &hi);
    bool by_bytes = (hi - lo) / (int64_t)fan_dtype_size(like->dtype) < count;
    if (!by_bytes)
        return fan_array_view(a->storage, a->data, a->dtype, a->ndim, shape, a->strides,
                              a->writable, out, err);
    int64_t bytes = hi - lo;
    return fan_array_view(a->storage, a->data + lo, FAN_DT_UINT8, 1, &bytes, &step, a->writable,
                          out, err);
}

/* stage_once: copies an operand that repeats itself. Its copy has the same strides where once()
 * takes the bytes. */
static fan_status stage_once(const fan_tree_run *r, const fan_array *a, const fan_array *staged,
                             fan_error *err)
{
    fan_array *from = NULL, *to = NULL;
    fan_status status = once(a, a, &from, err);
    if (status == FAN_OK)
        status = once(staged, a, &to, err);
    if (status == FAN_OK) {
        fan_operand in = {.array = from, .acc = from->dtype};
        fan_job job = {.kind = FAN_JOB_COPY, .out = to, .in = &in, .n = 1, .label = "stage"};
        status = fan_device_run(r->tree->device, r->tree->origin, &job, err);
    }
    fan_array_drop(from);
    fan_array_drop(to);
    return status;
}

fan_status fan__tree_stage(const fan_tree_run *r, fan_tree_node *n, fan_error *err)
{
    size_t count = 0;
    for (size_t c = 0; c < n->ncopied; c++) {
        size_t i = n->copied[c];
        const fan_array *a = r->args->in[i];
        if (repeats(a)) {
            FAN_TRY(stage_once(r, a, n->operands[i].staged, err));
            continue;
        }
        n->copy_in[count] = (fan_operand){.array = a, .acc = a->dtype};
        n->copies[count] = (fan_job){.kind = FAN_JOB_COPY,
                                     .out = n->operands[i].staged,
                                     .in = &n->copy_in[count],
                                     .n = 1,
                                     .label = "stage"};
        count++;
    }
    for (size_t i = 0; i < count; i += FAN_STAGE_MANY) {
        size_t some = count - i < FAN_STAGE_MANY ? count - i : FAN_STAGE_MANY;
        fan_job *copies = n->copies + i;
        const fan_backend *b = r->tree->device->backend;
        fan_job_state states[FAN_STAGE_MANY];
        bool batched = some > 1 && b->run_many != NULL;
        for (size_t k = 0; k < some; k++) {
            states[k] = FAN_JOB_PENDING;
            copies[k].kind = batched ? FAN_JOB_SUM : FAN_JOB_COPY; /* a sum of one: the same bits */
        }
        if (batched)
            FAN_TRY(b->run_many(r->tree->device, r->tree->origin, copies, some, states, err));
        for (size_t k = 0; k < some; k++)
            if (states[k] == FAN_JOB_PENDING)
                FAN_TRY(fan_device_run(r->tree->device, r->tree->origin, &copies[k], err));
    }
    return FAN_OK;
}

void fan_tree_result_clear(fan_tree_result *r)
{
    while (r->n > 0)
        fan_array_drop(r->at[--r->n]);
}

void fan_tree_result_fini(fan_tree_result *r)
{
    fan_tree_result_clear(r);
    fan_free(r->at);
    *r = (fan_tree_result){0};
}

fan_status fan__tree_launch(const fan_tree *t, const fan_tree_node *n, int number, fan_error *err)
{
    const fan_recorder *r = t->recorder;
    bool traced = atomic_load_explicit(&fan_traces, memory_order_relaxed) && fan_trace_on();
    bool timed = traced && r->clock;
    double start = timed ? r->clock(t->device, t->origin) : -1;
    FAN_TRY(r->launch(n->recording, t->origin, err));
    if (!traced)
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
    snprintf(line.label, sizeof line.label, "replay of %.80s, recording %d",
             n->signature->function->name, number);
    fan_trace_put(&line);
    return FAN_OK;
}

/* view_on: a view like `like` on another storage over the same memory. */
static fan_status view_on(fan_storage *st, const fan_array *like, char *data, fan_array **out,
                          fan_error *err)
{
    return fan_array_view(st, data, like->dtype, like->ndim, like->shape, like->strides,
                          like->writable, out, err);
}

/* renew: a block whose storage ended with references to it gets a new one, and its outputs new
 * arrays. */
static fan_status renew(fan_tree_run *r, fan_tree_node *n, fan_tree_block *b, fan_error *err)
{
    if (b->storage)
        return FAN_OK;
    FAN_TRY(fan__tree_block_lend(r->tree, b, r->tree->origin, r->args->call_site, err));
    for (size_t i = 0; i < n->nout; i++) {
        fan_tree_output *o = &n->outputs[i];
        fan_array *made;
        if (o->block != b)
            continue;
        fan_status status = view_on(b->storage, o->array, o->array->data, &made, err);
        if (status != FAN_OK) {
            b->lease->block = NULL;
            fan_storage_drop(b->storage);
            b->storage = NULL;
            return status;
        }
        fan_array_drop(o->array);
        o->array = made;
    }
    return FAN_OK;
}

/* keep_copy: a copy of an output in its own memory, made on `s`. */
static fan_status keep_copy(const fan_tree_run *r, fan_stream *s, const fan_array *a,
                            fan_array **out, fan_error *err)
{
    fan_tree *t = r->tree;
    fan_operand in = {.array = a};
    FAN_TRY(fan_device_array(t->device, r->caller, a->dtype, a->ndim, a->shape, a, out, err));
    fan_job job = {.kind = FAN_JOB_COPY, .out = *out, .in = &in, .n = 1, .label = "keep"};
    fan_status status = fan_device_run(t->device, s, &job, err);
    if (status != FAN_OK) {
        fan_array_drop(*out);
        *out = NULL;
    }
    return status;
}

fan_status fan__tree_keep_operands(const fan_tree_run *r, fan_error *err)
{
    fan_tree_result *res = r->result;
    for (size_t k = 0; k < res->n; k++)
        for (size_t i = 0; i < r->args->n && fan__tree_keeps(r->function, k) && res->at[k]; i++) {
            fan_array *a = res->at[k], *made;
            if (!r->args->in[i] || r->args->in[i]->storage != a->storage)
                continue;
            FAN_TRY(keep_copy(r, r->caller, a, &made, err));
            fan_array_drop(a);
            res->at[k] = made;
            break;
        }
    return FAN_OK;
}

/* output_of: a hold on one output. */
static fan_status output_of(const fan_tree_run *r, const fan_tree_output *o, fan_array **out,
                            fan_error *err)
{
    fan_array *a;
    *out = NULL;
    if (!o->block && o->operand < 0) {
        /* outside of the arena, which was full */
        *out = o->array ? fan_array_hold(o->array) : NULL;
        return FAN_OK;
    }
    if (o->block)
        a = fan_array_hold(o->array);
    else if (!o->array) /* the operand itself */
        a = fan_array_hold(r->args->in[o->operand]);
    else {
        const fan_array *in = r->args->in[o->operand];
        /* check_own allows no other view of a copy */
        bool whole = r->operands[o->operand].placement == FAN_PLACE_COPY;
        const fan_array *like = whole ? in : o->array;
        FAN_TRY(view_on(in->storage, like, like->data, &a, err));
    }
    if (!o->keep) {
        *out = a;
        return FAN_OK;
    }
    fan_status status = keep_copy(r, r->tree->origin, a, out, err);
    fan_array_drop(a);
    return status;
}

fan_status fan__tree_hand_out(fan_tree_run *r, fan_tree_node *n, fan_error *err)
{
    fan_tree_result *out = r->result;
    if (fan_grow((void **)&out->at, &out->cap, n->nout, sizeof(fan_array *)))
        return fan__tree_no_memory(err);
    fan_tree_result_clear(out);
    out->form = n->signature->form;
    for (size_t i = 0; i < n->nblocks; i++)
        if (n->blocks[i]->lease)
            memcpy(n->blocks[i]->lease->made, r->call_site, sizeof n->blocks[i]->lease->made);
    for (; out->n < n->nout; out->n++)
        FAN_TRY(output_of(r, &n->outputs[out->n], &out->at[out->n], err));
    return FAN_OK;
}

fan_status fan__tree_replay(fan_tree_run *r, fan_tree_node *n, fan_error *err)
{
    fan_tree *t = r->tree;
    /* Only copied operands can have moved since the last check. */
    for (size_t c = 0; c < n->ncopied; c++) {
        size_t k = n->copied[c];
        const fan_array *a = r->args->in[k];
        if (n->operands[k].checked == a->data)
            continue;
        for (size_t i = 0; i < n->n; i++)
            if (is_written(r, i))
                FAN_TRY(check_pair(r, i, k, err));
        n->operands[k].checked = a->data;
    }
    for (size_t i = 0; i < n->ndead && t->origin; i++)
        if (n->dead[i]->storage)
            FAN_TRY(fan_memory_wait_users(n->dead[i]->storage, t->origin, r->caller, err));
    /* The storages are valid again; those that ended with references are replaced: no other thread
     * reads `ended` of these. */
    for (size_t i = 0; i < n->nblocks; i++) {
        FAN_TRY(renew(r, n, n->blocks[i], err));
        atomic_store_explicit(&n->blocks[i]->storage->ended, NULL, memory_order_relaxed);
    }
    fan_status status = fan__tree_enter(r, err);
    if (status == FAN_OK)
        status = fan__tree_stage(r, n, err);
    if (status == FAN_OK)
        status = fan__tree_launch(t, n, n->number, err);
    if (status == FAN_OK)
        status = fan__tree_hand_out(r, n, err);
    /* also on failure: some work may be queued */
    fan_status left = fan__tree_leave(r, status == FAN_OK ? err : NULL);
    if (status == FAN_OK)
        status = left;
    if (status == FAN_OK && n->reaches > t->reach)
        t->reach = n->reaches;
    n->replays++;
    return status;
}
