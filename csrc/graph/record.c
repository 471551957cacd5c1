/* Warm-ups and recordings: a function's body runs and allocates from the arena. */
#include "graph/internal.h"

#include "array/overlap.h"
#include "base/fault.h"
#include "base/mem.h"
#include "device/job.h"

#include <stdlib.h>
#include <string.h>

/* ---- the memory of a body ---- */

/* A call's own blocks, while its body runs. */
typedef struct fan_tree_scope {
    fan_memory_scope scope; /* first */
    fan_tree *tree;
    const char *call_site;
    fan_tree_block **blocks;
    size_t n, cap;
    fan_graph_ranges used; /* all that it ever allocated */
    /* why some memory came from the device: the arena is full; "": none did */
    char full[256];
    /* While recording: memory from the device, held until the launch, which is the first time that
     * the work runs. */
    fan_storage **outside;
    size_t noutside, outside_cap;
} fan_tree_scope;

/* block_new: new memory of the arena, listed, which `owner` uses first; it holds its storage. */
static fan_status block_new(fan_tree *t, fan_stream *owner, size_t bytes, const char *call_site,
                            fan_tree_block **out, fan_error *err)
{
    fan_tree_block *b = fan_calloc(sizeof *b);
    if (!b)
        return fan__tree_no_memory(err);
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

static fan_status scope_alloc(fan_memory_scope *scope, fan_stream *owner, size_t bytes,
                              fan_storage **out, fan_error *err)
{
    fan_tree_scope *s = (fan_tree_scope *)scope;
    fan_tree_block *b = NULL;
    size_t n = 0;
    /* Frees dead blocks that only `owner` used: its queue orders that use before the next. Without
     * streams any. */
    for (size_t i = 0; i < s->n; i++) {
        b = s->blocks[i];
        if ((!owner && s->tree->origin) || fan__tree_block_lives(b) ||
            !fan_memory_used_by(b->storage, owner)) {
            s->blocks[n++] = b;
            continue;
        }
        (void)fan_graph_pool_free(&s->tree->pool, b->offset);
        fan__tree_block_free(b, NULL);
    }
    s->n = n;
    if (fan_grow((void **)&s->blocks, &s->cap, s->n + 1, sizeof(fan_tree_block *)) ||
        fan_grow((void **)&s->used.at, &s->used.cap, s->used.n + 1, sizeof *s->used.at))
        return fan__tree_no_memory(err);
    fan_error why = {0};
    fan_status status = block_new(s->tree, owner, bytes, s->call_site, &b, &why);
    if (status == FAN_ERR_DEVICE_NOMEM) {
        s->full[0] = '\0';
        fan_append(s->full, sizeof s->full,
                   "%s; delete outputs, end the step, or give the tree more (memory=)", why.text);
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

/* While recording, memory that the body frees would be reused before the launch writes into it, so
 * it is held. On a device it is reclaimed after the tree's stream, which runs the launch. */
static fan_status scope_outside(fan_memory_scope *scope, fan_storage *made, fan_error *err)
{
    fan_tree_scope *s = (fan_tree_scope *)scope;
    if (!scope->recording || FAN_FAULT(TREE_OUTSIDE_FREED))
        return FAN_OK;
    if (fan_grow((void **)&s->outside, &s->outside_cap, s->noutside + 1, sizeof *s->outside))
        return fan__tree_no_memory(err);
    if (s->tree->origin)
        FAN_TRY(fan_memory_record_stream(made, s->tree->origin, err));
    s->outside[s->noutside++] = fan_storage_hold(made);
    return FAN_OK;
}

/* scope_fini: frees the remaining blocks; `listed`: in the block table, too. */
static void scope_fini(fan_tree_scope *s, bool listed, const char *why)
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

/* ---- check the result of a body ---- */

static fan_status check_form(const fan_tree_run *r, fan_error *err)
{
    const fan_tree_signature *k = r->signature;
    size_t nkeep = r->function->nkeep;
    if (nkeep && nkeep != SIZE_MAX && nkeep != r->result->n)
        return fan_fail(
            err, FAN_ERR_VALUE,
            "%s returned %zu output%s, but keep= has %zu: give one for each, or one bool for all",
            r->function->name, r->result->n, FAN_PLURAL(r->result->n), nkeep);
    if (!k->warm || (k->nout == r->result->n && k->form == r->result->form))
        return FAN_OK;
    return fan_fail(
        err, FAN_ERR_VALUE,
        "%s returned %zu output%s, and %zu before with operands of the same dtypes and shapes: a "
        "replay always returns the same number; pass what it depends on as key=",
        r->function->name, r->result->n, FAN_PLURAL(r->result->n), k->nout);
}

/* operand_of: the operand whose memory an output is in; -1: none. */
static int operand_of(const fan_tree_run *r, const fan_array *a, fan_array *const *given)
{
    for (size_t i = 0; i < r->args->n; i++)
        if (given[i] && given[i]->storage == a->storage)
            return (int)i;
    return -1;
}

/* check_own: is_full: some memory came from the device, so an output may lie outside of the
 * arena. */
static fan_status check_own(const fan_tree_run *r, fan_array *const *given, bool is_full,
                            fan_error *err)
{
    for (size_t i = 0; i < r->result->n; i++) {
        const fan_array *a = r->result->at[i];
        const fan_tree_block *b = a ? fan__tree_block_of(r->tree, a) : NULL;
        int operand = a ? operand_of(r, a, given) : -1;
        if (!a || (operand < 0 && (b ? !b->node : is_full)))
            continue;
        if (operand < 0)
            return fan_fail(err, FAN_ERR_VALUE,
                            "%s: output %zu is not its own: the function did not allocate it in "
                            "this call, and it is no operand; pass the array as an operand",
                            r->function->name, i);
        if (r->operands[operand].placement == FAN_PLACE_COPY &&
            !fan_array_same_view(a, given[operand]))
            return fan_fail(err, FAN_ERR_VALUE,
                            "%s: output %zu is a view of operand %d, which is copied: return a "
                            "copy, or give the operand the role static",
                            r->function->name, i, operand);
    }
    return FAN_OK;
}

/* escaped: a block with other references that is no output of the body; NULL: none. */
static const fan_tree_block *escaped(const fan_tree_run *r, const fan_tree_scope *s,
                                     const fan_tree_node *n)
{
    for (size_t i = 0; i < s->n; i++) {
        const fan_tree_block *b = s->blocks[i];
        bool given = false;
        /* a staged operand: referenced by the scope and the node alone */
        for (size_t k = 0; k < n->n; k++) {
            const fan_array *a = n->operands[k].staged;
            given |= a && a->storage == b->storage && atomic_load(&a->refs) == 1 &&
                     atomic_load(&b->storage->refs) == 2;
        }
        for (size_t k = 0; k < r->result->n; k++)
            given |= r->result->at[k] && r->result->at[k]->storage == b->storage;
        if (!given && fan__tree_block_lives(b))
            return b;
    }
    return NULL;
}

static fan_status check_escape(const fan_tree_run *r, const fan_tree_scope *s,
                               const fan_tree_node *n, fan_error *err)
{
    const fan_tree_block *b = escaped(r, s, n);
    if (b && r->args->body.collect) {
        r->args->body.collect(r->args->body.ctx);
        b = escaped(r, s, n);
    }
    return b && !FAN_FAULT(TREE_ADOPTED)
               ? fan_fail(
                     err, FAN_ERR_STATE,
                     "%s: a reference keeps %llu byte%s that the function allocated and did not "
                     "return, or the copy of an operand that it was given, and the next replay "
                     "overwrites them: return the array, or add into an operand with the role "
                     "accumulate (a leaf without a gradient keeps the array: pass its gradient)",
                     r->function->name, (unsigned long long)b->bytes, FAN_PLURAL(b->bytes))
               : FAN_OK;
}

/* ---- check what a recording reads and writes ---- */

typedef struct access_check {
    fan_tree_run *r;
    const fan_tree_scope *scope;
    fan_tree_operand *operands;
    const char *foreign; /* the operation that uses other memory; NULL: none */
} access_check;

static bool access_visit(void *ctx, const char *name, const void *data, size_t bytes, bool write)
{
    access_check *c = ctx;
    const fan_tree_run *r = c->r;
    for (size_t i = 0; i < r->args->n; i++) {
        const fan_tree_operand *o = &c->operands[i];
        const fan_array *a = o->placement == FAN_PLACE_COPY ? o->staged : r->args->in[i];
        int64_t lo = 0, hi = 0;
        if (a)
            fan_array_reach(a, &lo, &hi);
        if (!a || !fan_flat_within(data, bytes, a->data + lo, (uint64_t)(hi - lo)))
            continue;
        r->signature->written[i] |= write;
        c->r->wrote |= write && o->placement == FAN_PLACE_COPY;
        return true;
    }
    const fan_array *arena = r->tree->arena;
    for (size_t i = 0; i < c->scope->used.n; i++)
        if (fan_flat_within(data, bytes, arena->data + c->scope->used.at[i].lo,
                            c->scope->used.at[i].hi - c->scope->used.at[i].lo))
            return true;
    if (c->scope->full[0])
        return true; /* this recording is launched once */
    c->foreign = name;
    return false;
}

/* ---- nodes ---- */

/* geometry: an array with the address and layout of another one, which it does not hold. */
static fan_status geometry(const fan_array *a, fan_array **out, fan_error *err)
{
    fan_storage *st = fan_storage_wrap(a->storage->data, a->storage->bytes, NULL, NULL);
    if (!st)
        return fan__tree_no_memory(err);
    fan_status status =
        fan_array_view(st, a->data, a->dtype, a->ndim, a->shape, a->strides, a->writable, out, err);
    fan_storage_drop(st);
    return status;
}

static fan_status node_new(const fan_tree_run *r, fan_tree_node **out, fan_error *err)
{
    fan_tree_node *n = fan_calloc(sizeof *n);
    size_t room = r->args->n + 1;
    *out = n;
    if (!n || !(n->operands = fan_calloc(room * sizeof *n->operands)) ||
        !(n->copied = fan_alloc(room * sizeof *n->copied)) ||
        !(n->copies = fan_calloc(room * sizeof *n->copies)) ||
        !(n->copy_in = fan_calloc(room * sizeof *n->copy_in)))
        return fan__tree_no_memory(err);
    n->signature = r->signature;
    n->parent = r->tree->current;
    n->n = r->args->n;
    memcpy(n->operands, r->operands, n->n * sizeof *n->operands);
    for (size_t i = 0; i < n->n; i++)
        if (n->operands[i].placement == FAN_PLACE_COPY)
            n->copied[n->ncopied++] = i;
    return FAN_OK;
}

/* node_outputs: moves the outputs and their blocks to the node; the scope keeps the other
 * blocks. */
static fan_status node_outputs(fan_tree_run *r, fan_tree_node *n, fan_tree_scope *s,
                               fan_array *const *given, fan_error *err)
{
    fan_tree_result *res = r->result;
    n->outputs = fan_calloc((res->n + 1) * sizeof *n->outputs);
    if (!n->outputs ||
        fan_grow((void **)&n->blocks, &n->blocks_cap, res->n + 1, sizeof(fan_tree_block *)))
        return fan__tree_no_memory(err);
    for (; n->nout < res->n; n->nout++) {
        fan_tree_output *o = &n->outputs[n->nout];
        fan_array *a = res->at[n->nout];
        fan_tree_block *b = a ? fan__tree_block_of(r->tree, a) : NULL;
        o->operand = -1;
        o->keep = fan__tree_keeps(r->function, n->nout);
        if (!a)
            continue;
        if (operand_of(r, a, given) >= 0) {
            o->operand = operand_of(r, a, given);
            if (a == given[o->operand])
                continue;
            r->signature->shown[o->operand] |= r->operands[o->operand].placement != FAN_PLACE_COPY;
            FAN_TRY(geometry(a, &o->array, err));
            continue;
        }
        o->block = b;
        o->array = fan_array_hold(a);
        if (!b || b->node)
            continue;
        b->node = n;
        n->blocks[n->nblocks++] = b;
        for (size_t i = 0; i < s->n; i++)
            if (s->blocks[i] == b)
                s->blocks[i] = s->blocks[--s->n];
    }
    return FAN_OK;
}

/* ---- run a body ---- */

static fan_status run_body(fan_tree_run *r, fan_tree_scope *s, fan_array *const *given,
                           fan_error *err)
{
    fan_tree *t = r->tree;
    if (t->origin)
        FAN_TRY(fan_stream_push(t->origin, err));
    fan_memory_scope_begin(&s->scope);
    r->ran = true;
    fan_status status = r->args->body.run(r->args->body.ctx, given, r->result, err);
    fan_memory_scope_end(&s->scope);
    if (t->origin)
        fan_stream_pop(t->origin);
    return status;
}

static fan_tree_scope scope_of(const fan_tree_run *r, bool recording)
{
    return (fan_tree_scope){.scope = {.device = r->tree->device,
                                      .alloc = scope_alloc,
                                      .outside = scope_outside,
                                      .who = r->function->name,
                                      .recording = recording},
                            .tree = r->tree,
                            .call_site = r->args->call_site};
}

static const char failed_words[] =
    "this was made by a function of a graph tree in a call that failed";

/* wait_scope: the tree's stream waits for all users of what the body allocated. */
static fan_status wait_scope(const fan_tree_run *r, const fan_tree_scope *s, fan_error *err)
{
    for (size_t i = 0; i < s->n; i++)
        FAN_TRY(fan_memory_wait_users(s->blocks[i]->storage, r->tree->origin, NULL, err));
    return FAN_OK;
}

/* undo: after a failure: the tree is as before the call. `saved`: the block table of then; NULL: it
 * has not changed. */
static void undo(fan_tree_run *r, fan_tree_node *n, fan_tree_scope *s, fan_graph_ranges *saved)
{
    (void)fan__tree_leave(r, NULL); /* before any memory that was used is released */
    fan_tree_result_clear(r->result);
    if (!s->scope.recording)
        (void)wait_scope(r, s, NULL);
    fan__tree_node_free(n, failed_words);
    scope_fini(s, false, failed_words);
    if (saved) {
        fan_graph_pool_swap(&r->tree->pool, saved);
        fan__tree_relist(r->tree);
    }
}

/* commit_warm: the path continues with a node that ends with it. A call that did not fit into the
 * arena is warmed up again, so it runs eagerly until it fits. */
static void commit_warm(fan_tree_run *r, fan_tree_node *n, const fan_tree_scope *s)
{
    fan_tree *t = r->tree;
    n->warm = true;
    n->number = -1;
    t->current = n;
    r->signature->warm = !s->full[0];
    t->path = FAN_TREE_WARMUP;
    memcpy(r->full, s->full, sizeof r->full);
}

fan_status fan__tree_warm_up(fan_tree_run *r, fan_error *err)
{
    fan_tree *t = r->tree;
    fan_tree_scope s = scope_of(r, false);
    fan_graph_ranges saved = {0};
    bool is_saved = false;
    fan_tree_node *n = NULL;
    fan_status status;
    FAN_TRY(fan__tree_check_overlap(r, err));
    FAN_GO(fan_graph_pool_checkpoint(&t->pool, &saved, err));
    is_saved = true;
    FAN_GO(node_new(r, &n, err));
    FAN_GO(fan__tree_sweep(t, r->restore, false, r->caller, NULL, err));
    FAN_GO(fan__tree_enter(r, err));
    FAN_GO(run_body(r, &s, r->args->in, err));
    FAN_GO(check_form(r, err));
    FAN_GO(check_own(r, r->args->in, s.full[0], err));
    FAN_GO(check_escape(r, &s, n, err));
    FAN_GO(wait_scope(r, &s, err));
    FAN_GO(node_outputs(r, n, &s, r->args->in, err));
    r->signature->nout = r->result->n;
    r->signature->form = r->result->form;
    FAN_GO(fan__tree_hand_out(r, n, err));
    FAN_GO(fan__tree_leave(r, err));
    commit_warm(r, n, &s);
    scope_fini(&s, true, NULL);
done:
    if (status != FAN_OK)
        undo(r, n, &s, is_saved ? &saved : NULL);
    fan_graph_ranges_fini(&saved);
    return status;
}

/* staged_strides: the strides of an operand's copy. It keeps the order of axes, signs, zero strides
 * and gaps, since a library chooses the order of its sums by these; gaps shrink to one element. If
 * axes interleave, or strides are no multiples of the element size, the strides are the operand's
 * own. false: no gaps, and all strides positive. */
static bool staged_strides(const fan_array *a, int64_t *strides)
{
    int order[FAN_MAX_NDIM];
    int64_t item = (int64_t)fan_dtype_size(a->dtype), span = item;
    bool odd = false, own = false;
    for (int k = 0; k < a->ndim; k++) {
        int at = k;
        for (; at > 0 && llabs(a->strides[order[at - 1]]) < llabs(a->strides[k]); at--)
            order[at] = order[at - 1];
        order[at] = k;
    }
    /* the smallest stride first; of equal ones the last axis */
    for (int i = a->ndim - 1; i >= 0; i--) {
        int k = order[i];
        int64_t step = llabs(a->strides[k]);
        strides[k] = step ? span : 0;
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
static fan_status stage_one(const fan_tree_run *r, const fan_array *a, fan_array **out,
                            fan_error *err)
{
    fan_tree *t = r->tree;
    int64_t strides[FAN_MAX_NDIM], lo = 0, bytes = (int64_t)fan_dtype_size(a->dtype);
    fan_array *flat;
    if (!staged_strides(a, strides))
        return fan_device_array(t->device, t->origin, a->dtype, a->ndim, a->shape, a, out, err);
    for (int k = 0; k < a->ndim; k++) {
        int64_t reach = strides[k] * (a->shape[k] - 1);
        bytes += llabs(reach);
        lo += reach < 0 ? reach : 0;
    }
    FAN_TRY(fan_device_array(t->device, t->origin, FAN_DT_UINT8, 1, &bytes, NULL, &flat, err));
    fan_status status = fan_array_view(flat->storage, flat->data - lo, a->dtype, a->ndim, a->shape,
                                       strides, true, out, err);
    fan_array_drop(flat);
    return status;
}

/* stage_new: memory for all copied operands; given: the arguments of the body. */
static fan_status stage_new(const fan_tree_run *r, fan_tree_node *n, fan_tree_scope *s,
                            fan_array **given, fan_error *err)
{
    fan_status status = FAN_OK;
    fan_memory_scope_begin(&s->scope);
    for (size_t i = 0; i < n->n && status == FAN_OK; i++) {
        fan_array *a = r->args->in[i];
        given[i] = a;
        if (n->operands[i].placement != FAN_PLACE_COPY)
            continue;
        status = stage_one(r, a, &n->operands[i].staged, err);
        given[i] = n->operands[i].staged;
    }
    fan_memory_scope_end(&s->scope);
    return status;
}

/* capture: records the body into n->recording. */
static fan_status capture(fan_tree_run *r, fan_tree_node *n, fan_tree_scope *s,
                          fan_array *const *given, fan_error *err)
{
    fan_tree *t = r->tree;
    FAN_TRY(t->recorder->begin(t->device, t->origin, err));
    s->scope.recording = true;
    fan_status status = run_body(r, s, given, err);
    if (status != FAN_OK) {
        t->recorder->abort(t->device, t->origin);
        return status;
    }
    fan_error why = {0};
    status = t->recorder->end(t->device, t->origin, &n->recording, &why);
    return status == FAN_ERR_CAPTURE
               ? fan_fail_code(err, status, why.code, "%s cannot be recorded: %s",
                               r->function->name, why.text)
               : (err ? (void)(*err = why) : (void)0, status);
}

fan_status fan__tree_record(fan_tree_run *r, fan_tree_node **out, fan_error *err)
{
    fan_tree *t = r->tree;
    fan_tree_scope s = scope_of(r, false);
    fan_graph_ranges saved = {0};
    bool is_saved = false;
    fan_tree_node *n = NULL;
    fan_tree_children *place = NULL;
    uint64_t reach = t->reach;
    fan_array **given = fan_calloc((r->args->n + 1) * sizeof(fan_array *));
    fan_status status = given ? FAN_OK : fan__tree_no_memory(err);
    *out = NULL;
    if (status != FAN_OK)
        return status;
    FAN_GO(fan__tree_check_overlap(r, err));
    FAN_GO(fan_graph_pool_checkpoint(&t->pool, &saved, err));
    is_saved = true;
    place = fan__tree_place(t->current, r->signature);
    if (!place) {
        fan_tree_node *at = t->current;
        if (fan_grow((void **)&at->places, &at->places_cap, at->nplaces + 1, sizeof *at->places))
            FAN_GO(fan__tree_no_memory(err));
        place = &at->places[at->nplaces++];
        *place = (fan_tree_children){.signature = r->signature};
    }
    if (fan_grow((void **)&place->children, &place->cap, place->n + 1, sizeof(fan_tree_node *)))
        FAN_GO(fan__tree_no_memory(err));
    FAN_GO(node_new(r, &n, err));
    FAN_GO(fan__tree_sweep(t, r->restore, r->keep_dead, r->caller, n, err));
    t->reach = 0;
    FAN_GO(stage_new(r, n, &s, given, err));
    FAN_GO(fan__tree_enter(r, err));
    FAN_GO(capture(r, n, &s, given, err));
    FAN_GO(check_form(r, err));
    access_check c = {.r = r, .scope = &s, .operands = n->operands};
    if (t->recorder->accesses)
        t->recorder->accesses(n->recording, access_visit, &c);
    if (c.foreign)
        FAN_GO(fan_fail(err, FAN_ERR_CAPTURE, FAN_TREE_FOREIGN, r->function->name, c.foreign));
    if (r->wrote)
        goto done;
    FAN_GO(fan__tree_check_overlap(r, err)); /* again: now the written operands are known */
    FAN_GO(check_own(r, given, s.full[0], err));
    FAN_GO(check_escape(r, &s, n, err));
    FAN_GO(node_outputs(r, n, &s, given, err));
    n->used = s.used;
    s.used = (fan_graph_ranges){0};
    scope_fini(&s, true, NULL);
    FAN_GO(fan_graph_pool_checkpoint(&t->pool, &n->block_table, err));
    n->reaches = t->reach;
    FAN_GO(fan__tree_stage(r, n, err));
    FAN_GO(fan__tree_launch(t, n, t->numbers, err));
    r->signature->nout = r->result->n;
    r->signature->form = r->result->form;
    FAN_GO(fan__tree_hand_out(r, n, err));
    FAN_GO(fan__tree_leave(r, err));
    if (s.full[0] && !FAN_FAULT(TREE_FULL_REPLAYED))
        commit_warm(r, n, &s);
    else {
        place->children[place->n++] = n;
        n->signature->function->recordings++;
        n->next = t->nodes;
        t->nodes = n;
        n->number = t->numbers++;
        t->stats.nodes++;
        t->current = n;
        t->path = FAN_TREE_RECORDING;
    }
    *out = n;
done:
    t->reach = reach > t->reach ? reach : t->reach;
    if (!*out)
        undo(r, n, &s, is_saved ? &saved : NULL);
    while (s.noutside > 0)
        fan_storage_drop(s.outside[--s.noutside]);
    fan_free(s.outside);
    fan_graph_ranges_fini(&saved);
    fan_free(given);
    return status;
}
