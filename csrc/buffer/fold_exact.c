/* fold_exact: sums that depend on no order (A11, D25): of terms, and of the state that a budget
 * makes of them (D36).
 *
 * Sections: its shape, and the window over it (one element along the axes along which all terms
 * stay expanded, A13); the numbers of the terms; the state, which absorbs terms; a sparse sum, a
 * dense one. */
#include "array/exact.h"
#include "base/mem.h"
#include "buffer/fold_job.h"
#include "buffer/order.h"
#include "buffer/slot.h"
#include "buffer/weights.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static fan_array *numbers_of(const fan_value *value)
{
    if (value->form == FAN_FORM_SPARSE)
        return value->sparse->values;
    return value->array;
}

/* The dtype that holds every term as it is: a reduced one is in the accumulation dtype (D7). */
static fan_dtype exact_dtype(const fan_fold *fold)
{
    fan_dtype d = fan_fold_dtype(fold);
    if (fold->state)
        d = fan_dtype_promote(d, fan_window_dtype(fold->state->sum));
    for (size_t i = 0; i < fold->n; i++)
        d = fan_dtype_promote(d, numbers_of(fold->terms[i].v)->dtype);
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

static void exact_layout_of(const fan_fold *fold, exact_layout *layout)
{
    const fan_slot *s = fan_fold_slot(fold);
    const fan_slot_spec *spec = s->spec;
    layout->axes = fold->plan.expanded;
    layout->ndim = s->state->ndim;
    layout->whole = s->state->shape;
    if (spec->has_shape) {
        layout->ndim = spec->ndim;
        layout->whole = spec->shape;
    }
    layout->size = 1;
    for (int i = 0; i < layout->ndim; i++) {
        bool cut = layout->axes >> i & 1;
        layout->shape[i] = layout->whole[i];
        if (cut)
            layout->shape[i] = 1;
        layout->size *= layout->shape[i];
    }
}

/* exact_window: a new window with the sum so far. */
static fan_status exact_window(const fan_fold *fold, fan_dtype d, const exact_layout *layout,
                               fan_window **out, fan_error *err)
{
    const fan_exact_state *state = fold->state;
    fan_window *window;
    if (state)
        window = fan_window_copy(state->sum, d);
    else
        window = fan_window_new(d, layout->size);
    if (window && state && state->expanded != layout->axes) {
        fan_window *narrow = window;
        uint64_t spread = state->expanded & ~layout->axes;
        window = fan_window_spread(narrow, layout->ndim, layout->shape, spread);
        fan_window_free(narrow);
    }
    *out = window;
    if (!window)
        return fan_fold_fail_memory(fold, err);
    return FAN_OK;
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
static fan_status exact_number(fan_fold *fold, size_t i, fan_dtype d, fan_array **out,
                               fan_error *err)
{
    fan_dtype own = fan_fold_dtype(fold);
    fan_array *numbers = numbers_of(fold->terms[i].v);
    fan_array *base = NULL;
    if (fold->plan.expanded)
        FAN_TRY(fan_array_compact(numbers, fold->plan.expanded, &base, err));
    else
        base = fan_array_hold(numbers);
    if (d == own || fan_exact_fits(base->dtype)) {
        *out = base;
        return FAN_OK;
    }
    fan_status status = fan_fold_fresh(fold, own, base->ndim, base->shape, base, out, err);
    if (status == FAN_OK)
        status = fan_fold_copy(fold, "round", *out, base, err);
    fan_array_drop(base);
    return status;
}

/* The numbers of all terms; *out: exact_numbers_free, also after a failure. */
static fan_status exact_numbers(fan_fold *fold, fan_dtype d, fan_array ***out, fan_error *err)
{
    *out = fan_calloc((fold->n + 1) * sizeof **out);
    if (!*out)
        return fan_fold_fail_memory(fold, err);
    for (size_t i = 0; i < fold->n; i++)
        FAN_TRY(exact_number(fold, i, d, &(*out)[i], err));
    return FAN_OK;
}

/* A stored number of a sparse sum, by its place in the dense array. */
typedef struct stored {
    int64_t place;
    int64_t at;
} stored;

static int by_place(const void *a, const void *b)
{
    const stored *x = a;
    const stored *y = b;
    return (x->place > y->place) - (x->place < y->place);
}

/* Where the numbers of a sparse term go: to their places, or to those in `all` (n of them, sorted);
 * *to is the caller's. */
static fan_status places_among(const fan_sparse *sparse, const stored *all, size_t n, int64_t **to,
                               fan_error *err)
{
    size_t size = (size_t)sparse->values->size;
    *to = fan_alloc((size + 1) * sizeof **to);
    if (!*to)
        return fan_fail_memory(err);
    int64_t *places = *to;
    FAN_TRY(fan_sparse_places(sparse, places, err));
    for (size_t i = 0; all && i < size; i++) {
        const stored wanted = {.place = places[i]};
        const stored *found = bsearch(&wanted, all, n, sizeof *all, by_place);
        if (!found) {
            return fan_fail(err, FAN_ERR_VALUE,
                            "the indices of a sparse gradient were changed while it was summed");
        }
        places[i] = found->at;
    }
    return FAN_OK;
}

/* The numbers of one sparse term into the window. `all`, n: as places_among has them. */
static fan_status exact_add_sparse(fan_window *sum, const fan_sparse *sparse,
                                   const fan_array *numbers, const stored *all, size_t n,
                                   fan_error *err)
{
    int64_t *to = NULL;
    fan_status status = places_among(sparse, all, n, &to, err);
    if (status == FAN_OK)
        status = fan_window_add_at(sum, numbers, to, err);
    fan_free(to);
    return status;
}

/* exact_add: adds all terms, whose numbers are `numbers`, without the frontend's lock: it takes a
 * while. If all are dense, a failure leaves the window as it was. `all`, n: as places_among has
 * them. */
static fan_status exact_add(fan_fold *fold, fan_window *sum, fan_array *const *numbers,
                            const stored *all, size_t n, fan_error *err)
{
    fan_buffer *b = fold->b;
    fan_status status = FAN_OK;
    const fan_array **dense = fan_alloc((fold->n + 1) * sizeof *dense);
    size_t denses = 0;
    if (!dense)
        return fan_slot_fail_memory(b, fold->slot, err);
    void *left = fan_frontend_leave(b->frontend, true);
    for (size_t i = 0; i < fold->n && status == FAN_OK; i++) {
        const fan_value *value = fold->terms[i].v;
        if (value->form == FAN_FORM_DENSE)
            dense[denses++] = numbers[i];
        else
            status = exact_add_sparse(sum, value->sparse, numbers[i], all, n, err);
    }
    if (status == FAN_OK)
        status = fan_window_add(sum, dense, denses, err);
    fan_free(dense);
    fan_frontend_return(b->frontend, left);
    return status;
}

/* The terms were read once for a sum. */
static void exact_count(const fan_fold *fold, fan_array *const *numbers)
{
    FAN_COUNT(fold->b, passes, fold->n > 0);
    for (size_t i = 0; i < fold->n; i++)
        FAN_COUNT(fold->b, bytes_read, fan_dense_bytes(numbers[i]));
}

/* A state without a sum; NULL: no memory. Dense terms alone come here. */
static fan_exact_state *exact_state_new(const fan_fold *fold)
{
    const fan_array *first = fold->terms[0].v->array;
    fan_exact_state *exact = fan_calloc(sizeof *exact);
    if (exact && first->ndim)
        memcpy(exact->strides, first->strides, (size_t)first->ndim * sizeof *first->strides);
    return exact;
}

/* *sum becomes the state's sum with the terms: in its window, or in a new or a wider one. Where
 * this fails, the state is as it was. */
static fan_status exact_absorb(fan_fold *fold, const fan_exact_state *exact,
                               const exact_layout *layout, fan_window **sum, fan_error *err)
{
    fan_status status = FAN_OK;
    fan_array **numbers = NULL;
    fan_dtype d = exact_dtype(fold);
    *sum = exact->sum;
    if (!*sum || fan_window_dtype(*sum) != d || exact->expanded != layout->axes)
        FAN_TRY(exact_window(fold, d, layout, sum, err));
    FAN_GO(exact_numbers(fold, d, &numbers, err));
    status = exact_add(fold, *sum, numbers, NULL, 0, err);
    exact_count(fold, numbers);
done:
    exact_numbers_free(numbers, fold->n);
    if (status != FAN_OK && *sum != exact->sum)
        fan_window_free(*sum);
    return status;
}

fan_status fan_fold_absorb(fan_fold *fold, const fan_like *like, size_t nonfinite, fan_error *err)
{
    fan_slot_state *state = fan_fold_slot(fold)->state;
    if (fold->n == 0)
        return FAN_OK;
    for (size_t i = 0; i < fold->n; i++) {
        const fan_term *term = &fold->terms[i];
        FAN_TRY(fan_slot_check_unmoved(fold->b, fold->slot, term->v, term->key, err));
    }
    fan_exact_state *exact = state->exact;
    if (!exact)
        exact = exact_state_new(fold);
    if (!exact)
        return fan_fold_fail_memory(fold, err);
    exact_layout layout;
    exact_layout_of(fold, &layout);
    fan_window *sum;
    fan_status status = exact_absorb(fold, exact, &layout, &sum, err);
    if (status != FAN_OK) {
        if (!state->exact)
            fan_free(exact);
        return status;
    }

    exact->like = *like;
    exact->expanded = layout.axes;
    if (sum != exact->sum)
        fan_window_free(exact->sum);
    exact->sum = sum;
    fold->state = exact;
    state->exact = exact;
    if (nonfinite < fold->n)
        fan_sum_stats_blame(&state->sum_stats, fold->terms[nonfinite].key);
    FAN_COUNT(fold->b, folds, 1);
    state->rules |= fold->plan.rules;
    fold->n = 0; /* nothing is left to sum: fan_fold_commit_end takes the items off the list */
    return FAN_OK;
}

/* The exact sum over the entries of `sum`, which has the structure of all terms. */
static fan_status exact_values(fan_fold *fold, const fan_sparse *sum, fan_array **values,
                               fan_error *err)
{
    fan_status status = FAN_OK;
    const fan_array *like = sum->values;
    size_t n = (size_t)like->size;
    fan_dtype d = exact_dtype(fold);
    stored *all = fan_alloc((n + 1) * sizeof *all);
    fan_window *window = fan_window_new(d, like->size);
    int64_t *places = NULL;
    fan_array **numbers = NULL;
    if (!all || !window)
        FAN_GO(fan_fold_fail_memory(fold, err));
    FAN_GO(exact_numbers(fold, d, &numbers, err));
    FAN_GO(places_among(sum, NULL, 0, &places, err));
    for (size_t i = 0; i < n; i++)
        all[i] = (stored){places[i], (int64_t)i};
    qsort(all, n, sizeof *all, by_place);
    FAN_GO(exact_add(fold, window, numbers, all, n, err));
    FAN_GO(fan_array_new(fold->plan.dtype, like->ndim, like->shape, NULL, values, err));
    fan_window_round(*values, window, fan_fold_scale(fold));
done:
    exact_numbers_free(numbers, fold->n);
    fan_free(all);
    fan_free(places);
    fan_window_free(window);
    return status;
}

/* All terms sparse: their sum. It is not counted. */
static fan_status exact_merge(fan_fold *fold, fan_sparse **out, fan_error *err)
{
    fan_status status = FAN_OK;
    fan_sparse *sum = NULL;
    fan_array *values = NULL;
    FAN_GO(fan_fold_sum_sparse(fold, fold->n, &sum, err));
    FAN_GO(exact_values(fold, sum, &values, err));
    status = fan_sparse_new(sum->format, sum->ndim, sum->shape, sum->indices, sum->pointers, values,
                            true, out, err);
done:
    fan_array_drop(values);
    fan_sparse_drop(sum);
    return status;
}

fan_status fan_fold_exact_merged(const fan_fold *fold, const fan_value *value, fan_sparse **out,
                                 fan_error *err)
{
    fan_dtype_set seen = fan_dtype_set_add(0, value->dtype, false);
    fan_term only = {.v = value, .seen = seen};
    fan_fold alone = {.b = fold->b,
                      .slot = fold->slot,
                      .terms = &only,
                      .n = 1,
                      .seen = seen,
                      .plan = {.dtype = value->dtype}};
    return exact_merge(&alone, out, err);
}

static fan_status fold_exact_sparse(fan_fold *fold, fan_error *err)
{
    fan_sparse *sum;
    FAN_COUNT(fold->b, passes, 2);
    for (size_t i = 0; i < fold->n; i++)
        FAN_COUNT(fold->b, bytes_read, fan_dense_bytes(numbers_of(fold->terms[i].v)));
    FAN_TRY(exact_merge(fold, &sum, err));
    fold->result = fan_value_sparse(sum, fan_fold_device(fold));
    fold->owned = true;
    return FAN_OK;
}

/* The strides of the first dense term (D16); NULL: there is none. */
static const int64_t *exact_strides(const fan_fold *fold)
{
    if (fold->state)
        return fold->state->strides;
    for (size_t i = 0; i < fold->n; i++) {
        const fan_value *value = fold->terms[i].v;
        if (value->form == FAN_FORM_DENSE)
            return value->array->strides;
    }
    return NULL;
}

/* Memory for a dense sum: in the axis order of the first dense term (D16). */
static fan_status exact_fresh(fan_fold *fold, exact_layout *layout, fan_array **out, fan_error *err)
{
    const int64_t *strides = exact_strides(fold);
    fan_array like = {.ndim = layout->ndim,
                      .size = layout->size,
                      .shape = layout->shape,
                      .strides = (int64_t *)strides};
    return fan_fold_fresh(fold, fold->plan.dtype, like.ndim, like.shape, strides ? &like : NULL,
                          out, err);
}

/* The exact sum of n operands, rounded into `out`. */
static fan_status exact_job(fan_fold *fold, fan_array *out, const fan_operand *in, size_t n,
                            fan_error *err)
{
    fan_job job = {
        .kind = FAN_JOB_EXACT,
        .out = out,
        .in = in,
        .n = n,
        .scale = fan_fold_scale(fold),
        .label = "exact",
    };
    if (fold->out)
        return fan_fold_job(fold, &job, err);
    return fan_fold_job_to_fresh(fold, &job, err);
}

/* ---- with weights, or as a mean (W2) ---- */

#define STATE_PARTS 40 /* float64 numbers of a window's sum, each below the one before it */

/* The operands of an exact sum of products: the terms, and the state as arrays of float64. */
typedef struct exact_products {
    fan_operand *in;
    size_t n;
    fan_array *parts[STATE_PARTS];
    size_t nparts;
} exact_products;

static void exact_products_free(exact_products *p)
{
    for (size_t i = 0; i < p->nparts; i++)
        fan_array_drop(p->parts[i]);
    fan_free(p->in);
}

/* Fills `minus` with the numbers that, added to the window, take `part` away from it: -x of each
 * finite x, else -0.0, which adds nothing. *left: whether one of them is not 0. An inf or a NaN
 * stays in the first part alone. */
static void exact_take_away(fan_array *part, fan_array *minus, bool first, bool *left)
{
    double *x = (double *)(void *)part->data;
    double *away = (double *)(void *)minus->data;
    size_t numbers = (size_t)part->size * fan_dtype_size(part->dtype) / sizeof *x;
    *left = false;
    for (size_t i = 0; i < numbers; i++) {
        bool finite = isfinite(x[i]);
        away[i] = -0.0;
        if (finite)
            away[i] = -x[i];
        *left |= finite && x[i] != 0;
        if (!first && (!finite || x[i] == 0))
            x[i] = -0.0;
    }
}

/* The window's sum as arrays; the window is changed. */
static fan_status exact_window_parts(const fan_fold *fold, fan_window *window, fan_dtype wide,
                                     const exact_layout *layout, exact_products *p, fan_error *err)
{
    fan_status status = FAN_OK;
    fan_array *minus = NULL;
    bool left = true;
    FAN_GO(fan_array_new(wide, layout->ndim, layout->shape, NULL, &minus, err));
    while (left && p->nparts < STATE_PARTS) {
        fan_array *part = NULL;
        FAN_GO(fan_array_new(wide, layout->ndim, layout->shape, NULL, &part, err));
        p->parts[p->nparts++] = part;
        fan_window_round(part, window, NULL);
        exact_take_away(part, minus, p->nparts == 1, &left);
        const fan_array *in[] = {minus};
        FAN_GO(fan_window_add(window, in, 1, err));
    }
done:
    fan_array_drop(minus);
    if (status == FAN_ERR_NOMEM)
        return fan_fold_fail_memory(fold, err);
    return status;
}

/* The window of what has no weight of its own: the state, and the sparse terms. NULL: there is
 * nothing. */
static fan_status exact_unweighted(const fan_fold *fold, const exact_layout *layout,
                                   fan_array *const *numbers, fan_dtype wide, fan_window **out,
                                   fan_error *err)
{
    *out = NULL;
    if (!fold->state && !fan_fold_has(fold, FAN_FORM_SPARSE))
        return FAN_OK;
    FAN_TRY(exact_window(fold, wide, layout, out, err));
    for (size_t i = 0; i < fold->n; i++) {
        const fan_value *value = fold->terms[i].v;
        if (value->form == FAN_FORM_SPARSE)
            FAN_TRY(exact_add_sparse(*out, value->sparse, numbers[i], NULL, 0, err));
    }
    return FAN_OK;
}

/* The sum of the products of all terms, and of the state, rounded into `out`. */
static fan_status exact_round_products(fan_fold *fold, const exact_layout *layout,
                                       fan_array *const *numbers, fan_dtype d, fan_array *out,
                                       fan_error *err)
{
    fan_status status = FAN_OK;
    exact_products p = {.n = 0};
    fan_window *window = NULL;
    fan_dtype wide = FAN_DT_FLOAT64;
    if (fan_dtype_kind(d) == 'c')
        wide = FAN_DT_COMPLEX128;
    FAN_GO(exact_unweighted(fold, layout, numbers, wide, &window, err));
    if (window) {
        d = wide;
        FAN_GO(exact_window_parts(fold, window, wide, layout, &p, err));
    }
    p.in = fan_alloc((fold->n + p.nparts + 1) * sizeof *p.in);
    if (!p.in)
        FAN_GO(fan_fold_fail_memory(fold, err));
    for (size_t i = 0; i < p.nparts; i++)
        p.in[p.n++] = (fan_operand){.array = p.parts[i], .acc = d};
    for (size_t i = 0; i < fold->n; i++) {
        if (fold->terms[i].v->form == FAN_FORM_SPARSE)
            continue;
        p.in[p.n++] = (fan_operand){.array = numbers[i], .acc = d, .weight = fold->terms[i].weight};
    }
    status = exact_job(fold, out, p.in, p.n, err);
done:
    exact_products_free(&p);
    fan_window_free(window);
    return status;
}

/* Whether the sum is one of products, or a quotient. */
static bool exact_has_products(const fan_fold *fold)
{
    bool weighted = fold->scale.divisor;
    for (size_t i = 0; i < fold->n; i++)
        weighted = weighted || fold->terms[i].weight.on;
    return weighted;
}

/* The sum of all terms, and of the state, rounded into `out`. */
static fan_status exact_round(fan_fold *fold, const exact_layout *layout, fan_array *out,
                              fan_error *err)
{
    fan_status status = FAN_OK;
    const fan_exact_state *state = fold->state;
    const fan_scale *scale = fan_fold_scale(fold);
    fan_window *sum = NULL;
    fan_array **numbers = NULL;
    fan_dtype d = exact_dtype(fold);
    bool sparse = fan_fold_has(fold, FAN_FORM_SPARSE);
    FAN_GO(exact_numbers(fold, d, &numbers, err));
    if (exact_has_products(fold)) {
        FAN_GO(exact_round_products(fold, layout, numbers, d, out, err));
    } else if (state && fold->n == 0 && state->expanded == layout->axes) {
        fan_window_round(out, state->sum, scale);
    } else if (state || sparse) {
        FAN_GO(exact_window(fold, d, layout, &sum, err));
        exact_count(fold, numbers);
        FAN_GO(exact_add(fold, sum, numbers, NULL, 0, err));
        fan_window_round(out, sum, scale);
    } else {
        for (size_t i = 0; i < fold->n; i++)
            fold->scratch[i] = (fan_operand){.array = numbers[i], .acc = d};
        status = exact_job(fold, out, fold->scratch, fold->n, err);
    }
done:
    exact_numbers_free(numbers, fold->n);
    fan_window_free(sum);
    return status;
}

/* A dense sum: each number that is repeated (A13) is summed once. */
static fan_status fold_exact_dense(fan_fold *fold, fan_error *err)
{
    fan_status status = FAN_OK;
    fan_array *out = NULL;
    fan_array *whole = NULL; /* `out`, as the sum shows it */
    exact_layout layout;
    exact_layout_of(fold, &layout);
    if (fold->out)
        out = fan_array_hold(fold->out->array);
    else
        FAN_GO(exact_fresh(fold, &layout, &out, err));
    FAN_GO(fan_order_wait_terms(fold, err));
    if (fold->out)
        FAN_GO(fan_order_wait_taker(fold, fan_fold_accum(fold), &fold->plan.after, err));
    FAN_GO(exact_round(fold, &layout, out, err));
    if (fold->out) {
        status = fan_value_copy(fold->b->frontend, fold->out, &fold->result, err);
        goto done;
    }
    if (layout.axes)
        FAN_GO(fan_array_broadcast(out, layout.ndim, layout.whole, &whole, err));
    else
        whole = fan_array_hold(out);
    fan_fold_made(fold, whole);
done:
    fan_array_drop(whole);
    fan_array_drop(out);
    return status;
}

fan_status fan_fold_exact(fan_fold *fold, fan_error *err)
{
    if (fold->plan.kind != FAN_FOLD_EXACT_SPARSE)
        return fold_exact_dense(fold, err);
    if (fan_fold_is_copied(fold))
        return fan_fold_sparse(fold, err);
    return fold_exact_sparse(fold, err);
}
