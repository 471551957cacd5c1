/* ndarray: a host array of ours as an ndarray, or, in a graph tree, whose memory ends with its
 * step, as a handle. In this order: an ndarray over memory; which memory an ndarray shows, and
 * whether a graph tree can find it again; fan_export_array. */
#include "py/arrays/arrays.h"

#include "array/nditer.h"
#include "array/extents.h"

static void array_gone(PyObject *capsule)
{
    fan_array *a = PyCapsule_GetPointer(capsule, FAN_ARRAY_CAPSULE);
    PyObject *live = fan_exception_take();
    fan_array_drop(a);
    fan_exception_put(live);
}

PyObject *fan_ndarray_over(const fan_array *a, bool write, PyObject *base)
{
    FAN_UNINITIALIZED npy_intp dims[FAN_MAX_NDIM];
    FAN_UNINITIALIZED npy_intp strides[FAN_MAX_NDIM];
    PyArray_Descr *descr = fan_descr_of_dtype(a->dtype);
    if (!descr)
        return NULL;
    for (int i = 0; i < a->ndim; i++) {
        dims[i] = a->shape[i];
        strides[i] = a->strides[i];
    }
    PyObject *nd = PyArray_NewFromDescr(&PyArray_Type, descr, a->ndim, dims, strides, a->data,
                                        write ? NPY_ARRAY_WRITEABLE : 0, NULL);
    if (nd && PyArray_SetBaseObject((PyArrayObject *)nd, Py_NewRef(base)) < 0)
        Py_CLEAR(nd);
    return nd;
}

void fan_ndarray_extent(PyObject *o, const char **lo, size_t *bytes)
{
    PyArrayObject *a = (PyArrayObject *)o;
    npy_intp low = 0;
    npy_intp high = PyArray_ITEMSIZE(a);
    *lo = PyArray_BYTES(a);
    *bytes = 0;
    if (PyArray_SIZE(a) == 0)
        return;
    for (int i = 0; i < PyArray_NDIM(a); i++) {
        npy_intp last = (PyArray_DIM(a, i) - 1) * PyArray_STRIDE(a, i);
        if (last < 0)
            low += last;
        else
            high += last;
    }
    *lo += low;
    *bytes = (size_t)(high - low);
}

/* is_kernel_view: whether it is a view that a kernel of a graph tree was called with, or a view of
 * one. */
static bool is_kernel_view(PyObject *o)
{
    while (o && PyArray_Check(o))
        o = PyArray_BASE((PyArrayObject *)o);
    return o && PyCapsule_IsValid(o, FAN_KERNEL_MEMORY);
}

int fan_ndarray_check_known(PyObject *o, const char *op)
{
    const fan_handles_scope *scope = fan_handles_outermost();
    const char *data;
    size_t bytes;
    /* not redirected: the function runs as it is */
    if (!scope || !fan_storage_redirected() || is_kernel_view(o))
        return 0;
    fan_ndarray_extent(o, &data, &bytes);
    if (bytes == 0)
        return 0;
    for (size_t i = 0; i < scope->n; i++) {
        const fan_array *operand = scope->in[i];
        int64_t lo;
        int64_t hi;
        if (!operand || !scope->stays(scope, i))
            continue;
        fan_array_reach(operand, &lo, &hi);
        if (fan_flat_within(data, bytes, operand->data + lo, (uint64_t)(hi - lo)))
            return 0;
    }
    return fan_set_error(fan_state_get()->capture_error, scope->foreign, scope->function, op);
}

/* export_widened: an array of torch's bfloat16 or float8 as float32, which loses nothing. */
static PyObject *export_widened(const fan_array *a)
{
    fan_array *wide;
    if (FAN_CHECK(fan_array_new(FAN_DT_FLOAT32, a->ndim, a->shape, a, &wide, &err)) < 0)
        return NULL;
    fan_array_copy(wide, a);
    PyObject *nd = fan_export_array(wide);
    fan_array_drop(wide);
    return nd;
}

/* Address of an ndarray -> how many calls of all threads lock it. With the interpreter's lock. */
static PyObject *locked;

static long locks_of(PyObject *at)
{
    if (!at || !locked)
        return 0;
    PyObject *n = PyDict_GetItemWithError(locked, at);
    return n ? PyLong_AsLong(n) : 0;
}

/* lock_count: notes that `n` calls lock an array: 0, or -1 with an exception. */
static int lock_count(PyObject *at, long n)
{
    if (n == 0)
        return PyDict_DelItem(locked, at);
    if (!locked)
        locked = PyDict_New();
    if (!locked)
        return -1;
    PyObject *count = PyLong_FromLong(n);
    if (!count)
        return -1;
    int bad = PyDict_SetItem(locked, at, count);
    Py_DECREF(count);
    return bad;
}

bool fan_ndarray_may_write(PyArrayObject *a)
{
    bool may = PyArray_ISWRITEABLE(a);
    PyObject *o = NULL;
    if (locked)
        o = (PyObject *)a;
    for (; !may && o && PyArray_Check(o); o = PyArray_BASE((PyArrayObject *)o)) {
        PyObject *at = PyLong_FromVoidPtr(o);
        may = locks_of(at) > 0;
        Py_XDECREF(at);
        PyErr_Clear();
    }
    return may;
}

void fan_ndarray_lock(PyArrayObject *a, bool locks)
{
    PyObject *at = PyLong_FromVoidPtr(a);
    long n = locks_of(at);
    if (locks && (n > 0 || PyArray_ISWRITEABLE(a))) {
        if (at && lock_count(at, n + 1) == 0)
            PyArray_CLEARFLAGS(a, NPY_ARRAY_WRITEABLE);
    } else if (!locks && n > 0) {
        if (n == 1)
            PyArray_ENABLEFLAGS(a, NPY_ARRAY_WRITEABLE);
        (void)lock_count(at, n - 1);
    }
    PyErr_Clear();
    Py_XDECREF(at);
}

PyObject *fan_export_array(fan_array *a)
{
    if (fan_wants_handles(a))
        return fan_array_wrap(a, fan_cpu());
    /* Only where arrays of torch met NumPy's and the caller has no ml_dtypes. */
    if (fan_dtype_needs_ml_dtypes(a->dtype))
        return export_widened(a);
    if (a->size == 0) {
        PyArray_Descr *descr = fan_descr_of_dtype(a->dtype);
        if (!descr)
            return NULL;
        return PyArray_NewFromDescr(&PyArray_Type, descr, a->ndim, (const npy_intp *)a->shape, NULL,
                                    NULL, 0, NULL);
    }
    PyObject *base = PyCapsule_New(a, FAN_ARRAY_CAPSULE, array_gone);
    if (!base)
        return NULL;
    fan_array_hold(a);
    PyObject *nd = fan_ndarray_over(a, a->writable, base);
    Py_DECREF(base);
    return nd;
}
