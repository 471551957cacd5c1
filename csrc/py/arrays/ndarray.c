/* ndarray: a host array of ours as an ndarray; of a graph tree as a handle, for an ndarray cannot
 * end. */
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
    PyObject *made;
    if (!descr)
        return NULL;
    for (int i = 0; i < a->ndim; i++) {
        dims[i] = (npy_intp)a->shape[i];
        strides[i] = (npy_intp)a->strides[i];
    }
    made = PyArray_NewFromDescr(&PyArray_Type, descr, a->ndim, dims, strides, a->data,
                                write ? NPY_ARRAY_WRITEABLE : 0, NULL);
    if (made && PyArray_SetBaseObject((PyArrayObject *)made, Py_NewRef(base)) < 0)
        Py_CLEAR(made);
    return made;
}

void fan_ndarray_extent(PyObject *o, const char **lo, size_t *bytes)
{
    PyArrayObject *a = (PyArrayObject *)o;
    npy_intp low = 0, high = PyArray_ITEMSIZE(a);
    for (int i = 0; i < PyArray_NDIM(a); i++) {
        npy_intp way = PyArray_DIM(a, i) > 1 ? (PyArray_DIM(a, i) - 1) * PyArray_STRIDE(a, i) : 0;
        *(way < 0 ? &low : &high) += way;
    }
    bool none = PyArray_SIZE(a) == 0;
    *lo = PyArray_BYTES(a) + (none ? 0 : low);
    *bytes = none ? 0 : (size_t)(high - low);
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
    const fan_handles_scope *s = fan_handles_outermost();
    const char *data;
    size_t bytes;
    /* not redirected: the function runs as it is */
    if (!s || !fan_storage_redirected() || is_kernel_view(o))
        return 0;
    fan_ndarray_extent(o, &data, &bytes);
    for (size_t i = 0; i < s->n; i++) {
        int64_t lo, hi;
        if (!s->in[i] || !s->stays(s, i))
            continue;
        fan_array_reach(s->in[i], &lo, &hi);
        if (fan_flat_within(data, bytes, s->in[i]->data + lo, (uint64_t)(hi - lo)))
            return 0;
    }
    if (bytes == 0)
        return 0;
    return fan_set_error(fan_state_get()->capture_error, s->foreign, s->function, op);
}

PyObject *fan_export_array(fan_array *a)
{
    PyObject *nd, *base;
    if (fan_wants_handles(a))
        return fan_array_wrap(a, fan_cpu());
    if (fan_dtype_needs_ml_dtypes(a->dtype)) {
        /* Only where torch's bfloat16 or float8 met NumPy's arrays and the caller has no ml_dtypes:
         * nothing is lost in float32. */
        fan_array *wide = NULL;
        fan_error err = {0};
        fan_status status = fan_array_new(FAN_DT_FLOAT32, a->ndim, a->shape, a, &wide, &err);
        if (status != FAN_OK)
            return fan_raise(status, &err);
        fan_array_copy(wide, a);
        nd = fan_export_array(wide);
        fan_array_drop(wide);
        return nd;
    }
    if (a->size == 0) {
        PyArray_Descr *descr = fan_descr_of_dtype(a->dtype);
        return descr ? PyArray_NewFromDescr(&PyArray_Type, descr, a->ndim,
                                            (const npy_intp *)a->shape, NULL, NULL, 0, NULL)
                     : NULL;
    }
    base = PyCapsule_New(a, FAN_ARRAY_CAPSULE, array_gone);
    if (!base)
        return NULL;
    fan_array_hold(a);
    nd = fan_ndarray_over(a, a->writable, base);
    Py_DECREF(base);
    return nd;
}
