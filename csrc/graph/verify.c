/* A replay beside the eager function (GraphTree's verify=).
 *
 * Title: In place. The function runs first, on the caller's own operands, since its closure may
 * reference one of them. Its outputs and what it wrote into the operands are read to the host; the
 * operands are restored from copies; the recording is replayed; both are compared byte by byte. If
 * they differ, the operands are restored once more, so that the failing call has changed nothing,
 * and the recording is verified again next time.
 *
 * The function runs as in an eager call: outside of the arena, on the caller's stream. The replay
 * follows on the
 * tree's. */
#include "graph/internal.h"

#include "base/fault.h"
#include "base/mem.h"
#include "device/event.h"
#include "device/job.h"

#include <stdio.h>
#include <string.h>

typedef struct verify_state {
    size_t n;
    /* held; a copy of each writable operand, on the device; NULL: not writable */
    fan_array **before;
    fan_array **after;    /* held; .. its values after the function ran, on the host */
    fan_array **gave;     /* held; each output, on the host; NULL: None */
    fan_tree_result made; /* the function's outputs, dropped once they were read */
    size_t ngave;
} verify_state;

static void arrays_free(fan_array **arrays, size_t n)
{
    for (size_t i = 0; arrays && i < n; i++)
        fan_array_drop(arrays[i]);
    fan_free(arrays);
}

static fan_status copy_on(const fan_tree_run *r, const fan_array *from, const fan_array *to,
                          fan_error *err)
{
    fan_operand in = {.array = from, .acc = from->dtype};
    fan_job job = {.kind = FAN_JOB_COPY, .out = to, .in = &in, .n = 1, .label = "verify"};
    return from->size ? fan_device_run(r->tree->device, r->caller, &job, err) : FAN_OK;
}

/* read_host: an array's values in C order; waits for the caller's stream. */
static fan_status read_host(const fan_tree_run *r, const fan_array *a, fan_array **out,
                            fan_error *err)
{
    FAN_TRY(fan_array_new(a->dtype, a->ndim, a->shape, NULL, out, err));
    return a->size ? r->tree->device->backend->read(r->caller, *out, a, err) : FAN_OK;
}

static fan_status put_back_operands(const fan_tree_run *r, const verify_state *v, fan_error *err)
{
    fan_status status = FAN_OK;
    for (size_t i = 0; i < v->n && !FAN_FAULT(TREE_VERIFY_TWICE); i++)
        if (v->before[i]) {
            fan_status one =
                copy_on(r, v->before[i], r->args->in[i], status == FAN_OK ? err : NULL);
            status = status == FAN_OK ? one : status;
        }
    return status;
}

/* read_function: its outputs, and the operands that it may have written. */
static fan_status read_function(const fan_tree_run *r, verify_state *v, fan_error *err)
{
    v->gave = fan_calloc((v->made.n + 1) * sizeof *v->gave);
    if (!v->gave)
        return fan__tree_no_memory(err);
    for (v->ngave = 0; v->ngave < v->made.n; v->ngave++)
        if (v->made.at[v->ngave]) {
            fan_status status = read_host(r, v->made.at[v->ngave], &v->gave[v->ngave], err);
            if (status != FAN_OK) {
                v->ngave++;
                return status;
            }
        }
    for (size_t i = 0; i < v->n; i++)
        if (v->before[i])
            FAN_TRY(read_host(r, r->args->in[i], &v->after[i], err));
    return FAN_OK;
}

/* ---- compare ---- */

/* differ: writes into `why` how an array differs from the function's ("": not at all). `what`: its
 * name. */
static fan_status differ(const fan_tree_run *r, const fan_array *is, const fan_array *was,
                         const char *what, char why[256], fan_error *err)
{
    fan_array *here = NULL;
    char one[128], two[128];
    why[0] = '\0';
    if (is->dtype != was->dtype || is->ndim != was->ndim ||
        (is->ndim && memcmp(is->shape, was->shape, (size_t)is->ndim * sizeof *is->shape) != 0)) {
        snprintf(why, 256, "%s is %s %s now, and was %s %s when it was recorded", what,
                 fan_shape_text(was->ndim, was->shape, one, sizeof one), fan_dtype_name(was->dtype),
                 fan_shape_text(is->ndim, is->shape, two, sizeof two), fan_dtype_name(is->dtype));
        return FAN_OK;
    }
    size_t size = fan_dtype_size(is->dtype);
    long long count = 0, first = -1;
    fan_status status = read_host(r, is, &here, err);
    for (int64_t k = 0; status == FAN_OK && k < is->size; k++)
        if (memcmp(here->data + (size_t)k * size, was->data + (size_t)k * size, size) != 0) {
            first = count++ ? first : k;
        }
    if (count)
        snprintf(why, 256, "%s differs in %lld of %lld element%s, the first is element %lld", what,
                 count, (long long)is->size, FAN_PLURAL((size_t)is->size), first);
    fan_array_drop(here);
    return status;
}

/* compare: writes into `why` the first array that differs; "": none. */
static fan_status compare(const fan_tree_run *r, const verify_state *v, char why[256],
                          fan_error *err)
{
    static const char *const roles[] = {"auto", "copy", "static", "accumulate"};
    const fan_tree_result *is = r->result;
    char what[64];
    why[0] = '\0';
    if (is->n != v->ngave)
        snprintf(why, 256, "it returns %zu output%s now, and returned %zu when it was recorded",
                 v->ngave, FAN_PLURAL(v->ngave), is->n);
    for (size_t k = 0; !why[0] && k < is->n; k++) {
        snprintf(what, sizeof what, "output %zu", k);
        if (!is->at[k] != !v->gave[k])
            snprintf(why, 256, "%s is %s now, and was %s when it was recorded", what,
                     v->gave[k] ? "an array" : "None", is->at[k] ? "an array" : "None");
        else if (is->at[k])
            FAN_TRY(differ(r, is->at[k], v->gave[k], what, why, err));
    }
    for (size_t i = 0; !why[0] && i < v->n; i++)
        if (v->before[i]) {
            snprintf(what, sizeof what, "operand %zu (%s)", i,
                     roles[r->function->roles[r->function->nroles ? i : 0]]);
            FAN_TRY(differ(r, r->args->in[i], v->after[i], what, why, err));
        }
    return FAN_OK;
}

static fan_status fail_different(const fan_tree_run *r, const fan_tree_node *n, const char *why,
                                 fan_error *err)
{
    const fan_tree_body *body = &r->args->body;
    char cause[512] = "";
    if (body->cause)
        body->cause(body->ctx, n->number, cause, sizeof cause);
    return fan_fail(
        err, FAN_ERR_CAPTURE,
        "%s: the function as it is gives something else than the replay of recording %d: %s. %s: "
        "pass it as an operand, an array where it changes often, or as key=",
        r->function->name, n->number, why,
        cause[0] ? cause
                 : "The result depends on something that is no operand (a number, a branch, a "
                   "counter, random numbers)");
}

fan_status fan__tree_verify(fan_tree_run *r, fan_tree_node *n, fan_error *err)
{
    size_t room = r->args->n + 1;
    verify_state v = {.n = r->args->n,
                      .before = fan_calloc(room * sizeof *v.before),
                      .after = fan_calloc(room * sizeof *v.after)};
    fan_stream *origin = r->tree->origin;
    char why[256];
    fan_status status, back;
    FAN_GO(v.before && v.after ? FAN_OK : fan__tree_no_memory(err));
    /* The function runs eagerly, on the caller's operands, which are then restored. */
    /* the tree's stream may still write what the function reads */
    if (origin && r->caller != origin)
        FAN_GO(fan_stream_follow(r->caller, origin, err));
    for (size_t i = 0; i < v.n; i++) {
        const fan_array *a = r->args->in[i];
        if (!a || !a->writable)
            continue;
        FAN_GO(fan_device_array(r->tree->device, r->caller, a->dtype, a->ndim, a->shape, a,
                                &v.before[i], err));
        FAN_GO(copy_on(r, a, v.before[i], err));
    }
    status = r->args->body.run(r->args->body.ctx, r->args->in, &v.made, err);
    if (status == FAN_OK)
        status = read_function(r, &v, err);
    fan_tree_result_clear(&v.made);
    back = put_back_operands(r, &v, status == FAN_OK ? err : NULL);
    r->entered = false; /* the replay must wait for all this */
    FAN_GO(status == FAN_OK ? back : status);
    FAN_GO(fan__tree_replay(r, n, err));
    status = compare(r, &v, why, err);
    if (status == FAN_OK && !why[0]) {
        n->verified++;
        goto done;
    }
    back = put_back_operands(r, &v, status == FAN_OK ? err : NULL);
    if (status == FAN_OK)
        status = back == FAN_OK ? fail_different(r, n, why, err) : back;
done:
    arrays_free(v.before, v.n);
    arrays_free(v.after, v.n);
    arrays_free(v.gave, v.ngave);
    fan_free(v.made.at); /* empty: they were dropped */
    return status;
}
