#include "base/mem.h"
#include "buffer/fold_job.h"
#include "buffer/fold_kinds.h"
#include "buffer/options.h"
#include "buffer/order.h"

/* All terms sparse (A5, A7), or one of them to be finished. */
fan_status fan_fold_sparse(fan_fold *f, fan_error *err)
{
    fan_status status = FAN_OK;
    fan_sparse *sum = NULL;
    fan_sparse_operand *in = fan_alloc(f->n * sizeof *in);
    if (!in)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    for (size_t i = 0; i < f->n; i++)
        in[i] = (fan_sparse_operand){f->terms[i].v->sparse, fan_fold_accumulated(f, f->terms[i].seen)};
    FAN_GO(fan_order_wait_terms(f, err));
    FAN_COUNT(f->b, passes, 1);
    FAN_GO(fan_device_sparse_merge(fan_fold_device(f), fan_fold_slot(f)->p->accum, in, f->n, f->plan.coalesce,
                                   f->finish ? f->plan.dtype : FAN_DT_NONE,
                                   f->take && f->take->scale.on ? &f->take->scale : NULL, &sum, err));
    f->result = fan_value_sparse(sum, fan_fold_device(f));
    f->ours = true;
done:
    fan_free(in);
    return status;
}
