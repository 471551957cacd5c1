/* How a sum is carried out. The plan comes from accum and sync; here arrays are made, streams wait, jobs run.
 *
 * Order within a fold: plan; allocate; wait and mark; run; record. So a want of memory is met before anything has
 * happened.
 */
#include "buffer/slot.h"

#include "array/exact.h"
#include "array/overlap.h"
#include "base/fault.h"
#include "base/interrupt.h"
#include "base/mem.h"
#include "base/trace.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BUSY_BYTES 65536 /* from here on the frontend is left while a job runs */

static fan_slot *slot_of(const fan_fold *f) { return &f->b->slots[f->slot]; }

static fan_device *device_of(const fan_fold *f)
{
    fan_device *d = slot_of(f)->p->device;
    return d ? d : fan_cpu();
}

static uint64_t left_out(fan_device *d) { return d->backend->left_out ? d->backend->left_out(d) : 0; }

fan_status fan_plan_record(fan_buffer *b, fan_stream *s, uint64_t bit, fan_event **out, fan_error *err)
{
    if (left_out(s->device) & bit)
        return fan_event_new(s->device, out, err);
    FAN_TRY(fan_event_record(s, out, err));
    FAN_COUNT(b, events, 1);
    return FAN_OK;
}

fan_status fan_plan_refused(const char *who, fan_error *err)
{
    fan_error was;
    if (!err)
        return FAN_ERR_CAPTURE;
    was = *err;
    bool redirect = was.code == 906 && !fan_get_capture_redirect();
    return fan_fail_code(
        err, FAN_ERR_CAPTURE, was.code, "%s: %s%s", who, was.text,
        redirect ? "; or let fanin.set_options(capture_redirect=True) put the captured stream in its place" : "");
}

fan_status fan_plan_wait(fan_buffer *b, size_t slot, fan_stream *s, fan_event *e, uint64_t bit, fan_error *err)
{
    bool elided = false;
    if (!e || !e->stream || (left_out(s->device) & bit))
        return FAN_OK;
    fan_status status = fan_stream_wait(s, e, &elided, err);
    if (status == FAN_ERR_CAPTURE) {
        char who[256];
        snprintf(who, sizeof who, FAN_SLOT_SAID, FAN_SLOT_WHO(b, slot));
        status = fan_plan_refused(who, err);
    }
    FAN_TRY(status);
    if (elided)
        FAN_COUNT(b, waits_elided, 1);
    else
        FAN_COUNT(b, waits, 1);
    return FAN_OK;
}

fan_status fan_plan_consumer(fan_stream *s, fan_stream *t, const fan_event *e, fan_stream **out, fan_error *err)
{
    uint64_t mine, theirs;
    *out = s;
    if (!s || !t || s == t || !fan_get_capture_redirect())
        return FAN_OK;
    FAN_TRY(fan_stream_capture(s, &mine, err));
    FAN_TRY(fan_stream_capture(t, &theirs, err));
    bool still =
        !e || e->capture == theirs; /* what was recorded in a capture that has ended is for no stream to take over */
    if (fan_capture_rule(mine, theirs, still, s->handle == FAN_LEGACY) == FAN_CAPTURE_REDIRECT)
        *out = t;
    return FAN_OK;
}

fan_status fan_plan_mark(const fan_value *v, fan_stream *s, uint64_t bit, fan_error *err)
{
    if (left_out(s->device) & bit)
        return FAN_OK;
    return fan_value_mark(v, s, err);
}

/* A wish holds the whole sum (each add saw to that), and so every prefix of it, of whatever kind that is. */
static fan_dtype accumulated(const fan_fold *f, fan_dtype_set seen)
{
    fan_dtype d = fan_dtype_set_promote(seen), wish = slot_of(f)->spec->accumulate;
    if (d == FAN_DT_NONE)
        return d;
    return wish == FAN_DT_NONE ? fan_dtype_accumulate(d) : wish;
}

fan_dtype fan_fold_dtype(const fan_fold *f) { return fan_dtype_set_promote(f->seen); }

/* Whether the first term's memory may be written. The other terms must be dense or sparse. */
static fan_reuse_answer may_write(const fan_fold *f, size_t which, fan_dtype target)
{
    const fan_term *t = &f->terms[which];
    const fan_array *a = t->v->array;
    fan_array *others[3];
    fan_array *compact = NULL;
    uint64_t expanded = fan_array_expanded(a);
    fan_reuse facts = {
        .writable = a->writable || t->ours,
        .exact = a->dtype == target,
        .apart = true,
        .borrowed = t->v->borrowed,
        .ours = t->ours,
        .lent = t->lent,
        .donated = t->donated,
        .host = !device_of(f)->backend->has_streams,
        .settled = true, /* fold_settle makes A wait */
    };
    facts.dense = fan_array_dense(a);
    /* The compact base of our own expanded sum may be written as long as the sum stays expanded (A13). */
    if (!facts.dense && expanded && t->ours && fan_array_compact(a, expanded, &compact, NULL) == FAN_OK) {
        facts.dense = fan_array_dense(compact);
        fan_array_drop(compact);
        for (size_t i = 0; i < f->n; i++)
            if (!f->terms[i].v->array || (expanded & ~fan_array_expanded(f->terms[i].v->array)))
                facts.dense = false;
    }
    for (size_t i = 0; i < f->n && facts.apart; i++) {
        if (i == which)
            continue;
        size_t n = fan_value_arrays(f->terms[i].v, others, 3);
        for (size_t k = 0; k < n && k < 3; k++)
            facts.apart = facts.apart && (fan_array_apart(a, others[k]) || fan_array_disjoint(a, others[k])); /* D43 */
    }
    if (!facts.ours && !facts.donated && !t->lent && facts.host && t->v->object)
        facts.unshared = f->b->frontend->unshared(t->v->object);
    if (FAN_FAULT(WRITE_SHARED) ||
        (FAN_FAULT(REFCOUNT_IS_ENOUGH) && atomic_load(&a->refs) == 1 && atomic_load(&a->storage->refs) == 1))
        facts.ours = true;
    return fan_reusable(&facts);
}

fan_reuse_answer fan_fold_reuse(const fan_fold *f)
{
    if (f->n == 0 || f->terms[0].v->form != FAN_FORM_DENSE)
        return FAN_REUSE_LAYOUT;
    return may_write(f, 0, accumulated(f, f->seen));
}

fan_accum_plan fan_fold_plan(const fan_fold *f)
{
    fan_side side[2] = {{.form = FAN_FORM_UNDEFINED}, {.form = FAN_FORM_UNDEFINED}};
    for (size_t i = 0; i < 2 && i < f->n; i++) {
        side[i].form = f->terms[i].v->form;
        if (side[i].form == FAN_FORM_SPARSE)
            side[i].format = (int)f->terms[i].v->sparse->format;
        if (side[i].form == FAN_FORM_DENSE && !f->forbid_in_place)
            side[i].reusable = may_write(f, i, accumulated(f, f->seen)) == FAN_REUSE_YES;
    }
    return fan_accum(side[0], side[1], f->b->create_graph);
}

/* S12, S13: every term is used on A, which waits for the newest event of each distinct stream. Term 0 is the value. */
fan_status fan_fold_wait_terms(fan_fold *f, fan_error *err)
{
    fan_stream *A = slot_of(f)->p->accum;
    if (!A || FAN_FAULT(FOLD_UNORDERED))
        return FAN_OK;
    for (size_t i = 0; i < f->n; i++) {
        const fan_term *t = &f->terms[i];
        bool newest = true;
        /* Lifetime: also where P is A, for the memory may be a third stream's. */
        FAN_TRY(fan_plan_mark(t->v, FAN_FAULT(MARK_ON_PRODUCER) ? t->producer : A,
                              i == 0 ? FAN_PLAN_S13_MARK : FAN_PLAN_S12_MARK, err));
        if (!t->producer || t->producer == A || (FAN_FAULT(STREAMS_BY_NUMBER) && t->producer->handle == A->handle) ||
            (FAN_FAULT(STREAMS_BY_DEVICE) && t->producer->device == A->device))
            continue;
        /* An event whose record on the same stream began when this one's was through covers this gradient too. */
        for (size_t j = 0; j < f->n && newest && t->event; j++)
            if (j != i && f->terms[j].producer == t->producer && f->terms[j].event)
                newest = FAN_FAULT(OLDEST_EVENT) ? !fan_event_covers(t->event, f->terms[j].event)
                                                 : !fan_event_covers(f->terms[j].event, t->event);
        f->rules |= i == 0 ? FAN_S(13) : FAN_S(12);
        if (newest)
            FAN_TRY(fan_plan_wait(f->b, f->slot, A, t->event, i == 0 ? FAN_PLAN_S13_WAIT : FAN_PLAN_S12_WAIT, err));
    }
    return FAN_OK;
}

/* before_record: an event that is recorded on s now is behind all sums on s: also those that wait in the batch. */
static void before_record(const fan_fold *f, const fan_stream *s)
{
    if (f->batch && fan_batch_waits_on(f->batch, s) && !FAN_FAULT(BATCH_SETTLED))
        fan_batch_flush(f->batch);
}

/* Reusable, last condition: A waits for an event recorded now on every other stream that used the memory. */
static fan_status settle(fan_fold *f, const fan_array *a, fan_error *err)
{
    fan_stream *A = slot_of(f)->p->accum, *user;
    fan_status status = FAN_OK;
    if (!A || !a->storage || FAN_FAULT(WRITE_WITHOUT_WAIT) || FAN_FAULT(REFCOUNT_IS_ENOUGH))
        return FAN_OK;
    for (size_t i = 0; status == FAN_OK && (user = fan_memory_user(a->storage, i)); i++) {
        fan_event *e = NULL;
        if (user != A) {
            before_record(f, user);
            if ((status = fan_event_record(user, &e, err)) == FAN_OK) {
                FAN_COUNT(f->b, events, 1);
                status = fan_plan_wait(f->b, f->slot, A, e, 0, err);
            }
        }
        fan_event_drop(e);
        fan_stream_drop(user);
    }
    return status;
}

static uint64_t dense_bytes(const fan_array *a) { return (uint64_t)a->size * fan_dtype_size(a->dtype); }

static fan_status run(fan_fold *f, fan_job *job, fan_error *err)
{
    fan_buffer *b = f->b;
    fan_slot *s = slot_of(f);
    fan_device *d = device_of(f);
    char label[FAN_TRACE_LABEL];
    uint64_t bytes = job->out ? dense_bytes(job->out) : 0;
    if (d->backend->has_streams || fan_trace_on()) { /* nobody else reads it */
        if (s->spec->name)
            snprintf(label, sizeof label, "%s %s", job->label, s->spec->name);
        else
            snprintf(label, sizeof label, "%s %s[%zu]", job->label, b->name, f->slot);
        job->label = label;
    }
    FAN_COUNT(b, passes, 1);
    FAN_COUNT(b, bytes_written, bytes);
    for (size_t i = 0; i < job->n; i++) {
        uint64_t n = dense_bytes(job->in[i].array);
        FAN_COUNT(b, bytes_read, n);
        bytes += n;
    }
    fan_stream *on = s->p->accum;
    if (FAN_FAULT(SUM_ON_LAST_PRODUCER) && f->n)
        on = f->terms[f->n - 1].producer;
    if (f->batch)
        return fan_batch_put(f->batch, on, job, &f->number, err);
    bool away = bytes >= BUSY_BYTES && !d->backend->has_streams && b->frontend->leave;
    void *left = away ? b->frontend->leave() : NULL;
    fan_status status = fan_device_run(d, on, job, err);
    if (away)
        b->frontend->enter(left);
    return status;
}

/* run, into memory that is dropped where the user ends a take meanwhile. */
static fan_status run_to_fresh(fan_fold *f, fan_job *job, fan_error *err)
{
    fan_interrupt interrupt;
    bool may_end = f->may_end && !device_of(f)->backend->has_streams;
    fan_interrupt_begin(&interrupt, may_end ? f->b->frontend->poll : NULL, err);
    return fan_interrupt_end(&interrupt, run(f, job, err));
}

static fan_status fresh(fan_fold *f, fan_dtype dtype, int ndim, const int64_t *shape, const fan_array *like,
                        fan_array **out, fan_error *err)
{
    fan_device *d = device_of(f);
    const fan_frontend *frontend = f->b->frontend;
    const fan_value *first = NULL; /* D15: of its kind the sum is */
    for (size_t i = 0; i < f->n; i++)
        if (!first || f->terms[i].v->rank < first->rank)
            first = f->terms[i].v;
    *out = NULL;
    if (d->backend->has_streams && frontend->fresh && first)
        FAN_TRY(frontend->fresh(first->origin, d, slot_of(f)->p->accum, dtype, ndim, shape, like, out, err));
    return *out ? FAN_OK : fan_device_array(d, slot_of(f)->p->accum, dtype, ndim, shape, like, out, err);
}

/* Takes over term `i` as the result: its memory now holds the sum. */
static fan_status keep_term(fan_fold *f, size_t i, fan_value *out, fan_error *err)
{
    FAN_TRY(fan_value_copy(f->b->frontend, f->terms[i].v, out, err));
    f->ours = f->terms[i].ours;
    f->donated = f->terms[i].donated;
    return FAN_OK;
}

fan_status fan_fold_wait_taker(fan_fold *f, fan_stream *A, fan_error *err)
{
    fan_stream *taker;
    fan_event *e = NULL;
    if (!A)
        return FAN_OK;
    FAN_TRY(fan_plan_consumer(f->taker, A, NULL, &taker, err));
    if (taker && taker != A) {
        before_record(f, taker);
        FAN_TRY(fan_plan_record(f->b, taker, 0, &e, err));
        fan_status status = fan_plan_wait(f->b, f->slot, A, e, FAN_PLAN_S22_WAIT, err);
        fan_event_drop(e);
        FAN_TRY(status);
    }
    return fan_plan_mark(f->out, A, FAN_PLAN_S22_MARK, err);
}

uint64_t fan_fold_expanded(const fan_fold *f)
{
    uint64_t axes = f->n ? ~UINT64_C(0) : 0;
    for (size_t i = 0; i < f->n; i++)
        axes &= f->terms[i].v->form == FAN_FORM_DENSE ? fan_array_expanded(f->terms[i].v->array) : 0;
    return axes;
}

static fan_dtype finished(const fan_fold *f)
{
    return f->finish_dtype != FAN_DT_NONE ? f->finish_dtype : fan_fold_dtype(f);
}

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
static fan_status fold_dense(fan_fold *f, fan_dtype target, fan_error *err)
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
        in[i] = (fan_operand){f->terms[i].v->array, accumulated(f, f->terms[i].seen)};
    cut = expanded != 0 && !f->out && !(f->take && f->take->writable);
    if (cut)
        for (; made < f->n; made++) {
            fan_array *c = NULL;
            FAN_GO(fan_array_compact(in[made].array, expanded, &c, err));
            in[made].array = c;
        }
    if (f->out) {
        out = fan_array_hold(f->out->array);
    } else if (!f->finish && !f->forbid_in_place && may_write(f, 0, target) == FAN_REUSE_YES) {
        in_place = true;
        FAN_GO(keep_term(f, 0, &kept, err));
        out = fan_array_hold((fan_array *)in[0].array);
        f->rules |= FAN_A(6);
    } else {
        FAN_GO(fresh(f, target, in[0].array->ndim, in[0].array->shape, in[0].array, &out, err));
        f->rules |= FAN_A(7);
    }
    if (cut) {
        f->rules |= FAN_A(13);
        if (!in_place)
            FAN_GO(fan_array_broadcast(out, full->ndim, full->shape, &seen, err));
    }
    if (!FAN_FAULT(WAIT_AFTER_SUM))
        FAN_GO(fan_fold_wait_terms(f, err));
    if (in_place)
        FAN_GO(settle(f, out, err));
    if (f->out)
        FAN_GO(fan_fold_wait_taker(f, slot_of(f)->p->accum, err));
    bool here = f->b->known && !device_of(f)->backend->has_streams;
    fan_stats_out figures = {.words = f->known.words, .before = slot_of(f)->p->known.words, .keys = f->keys};
    FAN_GO((f->out || in_place ? run : run_to_fresh)(
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
        FAN_GO(fan_fold_wait_terms(f, err));
    FAN_COUNT(f->b, in_place, in_place ? f->n - 1 : 0);
    if (f->out) {
        status = fan_value_copy(f->b->frontend, f->out, &f->result, err);
    } else if (in_place) {
        f->result = kept;
        kept = (fan_value){.dtype = FAN_DT_NONE};
    } else {
        f->result = fan_value_dense(fan_array_hold(cut ? seen : out), device_of(f));
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

/* All terms sparse (A5, A7), or one of them to be finished. */
static fan_status fold_sparse(fan_fold *f, fan_error *err)
{
    fan_status status = FAN_OK;
    fan_sparse *sum = NULL;
    const fan_sparse *first = f->terms[0].v->sparse;
    fan_sparse_operand *in = fan_alloc(f->n * sizeof *in);
    int64_t nnz = 0, before = first->nnz_coalesced;
    bool same = true;
    if (!in)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    for (size_t i = 0; i < f->n; i++) {
        in[i] = (fan_sparse_operand){f->terms[i].v->sparse, accumulated(f, f->terms[i].seen)};
        nnz += fan_sparse_nnz(in[i].sparse);
        same = same && in[i].sparse->format == first->format;
    }
    FAN_GO(fan_fold_wait_terms(f, err));
    f->rules |= same ? FAN_A(5) : FAN_A(7);
    bool coalesce = f->finish ? f->n > 1 : nnz > 2 * before;
    FAN_COUNT(f->b, passes, 1);
    FAN_GO(fan_device_sparse_merge(device_of(f), slot_of(f)->p->accum, in, f->n, coalesce,
                                   f->finish ? finished(f) : FAN_DT_NONE,
                                   f->take && f->take->scale.on ? &f->take->scale : NULL, &sum, err));
    f->result = fan_value_sparse(sum, device_of(f));
    f->ours = true;
done:
    fan_free(in);
    return status;
}

static fan_status into(fan_fold *f, fan_job_kind kind, const char *label, const fan_array *out, const fan_operand *in,
                       size_t n, const fan_sparse *sparse, fan_error *err)
{
    return run(f, &(fan_job){.kind = kind, .out = out, .in = in, .n = n, .sparse = sparse, .label = label}, err);
}

/* The first n terms, all sparse, as one without duplicates. */
static fan_status sum_sparse(fan_fold *f, size_t n, fan_sparse **out, fan_error *err)
{
    fan_sparse_operand *in = fan_alloc(n * sizeof *in);
    if (!in)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    for (size_t i = 0; i < n; i++)
        in[i] = (fan_sparse_operand){f->terms[i].v->sparse, accumulated(f, f->terms[i].seen)};
    FAN_COUNT(f->b, passes, 1);
    fan_status status =
        fan_device_sparse_merge(device_of(f), slot_of(f)->p->accum, in, n, true, FAN_DT_NONE, NULL, out, err);
    fan_free(in);
    return status;
}

/* A sum of dense and sparse terms on its way. */
typedef struct mixed {
    fan_array *cur;   /* the sum so far, in the accumulation dtype of what is in it */
    fan_value kept;   /* the term whose memory `cur` is; undefined: fresh memory */
    fan_dtype target; /* the accumulation dtype of all */
    int ndim;
    const int64_t *shape;
    size_t lead; /* sparse terms before the first dense one, where that is copied */
    size_t next; /* the term that comes next */
} mixed;

/* Where the sum is made: in the first term or the second, or in fresh memory. */
static fan_status mixed_place(fan_fold *f, mixed *m, fan_error *err)
{
    fan_term *t = f->terms;
    bool may = !f->finish && !f->forbid_in_place && accumulated(f, t[0].seen) == m->target;
    bool asked = f->b->known != NULL; /* .. whether a term was finite, once the sum is made: it must be there still */
    if (may && (!asked || (fan_fold_skip(f) && !device_of(f)->backend->has_streams)) &&
        t[0].v->form == FAN_FORM_DENSE && may_write(f, 0, m->target) == FAN_REUSE_YES) {
        f->rules |= FAN_A(6);
        m->cur = fan_array_hold(t[0].v->array);
        return keep_term(f, 0, &m->kept, err);
    }
    if (may && !asked && t[0].v->form == FAN_FORM_SPARSE && t[0].v->sparse->coalesced &&
        t[1].v->form == FAN_FORM_DENSE && may_write(f, 1, m->target) == FAN_REUSE_YES) {
        f->rules |= FAN_A(3);
        m->cur = fan_array_hold(t[1].v->array);
        return keep_term(f, 1, &m->kept, err);
    }
    f->rules |= t[0].v->form == FAN_FORM_SPARSE ? FAN_A(4) : FAN_A(7);
    while (t[m->lead].v->form == FAN_FORM_SPARSE)
        m->lead++;
    return fresh(f, accumulated(f, t[m->lead].seen), m->ndim, m->shape, t[m->lead].v->array, &m->cur, err);
}

/* The terms up to and with the first dense one. */
static fan_status mixed_begin(fan_fold *f, mixed *m, fan_error *err)
{
    fan_term *t = f->terms;
    if (m->kept.form == FAN_FORM_DENSE) {
        FAN_TRY(settle(f, m->cur, err));
        FAN_COUNT(f->b, in_place, f->n - 1);
        m->next = t[0].v->form == FAN_FORM_SPARSE ? 2 : 1;
        return m->next == 1 ? FAN_OK : into(f, FAN_JOB_SCATTER, "scatter", m->cur, NULL, 0, t[0].v->sparse, err);
    }
    /* What is sparse before the first dense term is summed by itself; where it has no entry the dense value stays as it
     * is (D12). */
    f->scratch[0] = (fan_operand){t[m->lead].v->array, m->cur->dtype};
    FAN_TRY(into(f, FAN_JOB_COPY, "copy", m->cur, f->scratch, 1, NULL, err));
    m->next = m->lead + 1;
    if (!m->lead)
        return FAN_OK;
    fan_sparse *leading = NULL;
    FAN_TRY(sum_sparse(f, m->lead, &leading, err));
    fan_status status = into(f, FAN_JOB_SCATTER, "scatter", m->cur, NULL, 0, leading, err);
    fan_sparse_drop(leading);
    return status;
}

/* One sparse term, or all dense ones up to the next sparse. */
static fan_status mixed_more(fan_fold *f, mixed *m, fan_error *err)
{
    fan_term *t = f->terms;
    size_t i = m->next, end = i;
    fan_array *wider = NULL;
    fan_status status;
    while (end < f->n && t[end].v->form == FAN_FORM_DENSE)
        end++;
    end = end > i ? end : i + 1;
    fan_dtype acc = accumulated(f, t[end - 1].seen);
    if (acc != m->cur->dtype)
        FAN_TRY(fresh(f, acc, m->ndim, m->shape, m->cur, &wider, err));
    fan_array *to = wider ? wider : m->cur;
    f->scratch[0] = (fan_operand){m->cur, m->cur->dtype};
    if (t[i].v->form == FAN_FORM_DENSE) {
        for (size_t k = i; k < end; k++)
            f->scratch[1 + k - i] = (fan_operand){t[k].v->array, accumulated(f, t[k].seen)};
        status = into(f, FAN_JOB_SUM, "sum", to, f->scratch, 1 + end - i, NULL, err);
    } else {
        status = wider ? into(f, FAN_JOB_COPY, "widen", to, f->scratch, 1, NULL, err) : FAN_OK;
        if (status == FAN_OK)
            status = into(f, FAN_JOB_SCATTER, "scatter", to, NULL, 0, t[i].v->sparse, err);
    }
    if (wider) {
        fan_array_drop(status == FAN_OK ? m->cur : wider);
        m->cur = status == FAN_OK ? wider : m->cur;
    }
    m->next = end;
    return status;
}

/* The sum in the dtype in which it is wanted, scaled. */
static fan_status mixed_end(fan_fold *f, mixed *m, fan_error *err)
{
    fan_dtype dtype = f->finish ? finished(f) : m->target;
    const fan_scale *scale = f->finish && f->take && f->take->scale.on ? &f->take->scale : NULL;
    fan_array *done = NULL;
    if (dtype == m->cur->dtype && !scale)
        return FAN_OK;
    FAN_TRY(fresh(f, dtype, m->ndim, m->shape, m->cur, &done, err));
    f->scratch[0] = (fan_operand){m->cur, m->cur->dtype};
    fan_status status = run(
        f, &(fan_job){.kind = FAN_JOB_SUM, .out = done, .in = f->scratch, .n = 1, .scale = scale, .label = "finish"},
        err);
    fan_array_drop(status == FAN_OK ? m->cur : done);
    m->cur = status == FAN_OK ? done : m->cur;
    return status;
}

/* Dense and sparse in any mix: a dense sum, written term by term in order (A3, A4, A6, A7). It is in the accumulation
 * dtype of each prefix. */
static fan_status fold_mixed(fan_fold *f, fan_error *err)
{
    fan_status status = FAN_OK;
    mixed m = {.kept = {.dtype = FAN_DT_NONE}, .target = accumulated(f, f->seen)};
    bool begun = false;
    m.ndim = fan_value_shape(f->terms[0].v, &m.shape);
    FAN_GO(mixed_place(f, &m, err));
    FAN_GO(fan_fold_wait_terms(f, err));
    FAN_GO(mixed_begin(f, &m, err));
    begun = m.next > 1;
    for (; m.next < f->n; begun = true)
        FAN_GO(mixed_more(f, &m, err));
    FAN_GO(mixed_end(f, &m, err));
    if (m.kept.form == FAN_FORM_DENSE) {
        f->result = m.kept;
        m.kept = (fan_value){.dtype = FAN_DT_NONE};
    } else {
        f->result = fan_value_dense(fan_array_hold(m.cur), device_of(f));
        f->ours = true;
    }
done:
    if (status == FAN_ERR_DEVICE_NOMEM && begun &&
        m.kept.form ==
            FAN_FORM_DENSE) { /* want of memory changes nothing, as a rule: here a part of the sum is in its place */
        status = FAN_ERR_DEVICE;
        if (err)
            err->status = status;
    }
    fan_value_drop(f->b->frontend, &m.kept);
    fan_array_drop(m.cur);
    return status;
}

bool fan_fold_exact(const fan_fold *f)
{
    fan_dtype d = fan_fold_dtype(f);
    return slot_of(f)->spec->exact && d != FAN_DT_NONE && fan_exact_fits(d);
}

static const fan_array *numbers_of(const fan_value *v)
{
    return v->form == FAN_FORM_SPARSE ? v->sparse->values : v->array;
}

/* The dtype that holds every term as it is: a reduced one is in the accumulation dtype (D7). */
static fan_dtype exact_dtype(const fan_fold *f)
{
    fan_dtype d = fan_fold_dtype(f);
    if (f->state)
        d = fan_dtype_promote(d, f->state->dtype);
    for (size_t i = 0; i < f->n; i++)
        d = fan_dtype_promote(d, numbers_of(f->terms[i].v)->dtype);
    return d;
}

static fan_exact_state *exact_state(const fan_fold *f, fan_dtype d, int64_t size)
{
    const fan_exact_state *old = f->state;
    fan_exact_state *st = fan_alloc(sizeof *st + (size_t)size * fan_exact_state_size(d));
    if (!st)
        return NULL;
    *st = (fan_exact_state){.dtype = d, .size = size};
    if (!old) {
        fan_exact_start(st->words, d, size);
        return st;
    }
    st->origin = old->origin;
    st->rank = old->rank;
    if (old->dtype == d)
        memcpy(st->words, old->words, (size_t)size * fan_exact_state_size(d));
    else
        fan_exact_widen(st->words, d, old->words, old->dtype, size);
    return st;
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

/* Where the numbers of a sparse term go: to their places, or to those that `all` (n of them, sorted) say; *to is the
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

/* Adds all terms. Outside the frontend: it takes a while. `all`, n: as places_among has them. */
static fan_status exact_add(fan_fold *f, fan_exact_state *st, const stored *all, size_t n, fan_error *err)
{
    fan_buffer *b = f->b;
    fan_status status = FAN_OK;
    void *left = b->frontend->leave ? b->frontend->leave() : NULL;
    for (size_t i = 0; i < f->n && status == FAN_OK; i++) {
        const fan_value *v = f->terms[i].v;
        int64_t *to = NULL;
        if (v->form == FAN_FORM_DENSE) {
            fan_exact_add(st->words, st->dtype, (const fan_array *const[]){v->array}, 1);
            continue;
        }
        status = places_among(v->sparse, all, n, &to, err);
        if (status == FAN_OK)
            fan_exact_add_at(st->words, st->dtype, v->sparse->values, to);
        fan_free(to);
    }
    if (b->frontend->leave)
        b->frontend->enter(left);
    FAN_COUNT(b, passes, f->n > 0);
    for (size_t i = 0; i < f->n; i++)
        FAN_COUNT(b, bytes_read, dense_bytes(numbers_of(f->terms[i].v)));
    return status;
}

fan_status fan_fold_absorb(fan_fold *f, const fan_value *like, fan_error *err)
{
    fan_pass *p = slot_of(f)->p;
    fan_exact_state *st = p->exact;
    if (f->n == 0)
        return FAN_OK;
    for (size_t i = 0; i < f->n; i++)
        FAN_TRY(fan_slot_still(f->b, f->slot, f->terms[i].v, f->terms[i].key, err));
    fan_dtype d = exact_dtype(f);
    if (!st || st->dtype != d) {
        st = exact_state(f, d, f->terms[0].v->array->size);
        if (!st)
            return fan_fail(err, FAN_ERR_NOMEM, "%s: slot %zu: out of memory", f->b->name, f->slot);
        fan_free(p->exact);
        p->exact = st;
    }
    if (like && (!f->state || like->rank < st->rank)) {
        st->origin = like->origin;
        st->rank = like->rank;
    }
    f->state = st;
    FAN_TRY(exact_add(f, st, NULL, 0, err)); /* dense terms alone come here: nothing fails */
    for (size_t i = 0; f->b->known && !p->known.bad && i < f->n; i++) {
        fan_stats of;
        fan_stats_of(f->terms[i].v->array, &of);
        p->known.bad = of.nonfinite > 0;
        p->known.bad_key = f->terms[i].key;
    }
    FAN_COUNT(f->b, folds, 1);
    p->rules |= FAN_A(11);
    f->n = 0; /* nothing is left to sum: fan_fold_commit takes the items off the list */
    return FAN_OK;
}

/* The exact sum over the entries of `sum`, which has the structure of all terms. */
static fan_status exact_values(fan_fold *f, const fan_sparse *sum, const fan_scale *scale, fan_array **values,
                               fan_error *err)
{
    fan_status status = FAN_OK;
    size_t n = (size_t)sum->values->size;
    stored *all = fan_alloc((n ? n : 1) * sizeof *all);
    int64_t *places = NULL;
    fan_exact_state *st = exact_state(f, exact_dtype(f), sum->values->size);
    if (!all || !st)
        FAN_GO(fan_fail(err, FAN_ERR_NOMEM, "%s: slot %zu: out of memory", f->b->name, f->slot));
    FAN_GO(places_among(sum, NULL, 0, &places, err));
    for (size_t i = 0; i < n; i++)
        all[i] = (stored){places[i], (int64_t)i};
    qsort(all, n, sizeof *all, by_place);
    FAN_GO(exact_add(f, st, all, n, err));
    FAN_GO(fan_array_new(finished(f), sum->values->ndim, sum->values->shape, NULL, values, err));
    fan_exact_finish(*values, st->words, st->dtype, scale);
done:
    fan_free(all);
    fan_free(places);
    fan_free(st);
    return status;
}

/* All terms sparse: a sparse sum. */
static fan_status fold_exact_sparse(fan_fold *f, fan_error *err)
{
    fan_status status = FAN_OK;
    const fan_scale *scale = f->take && f->take->scale.on ? &f->take->scale : NULL;
    fan_sparse *sum = NULL, *made = NULL;
    fan_array *values = NULL;
    FAN_GO(sum_sparse(f, f->n, &sum, err));
    FAN_GO(exact_values(f, sum, scale, &values, err));
    FAN_GO(fan_sparse_new(sum->format, sum->ndim, sum->shape, sum->indices, sum->pointers, values, true, &made, err));
    f->rules |= FAN_A(11);
    f->result = fan_value_sparse(made, device_of(f));
    f->ours = true;
done:
    fan_array_drop(values);
    fan_sparse_drop(sum);
    return status;
}

static fan_status fold_exact(fan_fold *f, fan_error *err)
{
    fan_status status = FAN_OK;
    const fan_slot *s = slot_of(f);
    const fan_spec *spec = s->spec;
    const fan_array *like = NULL;
    size_t sparse = 0;
    for (size_t i = 0; i < f->n; i++) {
        sparse += f->terms[i].v->form == FAN_FORM_SPARSE;
        like = !like && f->terms[i].v->form == FAN_FORM_DENSE ? f->terms[i].v->array : like;
    }
    if (sparse && sparse == f->n && !f->state)
        return fold_exact_sparse(f, err);
    const fan_scale *scale = f->take && f->take->scale.on ? &f->take->scale : NULL;
    fan_exact_state *st = NULL;
    fan_array *out = NULL;
    fan_dtype d = exact_dtype(f);
    if (f->out)
        out = fan_array_hold(f->out->array);
    else
        FAN_GO(fresh(f, finished(f), spec->has_shape ? spec->ndim : s->p->ndim,
                     spec->has_shape ? spec->shape : s->p->shape, like, &out, err));
    f->rules |= FAN_A(11);
    FAN_GO(fan_fold_wait_terms(f, err));
    if (f->out)
        FAN_GO(fan_fold_wait_taker(f, slot_of(f)->p->accum, err));
    if (f->state || sparse) {
        st = exact_state(f, d, out->size);
        if (!st)
            FAN_GO(fan_fail(err, FAN_ERR_NOMEM, "%s: slot %zu: out of memory", f->b->name, f->slot));
        FAN_GO(exact_add(f, st, NULL, 0, err));
        fan_exact_finish(out, st->words, d, scale);
    } else {
        for (size_t i = 0; i < f->n; i++)
            f->scratch[i] = (fan_operand){f->terms[i].v->array, d};
        FAN_GO((f->out ? run : run_to_fresh)(
            f,
            &(fan_job){
                .kind = FAN_JOB_EXACT, .out = out, .in = f->scratch, .n = f->n, .scale = scale, .label = "exact"},
            err));
    }
    if (f->out) {
        status = fan_value_copy(f->b->frontend, f->out, &f->result, err);
    } else {
        f->result = fan_value_dense(out, device_of(f));
        out = NULL;
        f->ours = true;
    }
done:
    fan_free(st);
    fan_array_drop(out);
    return status;
}

static fan_status fold_body(fan_fold *f, fan_error *err);

/* D14: what stands before the first object is summed as usual; from there on the fold is pairwise (A8), as it is for a
 * pass that records itself (A1). */
static fan_status fold_objects(fan_fold *f, size_t first, fan_error *err)
{
    fan_status status = FAN_OK;
    fan_value sum = {.dtype = FAN_DT_NONE}, next = {.dtype = FAN_DT_NONE};
    fan_stream *A = slot_of(f)->p->accum;
    size_t i = first ? first : 1;
    if ((f->take && f->take->scale.on) || f->out)
        return fan_fail(err, FAN_ERR_TYPE, "%s: slot %zu sums objects; scale= and out= need arrays", f->b->name,
                        f->slot);
    f->rules |= f->b->create_graph ? FAN_A(1) : FAN_A(8);
    /* An object brings no dtype, so its `seen` is that of all before it. */
    if (first > 1 || (first == 1 && f->terms[0].v->dtype != fan_dtype_set_promote(f->terms[1].seen))) {
        fan_fold sub = *f;
        sub.n = first;
        sub.seen = f->terms[first].seen;
        sub.finish = true;
        sub.finish_dtype = FAN_DT_NONE;
        sub.take = NULL;
        sub.result = (fan_value){.dtype = FAN_DT_NONE};
        sub.known = (fan_sum_stats){.yes = false};
        status = fold_body(&sub, err);
        f->rules |= sub.rules;
        sum = sub.result;
        FAN_TRY(status);
    } else {
        FAN_TRY(fan_value_copy(f->b->frontend, f->terms[0].v, &sum, err));
    }
    FAN_GO(fan_fold_wait_terms(f, err));
    if (A)
        FAN_GO(fan_stream_push(A, err));
    for (; i < f->n && status == FAN_OK; i++) {
        const fan_value *v = f->terms[i].v;
        fan_value own = {.dtype = FAN_DT_NONE};
        /* A reduced contribution is kept in the accumulation dtype (D7); an object meets it in its own. */
        if (v->form == FAN_FORM_DENSE && f->terms[i].own != FAN_DT_NONE && v->dtype != f->terms[i].own) {
            fan_array *a = NULL;
            status = fresh(f, f->terms[i].own, v->array->ndim, v->array->shape, v->array, &a, err);
            f->scratch[0] = (fan_operand){v->array, f->terms[i].own};
            if (status == FAN_OK)
                status =
                    run(f, &(fan_job){.kind = FAN_JOB_COPY, .out = a, .in = f->scratch, .n = 1, .label = "round"}, err);
            if (status != FAN_OK) {
                fan_array_drop(a);
                break;
            }
            own = fan_value_dense(a, device_of(f));
            own.origin = v->origin;
            own.rank = v->rank;
            v = &own;
        }
        FAN_COUNT(f->b, passes, 1);
        status = f->b->frontend->combine(slot_of(f)->spec->combine, &sum, v, &next, err);
        fan_value_drop(f->b->frontend, &own);
        if (status == FAN_OK) {
            fan_value_drop(f->b->frontend, &sum);
            sum = next;
            next = (fan_value){.dtype = FAN_DT_NONE};
        }
    }
    if (A)
        fan_stream_pop(A);
    FAN_GO(status);
    f->result = sum;
    sum = (fan_value){.dtype = FAN_DT_NONE};
    f->ours = false;
done:
    fan_value_drop(f->b->frontend, &sum);
    return status;
}

static fan_status fold_body(fan_fold *f, fan_error *err)
{
    size_t sparse = 0, first = f->n;
    if (fan_fold_exact(f))
        return fold_exact(f, err);
    for (size_t i = f->n; i-- > 0;) {
        sparse += f->terms[i].v->form == FAN_FORM_SPARSE;
        if (f->terms[i].v->form == FAN_FORM_OBJECT)
            first = i;
    }
    if (first < f->n)
        return fold_objects(f, first, err);
    if (sparse == f->n)
        return fold_sparse(f, err);
    if (sparse)
        return fold_mixed(f, err);
    return fold_dense(f, f->finish ? finished(f) : accumulated(f, f->seen), err);
}

bool fan_fold_batches(const fan_fold *f)
{
    if (!slot_of(f)->p->accum || f->b->known || f->n == 0 || fan_fold_exact(f))
        return false;
    for (size_t i = 0; i < f->n; i++)
        if (f->terms[i].v->form != FAN_FORM_DENSE)
            return false;
    return true;
}

fan_status fan_fold_begin(fan_fold *f, fan_batch *batch, fan_error *err)
{
    fan_slot *s = slot_of(f);
    assert((f->n > 0 || f->state) && s->busy);
    f->before = (fan_sync_slot){.consumer = fan_stream_id_of(s->p->consumer),
                                .accum = fan_stream_id_of(s->p->accum),
                                .ready = fan_stream_id_of(f->n ? f->terms[0].producer : NULL),
                                .has_event = f->n && f->terms[0].event != NULL};
    f->result = (fan_value){.dtype = FAN_DT_NONE};
    for (size_t i = 0; i < f->n; i++)
        if (!f->terms[i].ours)
            FAN_TRY(fan_slot_still(f->b, f->slot, f->terms[i].v, f->terms[i].key, err));
    f->batch = batch;
    if (s->p->accum && FAN_FAULT(RECORD_BEFORE_SUM)) {
        fan_event_drop(f->ready_event);
        FAN_TRY(fan_plan_record(f->b, s->p->accum, FAN_PLAN_S15_RECORD, &f->early, err));
    }
    fan_status status = fan_fold_figures(f, err);
    if (status == FAN_OK)
        status = fold_body(f, err);
    if (status != FAN_OK) {
        f->batch = NULL;
        fan_fold_abandon(f);
    }
    return status;
}

bool fan_fold_left(const fan_fold *f)
{
    return f->batch && fan_batch_state(f->batch, f->number) == FAN_JOB_PENDING && !FAN_FAULT(BATCH_LATE);
}

void fan_fold_abandon(fan_fold *f)
{
    fan_value_drop(f->b->frontend, &f->result);
    f->result = (fan_value){.dtype = FAN_DT_NONE};
    fan_event_drop(f->early);
    f->early = NULL;
    f->batch = NULL;
}

/* S15 to S17, S22: what orders others after the sum. */
static fan_status fold_record(fan_fold *f, fan_error *err)
{
    fan_stream *A = slot_of(f)->p->accum;
    fan_event *e = f->early;
    bool record;
    uint64_t bit;
    f->early = NULL;
    if (f->finish) {
        fan_sync_finish plan = fan_sync_finish_plan(f->before, f->out != NULL, fan_stream_id_of(f->taker));
        record = plan.record;
        f->rules |= plan.rules;
        bit = FAN_PLAN_S22_RECORD;
    } else {
        fan_sync_fold plan = fan_sync_fold_plan(f->before);
        record = plan.record;
        f->rules |= plan.rules;
        record = record && !FAN_FAULT(NO_RECORD_BEHIND_SUM);
        bit = FAN_PLAN_S15_RECORD;
    }
    /* Left out, S15 leaves the first producer's event in place; a record that finds no memory leaves none, and S18
     * records then. */
    if (record && (left_out(A->device) & bit))
        e = f->terms[0].event ? fan_event_hold(f->terms[0].event) : NULL;
    else if (record && !e) {
        fan_status status = fan_plan_record(f->b, A, bit, &e, err);
        if (status != FAN_OK && status != FAN_ERR_NOMEM && status != FAN_ERR_DEVICE_NOMEM)
            return status;
    }
    f->ready_event = e;
    f->ready = fan_stream_hold(FAN_FAULT(READY_STREAM_STAYS) && f->terms[0].producer ? f->terms[0].producer : A);
    return FAN_OK;
}

static void fold_trace(const fan_fold *f)
{
    const fan_slot *s = slot_of(f);
    if (!fan_trace_on())
        return;
    fan_trace_line line = {.kind = FAN_TRACE_FOLD,
                           .how = s->p->how,
                           .device = s->p->device ? (int16_t)s->p->device->index : -1,
                           .slot = (int32_t)f->slot,
                           .count = (uint32_t)f->n,
                           .buffer = f->b->id,
                           .key = -1,
                           .rules = f->rules,
                           .stream = s->p->accum ? s->p->accum->handle : 0,
                           .bytes = fan_value_bytes(&f->result),
                           .in_place = (f->rules & (FAN_A(6) | FAN_A(3))) != 0,
                           .start_us = -1,
                           .end_us = -1};
    snprintf(line.label, sizeof line.label, "%s", s->spec->name ? s->spec->name : f->b->name);
    fan_trace_put(&line);
}

fan_status fan_fold_end(fan_fold *f, fan_error *err)
{
    fan_status status = FAN_OK;
    if (f->batch && fan_batch_state(f->batch, f->number) == FAN_JOB_FAILED && !FAN_FAULT(BATCH_NO_FATE))
        status = fan_batch_failure(f->batch, err);
    assert(!fan_fold_left(f));
    f->batch = NULL;
    if (status == FAN_OK)
        status = fan_fold_learn(f, &f->result, err);
    if (status == FAN_OK) {
        FAN_COUNT(f->b, folds, f->n > 1);
        if (slot_of(f)->p->accum)
            status = fold_record(f, err);
        else
            f->rules |= FAN_S(3);
    }
    if (status == FAN_OK)
        fold_trace(f);
    else
        fan_fold_abandon(f);
    return status;
}

fan_status fan_fold_run(fan_fold *f, fan_error *err)
{
    FAN_TRY(fan_fold_begin(f, NULL, err));
    return fan_fold_end(f, err);
}
