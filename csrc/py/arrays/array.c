/* array: fanin.sim.Array, an array on a device, or on the CPU in a graph tree. In this order:
 * views; the type; values; exports to other libraries; attributes. Views with indices and operators
 * are Python (fanin._array). */
#include "py/base/args.h"
#include "py/base/handles.h"
#include "py/arrays/arrays.h"
#include "py/arrays/dlpack.h"

#include "device/cpu/recording.h"

#include <string.h>

static bool array_on_cpu(PyObject *o)
{
    fan_device *d = NULL;
    return fan_array_arg(o, &d) && d == fan_cpu();
}

/* wrap_taken: an Array over the memory of `self`; takes the hold of `a`. */
static PyObject *wrap_taken(fan_array *a, PyObject *self)
{
    PyObject *made = fan_array_wrap(a, fan_array_self(self)->d);
    fan_array_drop(a);
    return made;
}

static PyObject *array_view(PyObject *o, PyObject *const *values)
{
    fan_array *a = fan_array_self(o)->a;
    fan_array *made;
    FAN_UNINITIALIZED int64_t shape[FAN_MAX_NDIM], strides[FAN_MAX_NDIM];
    void *data = PyLong_AsVoidPtr(values[0]);
    int ndim = fan_shape_tuple(values[1], shape);
    if (PyErr_Occurred())
        return NULL;
    if (fan_shape_tuple(values[2], strides) != ndim)
        return NULL;
    if (fan_array_usable(a) < 0)
        return NULL;
    if (FAN_CHECK(fan_array_view(a->storage, data, a->dtype, ndim, shape, strides, a->writable,
                                 &made, &err)) < 0)
        return NULL;
    return wrap_taken(made, o);
}

static PyObject *array_broadcast(PyObject *o, PyObject *to)
{
    fan_array *a = fan_array_self(o)->a;
    fan_array *made;
    FAN_UNINITIALIZED int64_t shape[FAN_MAX_NDIM];
    int n = fan_shape_tuple(to, shape);
    if (n < 0 || fan_array_usable(a) < 0)
        return NULL;
    if (FAN_CHECK(fan_array_broadcast(a, n, shape, &made, &err)) < 0)
        return NULL;
    return wrap_taken(made, o);
}

/* ---- the type ---- */

static PyObject *array_new(PyTypeObject *Py_UNUSED(type), PyObject *Py_UNUSED(args),
                           PyObject *Py_UNUSED(kwargs))
{
    return PyErr_Format(
        PyExc_TypeError,
        "arrays on a simulated device are made by Machine.array(ndarray, device=0) and "
        "Machine.empty(shape, dtype, device=0)");
}

static void array_dealloc(PyObject *o)
{
    PyTypeObject *type = Py_TYPE(o);
    fan_array_object *self = fan_array_self(o);
    if (self->weakrefs)
        PyObject_ClearWeakRefs(o);
    /* The drop of the last hold frees the memory: that calls the device, which may switch to
     * another host thread. */
    Py_BEGIN_ALLOW_THREADS
        fan_array_drop(self->a);
        fan_array_drop(self->replaced);
        fan_device_drop(self->d);
    Py_END_ALLOW_THREADS
    type->tp_free(o);
    Py_DECREF(type);
}

/* Values */

static const fan_error reads = {.text = "numpy(): a function that is recorded cannot read values "
                                        "on the host: what is done with them would not be "
                                        "done again"};

/* read_values: copies the values to the host. */
static fan_status read_values(const fan_array_object *self, bool on_cpu, fan_array *dst,
                              fan_error *err)
{
    fan_device *d = self->d;
    fan_status status = FAN_OK;
    fan_stream *s = fan_stream_current(d);
    if (!s && !on_cpu)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory for a stream");
    if (d->backend->use)
        status = d->backend->use(d, self->a, "read", false, err);
    if (status == FAN_OK)
        status = d->backend->read(s, dst, self->a, err);
    fan_stream_drop(s);
    return status;
}

static PyObject *array_numpy(PyObject *o, PyObject *Py_UNUSED(none))
{
    fan_array *a = fan_array_self(o)->a;
    fan_array *dst;
    bool on_cpu = array_on_cpu(o);
    if (on_cpu && fan_recording_here())
        return fan_raise(FAN_ERR_CAPTURE, &reads);
    if (fan_array_usable(a) < 0)
        return NULL;
    PyArray_Descr *descr = fan_descr_of_dtype(a->dtype);
    if (!descr)
        return NULL;
    PyObject *made = PyArray_NewFromDescr(&PyArray_Type, descr, a->ndim, (const npy_intp *)a->shape,
                                          NULL, NULL, 0, NULL);
    if (!made)
        return NULL;
    if (fan_view_ndarray((PyArrayObject *)made, a->dtype, true, &dst) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    if (FAN_CHECK_UNLOCKED(read_values(fan_array_self(o), on_cpu, dst, &err)) < 0)
        Py_CLEAR(made);
    fan_array_drop(dst);
    return made;
}

static PyObject *array_record_stream(PyObject *o, PyObject *arg)
{
    fan_stream *s = NULL;
    if (fan_stream_arg(arg, &s) < 0)
        return NULL;
    if (!s)
        return PyErr_Format(PyExc_TypeError, "record_stream: expected a stream, got None");
    int bad = FAN_CHECK_UNLOCKED(fan_memory_record_stream(fan_array_self(o)->a->storage, s, &err));
    fan_stream_drop(s);
    if (bad)
        return NULL;
    Py_RETURN_NONE;
}

/* To other libraries (dlpack.h) */

static PyObject *array_dlpack(PyObject *o, PyObject *const *a)
{
    const fan_array_object *self = fan_array_self(o);
    if (fan_array_usable(self->a) < 0)
        return NULL;
    if (array_on_cpu(o)) {
        return PyErr_Format(PyExc_BufferError,
                            "__dlpack__: memory of a graph tree ends with its step, and %R may be "
                            "of one: x.numpy() is "
                            "a copy",
                            o);
    }
    return fan_dlpack_export(self->a, self->d, a);
}

static PyObject *array_dlpack_device(PyObject *o, PyObject *Py_UNUSED(none))
{
    if (array_on_cpu(o))
        return Py_BuildValue("(ii)", FAN_DL_CPU, 0);
    return fan_dlpack_device(fan_array_self(o)->d);
}

static PyObject *array_get_cuda_array_interface(PyObject *o, void *Py_UNUSED(closure))
{
    const fan_array_object *self = fan_array_self(o);
    if (fan_array_usable(self->a) < 0)
        return NULL;
    if (array_on_cpu(o))
        return PyErr_Format(PyExc_AttributeError, "__cuda_array_interface__: %R is on the CPU", o);
    return fan_interface_export(self->a, self->d);
}

static PyObject *array_repr(PyObject *o)
{
    fan_array *a = fan_array_self(o)->a;
    char shape[256];
    char device[32];
    return PyUnicode_FromFormat("<fanin.sim.Array %s %s on %s, %llu B>",
                                fan_shape_text(a->ndim, a->shape, shape, sizeof shape),
                                fan_dtype_name(a->dtype),
                                fan_device_text(fan_array_self(o)->d, device, sizeof device),
                                (unsigned long long)a->size * fan_dtype_size(a->dtype));
}

#define GETTER(name, value)                                                  \
    static PyObject *array_get_##name(PyObject *o, void *Py_UNUSED(closure)) \
    {                                                                        \
        const fan_array_object *self = fan_array_self(o);                    \
        const fan_array *a = self->a;                                        \
        (void)a;                                                             \
        return value;                                                        \
    }
GETTER(shape, fan_ints(a->ndim, a->shape))
GETTER(strides, fan_ints(a->ndim, a->strides))
GETTER(dtype, (PyObject *)fan_descr_of_dtype(a->dtype))
GETTER(ndim, PyLong_FromLong(a->ndim))
GETTER(size, PyLong_FromLongLong(a->size))
GETTER(itemsize, PyLong_FromSize_t(fan_dtype_size(a->dtype)))
GETTER(nbytes, PyLong_FromLongLong(a->size *(int64_t)fan_dtype_size(a->dtype)))
GETTER(address, PyLong_FromVoidPtr(a->data))
GETTER(device, fan_device_name(self->d))

static PyObject *array_get_users(PyObject *o, void *Py_UNUSED(closure))
{
    fan_storage *storage = fan_array_self(o)->a->storage;
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list; i++) {
        fan_stream *user = fan_memory_user(storage, i);
        if (!user)
            break;
        fan_list_add(&list, fan_stream_wrap(user));
        fan_stream_drop(user);
    }
    return fan_tuple_of(list);
}

#include "py/declared/Array.h"

/* array_getattr: on the CPU, ndarray's methods besides. In C: a __getattr__ would make every
 * attribute slower. */
static PyObject *array_getattr(PyObject *o, PyObject *name)
{
    PyObject *found = PyObject_GenericGetAttr(o, name);
    if (found || !array_on_cpu(o))
        return found;
    if (!PyErr_ExceptionMatches(PyExc_AttributeError))
        return NULL;
    if (PyUnicode_READ_CHAR(name, 0) == '_')
        return NULL;
    PyErr_Clear();
    return fan_call("fanin.graph.cpu_arrays", "method", "(OO)", o, name);
}

static PyMemberDef members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(fan_array_object, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)array_doc}, {Py_tp_new, array_new},          {Py_tp_dealloc, array_dealloc},
    {Py_tp_repr, array_repr},       {Py_tp_methods, array_methods},  {Py_tp_members, members},
    {Py_tp_getset, array_getset},   {Py_tp_getattro, array_getattr}, {0, NULL},
};

PyType_Spec fan_array_spec = {
    .name = "fanin.sim.Array",
    .basicsize = sizeof(fan_array_object),
    .flags = Py_TPFLAGS_DEFAULT, /* fanin._array adds methods */
    .slots = slots,
};
