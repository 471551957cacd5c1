/* A replay beside the eager function (GraphTree's verify=).
 *
 * Title: In place. The function runs first, on the caller's own operands, since its closure may
 * reference one of them. Its outputs and what it wrote into the operands are read to the host; the
 * operands are restored from copies; the recording is replayed; both are compared byte by byte. If
 * they differ, the operands are restored once more, so that the failing call has changed nothing,
 * and the recording is verified again next time.
 *
 * The function runs as in an eager call: outside of the arena, on the caller's stream. The replay
 * follows on the tree's.
 *
 * Sections: run the function, compare; fan__tree_verify, at the end, calls both. */
#include "graph/internal.h"

#include "base/fault.h"
#include "base/mem.h"
#include "device/event.h"
#include "device/job.h"

#include <stdio.h>
#include <string.h>

typedef struct verify_state {
    fan_tree_run *run;
    size_t n; /* operands */
    /* held; a copy of each writable operand, on the device; NULL: not writable */
    fan_array **before;
    fan_array **after;    /* held; .. its values after the function ran, on the host */
    fan_array **gave;     /* held; each output, on the host; NULL: None */
    fan_tree_result made; /* the function's outputs, dropped once they were read */
    size_t ngave;
    char why[256]; /* the first difference; "": none */
} verify_state;

static void arrays_free(fan_array **arrays, size_t n)
{
    for (size_t i = 0; arrays && i < n; i++)
        fan_array_drop(arrays[i]);
    fan_free(arrays);
}

static fan_status copy_on(const fan_tree_run *run, const fan_array *from, const fan_array *to,
                          fan_error *err)
{
    if (!from->size)
        return FAN_OK;
    return fan__tree_copy(run->tree, run->caller, from, to, "verify", err);
}

/* read_host: an array's values in C order; waits for the caller's stream. */
static fan_status read_host(const fan_tree_run *run, const fan_array *from, fan_array **out,
                            fan_error *err)
{
    FAN_TRY(fan_array_new(from->dtype, from->ndim, from->shape, NULL, out, err));
    if (!from->size)
        return FAN_OK;
    return run->tree->device->backend->read(run->caller, *out, from, err);
}

/* ---- run the function ---- */

/* put_back_operands: restores all that it can; the first failure is returned. */
static fan_status put_back_operands(const verify_state *v, fan_error *err)
{
    fan_status status = FAN_OK;
    for (size_t i = 0; i < v->n && !FAN_FAULT(TREE_VERIFY_TWICE); i++) {
        if (!v->before[i])
            continue;
        fan_status copied = copy_on(v->run, v->before[i], v->run->args->in[i], err);
        if (status != FAN_OK || copied == FAN_OK)
            continue;
        status = copied;
        err = NULL;
    }
    return status;
}

/* read_function: its outputs, and the operands that it may have written. */
static fan_status read_function(verify_state *v, fan_error *err)
{
    const fan_tree_result *made = &v->made;
    v->gave = fan_calloc(made->n * sizeof *v->gave);
    if (!v->gave)
        return fan__tree_no_memory(err);
    v->ngave = made->n;
    for (size_t i = 0; i < made->n; i++) {
        if (made->at[i])
            FAN_TRY(read_host(v->run, made->at[i], &v->gave[i], err));
    }
    for (size_t i = 0; i < v->n; i++) {
        if (v->before[i])
            FAN_TRY(read_host(v->run, v->run->args->in[i], &v->after[i], err));
    }
    return FAN_OK;
}

/* run_function: eagerly, on the caller's operands, which are then restored. */
static fan_status run_function(verify_state *v, fan_error *err)
{
    fan_tree_run *run = v->run;
    fan_tree *tree = run->tree;
    const fan_tree_body *body = &run->args->body;
    /* the tree's stream may still write what the function reads */
    if (tree->origin && run->caller != tree->origin)
        FAN_TRY(fan_stream_follow(run->caller, tree->origin, err));
    for (size_t i = 0; i < v->n; i++) {
        const fan_array *a = run->args->in[i];
        if (!a || !a->writable)
            continue;
        FAN_TRY(fan_device_array(tree->device, run->caller, a->dtype, a->ndim, a->shape, a,
                                 &v->before[i], err));
        FAN_TRY(copy_on(run, a, v->before[i], err));
    }
    fan_status status = body->run(body->ctx, run->args->in, &v->made, err);
    if (status == FAN_OK)
        status = read_function(v, err);
    fan_tree_result_clear(&v->made);
    if (status == FAN_OK)
        return put_back_operands(v, err);
    (void)put_back_operands(v, NULL);
    return status;
}

/* ---- compare ---- */

/* differ: writes into v->why how an array differs from the function's. `name`: the array's. */
static fan_status differ(verify_state *v, const fan_array *is, const fan_array *was,
                         const char *name, fan_error *err)
{
    if (is->dtype != was->dtype || !fan_array_same_shape(is, was)) {
        char shape_was[128];
        char shape_is[128];
        snprintf(v->why, sizeof v->why, "%s is %s %s now, and was %s %s when it was recorded", name,
                 fan_shape_text(was->ndim, was->shape, shape_was, sizeof shape_was),
                 fan_dtype_name(was->dtype),
                 fan_shape_text(is->ndim, is->shape, shape_is, sizeof shape_is),
                 fan_dtype_name(is->dtype));
        return FAN_OK;
    }
    fan_array *here = NULL;
    size_t size = fan_dtype_size(is->dtype);
    size_t elements = (size_t)is->size;
    size_t count = 0;
    size_t first = 0;
    fan_status status = read_host(v->run, is, &here, err);
    for (size_t k = elements; status == FAN_OK && k-- > 0;) {
        if (memcmp(here->data + k * size, was->data + k * size, size) != 0) {
            first = k;
            count++;
        }
    }
    if (count) {
        snprintf(v->why, sizeof v->why,
                 "%s differs in %zu of %zu element%s, the first is element %zu", name, count,
                 elements, FAN_PLURAL(elements), first);
    }
    fan_array_drop(here);
    return status;
}

static const char *kind_of(const fan_array *output)
{
    if (output)
        return "an array";
    return "None";
}

/* compare: writes into v->why the first array that differs. */
static fan_status compare(verify_state *v, fan_error *err)
{
    static const char *const roles[] = {"auto", "copy", "static", "accumulate"};
    const fan_tree_run *run = v->run;
    const fan_tree_result *is = run->result;
    char name[64];
    if (is->n != v->ngave) {
        snprintf(v->why, sizeof v->why,
                 "it returns %zu output%s now, and returned %zu when it was recorded", v->ngave,
                 FAN_PLURAL(v->ngave), is->n);
    }
    for (size_t k = 0; !v->why[0] && k < is->n; k++) {
        const fan_array *gave = v->gave[k];
        snprintf(name, sizeof name, "output %zu", k);
        if (!is->at[k] != !gave) {
            snprintf(v->why, sizeof v->why, "%s is %s now, and was %s when it was recorded", name,
                     kind_of(gave), kind_of(is->at[k]));
        } else if (gave)
            FAN_TRY(differ(v, is->at[k], gave, name, err));
    }
    for (size_t i = 0; !v->why[0] && i < v->n; i++) {
        if (!v->before[i])
            continue;
        snprintf(name, sizeof name, "operand %zu (%s)", i, roles[fan__tree_role(run->function, i)]);
        FAN_TRY(differ(v, run->args->in[i], v->after[i], name, err));
    }
    return FAN_OK;
}

static fan_status fail_different(const verify_state *v, const fan_tree_node *node, fan_error *err)
{
    const fan_tree_body *body = &v->run->args->body;
    char cause[512] = "";
    if (body->cause)
        body->cause(body->ctx, node->number, cause, sizeof cause);
    if (!cause[0]) {
        snprintf(cause, sizeof cause,
                 "The result depends on something that is no operand (a number, a branch, a "
                 "counter, random numbers)");
    }
    return fan_fail(err, FAN_ERR_CAPTURE,
                    "%s: the function as it is gives something else than the replay of recording "
                    "%d: %s. %s: pass it as an operand, an array where it changes often, or as "
                    "key=",
                    v->run->function->name, node->number, v->why, cause);
}

fan_status fan__tree_verify(fan_tree_run *run, fan_tree_node *node, fan_error *err)
{
    size_t room = run->args->n * sizeof(fan_array *);
    verify_state v = {
        .run = run,
        .n = run->args->n,
        .before = fan_calloc(room),
        .after = fan_calloc(room),
    };
    fan_status status = FAN_OK;
    if (!v.before || !v.after)
        FAN_GO(fan__tree_no_memory(err));
    FAN_GO(run_function(&v, err));
    run->entered = false; /* the replay must wait for all this */
    FAN_GO(fan__tree_replay(run, node, err));
    status = compare(&v, err);
    if (status != FAN_OK) {
        (void)put_back_operands(&v, NULL);
    } else if (v.why[0]) {
        FAN_GO(put_back_operands(&v, err));
        status = fail_different(&v, node, err);
    } else
        node->verified++;
done:
    arrays_free(v.before, v.n);
    arrays_free(v.after, v.n);
    arrays_free(v.gave, v.ngave);
    fan_free(v.made.at); /* empty: they were dropped */
    return status;
}
