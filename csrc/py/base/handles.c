/* handles: Python's objects for streams, events and arrays of devices, and which of them a scope or
 * a kernel holds. */
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
    PyObject *made = foreign ? PyObject_CallOneArg(foreign, o) : NULL;
    if (made && Py_TYPE(made) != fan_state_get()->stream_type)
        PyErr_SetString(PyExc_SystemError, "_interop.streams.foreign returned no stream");
    else if (made)
        *out = fan_stream_hold(fan_stream_of(made));
    Py_XDECREF(made);
    return *out ? 0 : -1;
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
    return Py_TYPE(o) == fan_state_get()->event_type ? fan_event_of(o) : NULL;
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
    outermost = outermost ? outermost : scope;
}

void fan_handles_end(const fan_handles_scope *scope)
{
    outermost = outermost == scope ? NULL : outermost;
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
