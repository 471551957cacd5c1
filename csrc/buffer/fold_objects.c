#include "buffer/fold_job.h"
#include "buffer/options.h"
#include "buffer/order.h"

/* A reduced contribution is kept in the accumulation dtype (D7); an object meets it in its own: *own, where it is not
 * undefined, is that. */
static fan_status in_own_dtype(fan_fold *f, const fan_term *t, fan_value *own, fan_error *err)
{
    const fan_value *v = t->v;
    fan_array *a = NULL;
    if (v->form != FAN_FORM_DENSE || t->own == FAN_DT_NONE || v->dtype == t->own)
        return FAN_OK;
    FAN_TRY(fan_fold_fresh(f, t->own, v->array->ndim, v->array->shape, v->array, &a, err));
    f->scratch[0] = (fan_operand){v->array, t->own};
    fan_status status =
        fan_fold_job(f, &(fan_job){.kind = FAN_JOB_COPY, .out = a, .in = f->scratch, .n = 1, .label = "round"}, err);
    if (status != FAN_OK) {
        fan_array_drop(a);
        return status;
    }
    *own = fan_value_dense(a, fan_fold_device(f));
    own->origin = v->origin;
    own->rank = v->rank;
    return FAN_OK;
}

/* *sum becomes that of itself and term t. */
static fan_status combine(fan_fold *f, const fan_term *t, fan_value *sum, fan_error *err)
{
    fan_value own = {.dtype = FAN_DT_NONE}, next = {.dtype = FAN_DT_NONE};
    FAN_TRY(in_own_dtype(f, t, &own, err));
    FAN_COUNT(f->b, passes, 1);
    fan_status status = f->b->frontend->combine(fan_fold_slot(f)->spec->combine, sum,
                                                own.form == FAN_FORM_UNDEFINED ? t->v : &own, &next, err);
    fan_value_drop(f->b->frontend, &own);
    if (status == FAN_OK) {
        fan_value_drop(f->b->frontend, sum);
        *sum = next;
    }
    return status;
}

fan_status fan_fold_objects(fan_fold *f, fan_value *sum, size_t i, fan_error *err)
{
    fan_status status = FAN_OK;
    fan_stream *A = fan_fold_slot(f)->p->accum;
    FAN_TRY(fan_order_wait_terms(f, err));
    if (A)
        FAN_TRY(fan_stream_push(A, err));
    for (; i < f->n && status == FAN_OK; i++)
        status = combine(f, &f->terms[i], sum, err);
    if (A)
        fan_stream_pop(A);
    FAN_TRY(status);
    f->result = *sum;
    *sum = (fan_value){.dtype = FAN_DT_NONE};
    f->owned = false;
    return FAN_OK;
}
