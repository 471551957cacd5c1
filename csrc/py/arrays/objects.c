/* objects: Python objects, and arrays of the core without an object around them, which the core
 * carries as `void *`. In this order: unboxed arrays (objects.h); references, and values; calls of
 * _interop.arrays. */
#include "py/arrays/objects.h"
#include "py/arrays/arrays.h"

#include <string.h>

bool fan_unboxed_plain(void *object, fan_plain_kind *kind, char **data)
{
    const fan_array *a = fan_unboxed_array(object);
#ifdef Py_GIL_DISABLED
    return false; /* the counters of plain entries need one thread at a time */
#endif
    if (a->ndim > FAN_PLAIN_NDIM || !fan_array_in_c_order(a))
        return false;
    kind->dtype = a->dtype;
    kind->origin = FAN_FROM_NDARRAY;
    kind->check_at_use = kind->scalar = kind->weak = kind->inside = false;
    kind->order = 0;
    kind->ndim = (int8_t)a->ndim;
    for (int i = 0; i < a->ndim; i++)
        kind->shape[i] = a->shape[i];
    *data = a->data;
    return true;
}

void *fan_unboxed_fresh(const fan_plain_kind *kind, char **data)
{
    fan_array *a;
    if (fan_array_new(kind->dtype, kind->ndim, kind->shape, NULL, &a, NULL) != FAN_OK)
        return NULL;
    *data = a->data;
    return fan_unboxed(a);
}

/* has_one_hold: whether the caller's is the one hold on an array. */
static bool has_one_hold(const fan_array *a)
{
    return atomic_load_explicit(&a->refs, memory_order_acquire) == 1;
}

bool fan_unboxed_is_unique(void *object)
{
    const fan_array *a = fan_unboxed_array(object);
    return has_one_hold(a) && a->writable && fan_storage_only_ours(a->storage);
}

bool fan_unboxed_drop_if_shared(void *object)
{
    fan_array *a = fan_unboxed_array(object);
    if (has_one_hold(a) && !fan_storage_only_ours(a->storage))
        return false; /* the drop would call out */
    fan_array_drop(a);
    return true;
}

fan_value fan_unboxed_value(void *object)
{
    fan_array *array = fan_array_hold(fan_unboxed_array(object));
    fan_value v = fan_value_dense(array, fan_cpu());
    v.origin = FAN_FROM_NDARRAY; /* the lowest rank */
    return v;
}

int fan__box(void **object)
{
    fan_array *a = fan_unboxed_array(*object);
    PyObject *boxed = fan_export_array(a);
    if (!boxed)
        return -1;
    *object = boxed;
    fan_array_drop(a);
    return 0;
}

/* ---- references, taken and dropped on any thread, while an exception may be live ---- */

void fan_object_hold(void *object)
{
    fan_gil gil;
    if (fan_is_unboxed(object)) {
        fan_array_hold(fan_unboxed_array(object));
        return;
    }
    if (!fan_gil_enter(&gil))
        return;
    Py_INCREF((PyObject *)object);
    fan_gil_leave(&gil);
}

void fan_object_drop(void *object)
{
    fan_gil gil;
    if (fan_is_unboxed(object)) {
        fan_array_drop(fan_unboxed_array(object));
        return;
    }
    if (!fan_gil_enter(&gil))
        return;
    PyObject *live = NULL;
    if (PyErr_Occurred())
        live = fan_exception_take();
    Py_DECREF((PyObject *)object);
    if (live)
        fan_exception_put(live);
    fan_gil_leave(&gil);
}

void fan_release_object(fan_storage *s)
{
    fan_object_drop(s->ctx);
}

void fan_object_hold_here(void *object)
{
    if (fan_is_unboxed(object))
        fan_array_hold(fan_unboxed_array(object));
    else
        Py_INCREF((PyObject *)object);
}

void fan_object_drop_here(void *object)
{
    if (fan_is_unboxed(object))
        fan_array_drop(fan_unboxed_array(object));
    else
        Py_DECREF((PyObject *)object);
}

void fan_value_release(fan_value *v)
{
    static const fan_frontend holds = {
        .hold = fan_object_hold,
        .drop = fan_object_drop,
    };
    PyObject *live = fan_exception_take();
    fan_value_drop(&holds, v);
    fan_exception_put(live);
}

void fan_value_set_dense(fan_value *out, fan_origin origin, fan_device *device, PyObject *object)
{
    out->form = FAN_FORM_DENSE;
    out->dtype = out->array->dtype;
    out->origin = (uint8_t)origin;
    out->device = device;
    out->object = Py_NewRef(object);
}

/* ---- calls ---- */

bool fan_result_is(PyObject *result, const PyObject *constant)
{
    if (!result)
        PyErr_Clear();
    Py_XDECREF(result);
    return result == constant;
}

PyObject *fan_arrays_call(const char *name, const char *format, ...)
{
    PyObject *function = NULL;
    PyObject *result = NULL;
    va_list values;
    va_start(values, format);
    PyObject *args = Py_VaBuildValue(format, values); /* first: it takes the references of "N" */
    va_end(values);
    if (!args)
        return NULL;
    PyObject *arrays = fan_arrays();
    if (arrays)
        function = PyObject_GetAttrString(arrays, name);
    if (function)
        result = PyObject_Call(function, args, NULL);
    Py_XDECREF(function);
    Py_DECREF(args);
    return result;
}
