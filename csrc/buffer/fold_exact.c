/* fold_exact: sums that depend on no order (A11, D25): of terms, and of the state that a budget
 * makes of them (D36).
 *
 *   its shape, and the window over it     one element along axes along which all stay expanded
 * (A13) its numbers                           each term's, as the sum takes them absorb terms move
 * into the state sparse, dense                         the sum itself */
#include "array/exact.h"
#include "base/mem.h"
#include "buffer/fold_job.h"
#include "buffer/order.h"
#include "buffer/stats.h"
#include "buffer/slot.h"

#include <stdlib.h>
#include <string.h>

static fan_array *numbers_of(const fan_value *v)
{
    return v->form == FAN_FORM_SPARSE ? v->sparse->values : v->array;
}

/* The dtype that holds every term as it is: a reduced one is in the accumulation dtype (D7). */
static fan_dtype exact_dtype(const fan_fold *f)
{
    fan_dtype d = fan_fold_dtype(f);
    if (f->state)
        d = fan_dtype_promote(d, fan_window_dtype(f->state->sum));
    for (size_t i = 0; i < f->n; i++)
        d = fan_dtype_promote(d, numbers_of(f->terms[i].v)->dtype);
    return d;
}

/* The sum while it is made: its shape, cut to one element along the axes along which it stays
 * expanded (A13). */
typedef struct exact_layout {
    uint64_t axes;
    int ndim;
    const int64_t *whole;
    int64_t shape[FAN_MAX_NDIM];
    int64_t size;
} exact_layout;

static void exact_layout_of(const fan_fold *f, exact_layout *layout)
{
    const fan_slot *s = fan_fold_slot(f);
    const fan_slot_spec *spec = s->spec;
    layout->axes = f->plan.expanded;
    layout->ndim = spec->has_shape ? spec->ndim : s->state->ndim;
    layout->whole = spec->has_shape ? spec->shape : s->state->shape;
    layout->size = 1;
    for (int i = 0; i < layout->ndim; i++) {
        bool cut = layout->axes >> i & 1;
        layout->shape[i] = cut ? 1 : layout->whole[i];
        layout->size *= layout->shape[i];
    }
}

/* exact_window: a new window with the sum so far. */
static fan_status exact_window(const fan_fold *f, fan_dtype d, const exact_layout *layout,
                               fan_window **out, fan_error *err)
{
    const fan_exact_state *state = f->state;
    fan_window *w = state ? fan_window_copy(state->sum, d) : fan_window_new(d, layout->size);
    if (w && state && state->expanded != layout->axes) {
        fan_window *narrow = w;
        w = fan_window_spread(narrow, layout->ndim, layout->shape, state->expanded & ~layout->axes);
        fan_window_free(narrow);
    }
    *out = w;
    return w ? FAN_OK : fan_slot_fail_memory(f->b, f->slot, err);
}

/* ---- the numbers of the terms ---- */

static void exact_numbers_free(fan_array **numbers, size_t n)
{
    for (size_t i = 0; numbers && i < n; i++)
        fan_array_drop(numbers[i]);
    fan_free(numbers);
}

/* The numbers of term i as the sum takes them: one along each axis along which it stays expanded
 * (A13), and an integer in the sum's dtype (D25), which d may exceed; any other number is one of d
 * as it is. */
static fan_status exact_number(fan_fold *f, size_t i, fan_dtype d, fan_array **out, fan_error *err)
{
    fan_status status = FAN_OK;
    fan_dtype own = fan_fold_dtype(f);
    fan_array *numbers = numbers_of(f->terms[i].v);
    fan_array *base = NULL;
    if (f->plan.expanded)
        FAN_GO(fan_array_compact(numbers, f->plan.expanded, &base, err));
    else
        base = fan_array_hold(numbers);
    if (d == own || fan_exact_fits(base->dtype)) {
        *out = base;
        return FAN_OK;
    }
    FAN_GO(fan_fold_fresh(f, own, base->ndim, base->shape, base, out, err));
    fan_operand in = {base, own};
    status = fan_fold_into(f, FAN_JOB_COPY, "round", *out, &in, 1, NULL, err);
done:
    fan_array_drop(base);
    return status;
}

/* The numbers of all terms; *out: exact_numbers_free, also after a failure. */
static fan_status exact_numbers(fan_fold *f, fan_dtype d, fan_array ***out, fan_error *err)
{
    *out = fan_calloc((f->n ? f->n : 1) * sizeof **out);
    if (!*out)
        return fan_slot_fail_memory(f->b, f->slot, err);
    for (size_t i = 0; i < f->n; i++)
        FAN_TRY(exact_number(f, i, d, &(*out)[i], err));
    return FAN_OK;
}

/* A stored number of a sparse sum, by its place in the dense array. */
typedef struct stored {
    int64_t place, at;
} stored;

static int by_place(const void *a, const void *b)
{
    const stored *x = a, *y = b;
    return (x->place > y->place) - (x->place < y->place);
}

/* Where the numbers of a sparse term go: to their places, or to those in `all` (n of them, sorted);
 * *to is the caller's. */
static fan_status places_among(const fan_sparse *s, const stored *all, size_t n, int64_t **to,
                               fan_error *err)
{
    size_t size = (size_t)s->values->size;
    *to = fan_alloc((size ? size : 1) * sizeof **to);
    if (!*to)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    FAN_TRY(fan_sparse_places(s, *to, err));
    for (size_t i = 0; all && i < size; i++) {
        const stored *found = bsearch(&(stored){.place = (*to)[i]}, all, n, sizeof *all, by_place);
        if (!found)
            return fan_fail(err, FAN_ERR_VALUE,
                            "the indices of a sparse gradient were changed while it was summed");
        (*to)[i] = found->at;
    }
    return FAN_OK;
}

/* exact_add: adds all terms, whose numbers are `numbers`, without the frontend's lock: it takes a
 * while. If all are dense, a failure leaves the window as it was. `all`, n: as places_among has
 * them. */
static fan_status exact_add(fan_fold *f, fan_window *sum, fan_array *const *numbers,
                            const stored *all, size_t n, fan_error *err)
{
    fan_buffer *b = f->b;
    fan_status status = FAN_OK;
    const fan_array **dense = fan_alloc((f->n ? f->n : 1) * sizeof *dense);
    size_t denses = 0;
    if (!dense)
        return fan_slot_fail_memory(b, f->slot, err);
    void *left = b->frontend->allow_threads_begin ? b->frontend->allow_threads_begin() : NULL;
    for (size_t i = 0; i < f->n && status == FAN_OK; i++) {
        const fan_value *v = f->terms[i].v;
        int64_t *to = NULL;
        if (v->form == FAN_FORM_DENSE) {
            dense[denses++] = numbers[i];
            continue;
        }
        status = places_among(v->sparse, all, n, &to, err);
        if (status == FAN_OK)
            status = fan_window_add_at(sum, numbers[i], to, err);
        fan_free(to);
    }
    if (status == FAN_OK)
        status = fan_window_add(sum, dense, denses, err);
    fan_free(dense);
    if (b->frontend->allow_threads_begin)
        b->frontend->allow_threads_end(left);
    FAN_COUNT(b, passes, f->n > 0);
    for (size_t i = 0; i < f->n; i++)
        FAN_COUNT(b, bytes_read, fan_dense_bytes(numbers[i]));
    return status;
}

/* The term that first brought an inf or a NaN, f->n: none has one; those of dense terms alone. */
static fan_status find_first_nonfinite(const fan_fold *f, size_t *found, fan_error *err)
{
    for (*found = 0; *found < f->n; ++*found) {
        bool finite;
        FAN_TRY(fan_fold_term_is_finite(f, &f->terms[*found], &finite, err));
        if (!finite)
            return FAN_OK;
    }
    return FAN_OK;
}

fan_status fan_fold_absorb(fan_fold *f, const fan_like *like, fan_error *err)
{
    fan_slot_state *p = fan_fold_slot(f)->state;
    fan_exact_state *st = p->exact;
    size_t nonfinite = f->n;
    if (f->n == 0)
        return FAN_OK;
    /* first: nothing is done yet where this fails */
    if (f->b->sum_stats && !p->sum_stats.has_nonfinite)
        FAN_TRY(find_first_nonfinite(f, &nonfinite, err));
    for (size_t i = 0; i < f->n; i++)
        FAN_TRY(fan_slot_check_unmoved(f->b, f->slot, f->terms[i].v, f->terms[i].key, err));
    fan_dtype d = exact_dtype(f);
    if (!st) {
        const fan_array *first = f->terms[0].v->array; /* dense terms alone come here */
        st = fan_calloc(sizeof *st);
        if (!st)
            return fan_slot_fail_memory(f->b, f->slot, err);
        if (first->ndim)
            memcpy(st->strides, first->strides, (size_t)first->ndim * sizeof *first->strides);
    }
    fan_window *sum = st->sum;
    fan_status status = FAN_OK;
    fan_array **numbers = NULL;
    exact_layout layout;
    exact_layout_of(f, &layout);
    if (!sum || fan_window_dtype(sum) != d || st->expanded != layout.axes)
        FAN_GO(exact_window(f, d, &layout, &sum, err));
    FAN_GO(exact_numbers(f, d, &numbers, err));
    FAN_GO(exact_add(f, sum, numbers, NULL, 0, err));
    st->like = *like;
    st->expanded = layout.axes;
    if (sum != st->sum)
        fan_window_free(st->sum);
    st->sum = sum;
    f->state = p->exact = st;
    if (nonfinite < f->n) {
        p->sum_stats.has_nonfinite = true;
        p->sum_stats.nonfinite_key = f->terms[nonfinite].key;
    }
    FAN_COUNT(f->b, folds, 1);
    p->rules |= f->plan.rules;
done:
    exact_numbers_free(numbers, f->n);
    if (status == FAN_OK) {
        f->n = 0; /* nothing is left to sum: fan_fold_commit_end takes the items off the list */
        return FAN_OK;
    }
    if (sum != st->sum)
        fan_window_free(sum);
    if (!p->exact)
        fan_free(st);
    return status;
}

/* The exact sum over the entries of `sum`, which has the structure of all terms. */
static fan_status exact_values(fan_fold *f, const fan_sparse *sum, const fan_scale *scale,
                               fan_array **values, fan_error *err)
{
    fan_status status = FAN_OK;
    size_t n = (size_t)sum->values->size;
    fan_dtype d = exact_dtype(f);
    stored *all = fan_alloc((n ? n : 1) * sizeof *all);
    fan_window *window = fan_window_new(d, sum->values->size);
    int64_t *places = NULL;
    fan_array **numbers = NULL;
    if (!all || !window)
        FAN_GO(fan_slot_fail_memory(f->b, f->slot, err));
    FAN_GO(exact_numbers(f, d, &numbers, err));
    FAN_GO(places_among(sum, NULL, 0, &places, err));
    for (size_t i = 0; i < n; i++)
        all[i] = (stored){places[i], (int64_t)i};
    qsort(all, n, sizeof *all, by_place);
    FAN_GO(exact_add(f, window, numbers, all, n, err));
    FAN_GO(fan_array_new(f->plan.dtype, sum->values->ndim, sum->values->shape, NULL, values, err));
    fan_window_round(*values, window, scale);
done:
    exact_numbers_free(numbers, f->n);
    fan_free(all);
    fan_free(places);
    fan_window_free(window);
    return status;
}

/* All terms sparse: a sparse sum. */
static fan_status fold_exact_sparse(fan_fold *f, fan_error *err)
{
    fan_status status = FAN_OK;
    const fan_scale *scale = fan_fold_scale(f);
    fan_sparse *sum = NULL, *made = NULL;
    fan_array *values = NULL;
    FAN_GO(fan_fold_sum_sparse(f, f->n, &sum, err));
    FAN_GO(exact_values(f, sum, scale, &values, err));
    FAN_GO(fan_sparse_new(sum->format, sum->ndim, sum->shape, sum->indices, sum->pointers, values,
                          true, &made, err));
    f->result = fan_value_sparse(made, fan_fold_device(f));
    f->owned = true;
done:
    fan_array_drop(values);
    fan_sparse_drop(sum);
    return status;
}

/* Memory for a dense sum: in the axis order of the first dense term (D16). */
static fan_status exact_fresh(fan_fold *f, exact_layout *layout, fan_array **out, fan_error *err)
{
    int64_t strides[FAN_MAX_NDIM];
    const int64_t *order = f->state ? f->state->strides : NULL;
    fan_array like = {
        .ndim = layout->ndim, .size = layout->size, .shape = layout->shape, .strides = strides};
    for (size_t i = 0; !order && i < f->n; i++)
        if (f->terms[i].v->form == FAN_FORM_DENSE)
            order = f->terms[i].v->array->strides;
    if (order && like.ndim)
        memcpy(strides, order, (size_t)like.ndim * sizeof *strides);
    return fan_fold_fresh(f, f->plan.dtype, like.ndim, like.shape, order ? &like : NULL, out, err);
}

/* A dense sum: each number that is repeated (A13) is summed once. */
static fan_status fold_exact_dense(fan_fold *f, fan_error *err)
{
    fan_status status = FAN_OK;
    const fan_slot *s = fan_fold_slot(f);
    const fan_scale *scale = fan_fold_scale(f);
    fan_window *sum = NULL;
    fan_array *out = NULL;
    fan_array *whole = NULL; /* `out`, as the sum shows it */
    fan_array **numbers = NULL;
    fan_dtype d = exact_dtype(f);
    exact_layout layout;
    exact_layout_of(f, &layout);
    bool is_state = f->state && f->n == 0 && f->state->expanded == layout.axes;
    bool sparse = false;
    for (size_t i = 0; i < f->n; i++)
        sparse = sparse || f->terms[i].v->form == FAN_FORM_SPARSE;
    if (f->out)
        out = fan_array_hold(f->out->array);
    else
        FAN_GO(exact_fresh(f, &layout, &out, err));
    FAN_GO(fan_order_wait_terms(f, err));
    if (f->out)
        FAN_GO(fan_order_wait_taker(f, s->state->accum, &f->plan.after, err));
    FAN_GO(exact_numbers(f, d, &numbers, err));
    if (is_state) {
        fan_window_round(out, f->state->sum, scale);
    } else if (f->state || sparse) {
        FAN_GO(exact_window(f, d, &layout, &sum, err));
        FAN_GO(exact_add(f, sum, numbers, NULL, 0, err));
        fan_window_round(out, sum, scale);
    } else {
        for (size_t i = 0; i < f->n; i++)
            f->scratch[i] = (fan_operand){numbers[i], d};
        fan_job job = {.kind = FAN_JOB_EXACT,
                       .out = out,
                       .in = f->scratch,
                       .n = f->n,
                       .scale = scale,
                       .label = "exact"};
        if (f->out)
            FAN_GO(fan_fold_job(f, &job, err));
        else
            FAN_GO(fan_fold_job_to_fresh(f, &job, err));
    }
    if (f->out) {
        status = fan_value_copy(f->b->frontend, f->out, &f->result, err);
        goto done;
    }
    if (layout.axes)
        FAN_GO(fan_array_broadcast(out, layout.ndim, layout.whole, &whole, err));
    else
        whole = fan_array_hold(out);
    f->result = fan_value_dense(whole, fan_fold_device(f));
    f->owned = true;
done:
    exact_numbers_free(numbers, f->n);
    fan_window_free(sum);
    fan_array_drop(out);
    return status;
}

fan_status fan_fold_exact(fan_fold *f, fan_error *err)
{
    if (f->plan.kind != FAN_FOLD_EXACT_SPARSE)
        return fold_exact_dense(f, err);
    return fan_fold_is_copied(f) ? fan_fold_sparse(f, err) : fold_exact_sparse(f, err);
}
