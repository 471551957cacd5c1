/* fold_partial: sums with partial terms: each element is the left fold of the terms that reach it.
 *
 *   A whole is made once. Before any term is added it holds what makes the first touch a store:
 *   -0 + x is x, bit for bit, for every x, so elements that some term will reach begin with -0 and
 *   the others with +0 (integers: 0). Where every patch is touched once, or several times as a
 *   whole, and no two others meet, its first touch is a copy, and nothing is written before it.
 *
 * In this order: what begins with -0; where the first touch is a copy; terms; the sum. */
#include "array/sparse.h"
#include "base/fault.h"
#include "base/mem.h"
#include "buffer/fold_job.h"
#include "buffer/order.h"

#include <stdlib.h>
#include <string.h>

/* A sum while it is made. */
typedef struct partial_sum {
    fan_array *cur; /* the sum so far, in the accumulation dtype of what is in it */
    fan_value kept; /* the term whose memory `cur` is; undefined: fresh memory */
    int ndim;
    const int64_t *shape;
    bool some_dense;  /* a term reaches every element */
    bool all_reached; /* .. one did so already, or `cur` needs nothing more to begin with */
    bool *first;      /* of each term: its first touch is a copy; NULL: they begin with -0 */
    bool covered;     /* .. and together they reach every element */
    fan_array *minus; /* one element of -0 in the dtype of `cur`; NULL: not made yet */
    size_t next;      /* the term that comes next */
} partial_sum;

static bool partial_is_signed(fan_dtype dtype)
{
    char kind = fan_dtype_kind(dtype);
    return kind == 'f' || kind == 'c';
}

static fan_dtype partial_acc(const fan_fold *fold, size_t i)
{
    return fan_fold_accumulated(fold, fold->terms[i].seen);
}

/* ---- what begins with -0 ---- */

/* One element on the device of the sum, each of its parts `value`. */
static fan_status partial_constant(fan_fold *fold, fan_dtype dtype, double value, fan_array **out,
                                   fan_error *err)
{
    fan_device *d = fan_fold_device(fold);
    fan_status status = FAN_OK;
    fan_array *wide = NULL;
    fan_array *host = NULL;
    const double both[2] = {value, value};
    bool complex = fan_dtype_kind(dtype) == 'c';
    FAN_GO(fan_array_new(complex ? FAN_DT_COMPLEX128 : FAN_DT_FLOAT64, 0, NULL, NULL, &wide, err));
    memcpy(wide->data, both, fan_dtype_size(wide->dtype));
    FAN_GO(fan_array_new(dtype, 0, NULL, NULL, &host, err));
    fan_operand in = {.array = wide, .acc = dtype};
    fan_job cast = {
        .kind = FAN_JOB_COPY,
        .out = host,
        .in = &in,
        .n = 1,
        .label = "cast",
    };
    fan_job_run(&cast, false);
    if (!d->backend->has_streams) {
        *out = fan_array_hold(host);
        goto done;
    }
    FAN_GO(fan_device_array(d, fan_fold_accum(fold), dtype, 0, NULL, NULL, out, err));
    in.array = host;
    status = fan_fold_into(fold, FAN_JOB_UPLOAD, "upload", *out, &in, 1, err);
done:
    fan_array_drop(wide);
    fan_array_drop(host);
    return status;
}

/* A view of a complex array as its real parts and its imaginary ones; of another array: itself. */
static fan_status partial_reals(const fan_array *a, fan_array **out, fan_error *err)
{
    int64_t shape[FAN_MAX_NDIM];
    int64_t strides[FAN_MAX_NDIM];
    if (fan_dtype_kind(a->dtype) != 'c') {
        *out = fan_array_hold((fan_array *)a);
        return FAN_OK;
    }
    if (a->ndim == FAN_MAX_NDIM) {
        return fan_fail(err, FAN_ERR_VALUE,
                        "a partial complex sum has at most %d axes: give x.dense()",
                        FAN_MAX_NDIM - 1);
    }
    bool single = a->dtype == FAN_DT_COMPLEX64;
    fan_dtype real = FAN_DT_FLOAT64;
    if (single)
        real = FAN_DT_FLOAT32;
    size_t axes = (size_t)a->ndim;
    memcpy(shape, a->shape, axes * sizeof *shape);
    memcpy(strides, a->strides, axes * sizeof *strides);
    shape[axes] = 2;
    strides[axes] = (int64_t)fan_dtype_size(real);
    return fan_array_view(a->storage, a->data, real, a->ndim + 1, shape, strides, a->writable, out,
                          err);
}

/* An array times a real number, in its place. */
static fan_status partial_multiply(fan_fold *fold, const fan_array *a, double factor,
                                   fan_error *err)
{
    const fan_scale scale = {.on = true, .re = factor};
    fan_array *reals = NULL;
    FAN_TRY(partial_reals(a, &reals, err));
    fan_operand in = {.array = reals, .acc = reals->dtype};
    fan_job job = {
        .kind = FAN_JOB_SUM,
        .out = reals,
        .in = &in,
        .n = 1,
        .scale = &scale,
        .label = "begin",
    };
    fan_status status = fan_fold_job(fold, &job, err);
    fan_array_drop(reals);
    return status;
}

/* One element of -0: a zero times -1, so that a recording makes it anew. */
static fan_status partial_minus_zero(fan_fold *fold, fan_dtype dtype, fan_array **out,
                                     fan_error *err)
{
    FAN_TRY(fan_device_array(fan_fold_device(fold), fan_fold_accum(fold), dtype, 0, NULL, NULL, out,
                             err));
    FAN_TRY(fan_fold_zero(fold, *out, err));
    return partial_multiply(fold, *out, -1.0, err);
}

/* `to` becomes -0. */
static fan_status partial_fill(fan_fold *fold, partial_sum *sum, const fan_array *to,
                               fan_error *err)
{
    fan_array *all = NULL;
    if (sum->minus && sum->minus->dtype != to->dtype) {
        fan_array_drop(sum->minus);
        sum->minus = NULL;
    }
    if (!sum->minus)
        FAN_TRY(partial_minus_zero(fold, to->dtype, &sum->minus, err));
    FAN_TRY(fan_array_broadcast(sum->minus, to->ndim, to->shape, &all, err));
    fan_status status = fan_fold_copy(fold, "begin", to, all, err);
    fan_array_drop(all);
    return status;
}

/* The elements that a sparse term reaches become -0, all others +0: each entry adds -1 in its
 * place, and the sum of these is multiplied by 0. Before any patch is filled. */
static fan_status partial_begin_sparse(fan_fold *fold, const fan_array *to, fan_error *err)
{
    fan_status status = FAN_OK;
    fan_array *one = NULL;
    fan_array *all = NULL;
    fan_sparse *marks = NULL;
    size_t found = 0;
    for (size_t i = 0; i < fold->n; i++) {
        const fan_value *value = fold->terms[i].v;
        if (value->form != FAN_FORM_SPARSE)
            continue;
        const fan_sparse *s = value->sparse;
        if (!one)
            FAN_GO(partial_constant(fold, to->dtype, -1.0, &one, err));
        FAN_GO(fan_array_broadcast(one, s->values->ndim, s->values->shape, &all, err));
        FAN_GO(fan_sparse_new(s->format, s->ndim, s->shape, s->indices, s->pointers, all,
                              s->coalesced, &marks, err));
        FAN_GO(fan_fold_scatter(fold, "begin", to, marks, err));
        fan_sparse_drop(marks);
        marks = NULL;
        fan_array_drop(all);
        all = NULL;
        found++;
    }
    if (!found)
        return FAN_OK;
    status = partial_multiply(fold, to, 0.0, err);
done:
    fan_array_drop(one);
    fan_array_drop(all);
    fan_sparse_drop(marks);
    return status;
}

/* Fills `to` with its values before the first term. */
static fan_status partial_begin(fan_fold *fold, partial_sum *sum, const fan_array *to,
                                fan_error *err)
{
    bool has_sign = partial_is_signed(to->dtype) && !FAN_FAULT(PADDED_ADD);
    if (sum->some_dense && has_sign)
        return partial_fill(fold, sum, to, err);
    FAN_TRY(fan_fold_zero(fold, to, err));
    if (!has_sign)
        return FAN_OK;
    FAN_TRY(partial_begin_sparse(fold, to, err));
    for (size_t i = 0; i < fold->n; i++) {
        const fan_value *value = fold->terms[i].v;
        fan_array *view = NULL;
        if (value->form != FAN_FORM_PARTIAL || value->patch->size == 0)
            continue;
        FAN_TRY(fan_patch_view(value->patch, to, &view, err));
        fan_status status = partial_fill(fold, sum, view, err);
        fan_array_drop(view);
        FAN_TRY(status);
    }
    return FAN_OK;
}

/* ---- where the first touch is a copy ---- */

typedef struct touch {
    const fan_patch *patch;
    size_t term;
} touch;

static int by_patch(const void *a, const void *b)
{
    const touch *one = a;
    const touch *two = b;
    int order = fan_patch_order(one->patch, two->patch);
    if (order != 0)
        return order;
    return (one->term > two->term) - (one->term < two->term);
}

/* Whether all terms are partial, and one dtype is that of all prefixes: what waits for its first
 * touch is never read. */
static bool partial_may_copy(const fan_fold *fold)
{
    fan_dtype acc = partial_acc(fold, 0);
    for (size_t i = 0; i < fold->n; i++) {
        if (fold->terms[i].v->form != FAN_FORM_PARTIAL || partial_acc(fold, i) != acc)
            return false;
    }
    return true;
}

/* sum->first, where no two different patches meet. */
static fan_status partial_first_touches(fan_fold *fold, partial_sum *sum, fan_error *err)
{
    size_t n = fold->n;
    size_t different = 0;
    int64_t reached = 0;
    fan_status status = FAN_OK;
    if (!partial_may_copy(fold) || FAN_FAULT(PADDED_ADD))
        return FAN_OK;
    touch *touches = fan_alloc(n * sizeof *touches);
    const fan_patch **patches = fan_alloc(n * sizeof *patches);
    bool *first = fan_calloc(n * sizeof *first);
    if (!touches || !patches || !first)
        FAN_GO(fan_fail_memory(err));
    for (size_t i = 0; i < n; i++)
        touches[i] = (touch){fold->terms[i].v->patch, i};
    qsort(touches, n, sizeof *touches, by_patch);
    for (size_t i = 0; i < n; i++) {
        const fan_patch *patch = touches[i].patch;
        bool again = i > 0 && fan_patch_order(touches[i - 1].patch, patch) == 0;
        if (again || patch->size == 0)
            continue;
        first[touches[i].term] = true;
        patches[different++] = patch;
        reached += patch->size;
    }
    bool missed = FAN_FAULT(FIRST_TOUCH_MISSED);
    if (missed || (different > 0 && fan_patches_disjoint(patches, different))) {
        sum->first = first;
        sum->covered = reached == fold->terms[0].v->patch->whole;
        first = NULL;
    }
done:
    fan_free(touches);
    fan_free(patches);
    fan_free(first);
    return status;
}

/* ---- terms ---- */

/* Term i, added to `to`, or copied into it. */
static fan_status partial_add(fan_fold *fold, const partial_sum *sum, size_t i, const fan_array *to,
                              fan_error *err)
{
    const fan_value *value = fold->terms[i].v;
    fan_array *view = NULL;
    if (value->form == FAN_FORM_SPARSE)
        return fan_fold_scatter(fold, "scatter", to, value->sparse, err);
    if (value->form == FAN_FORM_PARTIAL) {
        if (value->patch->size == 0)
            return FAN_OK;
        FAN_TRY(fan_patch_view(value->patch, to, &view, err));
        to = view;
    }
    fan_status status;
    if (sum->first && sum->first[i]) {
        status = fan_fold_copy(fold, "copy", to, value->array, err);
    } else {
        fan_operand in[2] = {{.array = to, .acc = to->dtype},
                             {.array = value->array, .acc = to->dtype}};
        status = fan_fold_into(fold, FAN_JOB_SUM, "sum", to, in, 2, err);
    }
    fan_array_drop(view);
    return status;
}

/* The address of an element, by its place in C order. */
static char *partial_element(const fan_array *a, int64_t place)
{
    char *at = a->data;
    for (int k = a->ndim - 1; k >= 0; k--) {
        at += place % a->shape[k] * a->strides[k];
        place /= a->shape[k];
    }
    return at;
}

/* The elements that a sparse term has reached, from the sum so far into `to`; on the host. */
static fan_status partial_convert_sparse(fan_fold *fold, const partial_sum *sum, size_t i,
                                         const fan_array *to, fan_error *err)
{
    fan_status status = FAN_OK;
    const fan_sparse *s = fold->terms[i].v->sparse;
    fan_array *wide = NULL;
    size_t bytes = fan_dtype_size(to->dtype);
    size_t n = (size_t)s->values->size;
    if (fan_fold_device(fold)->backend->has_streams) {
        return fan_fail_at(err, FAN_ERR_TYPE, 0,
                           fan_slot_place(fold->b, fold->slot, fold->terms[i].key),
                           "a sparse and a partial gradient of %s meet ones of %s later; declare "
                           "the slot's dtype (P4)",
                           fan_dtype_name(sum->cur->dtype), fan_dtype_name(to->dtype));
    }
    int64_t *places = fan_alloc((n + 1) * sizeof *places);
    if (!places)
        return fan_fail_memory(err);
    FAN_GO(fan_sparse_places(s, places, err));
    FAN_GO(fan_array_new(to->dtype, to->ndim, to->shape, NULL, &wide, err));
    FAN_GO(fan_fold_copy(fold, "widen", wide, sum->cur, err));
    for (size_t k = 0; k < n; k++)
        memcpy(partial_element(to, places[k]), partial_element(wide, places[k]), bytes);
done:
    fan_free(places);
    fan_array_drop(wide);
    return status;
}

/* Converts the sum so far into `to`, which begins as a sum of its own dtype does: an element that
 * no term has reached is not copied. */
static fan_status partial_convert(fan_fold *fold, partial_sum *sum, const fan_array *to,
                                  fan_error *err)
{
    FAN_TRY(partial_begin(fold, sum, to, err));
    for (size_t i = 0; i < sum->next; i++) {
        const fan_value *value = fold->terms[i].v;
        fan_array *from = NULL;
        fan_array *into = NULL;
        if (value->form == FAN_FORM_SPARSE) {
            FAN_TRY(partial_convert_sparse(fold, sum, i, to, err));
            continue;
        }
        if (value->patch->size == 0)
            continue;
        fan_status status = fan_patch_view(value->patch, sum->cur, &from, err);
        if (status == FAN_OK)
            status = fan_patch_view(value->patch, to, &into, err);
        if (status == FAN_OK)
            status = fan_fold_copy(fold, "widen", into, from, err);
        fan_array_drop(from);
        fan_array_drop(into);
        FAN_TRY(status);
    }
    return FAN_OK;
}

/* The sum so far, in a wider dtype (D3). */
static fan_status partial_widen(fan_fold *fold, partial_sum *sum, fan_dtype acc, fan_error *err)
{
    fan_array *wider = NULL;
    fan_status status;
    FAN_TRY(fan_fold_fresh(fold, acc, sum->ndim, sum->shape, sum->cur, &wider, err));
    bool same_kind = fan_dtype_kind(acc) == fan_dtype_kind(sum->cur->dtype);
    bool keeps_zeros = same_kind || !partial_is_signed(acc);
    if (sum->all_reached || keeps_zeros)
        status = fan_fold_copy(fold, "widen", wider, sum->cur, err);
    else
        status = partial_convert(fold, sum, wider, err);
    return fan_fold_replace(&sum->cur, wider, status);
}

static fan_status partial_more(fan_fold *fold, partial_sum *sum, fan_error *err)
{
    size_t i = sum->next;
    fan_dtype acc = partial_acc(fold, i);
    if (acc != sum->cur->dtype)
        FAN_TRY(partial_widen(fold, sum, acc, err));
    FAN_TRY(partial_add(fold, sum, i, sum->cur, err));
    sum->all_reached = sum->all_reached || fold->terms[i].v->form == FAN_FORM_DENSE;
    sum->next++;
    return FAN_OK;
}

/* ---- the sum ---- */

/* Where the sum is made, and what is in it before the second term. */
static fan_status partial_place(fan_fold *fold, partial_sum *sum, fan_error *err)
{
    const fan_value *first = fold->terms[0].v;
    const fan_array *like = NULL; /* D16: a partial one that comes before is in C order */
    bool after_partial = false;
    for (size_t i = 0; i < fold->n; i++) {
        const fan_value *value = fold->terms[i].v;
        if (value->form == FAN_FORM_PARTIAL)
            after_partial = true;
        if (value->form != FAN_FORM_DENSE)
            continue;
        sum->some_dense = true;
        if (!like && !after_partial)
            like = value->array;
    }
    if (fold->plan.exclusive) {
        sum->cur = fan_array_hold(first->array);
        return fan_fold_keep_term(fold, 0, &sum->kept, err);
    }
    FAN_TRY(partial_first_touches(fold, sum, err));
    return fan_fold_fresh(fold, partial_acc(fold, 0), sum->ndim, sum->shape, like, &sum->cur, err);
}

static fan_status partial_start(fan_fold *fold, partial_sum *sum, fan_error *err)
{
    const fan_value *first = fold->terms[0].v;
    if (first->form != FAN_FORM_DENSE) {
        if (sum->covered)
            return FAN_OK;
        if (sum->first)
            return fan_fold_zero(fold, sum->cur, err);
        return partial_begin(fold, sum, sum->cur, err);
    }
    sum->all_reached = true;
    sum->next = 1;
    if (!fold->plan.exclusive)
        return fan_fold_copy(fold, "copy", sum->cur, first->array, err);
    FAN_COUNT(fold->b, in_place, fold->n - 1);
    return fan_order_wait_users(fold, sum->cur, err);
}

/* *begun: a part of the sum is in its place. */
static fan_status partial_make(fan_fold *fold, partial_sum *sum, bool *begun, fan_error *err)
{
    FAN_TRY(partial_place(fold, sum, err));
    FAN_TRY(fan_order_wait_terms(fold, err));
    FAN_TRY(partial_start(fold, sum, err));
    while (sum->next < fold->n) {
        FAN_TRY(partial_more(fold, sum, err));
        *begun = true;
    }
    return fan_fold_finish(fold, &sum->cur, err);
}

fan_status fan_fold_partial(fan_fold *fold, fan_error *err)
{
    partial_sum sum = {.kept = fan_value_none()};
    bool begun = false;
    sum.ndim = fan_value_shape(fold->terms[0].v, &sum.shape);
    fan_status status = partial_make(fold, &sum, &begun, err);
    fan_array_drop(sum.minus);
    fan_free(sum.first);
    return fan_fold_whole_end(fold, sum.cur, &sum.kept, begun, status, err);
}

fan_status fan_fold_make_whole(fan_fold *fold, const fan_value *partial, fan_value *out,
                               fan_error *err)
{
    const fan_patch *patch = partial->patch;
    fan_status status = FAN_OK;
    fan_array *whole = NULL;
    fan_array *view = NULL;
    FAN_GO(fan_fold_fresh(fold, partial->dtype, patch->ndim, patch->shape, NULL, &whole, err));
    FAN_GO(fan_fold_zero(fold, whole, err));
    FAN_GO(fan_patch_view(patch, whole, &view, err));
    if (patch->size > 0)
        FAN_GO(fan_fold_copy(fold, "copy", view, partial->array, err));
    *out = fan_value_dense(fan_array_hold(whole), fan_fold_device(fold));
    out->origin = partial->origin;
    out->rank = partial->rank;
done:
    fan_array_drop(whole);
    fan_array_drop(view);
    return status;
}
