/* rows: sorted by their numbers, in their order, and summed one number after the other. */
#include "array/rows.h"

#include "array/exact.h"
#include "array/sum.h"
#include "base/interrupt.h"
#include "base/mem.h"

#include <string.h>

/* Rows in the order of their numbers. */
typedef struct row_order {
    int64_t *first; /* of each number the place in `at` of its first row; and one more */
    int64_t *at;    /* rows */
    int64_t most;   /* rows of one number */
} row_order;

static void order_free(row_order *order)
{
    fan_free(order->first);
    fan_free(order->at);
}

/* Counted, and then each put behind those of its number that came before. */
static fan_status order_make(row_order *order, const int64_t *ids, int64_t n, int64_t numbers,
                             int64_t *bad, fan_error *err)
{
    order->first = fan_calloc(((size_t)numbers + 2) * sizeof *order->first);
    order->at = fan_alloc(((size_t)n + 1) * sizeof *order->at);
    if (!order->first || !order->at)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    int64_t *count = order->first + 2; /* shifted by two: the next loop ends with it in place */
    for (int64_t k = 0; k < n; k++) {
        if (ids[k] < 0 || ids[k] >= numbers) {
            *bad = k;
            return fan_fail(err, FAN_ERR_VALUE, "no row has this number");
        }
        if (ids[k] + 1 < numbers)
            count[ids[k]]++;
    }
    for (int64_t i = 0; i < numbers; i++)
        order->first[i + 1] += order->first[i];
    for (int64_t k = 0; k < n; k++)
        order->at[order->first[ids[k] + 1]++] = k;
    for (int64_t i = 0; i < numbers; i++)
        order->most = fan_max(order->most, order->first[i + 1] - order->first[i]);
    return FAN_OK;
}

/* One row as an array of its own, for a sum alone. */
static void row_view(fan_array *view, const fan_array *of, int64_t row)
{
    memset(view, 0, sizeof *view);
    view->storage = of->storage;
    view->dtype = of->dtype;
    view->ndim = of->ndim - 1;
    view->shape = of->shape + 1;
    view->strides = of->strides + 1;
    view->data = of->data + row * of->strides[0];
    view->writable = true;
    view->size = 1;
    for (int k = 0; k < view->ndim; k++)
        view->size *= view->shape[k];
}

/* What the rows of one number are summed with: room for the most of them. */
typedef struct row_scratch {
    const char **data;
    fan_array *views;
    fan_operand *in;
} row_scratch;

static void scratch_free(row_scratch *scratch)
{
    fan_free(scratch->data);
    fan_free(scratch->views);
    fan_free(scratch->in);
}

static bool scratch_make(row_scratch *scratch, int64_t most, bool flat, bool any)
{
    size_t n = (size_t)most + 1;
    if (flat)
        scratch->data = fan_alloc(n * sizeof *scratch->data);
    if (flat && !scratch->data)
        return false;
    if (!any)
        return true;
    scratch->views = fan_alloc(n * sizeof *scratch->views);
    scratch->in = fan_alloc(n * sizeof *scratch->in);
    return scratch->views && scratch->in;
}

/* The rows of one number, any strides, or exactly. */
static void row_sum(const fan_array *out, const fan_array *rows, const int64_t *at, int64_t n,
                    fan_dtype acc, bool exact, const row_scratch *scratch)
{
    for (int64_t k = 0; k < n; k++) {
        row_view(&scratch->views[k], rows, at[k]);
        scratch->in[k] = (fan_operand){.array = &scratch->views[k], .acc = acc};
    }
    if (exact && n > 1)
        fan_exact_fold(out, scratch->in, (size_t)n, rows->dtype, NULL);
    else
        fan_sum(out, scratch->in, (size_t)n, NULL);
}

/* Rows of one number lie anywhere: those of the next number are asked for while one is summed. */
#define AHEAD_BYTES 1024
#define LINE 64

static void rows_ahead(const fan_array *rows, const int64_t *at, int64_t n, size_t bytes)
{
    size_t some = bytes < AHEAD_BYTES ? bytes : AHEAD_BYTES;
    for (int64_t k = 0; k < n && k < 32; k++) {
        const char *row = rows->data + at[k] * rows->strides[0];
        for (size_t line = 0; line < some; line += LINE)
            __builtin_prefetch(row + line);
    }
}

/* ---- exact sums of float32, mostly in float64 ---- */

#define COLUMNS 8 /* what the registers hold */

/* Numbers of float32 that are added in float64 without an error are an exact sum: the error of each
 * addition is computed with it, and is 0 unless the exponents are far apart. Returns whether all
 * are; an inf or a NaN has none. */
static inline __attribute__((always_inline)) bool single_columns(float *out,
                                                                 const char *const *data, size_t n,
                                                                 size_t first, size_t columns)
{
    double sum[COLUMNS] = {0};
    double wrong[COLUMNS] = {0};
    const float *row = (const float *)(const void *)data[0] + first;
    for (size_t i = 0; i < columns; i++)
        sum[i] = (double)row[i];
    for (size_t k = 1; k < n; k++) {
        row = (const float *)(const void *)data[k] + first;
        for (size_t i = 0; i < columns; i++) {
            double x = (double)row[i];
            double next = sum[i] + x;
            double back = next - sum[i];
            double error = (sum[i] - (next - back)) + (x - back);
            wrong[i] += error * error;
            sum[i] = next;
        }
    }
    bool exact = true;
    for (size_t i = 0; i < columns; i++) {
        exact = exact && wrong[i] == 0.0;
        out[first + i] = (float)sum[i];
    }
    return exact;
}

/* false: some numbers are not sums yet. */
static bool single_sum(char *out, const char *const *data, size_t n, size_t elements)
{
    float *to = (float *)(void *)out;
    size_t first = 0;
    for (; first + COLUMNS <= elements; first += COLUMNS) {
        if (!single_columns(to, data, n, first, COLUMNS))
            return false;
    }
    if (first == elements)
        return true;
    return single_columns(to, data, n, first, elements - first);
}

fan_status fan_rows_sum(const fan_array *out, const int64_t *ids, const fan_array *rows,
                        fan_dtype acc, bool exact, int64_t *bad, fan_error *err)
{
    row_order order = {NULL};
    row_scratch scratch = {NULL};
    fan_array target;
    int64_t numbers = out->shape[0];
    fan_status status = FAN_OK;
    *bad = -1;
    row_view(&target, rows, 0);
    size_t elements = (size_t)target.size;
    size_t bytes = elements * fan_dtype_size(out->dtype);
    bool gapless = fan_array_in_c_order(&target) && out->dtype == rows->dtype;
    uintptr_t places = (uintptr_t)rows->data | (uintptr_t)rows->strides[0];
    bool aligned = places % (uintptr_t)fan_dtype_size(rows->dtype) == 0;
    bool plain = gapless && aligned;
    bool single = exact && plain && rows->dtype == FAN_DT_FLOAT32;
    bool flat = !exact && plain && fan_sum_flat_fits(rows->dtype, acc);
    FAN_GO(order_make(&order, ids, rows->shape[0], numbers, bad, err));
    if (!scratch_make(&scratch, order.most, flat || single, !flat))
        FAN_GO(fan_fail(err, FAN_ERR_NOMEM, "out of memory"));
    for (int64_t i = 0; i < numbers && elements > 0; i++) {
        const int64_t *at = order.at + order.first[i];
        int64_t n = order.first[i + 1] - order.first[i];
        row_view(&target, out, i);
        if (gapless && i + 1 < numbers)
            rows_ahead(rows, at + n, order.first[i + 2] - order.first[i + 1], bytes);
        if (n == 0) {
            memset(target.data, 0, bytes);
            continue;
        }
        for (int64_t k = 0; k < n && (flat || single); k++)
            scratch.data[k] = rows->data + at[k] * rows->strides[0];
        bool done = single && n > 1 && single_sum(target.data, scratch.data, (size_t)n, elements);
        if (done)
            continue;
        if (!flat)
            row_sum(&target, rows, at, n, acc, exact, &scratch);
        else if (n == 1)
            memcpy(target.data, scratch.data[0], bytes);
        else
            (void)fan_sum_flat(target.data, scratch.data, (size_t)n, elements, rows->dtype, acc,
                               NULL);
    }
done:
    order_free(&order);
    scratch_free(&scratch);
    return status;
}
