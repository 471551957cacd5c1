/* export: the one way out: every sum becomes a Python object again: the value's own, or a new one
 * of its origin's kind (D15). */
#include "py/base/args.h"
#include "py/arrays/arrays.h"
#include "py/device/backends.h"
#include "py/arrays/dlpack.h"


#include <string.h>

/* export_part: what _interop.arrays gets of an array: fanin's device array, or an exporter. */
static PyObject *export_part(fan_array *a, fan_device *d)
{
    return d && d->backend->has_streams ? fan_array_wrap(a, d) : fan_exporter_new(a);
}

/* library_array: the library's own array, where the sum was written into one. Borrowed. */
static PyObject *library_array(const fan_value *v)
{
    const fan_dl_api *api =
        v->origin >= FAN_FROM_FOREIGN ? fan_state_get()->tables[v->origin] : NULL;
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
    if (!part || v->origin < FAN_FROM_FOREIGN || !fan_is_shared(v->device))
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
    if (!nd || v->array->ndim > 0 ||
        (v->origin != FAN_FROM_PYTHON_SCALAR && v->origin != FAN_FROM_NUMPY_SCALAR))
        return nd;
    scalar = PyArray_Return((PyArrayObject *)nd); /* steals */
    if (!scalar || v->origin == FAN_FROM_NUMPY_SCALAR)
        return scalar;
    /* NumPy's own scalars have a Python twin; those of ml_dtypes are floats. */
    nd = fan_dtype_kind(v->dtype) == 'f' ? PyNumber_Float(scalar)
                                         : PyObject_CallMethod(scalar, "item", NULL);
    Py_DECREF(scalar);
    return nd;
}

static PyObject *export_sparse(const fan_value *v)
{
    const fan_sparse *s = v->sparse;
    PyObject *arrays = fan_arrays(), *shape = NULL, *indices = NULL, *pointers = NULL,
             *values = NULL, *o = NULL;
    if (!arrays)
        return NULL;
    shape = fan_ints(s->ndim, s->shape);
    indices = shape ? export_part(s->indices, v->device) : NULL;
    pointers = !indices      ? NULL
               : s->pointers ? export_part(s->pointers, v->device)
                             : Py_NewRef(Py_None);
    values = pointers ? export_part(s->values, v->device) : NULL;
    if (values)
        o = PyObject_CallMethod(arrays, "export_sparse", "isOOOOO", (int)v->origin,
                                fan_format_name(s->format), shape, indices, pointers, values,
                                s->coalesced ? Py_True : Py_False);
    Py_XDECREF(shape);
    Py_XDECREF(indices);
    Py_XDECREF(pointers);
    Py_XDECREF(values);
    return o;
}

static PyObject *export_zero(const fan_value *v)
{
    fan_state *st = fan_state_get();
    PyObject *type = fan_lazy(&st->zero_type, "fanin.slots", "Zero");
    return type ? PyObject_CallFunction(type, "Ns", fan_ints(v->array->ndim, v->array->shape),
                                        fan_dtype_name(v->dtype))
                : NULL;
}

PyObject *fan_export(fan_value *v)
{
    PyObject *o = NULL;
    if (v->form == FAN_FORM_UNDEFINED)
        o = Py_NewRef(Py_None);
    else if (v->object) {
        o = Py_NewRef((PyObject *)v->object);
        if (v->device && v->origin != FAN_FROM_DEVICE_ARRAY && fan_is_shared(v->device))
            fan_leaves(o, v);
    } else if (v->form == FAN_FORM_DENSE)
        o = export_dense(v);
    else if (v->form == FAN_FORM_SPARSE)
        o = export_sparse(v);
    else if (v->form == FAN_FORM_ZERO)
        o = export_zero(v);
    else
        PyErr_SetString(PyExc_SystemError, "an object's sum without an object");
    fan_value_release(v);
    return o;
}
