/* rows: sorted by their numbers, in their order, and summed one number after the other. */
#include "array/rows.h"

#include "array/convert.h"
#include "array/exact.h"
#include "array/sum.h"
#include "array/sum_isa.h"
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

/* The sum of all rows, and what those of one number are summed with: room for the most of them. */
typedef struct row_sums {
    const fan_array *rows;
    fan_dtype acc;
    bool exact;
    bool gapless;    /* rows are runs of the result's dtype */
    bool single;     /* .. of float32, summed exactly */
    bool flat;       /* .. that one loop adds */
    size_t elements; /* of a row */
    size_t bytes;
    const char **data;
    fan_array *views;
    fan_operand *in;
} row_sums;

static void sums_begin(row_sums *sums, const fan_array *out)
{
    fan_array target;
    const fan_array *rows = sums->rows;
    row_view(&target, out, 0);
    sums->elements = (size_t)target.size;
    sums->bytes = sums->elements * fan_dtype_size(out->dtype);
    row_view(&target, rows, 0);
    sums->gapless = fan_array_in_c_order(&target) && out->dtype == rows->dtype;
    uintptr_t places = (uintptr_t)rows->data | (uintptr_t)rows->strides[0];
    bool aligned = places % (uintptr_t)fan_dtype_size(rows->dtype) == 0;
    bool plain = sums->gapless && aligned;
    if (sums->exact)
        sums->single = plain && rows->dtype == FAN_DT_FLOAT32;
    else
        sums->flat = plain && fan_sum_flat_fits(rows->dtype, sums->acc);
}

static void sums_free(row_sums *sums)
{
    fan_free(sums->data);
    fan_free(sums->views);
    fan_free(sums->in);
}

static bool sums_make_room(row_sums *sums, int64_t most)
{
    size_t n = (size_t)most + 1;
    bool runs = sums->flat || sums->single;
    if (runs)
        sums->data = fan_alloc(n * sizeof *sums->data);
    if (runs && !sums->data)
        return false;
    if (sums->flat)
        return true;
    sums->views = fan_alloc(n * sizeof *sums->views);
    sums->in = fan_alloc(n * sizeof *sums->in);
    return sums->views && sums->in;
}

/* The rows of one number, any strides, or exactly. */
static void sum_views(const row_sums *sums, const fan_array *out, const int64_t *at, int64_t n)
{
    for (int64_t k = 0; k < n; k++) {
        fan_array *view = &sums->views[k];
        row_view(view, sums->rows, at[k]);
        sums->in[k] = (fan_operand){.array = view, .acc = sums->acc};
    }
    if (sums->exact && n > 1)
        fan_exact_fold(out, sums->in, (size_t)n, sums->rows->dtype, NULL);
    else
        fan_sum(out, sums->in, (size_t)n, NULL);
}

/* Rows of one number lie anywhere: those of the next number are asked for while one is summed. */
#define AHEAD_BYTES 1024
#define LINE 64

static const char *row_at(const fan_array *rows, int64_t row)
{
    return rows->data + row * rows->strides[0];
}

static void rows_ahead(const row_sums *sums, const int64_t *at, int64_t n)
{
    size_t some = fan_umin(sums->bytes, AHEAD_BYTES);
    for (int64_t k = 0; k < n && k < 32; k++) {
        const char *row = row_at(sums->rows, at[k]);
        for (size_t line = 0; line < some; line += LINE)
            __builtin_prefetch(row + line);
    }
}

/* ---- exact sums of float32, mostly in float64 ----
 *
 * Numbers of float32 that are added in float64 without an error are an exact sum: the error of each
 * addition is computed with it, and is 0 unless the exponents are far apart; an inf or a NaN has
 * none. */

#define COLUMNS 8 /* that one pass over the rows sums; what the registers hold */
#define LANES 4

typedef float singles __attribute__((vector_size(LANES * sizeof(float))));
typedef double doubles __attribute__((vector_size(LANES * sizeof(double))));
typedef int64_t bits __attribute__((vector_size(LANES * sizeof(int64_t))));

static inline __attribute__((always_inline)) void single_read(const char *from, doubles *to)
{
    singles some;
    memcpy(&some, from, sizeof some);
    *to = __builtin_convertvector(some, doubles);
}

static inline __attribute__((always_inline)) void single_add(doubles *sum, const doubles *x,
                                                             bits *wrong)
{
    doubles next = *sum + *x;
    doubles back = next - *sum;
    doubles error = (*sum - (next - back)) + (*x - back);
    *wrong |= (bits)error;
    *sum = next;
}

static inline __attribute__((always_inline)) void single_write(char *to, const doubles *sum)
{
    singles some = __builtin_convertvector(*sum, singles);
    memcpy(to, &some, sizeof some);
}

/* Sums COLUMNS numbers from the byte `at` on; false: some addition had an error. */
static inline __attribute__((always_inline)) bool single_columns(char *out, fan_sources from,
                                                                 size_t at)
{
    const size_t half = sizeof(singles);
    doubles low;
    doubles high;
    doubles x;
    bits wrong = {0};
    single_read(from.at[0] + at, &low);
    single_read(from.at[0] + at + half, &high);
    for (size_t k = 1; k < from.n; k++) {
        single_read(from.at[k] + at, &x);
        single_add(&low, &x, &wrong);
        single_read(from.at[k] + at + half, &x);
        single_add(&high, &x, &wrong);
    }
    single_write(out + at, &low);
    single_write(out + at + half, &high);
    int64_t any = wrong[0] | wrong[1] | wrong[2] | wrong[3];
    return !(any & INT64_MAX); /* -0 is no error */
}

/* The same of at least COLUMNS numbers. Those of the last pass may be summed twice. */
static inline __attribute__((always_inline)) bool single_wide(char *out, fan_sources from,
                                                              size_t elements)
{
    size_t last = elements - COLUMNS;
    for (size_t first = 0; first < last; first += COLUMNS) {
        if (!single_columns(out, from, first * sizeof(float)))
            return false;
    }
    return single_columns(out, from, last * sizeof(float));
}

static inline double single_at(const char *numbers, size_t i)
{
    return (double)((const fan_any_f32 *)numbers)[i];
}

/* The same of fewer. */
static bool single_few(char *out, fan_sources from, size_t elements)
{
    for (size_t i = 0; i < elements; i++) {
        double sum = single_at(from.at[0], i);
        for (size_t k = 1; k < from.n; k++) {
            double x = single_at(from.at[k], i);
            double next = sum + x;
            double back = next - sum;
            double error = (sum - (next - back)) + (x - back);
            if (error != 0) /* a NaN too */
                return false;
            sum = next;
        }
        ((fan_any_f32 *)out)[i] = (float)sum;
    }
    return true;
}

static bool single_baseline(char *out, fan_sources from, size_t elements)
{
    return single_wide(out, from, elements);
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static bool single_avx2(char *out, fan_sources from,
                                                        size_t elements)
{
    return single_wide(out, from, elements);
}
#endif

/* false: some numbers are not sums yet. */
static bool single_sum(char *out, fan_sources from, size_t elements)
{
    if (elements < COLUMNS)
        return single_few(out, from, elements);
#if defined(__x86_64__)
    if (fan_sum_isa_rank() > 0)
        return single_avx2(out, from, elements);
#endif
    return single_baseline(out, from, elements);
}

/* Sums the n rows of one number into a row of the result. */
static void sum_row(const row_sums *sums, const fan_array *out, const int64_t *at, int64_t n)
{
    if (n == 0) {
        memset(out->data, 0, sums->bytes);
        return;
    }
    fan_sources from = {sums->data, (size_t)n};
    for (int64_t k = 0; k < n && sums->data; k++)
        sums->data[k] = row_at(sums->rows, at[k]);
    if (sums->flat && n == 1) {
        memcpy(out->data, sums->data[0], sums->bytes);
        return;
    }
    if (sums->flat) {
        (void)fan_sum_flat(out->data, from.at, from.n, sums->elements, out->dtype, sums->acc, NULL);
        return;
    }
    bool done = sums->single && n > 1 && single_sum(out->data, from, sums->elements);
    if (!done)
        sum_views(sums, out, at, n);
}

fan_status fan_rows_sum(const fan_array *out, const int64_t *ids, const fan_array *rows,
                        fan_dtype acc, bool exact, int64_t *bad, fan_error *err)
{
    row_order order = {.first = NULL};
    row_sums sums = {.rows = rows, .acc = acc, .exact = exact};
    fan_array target;
    int64_t numbers = out->shape[0];
    fan_status status = FAN_OK;
    *bad = -1;
    sums_begin(&sums, out);
    FAN_GO(order_make(&order, ids, rows->shape[0], numbers, bad, err));
    if (!sums_make_room(&sums, order.most))
        FAN_GO(fan_fail(err, FAN_ERR_NOMEM, "out of memory"));
    for (int64_t i = 0; i < numbers && sums.elements > 0; i++) {
        const int64_t *at = order.at + order.first[i];
        const int64_t *next = order.at + order.first[i + 1];
        row_view(&target, out, i);
        if (sums.gapless && i + 1 < numbers)
            rows_ahead(&sums, next, order.first[i + 2] - order.first[i + 1]);
        sum_row(&sums, &target, at, next - at);
    }
done:
    order_free(&order);
    sums_free(&sums);
    return status;
}
