/* fold_job: what every kind of sum is made with: fresh memory, jobs, terms that become the sum. */
#ifndef FAN_BUFFER_FOLD_JOB_H
#define FAN_BUFFER_FOLD_JOB_H

#include "buffer/fold.h"

static inline fan_slot *fan_fold_slot(const fan_fold *f) { return &f->b->slots[f->slot]; }

static inline fan_device *fan_fold_device(const fan_fold *f)
{
    fan_device *d = fan_fold_slot(f)->p->device;
    return d ? d : fan_cpu();
}

static inline uint64_t fan_dense_bytes(const fan_array *a) { return (uint64_t)a->size * fan_dtype_size(a->dtype); }

/* fan_fold_dtype: the sum's dtype; FAN_DT_NONE for objects. */
fan_dtype fan_fold_dtype(const fan_fold *f);
/* fan_fold_accumulated: what a prefix with these dtypes runs in (A11). */
fan_dtype fan_fold_accumulated(const fan_fold *f, fan_dtype_set seen);

/* fan_fold_expanded: axes along which every term is expanded (A13); 0 unless all are dense. */
uint64_t fan_fold_expanded(const fan_fold *f);

/* fan_term_holders: of *Reusable*, what is to be said of a dense or sparse term whoever asks: who can see its memory.
 * `host`: it is on a device without streams. What is to be written, and how, is the asker's to add. */
fan_reuse fan_term_holders(const fan_buffer *b, const fan_term *t, bool host);

/* fan_fold_job: queues the job on A, or puts it into the fold's batch; counted. */
fan_status fan_fold_job(fan_fold *f, fan_job *job, fan_error *err);
/* fan_fold_job_to_fresh: the same, into memory that is dropped where the user ends a take meanwhile. */
fan_status fan_fold_job_to_fresh(fan_fold *f, fan_job *job, fan_error *err);
/* fan_fold_into: the same of a job of few words. */
fan_status fan_fold_into(fan_fold *f, fan_job_kind kind, const char *label, const fan_array *out, const fan_operand *in,
                         size_t n, const fan_sparse *sparse, fan_error *err);
/* fan_fold_fresh: memory for a result: of the library whose kind it comes back as (D15), or of the device. */
fan_status fan_fold_fresh(fan_fold *f, fan_dtype dtype, int ndim, const int64_t *shape, const fan_array *like,
                          fan_array **out, fan_error *err);
/* fan_fold_keep_term: term `i` becomes the result: its memory will hold the sum. */
fan_status fan_fold_keep_term(fan_fold *f, size_t i, fan_value *out, fan_error *err);
/* fan_fold_sum_sparse: the first n terms, all sparse, as one without duplicates. */
fan_status fan_fold_sum_sparse(fan_fold *f, size_t n, fan_sparse **out, fan_error *err);

#endif
