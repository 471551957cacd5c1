#include "buffer/host.h"

#include "array/sum.h"

#include <string.h>

#define HOST_RELEASE_BYTES \
    (UINT64_C(256) << 10) /* of terms, from which on other threads may run while they are summed */

void fan_host_wake(fan_buffer *b)
{
    for (size_t i = 0; i < b->nlocks && atomic_load(&b->waiting); i++) {
        fan_slot_lock(b, i);
        fan_cond_broadcast(&b->changed[i]);
        fan_slot_unlock(b, i);
    }
}

bool fan_fast_fits(fan_dtype dtype, fan_dtype acc, uint64_t bytes)
{
    return !fan_fast_is_large(bytes) && fan_sum_flat_fits(dtype, acc);
}

/* ---- the sum ---- */

/* A gap-free array over a run, for a sum alone. */
static void host_array(fan_array *a, const fan_fast_kind *k, size_t count, const char *data)
{
    memset(a, 0, sizeof *a);
    a->data = (char *)data;
    a->dtype = k->dtype;
    a->ndim = 1;
    a->shape = a->dims;
    a->strides = a->dims + 1;
    a->size = a->dims[0] = (int64_t)count;
    a->dims[1] = (int64_t)fan_dtype_size(k->dtype);
}

/* The runs as arrays, one more of them than n: for several threads, or for statistics. */
static void host_sum_arrays(const fan_fast_kind *k, size_t count, const char *const *src, size_t n, fan_dtype acc,
                            const fan_scale *scale, char *out, fan_array *arrays, fan_operand *in, fan_stats *stats)
{
    for (size_t i = 0; i < n; i++) {
        host_array(&arrays[i], k, count, src[i]);
        in[i] = (fan_operand){.array = &arrays[i], .acc = acc};
    }
    if (stats && n == 1 && !scale && out == src[0]) { /* it is handed through */
        fan_stats_of(&arrays[0], stats);
        return;
    }
    host_array(&arrays[n], k, count, out);
    fan_sum_how how = {.stats = stats, .parallel = !stats};
    if (scale)
        how.scale = *scale;
    fan_sum(&arrays[n], in, n, &how);
}

/* The same of up to FAN_FAST_TERMS runs. Apart, because its frame is large. */
static __attribute__((noinline)) void host_sum_few_arrays(const fan_fast_kind *k, size_t count, const char *const *src,
                                                          size_t n, fan_dtype acc, const fan_scale *scale, char *out,
                                                          fan_stats *stats)
{
    FAN_UNINITIALIZED fan_array arrays[FAN_FAST_TERMS + 1];
    FAN_UNINITIALIZED fan_operand in[FAN_FAST_TERMS];
    host_sum_arrays(k, count, src, n, acc, scale, out, arrays, in, stats);
}

/* host_sum_runs: of up to FAN_FAST_TERMS runs. */
static inline __attribute__((always_inline)) void host_sum_runs(const fan_fast_kind *k, const char *const *src,
                                                                size_t n, fan_dtype acc, const fan_scale *scale,
                                                                char *out, fan_stats *stats)
{
    _Alignas(16) char factor[16];
    size_t count = fan_fast_elements(k);
    if (stats || !fan_fast_is_flat(count * fan_dtype_size(k->dtype), n)) {
        host_sum_few_arrays(k, count, src, n, acc, scale, out, stats);
    } else if (n == 1 && !scale) {
        memmove(out, src[0], count * fan_dtype_size(k->dtype));
    } else {
        if (scale)
            fan_scale_as(scale, acc, factor);
        (void)fan_sum_flat(out, src, n, count, k->dtype, acc, scale ? factor : NULL);
    }
}

/* All runs at once: a sum of many that is not in the dtype of the list has no other place between them, and of the
 * statistics of a part the first term that is not finite could not be found. */
static void host_sum_whole(const fan_list *p, size_t n, fan_dtype acc, const fan_scale *scale, char *out, void *scratch,
                           fan_stats *stats)
{
    fan_array *arrays = scratch;
    fan_operand *in = (fan_operand *)(void *)(arrays + n + 1);
    const char **src = (const char **)(void *)(in + n);
    for (size_t i = 0; i < n; i++)
        src[i] = fan_entry_data(&p->kind, &p->entries[i]);
    host_sum_arrays(&p->kind, fan_fast_elements(&p->kind), src, n, acc, scale, out, arrays, in, stats);
}

void fan_host_sum(fan_buffer *b, const fan_list *p, size_t n, fan_dtype acc, const fan_scale *scale, char *out,
                  void *scratch, fan_stats *stats)
{
    FAN_UNINITIALIZED const char *src[FAN_FAST_TERMS];
    bool whole = fan_host_scratch(p, n, acc, stats);
    bool release_gil = p->bytes > FAN_FAST_BYTES || n * p->bytes > HOST_RELEASE_BYTES;
    void *left = release_gil ? b->frontend->allow_threads_begin() : NULL;
    if (whole)
        host_sum_whole(p, n, acc, scale, out, scratch, stats);
    for (size_t done = whole ? n : 0; done < n;) {
        size_t m = 0;
        if (done)
            src[m++] = out;
        for (; m < FAN_FAST_TERMS && done < n; done++)
            src[m++] = fan_entry_data(&p->kind, &p->entries[done]);
        host_sum_runs(&p->kind, src, m, acc, done == n ? scale : NULL, out, stats);
    }
    if (!left)
        return;
    b->frontend->allow_threads_end(left);
    if (fan_sched_active()) { /* other threads may have come in meanwhile: so they do */
        fan_sched_stepped();
        fan_yield();
        fan_buffer_seen(b, SIZE_MAX, FAN_SCHED_WRITE);
    }
}

void fan_fast_sum(const fan_frontend *f, const fan_fast_kind *kind, const char *const *src, size_t n, char *out)
{
    uint64_t bytes = fan_fast_kind_bytes(kind);
    void *left = bytes > FAN_FAST_BYTES ? f->allow_threads_begin() : NULL;
    host_sum_runs(kind, src, n, fan_dtype_accumulate(kind->dtype), NULL, out, NULL);
    if (left)
        f->allow_threads_end(left);
    fan_fast_total.adds += n;
    fan_fast_total.folds++;
    fan_fast_total.passes++;
    fan_fast_total.bytes_read += n * bytes;
    fan_fast_total.bytes_written += bytes;
}
