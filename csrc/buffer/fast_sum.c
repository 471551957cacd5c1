/* fast_sum: the sums of the fast path: runs of one kind into one. */
#include "array/sum.h"
#include "buffer/fast_part.h"

#include <string.h>

bool fan_fast_fits(fan_dtype dtype, fan_dtype acc, uint64_t bytes)
{
    return !fan_fast_is_large(bytes) && fan_sum_flat_fits(dtype, acc);
}

/* A gap-free array over a run, for a sum alone. */
static void array_over(fan_array *a, const fan_fast_kind *k, const char *data)
{
    memset(a, 0, sizeof *a);
    a->data = (char *)data;
    a->dtype = k->dtype;
    a->ndim = 1;
    a->shape = a->dims;
    a->strides = a->dims + 1;
    a->size = a->dims[0] = (int64_t)fan_fast_elements(k);
    a->dims[1] = (int64_t)fan_dtype_size(k->dtype);
}

static void sum_arrays(const fan_fast_kind *k, const fan_fast_term *terms, size_t n, fan_dtype acc,
                       const fan_scale *scale, char *out, const fan_fast_scratch *with, fan_stats *stats)
{
    for (size_t i = 0; i < n; i++) {
        array_over(&with->arrays[i], k, fan_fast_data(k, &terms[i]));
        with->in[i] = (fan_operand){.array = &with->arrays[i], .acc = acc};
    }
    if (stats && n == 1 && !scale && out == terms[0].data) { /* it is handed through */
        fan_stats_of(&with->arrays[0], stats);
        return;
    }
    array_over(&with->arrays[n], k, out);
    fan_sum_how how = {.stats = stats, .parallel = !stats};
    if (scale)
        how.scale = *scale;
    fan_sum(&with->arrays[n], with->in, n, &how);
}

void fan_fast_sum_terms(const fan_fast_kind *k, const fan_fast_term *terms, size_t n, fan_dtype acc,
                        const fan_scale *scale, char *out, const fan_fast_scratch *scratch, fan_stats *stats)
{
    FAN_UNINITIALIZED const char *src[FAN_FAST_TERMS];
    _Alignas(16) char factor[16];
    if (scratch) {
        sum_arrays(k, terms, n, acc, scale, out, scratch, stats);
        return;
    }
    if (n == 1 && !scale) {
        memmove(out, fan_fast_data(k, &terms[0]), (size_t)fan_fast_bytes(k));
        return;
    }
    if (scale)
        fan_scale_as(scale, acc, factor);
    size_t count = fan_fast_elements(k);
    for (size_t done = 0; done < n;) {
        size_t m = 0;
        if (done)
            src[m++] = out;
        for (; m < FAN_FAST_TERMS && done < n; done++)
            src[m++] = fan_fast_data(k, &terms[done]);
        (void)fan_sum_flat(out, src, m, count, k->dtype, acc, scale && done == n ? factor : NULL);
    }
}

void fan_fast_sum(const fan_frontend *f, const fan_fast_kind *kind, const char *const *src, size_t n, char *out)
{
    uint64_t bytes = fan_fast_kind_bytes(kind);
    void *left = bytes > FAN_FAST_BYTES ? f->allow_threads_begin() : NULL;
    (void)fan_sum_flat(out, src, n, fan_fast_elements(kind), kind->dtype, fan_dtype_accumulate(kind->dtype), NULL);
    if (left)
        f->allow_threads_end(left);
    fan_fast_total.adds += n;
    fan_fast_total.folds++;
    fan_fast_total.passes++;
    fan_fast_total.bytes_read += n * bytes;
    fan_fast_total.bytes_written += bytes;
}
