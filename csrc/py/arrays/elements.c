/* elements: for fanin.audit: some elements of a torch tensor, and whether a sum is its terms' sum
 * bit for bit. An audit calls both at each gradient, for 256 elements, where torch's and NumPy's
 * calls would take most of the time. */
#include "array/lowp.h"
#include "buffer/list.h"
#include "py/base/args.h"
#include "py/arrays/arrays.h"
#include "py/arrays/dlpack.h"

/* ---- elements of a tensor ---- */

/* element_copy: writes element `at` to place i of `out`. A float32 is not computed with: a thread
 * may flush subnormal numbers to zero. */
static inline void element_copy(fan_dtype dtype, const char *data, int64_t at, char *out,
                                npy_intp i)
{
    if (dtype == FAN_DT_FLOAT64) {
        memcpy(out + 8 * i, data + 8 * at, 8);
        return;
    }
    if (dtype == FAN_DT_FLOAT32) {
        memcpy(out + 4 * i, data + 4 * at, 4);
        return;
    }
    uint16_t half;
    memcpy(&half, data + 2 * at, sizeof half);
    float element = 0;
    if (dtype == FAN_DT_FLOAT16)
        element = fan_float_of_float16(half);
    else
        element = fan_float_of_bfloat16(half);
    memcpy(out + 4 * i, &element, sizeof element);
}

static bool is_read(const fan_plain_kind *kind)
{
    switch (kind->dtype) {
    case FAN_DT_FLOAT64:
    case FAN_DT_FLOAT32:
    case FAN_DT_FLOAT16:
    case FAN_DT_BFLOAT16:
        return kind->order == 0;
    default:
        return false;
    }
}

/* elements_copy: writes the elements at n places, of int32, into `out`; NULL: the first n. Returns
 * false if there is no such place. */
static bool elements_copy(const fan_plain_kind *kind, const char *data, const int32_t *places,
                          npy_intp n, char *out)
{
    int64_t end = (int64_t)fan_plain_elements(kind);
    for (npy_intp i = 0; i < n; i++) {
        int64_t at = i;
        if (places)
            at = places[i];
        if (at < 0 || at >= end)
            return false;
        element_copy(kind->dtype, data, at, out, i);
    }
    return true;
}

static bool is_flat(PyObject *o, int type)
{
    if (!PyArray_CheckExact(o))
        return false;
    PyArrayObject *a = (PyArrayObject *)o;
    return PyArray_NDIM(a) == 1 && PyArray_TYPE(a) == type && PyArray_ISCARRAY_RO(a);
}

static PyObject *elements(PyObject *Py_UNUSED(m), PyObject *const *a)
{
    FAN_UNINITIALIZED fan_plain_kind kind;
    char *data = NULL;
    PyObject *tensor = a[0];
    bool whole = a[1] == Py_None;
    if (!fan_is_tensor(tensor) || !fan_plain_import_as(tensor, false, &kind, &data))
        Py_RETURN_NONE;
    if (!is_read(&kind) || !fan_plain_has_own_value(tensor))
        Py_RETURN_NONE;
    if (!whole && !is_flat(a[1], NPY_INT32))
        Py_RETURN_NONE;
    npy_intp n = (npy_intp)fan_plain_elements(&kind);
    const int32_t *places = NULL;
    if (!whole) {
        PyArrayObject *given = (PyArrayObject *)a[1];
        n = PyArray_DIM(given, 0);
        places = PyArray_DATA(given);
    }
    int type = NPY_FLOAT32;
    if (kind.dtype == FAN_DT_FLOAT64)
        type = NPY_FLOAT64;
    PyArrayObject *out = (PyArrayObject *)PyArray_SimpleNew(1, &n, type);
    if (!out)
        return NULL;
    if (!elements_copy(&kind, data, places, n, PyArray_BYTES(out))) {
        Py_DECREF(out);
        PyErr_SetString(PyExc_IndexError, "_elements: a place beyond the tensor's elements");
        return NULL;
    }
    return (PyObject *)out;
}

/* ---- sums ---- */

/* sum_has_bits: whether before + gradient, rounded to a dtype, has the bits of after; values of
 * narrower dtypes are float32. */
static bool sum_has_bits(fan_dtype dtype, const char *before, const char *gradient,
                         const char *after)
{
    if (dtype == FAN_DT_FLOAT64) {
        double x;
        double g;
        memcpy(&x, before, sizeof x);
        memcpy(&g, gradient, sizeof g);
        double sum = x + g;
        return memcmp(&sum, after, sizeof sum) == 0;
    }
    float x;
    float g;
    memcpy(&x, before, sizeof x);
    memcpy(&g, gradient, sizeof g);
    float sum = x + g;
    if (dtype == FAN_DT_FLOAT16)
        sum = fan_float_of_float16(fan_float16_of(sum));
    if (dtype == FAN_DT_BFLOAT16)
        sum = fan_float_of_bfloat16(fan_bfloat16_of(sum));
    return memcmp(&sum, after, sizeof sum) == 0;
}

static PyObject *adds_up(PyObject *Py_UNUSED(m), PyObject *const *a)
{
    enum {
        BEFORE,
        GRADIENT,
        AFTER,
        DTYPE
    };
    const char *name = PyUnicode_AsUTF8(a[DTYPE]);
    if (!name)
        return NULL;
    fan_dtype dtype = fan_dtype_from_name(name);
    if (dtype == FAN_DT_NONE)
        Py_RETURN_FALSE;
    int type = NPY_FLOAT32;
    size_t size = sizeof(float);
    if (dtype == FAN_DT_FLOAT64) {
        type = NPY_FLOAT64;
        size = sizeof(double);
    }
    for (int i = BEFORE; i <= AFTER; i++) {
        if (!is_flat(a[i], type))
            Py_RETURN_FALSE;
    }
    npy_intp n = PyArray_DIM((PyArrayObject *)a[GRADIENT], 0);
    const char *data[DTYPE];
    for (int i = BEFORE; i <= AFTER; i++) {
        PyArrayObject *one = (PyArrayObject *)a[i];
        if (PyArray_DIM(one, 0) != n)
            Py_RETURN_FALSE;
        data[i] = PyArray_BYTES(one);
    }
    bool same = true;
    for (size_t i = 0; same && i < (size_t)n; i++) {
        size_t at = i * size;
        same = sum_has_bits(dtype, data[BEFORE] + at, data[GRADIENT] + at, data[AFTER] + at);
    }
    return PyBool_FromLong(same);
}

#include "py/declared/elements.h"
