/* stream: fanin.Stream, a queue of a device.
 *
 * In order: new; wait, record and synchronize; what can be read; the type; the functions of the
 * current stream. */
#include "py/device/backends.h"
#include "py/base/handles.h"
#include "py/base/args.h"

#include "base/mem.h"

static PyObject *stream_new(PyTypeObject *type, PyObject *const *a)
{
    PyObject *where = a[0];
    PyObject *number = a[1];
    PyObject *made = NULL;
    fan_device *d = NULL;
    fan_stream *s = NULL;
    if (!PyLong_Check(number) || PyBool_Check(number)) {
        return PyErr_Format(PyExc_TypeError, "Stream: the handle is an integer, not %.80s",
                            Py_TYPE(number)->tp_name);
    }
    unsigned long long handle = PyLong_AsUnsignedLongLong(number);
    if (handle == (unsigned long long)-1 && PyErr_Occurred()) {
        PyErr_Clear();
        return PyErr_Format(PyExc_ValueError, "Stream: no stream has the handle %R", number);
    }
    if (fan_device_arg(where, &d) < 0)
        return NULL;
    if (!d || !d->backend->has_streams)
        PyErr_Format(PyExc_ValueError, "Stream: %R has no streams: its work runs at once", where);
    else
        s = fan_backend_stream(d, handle);
    if (s)
        made = fan_stream_make(type, s);
    fan_stream_drop(s);
    fan_device_drop(d);
    return made;
}

FAN_DEALLOC(stream_dealloc, fan_stream_drop(fan_stream_of(o)))

/* waited_stream: the stream that an argument of wait is; a hold, or NULL with an exception. */
static fan_stream *waited_stream(PyObject *arg)
{
    fan_stream *s = NULL;
    bool claims = PyObject_HasAttrString((PyObject *)Py_TYPE(arg), "__cuda_stream__");
    if (arg != Py_None && fan_stream_arg(arg, &s) < 0) {
        if (claims || !PyErr_ExceptionMatches(PyExc_TypeError))
            return NULL;
        PyErr_Clear();
    }
    if (!s) {
        PyErr_Format(PyExc_TypeError, "Stream.wait: expected an Event or a Stream, got %.80s",
                     Py_TYPE(arg)->tp_name);
    }
    return s;
}

/* warn_unrecorded: warns of a wait for an event that was never recorded. 0, or -1 with an
 * exception. */
static int warn_unrecorded(PyObject *o, PyObject *arg)
{
    fan_stream *recorded = fan_event_stream(fan_event_arg(arg));
    fan_stream_drop(recorded);
    if (recorded)
        return 0;
    return PyErr_WarnFormat(PyExc_RuntimeWarning, 1, "%R waits for %R: this does nothing", o, arg);
}

static PyObject *stream_wait(PyObject *o, PyObject *arg)
{
    fan_stream *s = fan_stream_of(o);
    fan_stream *other = NULL;
    fan_event *e = fan_event_arg(arg);
    fan_event *made = NULL;
    fan_error err = {0};
    fan_status status = FAN_OK;
    if (fan_stream_open(s) < 0)
        return NULL;
    if (e) {
        if (warn_unrecorded(o, arg) < 0)
            return NULL;
    } else {
        other = waited_stream(arg);
        if (!other)
            return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        if (other)
            status = fan_event_record(other, &made, &err);
        if (made)
            e = made;
        if (status == FAN_OK)
            status = fan_stream_wait(s, e, NULL, &err);
        fan_event_drop(made);
        fan_stream_drop(other);
    Py_END_ALLOW_THREADS
    return fan_done(status, &err);
}

static PyObject *stream_record(PyObject *o, PyObject *Py_UNUSED(none))
{
    fan_event *e = NULL;
    if (fan_stream_open(fan_stream_of(o)) < 0)
        return NULL;
    if (FAN_CHECK_UNLOCKED(fan_event_record(fan_stream_of(o), &e, &err)) < 0)
        return NULL;
    PyObject *made = fan_event_wrap(e);
    fan_event_drop(e);
    return made;
}

static PyObject *stream_synchronize(PyObject *o, PyObject *Py_UNUSED(none))
{
    return FAN_DONE_UNLOCKED(fan_stream_sync(fan_stream_of(o), &err));
}

static PyObject *stream_cuda_stream(PyObject *o, PyObject *Py_UNUSED(none))
{
    char text[32];
    if (!fan_stream_of(o)->device->backend->cuda_protocols) {
        return PyErr_Format(PyExc_TypeError, "%R is no CUDA stream: it is of %s", o,
                            fan_device_text(fan_stream_of(o)->device, text, sizeof text));
    }
    return Py_BuildValue("(iK)", 0, (unsigned long long)fan_stream_of(o)->handle);
}

static PyObject *stream_reduce(PyObject *o, PyObject *Py_UNUSED(none))
{
    return PyErr_Format(PyExc_TypeError, "cannot pickle or copy %R: it is a queue of this process",
                        o);
}

static PyObject *stream_repr(PyObject *o)
{
    char text[32];
    return PyUnicode_FromFormat("fanin.Stream(\"%s\", %llu)",
                                fan_device_text(fan_stream_of(o)->device, text, sizeof text),
                                (unsigned long long)fan_stream_of(o)->handle);
}

static Py_hash_t stream_hash(PyObject *o)
{
    return (Py_hash_t)(fan_stream_of(o)->id & 0x7fffffff);
}

static PyObject *stream_compare(PyObject *a, PyObject *b, int op)
{
    PyTypeObject *type = fan_state_get()->stream_type;
    if (op != Py_EQ && op != Py_NE)
        Py_RETURN_NOTIMPLEMENTED;
    if (Py_TYPE(a) != type || Py_TYPE(b) != type)
        Py_RETURN_NOTIMPLEMENTED;
    bool same = fan_stream_of(a)->id == fan_stream_of(b)->id;
    return PyBool_FromLong(same == (op == Py_EQ));
}

static PyObject *stream_get_device(PyObject *o, void *Py_UNUSED(closure))
{
    return fan_device_name(fan_stream_of(o)->device);
}

static PyObject *stream_get_handle(PyObject *o, void *Py_UNUSED(closure))
{
    return PyLong_FromUnsignedLongLong(fan_stream_of(o)->handle);
}

#include "py/declared/Stream.h"

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)stream_doc},
    {Py_tp_new, stream_new_door},
    {Py_tp_dealloc, stream_dealloc},
    {Py_tp_repr, stream_repr},
    {Py_tp_hash, stream_hash},
    {Py_tp_richcompare, stream_compare},
    {Py_tp_methods, stream_methods},
    {Py_tp_getset, stream_getset},
    {0, NULL},
};

PyType_Spec fan_stream_spec = {
    .name = "fanin.Stream",
    .basicsize = sizeof(fan_stream_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

/* Functions */

/* stream_of_device: what `read` returns of a device; None: it has none. */
static PyObject *stream_of_device(PyObject *where, fan_stream *(*read)(fan_device *d))
{
    fan_device *d = NULL;
    fan_stream *s = NULL;
    if (fan_device_arg(where, &d) < 0)
        return NULL;
    if (d)
        s = read(d);
    fan_device_drop(d);
    return fan_stream_give(s);
}

static PyObject *current_stream(PyObject *Py_UNUSED(module), PyObject *where)
{
    return stream_of_device(where, fan_stream_current);
}

static PyObject *stream_push(PyObject *Py_UNUSED(module), PyObject *o)
{
    fan_error err = {0};
    fan_stream *s = NULL;
    if (o == Py_None)
        return PyErr_Format(PyExc_TypeError, "expected a stream, got None");
    if (fan_stream_arg(o, &s) < 0)
        return NULL;
    fan_status status = fan_stream_push(s, &err);
    fan_stream_drop(s);
    return fan_done(status, &err);
}

/* One of a closed machine, too: after an interrupt the block of the machine may end before that of
 * its stream. */
static PyObject *stream_pop(PyObject *Py_UNUSED(module), PyObject *o)
{
    if (Py_TYPE(o) != fan_state_get()->stream_type) {
        return PyErr_Format(PyExc_TypeError, "expected a fanin.Stream, got %.80s",
                            Py_TYPE(o)->tp_name);
    }
    fan_stream_pop(fan_stream_of(o));
    Py_RETURN_NONE;
}

static PyObject *stream_pushed(PyObject *Py_UNUSED(module), PyObject *where)
{
    return stream_of_device(where, fan_stream_pushed);
}

static PyObject *build_info(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
#ifndef FAN_BUILD
#define FAN_BUILD "unknown"
#endif
#ifdef __clang__
    const char *compiler = "clang " __clang_version__;
#elif defined __GNUC__
    const char *compiler = "gcc " __VERSION__;
#else
    const char *compiler = "unknown";
#endif
    return Py_BuildValue("{s:s,s:s}", "compiler", compiler, "build", FAN_BUILD);
}

#include "py/declared/stream.h"
