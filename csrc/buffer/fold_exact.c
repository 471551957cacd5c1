#include "array/exact.h"
#include "base/mem.h"
#include "buffer/fold_job.h"
#include "buffer/order.h"
#include "buffer/stats.h"
#include "buffer/slot.h"

#include <stdlib.h>
#include <string.h>

static const fan_array *numbers_of(const fan_value *v)
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

/* exact_window: a new window with the sum so far. */
static fan_status exact_window(const fan_fold *f, fan_dtype d, int64_t size, fan_window **out, fan_error *err)
{
    *out = f->state ? fan_window_copy(f->state->sum, d) : fan_window_new(d, size);
    return *out ? FAN_OK : fan_fail_at(err, FAN_ERR_NOMEM, 0, fan_slot_place(f->b, f->slot, -1), "out of memory");
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

/* Where the numbers of a sparse term go: to their places, or to those in `all` (n of them, sorted); *to is the
 * caller's. */
static fan_status places_among(const fan_sparse *s, const stored *all, size_t n, int64_t **to, fan_error *err)
{
    size_t size = (size_t)s->values->size;
    *to = fan_alloc((size ? size : 1) * sizeof **to);
    if (!*to)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    FAN_TRY(fan_sparse_places(s, *to, err));
    for (size_t i = 0; all && i < size; i++) {
        const stored *found = bsearch(&(stored){.place = (*to)[i]}, all, n, sizeof *all, by_place);
        if (!found)
            return fan_fail(err, FAN_ERR_VALUE, "the indices of a sparse gradient were changed while it was summed");
        (*to)[i] = found->at;
    }
    return FAN_OK;
}

/* exact_add: adds all terms, without the frontend's lock: it takes a while. If all are dense, a failure leaves the
 * window as it was. `all`, n: as places_among has them. */
static fan_status exact_add(fan_fold *f, fan_window *sum, const stored *all, size_t n, fan_error *err)
{
    fan_buffer *b = f->b;
    fan_status status = FAN_OK;
    const fan_array **dense = fan_alloc((f->n ? f->n : 1) * sizeof *dense);
    size_t denses = 0;
    if (!dense)
        return fan_fail_at(err, FAN_ERR_NOMEM, 0, fan_slot_place(b, f->slot, -1), "out of memory");
    void *left = b->frontend->allow_threads_begin ? b->frontend->allow_threads_begin() : NULL;
    for (size_t i = 0; i < f->n && status == FAN_OK; i++) {
        const fan_value *v = f->terms[i].v;
        int64_t *to = NULL;
        if (v->form == FAN_FORM_DENSE) {
            dense[denses++] = v->array;
            continue;
        }
        status = places_among(v->sparse, all, n, &to, err);
        if (status == FAN_OK)
            status = fan_window_add_at(sum, v->sparse->values, to, err);
        fan_free(to);
    }
    if (status == FAN_OK)
        status = fan_window_add(sum, dense, denses, err);
    fan_free(dense);
    if (b->frontend->allow_threads_begin)
        b->frontend->allow_threads_end(left);
    FAN_COUNT(b, passes, f->n > 0);
    for (size_t i = 0; i < f->n; i++)
        FAN_COUNT(b, bytes_read, fan_dense_bytes(numbers_of(f->terms[i].v)));
    return status;
}

/* The term that first brought an inf or a NaN, f->n: none has one; those of dense terms alone. */
static fan_status find_first_nonfinite(const fan_fold *f, size_t *found, fan_error *err)
{
    for (*found = 0; *found < f->n; ++*found) {
        const fan_term *t = &f->terms[*found];
        fan_stats of;
        FAN_TRY(fan_slot_check_unmoved(f->b, f->slot, t->v, t->key, err));
        FAN_TRY(fan_fold_stats_of(f, t->v, &of, err));
        if (of.nonfinite)
            return FAN_OK;
    }
    return FAN_OK;
}

fan_status fan_fold_absorb(fan_fold *f, const fan_like *like, fan_error *err)
{
    fan_slot_state *p = fan_fold_slot(f)->p;
    fan_exact_state *st = p->exact;
    size_t nonfinite = f->n;
    if (f->n == 0)
        return FAN_OK;
    if (f->b->sum_stats && !p->sum_stats.has_nonfinite) /* first: nothing is done yet where this fails */
        FAN_TRY(find_first_nonfinite(f, &nonfinite, err));
    for (size_t i = 0; i < f->n; i++)
        FAN_TRY(fan_slot_check_unmoved(f->b, f->slot, f->terms[i].v, f->terms[i].key, err));
    fan_dtype d = exact_dtype(f);
    if (!st) {
        st = fan_calloc(sizeof *st);
        if (!st)
            return fan_fail_at(err, FAN_ERR_NOMEM, 0, fan_slot_place(f->b, f->slot, -1), "out of memory");
    }
    fan_window *sum = st->sum;
    fan_status status = FAN_OK;
    if (!sum || fan_window_dtype(sum) != d)
        FAN_GO(exact_window(f, d, f->terms[0].v->array->size, &sum, err));
    FAN_GO(exact_add(f, sum, NULL, 0, err)); /* dense terms alone come here */
    st->like = *like;
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
    f->n = 0; /* nothing is left to sum: fan_fold_commit_end takes the items off the list */
    return FAN_OK;
done:
    if (sum != st->sum)
        fan_window_free(sum);
    if (!p->exact)
        fan_free(st);
    return status;
}

/* The exact sum over the entries of `sum`, which has the structure of all terms. */
static fan_status exact_values(fan_fold *f, const fan_sparse *sum, const fan_scale *scale, fan_array **values,
                               fan_error *err)
{
    fan_status status = FAN_OK;
    size_t n = (size_t)sum->values->size;
    stored *all = fan_alloc((n ? n : 1) * sizeof *all);
    int64_t *places = NULL;
    fan_window *window = NULL;
    if (!all)
        FAN_GO(fan_fail_at(err, FAN_ERR_NOMEM, 0, fan_slot_place(f->b, f->slot, -1), "out of memory"));
    FAN_GO(exact_window(f, exact_dtype(f), sum->values->size, &window, err));
    FAN_GO(places_among(sum, NULL, 0, &places, err));
    for (size_t i = 0; i < n; i++)
        all[i] = (stored){places[i], (int64_t)i};
    qsort(all, n, sizeof *all, by_place);
    FAN_GO(exact_add(f, window, all, n, err));
    FAN_GO(fan_array_new(f->plan.dtype, sum->values->ndim, sum->values->shape, NULL, values, err));
    fan_window_round(*values, window, scale);
done:
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
    FAN_GO(fan_sparse_new(sum->format, sum->ndim, sum->shape, sum->indices, sum->pointers, values, true, &made, err));
    f->result = fan_value_sparse(made, fan_fold_device(f));
    f->owned = true;
done:
    fan_array_drop(values);
    fan_sparse_drop(sum);
    return status;
}

fan_status fan_fold_exact(fan_fold *f, fan_error *err)
{
    fan_status status = FAN_OK;
    const fan_slot *s = fan_fold_slot(f);
    const fan_slot_spec *spec = s->spec;
    const fan_array *like = NULL;
    size_t sparse = 0;
    for (size_t i = 0; i < f->n; i++) {
        sparse += f->terms[i].v->form == FAN_FORM_SPARSE;
        like = !like && f->terms[i].v->form == FAN_FORM_DENSE ? f->terms[i].v->array : like;
    }
    if (f->plan.kind == FAN_FOLD_EXACT_SPARSE && fan_fold_is_copied(f))
        return fan_fold_sparse(f, err);
    if (f->plan.kind == FAN_FOLD_EXACT_SPARSE)
        return fold_exact_sparse(f, err);
    const fan_scale *scale = fan_fold_scale(f);
    fan_window *sum = NULL;
    fan_array *out = NULL;
    fan_dtype d = exact_dtype(f);
    if (f->out)
        out = fan_array_hold(f->out->array);
    else
        FAN_GO(fan_fold_fresh(f, f->plan.dtype, spec->has_shape ? spec->ndim : s->p->ndim,
                              spec->has_shape ? spec->shape : s->p->shape, like, &out, err));
    FAN_GO(fan_order_wait_terms(f, err));
    if (f->out)
        FAN_GO(fan_order_wait_taker(f, s->p->accum, &f->plan.after, err));
    if (f->state && f->n == 0) {
        fan_window_round(out, f->state->sum, scale);
    } else if (f->state || sparse) {
        FAN_GO(exact_window(f, d, out->size, &sum, err));
        FAN_GO(exact_add(f, sum, NULL, 0, err));
        fan_window_round(out, sum, scale);
    } else {
        for (size_t i = 0; i < f->n; i++)
            f->scratch[i] = (fan_operand){f->terms[i].v->array, d};
        FAN_GO((f->out ? fan_fold_job : fan_fold_job_to_fresh)(
            f,
            &(fan_job){
                .kind = FAN_JOB_EXACT, .out = out, .in = f->scratch, .n = f->n, .scale = scale, .label = "exact"},
            err));
    }
    if (f->out) {
        status = fan_value_copy(f->b->frontend, f->out, &f->result, err);
    } else {
        f->result = fan_value_dense(out, fan_fold_device(f));
        out = NULL;
        f->owned = true;
    }
done:
    fan_window_free(sum);
    fan_array_drop(out);
    return status;
}
