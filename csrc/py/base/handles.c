/* handles: Python's objects for streams, events and arrays of devices.
 *
 * In order: streams; events; arrays; the functions of graph trees and the kernels that run on this
 * thread. */
#include "py/base/handles.h"

PyObject *fan_stream_make(PyTypeObject *type, fan_stream *s)
{
    fan_stream_object *self = (fan_stream_object *)type->tp_alloc(type, 0);
    if (self)
        self->s = fan_stream_hold(s);
    return (PyObject *)self;
}

PyObject *fan_stream_wrap(fan_stream *s)
{
    return fan_stream_make(fan_state_get()->stream_type, s);
}

PyObject *fan_stream_give(fan_stream *s)
{
    if (!s)
        Py_RETURN_NONE;
    PyObject *made = fan_stream_wrap(s);
    fan_stream_drop(s);
    return made;
}

int fan_stream_open(const fan_stream *s)
{
    return FAN_CHECK(fan_stream_check_open(s, &err));
}

int fan_stream_arg(PyObject *o, fan_stream **out)
{
    *out = NULL;
    if (!o || o == Py_None)
        return 0;
    if (Py_TYPE(o) == fan_state_get()->stream_type) {
        if (fan_stream_open(fan_stream_of(o)) < 0)
            return -1;
        *out = fan_stream_hold(fan_stream_of(o));
        return 0;
    }
    PyObject *foreign =
        fan_lazy(&fan_state_get()->foreign_stream, "fanin._interop.streams", "foreign");
    if (!foreign)
        return -1;
    PyObject *made = PyObject_CallOneArg(foreign, o);
    if (!made)
        return -1;
    if (Py_TYPE(made) == fan_state_get()->stream_type)
        *out = fan_stream_hold(fan_stream_of(made));
    Py_DECREF(made);
    if (!*out)
        return fan_set_error(PyExc_SystemError, "_interop.streams.foreign returned no stream");
    return 0;
}

PyObject *fan_event_make(PyTypeObject *type, fan_event *e)
{
    fan_event_object *self = (fan_event_object *)type->tp_alloc(type, 0);
    if (self)
        self->e = fan_event_hold(e);
    return (PyObject *)self;
}

PyObject *fan_event_wrap(fan_event *e)
{
    return fan_event_make(fan_state_get()->event_type, e);
}

fan_event *fan_event_arg(PyObject *o)
{
    if (Py_TYPE(o) != fan_state_get()->event_type)
        return NULL;
    return fan_event_of(o);
}

PyObject *fan_array_wrap(fan_array *a, fan_device *d)
{
    PyTypeObject *type = fan_state_get()->array_type;
    fan_array_object *self = (fan_array_object *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->a = fan_array_hold(a);
    self->d = fan_device_hold(d);
    return (PyObject *)self;
}

fan_array *fan_array_arg(PyObject *o, fan_device **d)
{
    if (Py_TYPE(o) != fan_state_get()->array_type)
        return NULL;
    if (d)
        *d = fan_array_self(o)->d;
    return fan_array_self(o)->a;
}

static _Thread_local const fan_handles_scope *outermost;

void fan_handles_begin(const fan_handles_scope *scope)
{
    if (!outermost)
        outermost = scope;
}

void fan_handles_end(const fan_handles_scope *scope)
{
    if (outermost == scope)
        outermost = NULL;
}

const fan_handles_scope *fan_handles_outermost(void)
{
    return outermost;
}

static _Thread_local PyObject *kernel_running;

PyObject *fan_kernel_running(void)
{
    return kernel_running;
}

PyObject *fan_kernel_running_set(PyObject *name)
{
    PyObject *before = kernel_running;
    kernel_running = name;
    return before;
}

bool fan_wants_handles(const fan_array *a)
{
    return outermost || (a && fan_memory_lent(a->storage));
}

int fan_array_usable(const fan_array *a)
{
    return FAN_CHECK(fan_storage_check(a->storage, &err));
}
