/* event: fanin.Event, a point in a stream's queue.
 *
 * In order: new; record, query and synchronize; what can be read; the type. */
#include "py/base/handles.h"
#include "py/device/backends.h"
#include "py/base/args.h"

static PyObject *event_new(PyTypeObject *type, PyObject *const *a)
{
    PyObject *where = a[0];
    PyObject *made = NULL;
    fan_device *d = NULL;
    fan_event *e = NULL;
    if (fan_device_arg(where, &d) < 0)
        return NULL;
    if (!d || !d->backend->has_streams) {
        fan_device_drop(d);
        return PyErr_Format(PyExc_ValueError,
                            "Event: %R has no streams and no events: its work runs at once", where);
    }
    if (FAN_CHECK(fan_event_new(d, &e, &err)) == 0)
        made = fan_event_make(type, e);
    fan_event_drop(e);
    fan_device_drop(d);
    return made;
}

FAN_DEALLOC(event_dealloc, fan_event_drop(fan_event_of(o)))

static PyObject *event_record(PyObject *o, PyObject *arg)
{
    fan_event *e = fan_event_of(o);
    fan_stream *s = NULL;
    if (fan_stream_arg(arg, &s) < 0)
        return NULL;
    if (!s)
        s = fan_stream_current(e->device);
    if (!s)
        return PyErr_NoMemory();
    int bad = fan_stream_open(s);
    if (!bad && s->device != e->device) {
        char mine[32];
        char theirs[32];
        bad = -1;
        PyErr_Format(PyExc_ValueError,
                     "Event.record: the event is of %s, the stream of %s%s; an event is recorded "
                     "on its own device: use "
                     "stream.record()",
                     fan_device_text(e->device, mine, sizeof mine),
                     fan_device_text(s->device, theirs, sizeof theirs),
                     fan_device_of_another(s->device, e->device));
    }
    if (!bad)
        bad = FAN_CHECK_UNLOCKED(fan_event_rerecord(e, s, &err));
    fan_stream_drop(s);
    if (bad)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *event_query(PyObject *o, PyObject *Py_UNUSED(none))
{
    fan_event *e = fan_event_of(o);
    fan_error err = {0};
    fan_status status;
    bool done = true;
    Py_BEGIN_ALLOW_THREADS
        status = fan_event_query(e, &done, &err);
        if (status == FAN_OK && !done && e->device->backend->nudge)
            status = e->device->backend->nudge(e->device, &err);
    Py_END_ALLOW_THREADS
    if (status != FAN_OK)
        return fan_raise(status, &err);
    return PyBool_FromLong(done);
}

static PyObject *event_synchronize(PyObject *o, PyObject *Py_UNUSED(none))
{
    fan_event *e = fan_event_of(o);
    return FAN_DONE_UNLOCKED(fan_event_sync(e, &err));
}

static PyObject *event_reduce(PyObject *o, PyObject *Py_UNUSED(none))
{
    return PyErr_Format(PyExc_TypeError,
                        "cannot pickle or copy %R: it is a point in a queue of this process", o);
}

static PyObject *event_repr(PyObject *o)
{
    fan_event *e = fan_event_of(o);
    fan_stream *s = fan_event_stream(e);
    char text[32];
    fan_device_text(e->device, text, sizeof text);
    if (!s)
        return PyUnicode_FromFormat("<fanin.Event on %s, never recorded>", text);
    unsigned long long handle = s->handle;
    fan_stream_drop(s);
    return PyUnicode_FromFormat("<fanin.Event on %s, recorded on stream %llu>", text, handle);
}

static PyObject *event_get_device(PyObject *o, void *Py_UNUSED(closure))
{
    return fan_device_name(fan_event_of(o)->device);
}

static PyObject *event_get_stream(PyObject *o, void *Py_UNUSED(closure))
{
    return fan_stream_give(fan_event_stream(fan_event_of(o)));
}

#include "py/declared/Event.h"

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)event_doc},
    {Py_tp_new, event_new_door},
    {Py_tp_dealloc, event_dealloc},
    {Py_tp_repr, event_repr_step},
    {Py_tp_methods, event_methods},
    {Py_tp_getset, event_getset},
    {0, NULL},
};

PyType_Spec fan_event_spec = {
    .name = "fanin.Event",
    .basicsize = sizeof(fan_event_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
