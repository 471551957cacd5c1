#include "base/fault.h"
#include "buffer/fold_job.h"
#include "buffer/fold_kinds.h"
#include "buffer/options.h"
#include "buffer/order.h"
#include "buffer/stats.h"

/* D5: a sum of Python ints that leaves its dtype is none. */
static fan_status check_ints(const fan_fold *f, bool *all, fan_error *err)
{
    const fan_scale *scale = f->take && f->take->scale.on ? &f->take->scale : NULL;
    fan_int_run run = {.sum = 0};
    size_t n = 0;
    while (n < f->n && fan_int_run_add(&run, f->terms[n].v))
        n++;
    *all = n == f->n;
    const fan_value *next = *all ? NULL : f->terms[n].v;
    fan_dtype d = *all ? fan_fold_dtype(f) : n ? fan_dtype_set_promote(f->terms[n - 1].seen) : FAN_DT_NONE;
    if (!n || !fan_int_run_leaves(&run, next, scale, d))
        return FAN_OK;
    return fan_fail(err, FAN_ERR_OVERFLOW,
                    FAN_SLOT_SAID
                    ": the sum of its Python ints does not fit %s; add floats, or object arrays, whose + has no limit",
                    FAN_SLOT_WHO(f->b, f->slot), fan_dtype_name(d));
}

/* All terms dense: one pass. */
fan_status fan_fold_dense(fan_fold *f, fan_dtype target, fan_error *err)
{
    fan_status status = FAN_OK;
    fan_operand *in = f->scratch;
    fan_array *out = NULL, *seen = NULL;
    fan_value kept = {.dtype = FAN_DT_NONE};
    const fan_array *full = f->terms[0].v->array;
    bool in_place = false, cut = false, ints;
    uint64_t expanded = fan_fold_expanded(f);
    size_t made = 0;

    FAN_TRY(check_ints(f, &ints, err));
    for (size_t i = 0; i < f->n; i++)
        in[i] = (fan_operand){f->terms[i].v->array, fan_fold_accumulated(f, f->terms[i].seen)};
    cut = expanded != 0 && !f->out && !(f->take && f->take->writable);
    if (cut)
        for (; made < f->n; made++) {
            fan_array *c = NULL;
            FAN_GO(fan_array_compact(in[made].array, expanded, &c, err));
            in[made].array = c;
        }
    if (f->out) {
        out = fan_array_hold(f->out->array);
    } else if (!f->finish && !f->forbid_in_place && fan_fold_may_write(f, 0, target) == FAN_REUSE_YES) {
        in_place = true;
        FAN_GO(fan_fold_keep_term(f, 0, &kept, err));
        out = fan_array_hold((fan_array *)in[0].array);
        f->rules |= FAN_A(6);
    } else {
        FAN_GO(fan_fold_fresh(f, target, in[0].array->ndim, in[0].array->shape, in[0].array, &out, err));
        f->rules |= FAN_A(7);
    }
    if (cut) {
        f->rules |= FAN_A(13);
        if (!in_place)
            FAN_GO(fan_array_broadcast(out, full->ndim, full->shape, &seen, err));
    }
    if (!FAN_FAULT(WAIT_AFTER_SUM))
        FAN_GO(fan_order_wait_terms(f, err));
    if (in_place)
        FAN_GO(fan_order_wait_users(f, out, err));
    if (f->out)
        FAN_GO(fan_order_wait_taker(f, fan_fold_slot(f)->p->accum, err));
    bool here = f->b->known && !fan_fold_device(f)->backend->has_streams;
    fan_stats_out figures = {.words = f->known.words, .before = fan_fold_slot(f)->p->known.words, .keys = f->keys};
    FAN_GO((f->out || in_place ? fan_fold_job : fan_fold_job_to_fresh)(
        f,
        &(fan_job){.kind = FAN_JOB_SUM,
                   .out = out,
                   .in = in,
                   .n = f->n,
                   .scale = f->take && f->take->scale.on ? &f->take->scale : NULL,
                   .stats = here ? &f->known.stats : NULL,
                   .figures = f->known.words ? &figures : NULL,
                   .skip = fan_fold_skip(f),
                   .label = f->n > 1 ? "sum" : "finish"},
        err));
    f->known.yes = f->known.yes || here || f->known.words;
    if (cut && out->size) /* each element stands for several */
        f->known.times = (uint64_t)(full->size / out->size);
    if (FAN_FAULT(WAIT_AFTER_SUM))
        FAN_GO(fan_order_wait_terms(f, err));
    FAN_COUNT(f->b, in_place, in_place ? f->n - 1 : 0);
    if (f->out) {
        status = fan_value_copy(f->b->frontend, f->out, &f->result, err);
    } else if (in_place) {
        f->result = kept;
        kept = (fan_value){.dtype = FAN_DT_NONE};
    } else {
        f->result = fan_value_dense(fan_array_hold(cut ? seen : out), fan_fold_device(f));
        f->ours = true;
    }
    f->result.weak = ints;
done:
    for (size_t i = 0; i < made; i++)
        fan_array_drop((fan_array *)in[i].array);
    fan_value_drop(f->b->frontend, &kept);
    fan_array_drop(out);
    fan_array_drop(seen);
    return status;
}
