/* export: the one way out: every sum becomes a Python object again: the value's own, or a new one of its origin's kind
 * (D15). */
#include "array/elements.h"
#include "py/dlpack.h"
#include "py/exchange.h"

#include "device/cuda/cuda.h"

#include <string.h>

/* ---- out ---- */

static void array_gone(PyObject *capsule)
{
    fan_array *a = PyCapsule_GetPointer(capsule, "fanin.array");
    PyObject *live = fan_exception_take();
    fan_array_drop(a);
    fan_exception_put(live);
}

PyObject *fan_export_array(fan_array *a)
{
    FAN_RAW npy_intp shape[FAN_MAX_NDIM];
    FAN_RAW npy_intp strides[FAN_MAX_NDIM];
    PyArray_Descr *descr;
    PyObject *nd, *base;
    if (fan_dtype_needs_ml_dtypes(a->dtype)) {
        /* Only where torch's bfloat16 or float8 met NumPy's arrays and the caller has no ml_dtypes: nothing is lost in
         * float32. */
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
    descr = fan_descr_of_dtype(a->dtype);
    if (!descr)
        return NULL;
    for (int i = 0; i < a->ndim; i++) {
        shape[i] = a->shape[i];
        strides[i] = a->strides[i];
    }
    if (a->size == 0)
        return PyArray_NewFromDescr(&PyArray_Type, descr, a->ndim, shape, NULL, NULL, 0, NULL);
    nd = PyArray_NewFromDescr(&PyArray_Type, descr, a->ndim, shape, strides, a->data,
                              a->writable ? NPY_ARRAY_WRITEABLE : 0, NULL);
    if (!nd)
        return NULL;
    base = PyCapsule_New(a, "fanin.array", array_gone);
    if (base)
        fan_array_hold(a);
    if (!base || PyArray_SetBaseObject((PyArrayObject *)nd, base) < 0)
        Py_CLEAR(nd);
    return nd;
}

/* export_part: what _interop.export gets of an array: fanin's device array, or an exporter. */
static PyObject *export_part(fan_array *a, fan_device *d)
{
    return d && d->backend->has_streams ? fan_array_wrap(a, d) : fan_exporter_new(a);
}

static PyObject *export_shape(int ndim, const int64_t *shape)
{
    PyObject *t = PyTuple_New(ndim);
    for (int i = 0; t && i < ndim; i++) {
        PyObject *n = PyLong_FromLongLong(shape[i]);
        if (!n) {
            Py_DECREF(t);
            return NULL;
        }
        PyTuple_SET_ITEM(t, i, n);
    }
    return t;
}

/* library_array: the library's own array, where the sum was written into one. Borrowed. */
static PyObject *library_array(const fan_value *v)
{
    const fan_dl_api *api = v->origin >= FAN_FROM_FOREIGN ? fan_state_get()->tables[v->origin] : NULL;
    PyObject *o = api ? fan_memory_wrapped(v->array->storage, fan_release_library_array) : NULL;
    int64_t strides[FAN_MAX_NDIM];
    fan_dl_tensor is;
    for (int i = 0; i < v->array->ndim; i++)
        strides[i] = v->array->strides[i] / (int64_t)fan_dtype_size(v->dtype);
    if (!o || api->look(o, &is) != 0 || (char *)is.data + is.byte_offset != v->array->data ||
        !fan_is_dense_like(&is, v->device, v->dtype, v->array->ndim, v->array->shape, strides)) {
        PyErr_Clear();
        return NULL;
    }
    return o;
}

static PyObject *export_device(const fan_value *v)
{
    PyObject *part, *arrays, *made, *o = library_array(v);
    if (o) {
        Py_INCREF(o);
        fan_leaves(o, v);
        return o;
    }
    part = fan_array_wrap(v->array, v->device);
    if (!part || v->origin < FAN_FROM_FOREIGN || !fan_cuda_of(v->device))
        return part;
    arrays = fan_arrays();
    made = arrays ? PyObject_CallMethod(arrays, "export_device", "iO", (int)v->origin, part) : NULL;
    Py_DECREF(part);
    return made;
}

static PyObject *export_dense(const fan_value *v)
{
    PyObject *arrays, *nd, *part, *scalar;
    if (v->device && v->device->backend->has_streams)
        return export_device(v);
    if (v->origin >= FAN_FROM_FOREIGN) {
        arrays = fan_arrays();
        part = arrays ? fan_exporter_new(v->array) : NULL;
        nd = part ? PyObject_CallMethod(arrays, "export_dense", "iO", (int)v->origin, part) : NULL;
        Py_XDECREF(part);
        return nd;
    }
    nd = fan_export_array(v->array);
    if (!nd || v->array->ndim > 0 || (v->origin != FAN_FROM_PYTHON_SCALAR && v->origin != FAN_FROM_NUMPY_SCALAR))
        return nd;
    scalar = PyArray_Return((PyArrayObject *)nd); /* steals */
    if (!scalar || v->origin == FAN_FROM_NUMPY_SCALAR)
        return scalar;
    /* NumPy's own scalars know their Python twin; those of ml_dtypes are floats. */
    nd = fan_dtype_kind(v->dtype) == 'f' ? PyNumber_Float(scalar) : PyObject_CallMethod(scalar, "item", NULL);
    Py_DECREF(scalar);
    return nd;
}

static PyObject *export_sparse(const fan_value *v)
{
    const fan_sparse *s = v->sparse;
    PyObject *arrays = fan_arrays(), *shape = NULL, *indices = NULL, *pointers = NULL, *values = NULL, *o = NULL;
    if (!arrays)
        return NULL;
    shape = export_shape(s->ndim, s->shape);
    indices = shape ? export_part(s->indices, v->device) : NULL;
    pointers = !indices ? NULL : s->pointers ? export_part(s->pointers, v->device) : Py_NewRef(Py_None);
    values = pointers ? export_part(s->values, v->device) : NULL;
    if (values)
        o = PyObject_CallMethod(arrays, "export_sparse", "isOOOOO", (int)v->origin, fan_format_name(s->format), shape,
                                indices, pointers, values, s->coalesced ? Py_True : Py_False);
    Py_XDECREF(shape);
    Py_XDECREF(indices);
    Py_XDECREF(pointers);
    Py_XDECREF(values);
    return o;
}

static PyObject *export_zero(const fan_value *v)
{
    fan_state *st = fan_state_get();
    PyObject *type = fan_lazy(&st->zero_type, "fanin.slots", "Zero"), *shape, *o;
    if (!type)
        return NULL;
    shape = export_shape(v->array->ndim, v->array->shape);
    o = shape ? PyObject_CallFunction(type, "Os", shape, fan_dtype_name(v->dtype)) : NULL;
    Py_XDECREF(shape);
    return o;
}

PyObject *fan_export(fan_value *v)
{
    PyObject *o = NULL, *live;
    if (v->form == FAN_FORM_UNDEFINED)
        o = Py_NewRef(Py_None);
    else if (v->object) {
        o = Py_NewRef((PyObject *)v->object);
        if (v->device && v->origin != FAN_FROM_DEVICE_ARRAY && fan_cuda_of(v->device))
            fan_leaves(o, v);
    } else if (v->form == FAN_FORM_DENSE)
        o = export_dense(v);
    else if (v->form == FAN_FORM_SPARSE)
        o = export_sparse(v);
    else if (v->form == FAN_FORM_ZERO)
        o = export_zero(v);
    else
        PyErr_SetString(PyExc_SystemError, "an object's sum without an object");
    live = fan_exception_take();
    fan_value_drop(&fan_python, v);
    fan_exception_put(live);
    return o;
}
