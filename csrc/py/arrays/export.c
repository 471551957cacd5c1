/* export: makes a Python object of every sum: fan_export returns the value's own object, or a new
 * one of its origin's kind (D15). Before it, one function for each form of a value. */
#include "py/base/args.h"
#include "py/arrays/arrays.h"
#include "py/device/backends.h"
#include "py/arrays/dlpack.h"

#include <string.h>

/* export_part: an array for _interop.arrays: as fanin's device array, or as an exporter; None of
 * NULL. */
static PyObject *export_part(fan_array *a, fan_device *d)
{
    if (!a)
        Py_RETURN_NONE;
    if (d && d->backend->has_streams)
        return fan_array_wrap(a, d);
    return fan_exporter_new(a);
}

/* library_array: the library's own array, where the sum was written into one. Borrowed. */
static PyObject *library_array(const fan_value *v)
{
    if (v->origin < FAN_FROM_FOREIGN)
        return NULL;
    const fan_dl_api *api = fan_state_get()->tables[v->origin];
    const fan_array *a = v->array;
    if (!api)
        return NULL;
    PyObject *o = fan_memory_wrapped(a->storage, fan_release_library_array);
    if (!o)
        return NULL;
    fan_dl_tensor tensor;
    if (api->look(o, &tensor) != 0) {
        PyErr_Clear();
        return NULL;
    }
    if ((char *)tensor.data + tensor.byte_offset != a->data)
        return NULL;
    int64_t strides[FAN_MAX_NDIM];
    for (int i = 0; i < a->ndim; i++)
        strides[i] = a->strides[i] / (int64_t)fan_dtype_size(v->dtype);
    if (!fan_is_dense_like(&tensor, v->device, v->dtype, a->ndim, a->shape, strides))
        return NULL;
    return o;
}

static PyObject *export_device(const fan_value *v)
{
    PyObject *own = library_array(v);
    if (own) {
        Py_INCREF(own);
        fan_leaves(own, v);
        return own;
    }
    PyObject *part = fan_array_wrap(v->array, v->device);
    if (!part)
        return part;
    if (v->origin < FAN_FROM_FOREIGN)
        return part;
    if (!fan_is_shared(v->device))
        return part;
    return fan_arrays_call("export_device", "(iN)", (int)v->origin, part);
}

static PyObject *export_dense(const fan_value *v)
{
    if (v->device && v->device->backend->has_streams)
        return export_device(v);
    if (v->origin >= FAN_FROM_FOREIGN)
        return fan_arrays_call("export_dense", "(iN)", (int)v->origin, fan_exporter_new(v->array));
    PyObject *nd = fan_export_array(v->array);
    bool is_number = v->origin == FAN_FROM_PYTHON_SCALAR || v->origin == FAN_FROM_NUMPY_SCALAR;
    if (!nd || v->array->ndim > 0 || !is_number)
        return nd;
    PyObject *scalar = PyArray_Return((PyArrayObject *)nd); /* steals */
    if (!scalar || v->origin == FAN_FROM_NUMPY_SCALAR)
        return scalar;
    /* NumPy's own scalars have a Python twin; those of ml_dtypes are floats. */
    if (fan_dtype_kind(v->dtype) == 'f')
        nd = PyNumber_Float(scalar);
    else
        nd = PyObject_CallMethod(scalar, "item", NULL);
    Py_DECREF(scalar);
    return nd;
}

static PyObject *export_sparse(const fan_value *v)
{
    const fan_sparse *s = v->sparse;
    return fan_arrays_call("export_sparse", "(isNNNNO)", (int)v->origin, fan_format_name(s->format),
                           fan_ints(s->ndim, s->shape), export_part(s->indices, v->device),
                           export_part(s->pointers, v->device), export_part(s->values, v->device),
                           fan_py_bool(s->coalesced));
}

/* export_partial: fanin.Partial._made of the values and their place. */
static PyObject *export_partial(const fan_value *v)
{
    const fan_patch *p = v->patch;
    int64_t along[FAN_MAX_NDIM];
    PyObject *type = fan_lazy(&fan_state_get()->partial_type, "fanin.partial", "Partial");
    if (!type)
        return NULL;
    for (int k = 0; k < p->ndim; k++)
        along[k] = p->from[k];
    PyObject *values = export_dense(v);
    if (!values)
        return NULL;
    PyObject *place = Py_BuildValue("NNNN", fan_ints(p->ndim, p->start), fan_ints(p->ndim, p->step),
                                    fan_ints(p->ndim, along), fan_ints(p->values, p->extent));
    if (!place) {
        Py_DECREF(values);
        return NULL;
    }
    return PyObject_CallMethod(type, "_made", "NNN", values, place, fan_ints(p->ndim, p->shape));
}

static PyObject *export_zero(const fan_value *v)
{
    PyObject *type = fan_lazy(&fan_state_get()->zero_type, "fanin.slots", "Zero");
    if (!type)
        return NULL;
    return PyObject_CallFunction(type, "Ns", fan_ints(v->array->ndim, v->array->shape),
                                 fan_dtype_name(v->dtype));
}

PyObject *fan_export(fan_value *v)
{
    PyObject *o = NULL;
    if (v->form == FAN_FORM_UNDEFINED) {
        o = Py_NewRef(Py_None);
    } else if (v->object) {
        o = Py_NewRef((PyObject *)v->object);
        if (v->device && v->origin != FAN_FROM_DEVICE_ARRAY && fan_is_shared(v->device))
            fan_leaves(o, v);
    } else if (v->form == FAN_FORM_DENSE) {
        o = export_dense(v);
    } else if (v->form == FAN_FORM_SPARSE) {
        o = export_sparse(v);
    } else if (v->form == FAN_FORM_PARTIAL) {
        o = export_partial(v);
    } else if (v->form == FAN_FORM_ZERO) {
        o = export_zero(v);
    } else {
        PyErr_SetString(PyExc_SystemError, "an object's sum without an object");
    }
    fan_value_release(v);
    return o;
}
