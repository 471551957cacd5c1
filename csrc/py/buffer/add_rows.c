/* add_rows: rows summed by their numbers (array/rows.h), for fanin.add_rows, which checks what it
 * is given. */
#include "array/exact.h"
#include "array/rows.h"
#include "base/float_mode.h"
#include "base/interrupt.h"
#include "py/arrays/arrays.h"
#include "py/base/args.h"
#include "py/buffer/buffer_object.h"

/* rows_accumulated: the dtype in which the rows are summed: the requested one, or twice as
 * wide a float; FAN_DT_NONE: it cannot hold them. */
static fan_dtype rows_accumulated(fan_dtype dtype, fan_dtype wish)
{
    fan_dtype wide = fan_sum_flat_upper(dtype);
    if (wish != FAN_DT_NONE)
        return fan_accum_dtype(dtype, wish);
    if (wide != FAN_DT_NONE)
        return wide;
    return fan_accum_dtype(dtype, FAN_DT_NONE);
}

/* rows_read: the rows as a value: a dense array of the host with an axis of rows. */
static int rows_read(PyObject *o, fan_value *rows)
{
    if (fan_import(o, false, false, rows) < 0)
        return -1;
    bool dense = rows->form == FAN_FORM_DENSE && rows->device == fan_cpu();
    if (dense && rows->array->ndim >= 1)
        return 0;
    fan_refuse(PyExc_TypeError,
               "rows: expected a dense array of the host with an axis of rows, got %s; "
               "on a device add fanin.Sparse(\"coo\", (ids[None], rows), shape) to a buffer",
               FAN_TYPE_TEXT(o));
    fan_value_drop(&fan_python, rows);
    return -1;
}

/* rows_refuse: the error of a number that no row has, instead of the core's. */
static void rows_refuse(int64_t bad, const int64_t *ids, int64_t numbers)
{
    if (bad < 0)
        return;
    PyErr_Clear();
    fan_refuse(PyExc_IndexError, "ids[%lld] is %lld; expected numbers from 0 to %lld",
               (long long)bad, (long long)ids[bad], (long long)(numbers - 1));
}

/* rows_sum: the sum, as an array of the kind of the rows; NULL with an exception. */
static PyObject *rows_sum(PyObject *const *a)
{
    FAN_DEFAULT_FLOAT_MODE;
    const int64_t *ids = PyArray_DATA((PyArrayObject *)a[0]);
    int64_t shape[FAN_MAX_NDIM];
    int64_t numbers;
    int64_t bad = -1;
    fan_value rows;
    fan_array *out = NULL;
    fan_dtype wish = FAN_DT_NONE;
    bool exact = false;
    if (fan_index(a[2], "n", PyExc_ValueError, &numbers) < 0)
        return NULL;
    if (fan_accumulate_arg(fan_or_none(a[3]), &wish, &exact) < 0)
        return NULL;
    if (rows_read(a[1], &rows) < 0)
        return NULL;
    const fan_array *from = rows.array;
    fan_dtype acc = rows_accumulated(rows.dtype, wish);
    int failed = -1;
    if (exact && !fan_exact_fits(rows.dtype)) {
        exact = false; /* integers: every sum is */
        acc = rows.dtype;
    }
    if (acc == FAN_DT_NONE) {
        fan_refuse(PyExc_ValueError, "accumulate=%s cannot hold rows of dtype %s (A11)",
                   fan_dtype_name(wish), fan_dtype_name(rows.dtype));
        goto done;
    }
    memcpy(shape, from->shape, (size_t)from->ndim * sizeof *shape);
    shape[0] = numbers;
    if (FAN_CHECK(fan_array_new(rows.dtype, from->ndim, shape, NULL, &out, &err)) < 0)
        goto done;
    fan_error err;
    fan_interrupt interrupt;
    fan_error_clear(&err);
    uint64_t bytes = (uint64_t)from->size * fan_dtype_size(from->dtype);
    void *left = fan_frontend_leave(&fan_python, bytes >= FAN_BUSY_BYTES);
    fan_interrupt_begin(&interrupt, fan_check_signals, &err);
    fan_status status = fan_rows_sum(out, ids, from, acc, exact, &bad, &err);
    status = fan_interrupt_end(&interrupt, status);
    fan_frontend_return(&fan_python, left);
    failed = fan_check(status, &err);
    if (failed)
        rows_refuse(bad, ids, numbers);
done:;
    uint8_t origin = rows.origin;
    fan_value_drop(&fan_python, &rows);
    if (failed) {
        fan_array_drop(out);
        return NULL;
    }
    fan_value sum = fan_value_dense(out, fan_cpu());
    sum.origin = origin;
    return fan_export(&sum);
}

static PyObject *add_rows(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    fan_error_context w = {
        .buffer = "add_rows",
        .slot = -1,
        .key = -1,
    };
    fan_error_context_push(&w);
    PyObject *sum = rows_sum(a);
    fan_error_context_pop(&w);
    return sum;
}

#include "py/declared/add_rows.h"
