/* errors: the core's error box and Python's exceptions, each turned into the other. */
#include "py/base/py.h"

#include <stdarg.h>
#include <stdio.h>

PyObject *fan_exception_take(void)
{
#if PY_VERSION_HEX >= 0x030C0000
    return PyErr_GetRaisedException();
#else
    PyObject *type, *value, *trace;
    if (!PyErr_Occurred())
        return NULL;
    PyErr_Fetch(&type, &value, &trace);
    if (!type)
        return NULL;
    PyErr_NormalizeException(&type, &value, &trace);
    if (trace)
        PyException_SetTraceback(value, trace);
    Py_DECREF(type);
    Py_XDECREF(trace);
    return value;
#endif
}

void fan_exception_put(PyObject *e)
{
#if PY_VERSION_HEX >= 0x030C0000
    PyErr_SetRaisedException(e);
#else
    if (e)
        PyErr_Restore(Py_NewRef((PyObject *)Py_TYPE(e)), e, PyException_GetTraceback(e));
    else if (PyErr_Occurred())
        PyErr_Clear();
#endif
}

void fan_iteration_failed(const char *iteration, PyObject *end)
{
    PyObject *cause;
    PyObject *replacement;
    if (!PyErr_ExceptionMatches(end))
        return;
    cause = fan_exception_take();
    PyErr_Format(PyExc_RuntimeError, "%s: a callback raised %s, which does not end the iteration",
                 iteration, Py_TYPE(cause)->tp_name);
    replacement = fan_exception_take();
    PyException_SetCause(replacement, Py_NewRef(cause));
    PyException_SetContext(replacement, cause);
    fan_exception_put(replacement);
}

/* class_of: borrowed. */
static PyObject *class_of(fan_status s)
{
    static PyObject **const builtin[] = {[FAN_ERR_INDEX] = &PyExc_IndexError,
                                         [FAN_ERR_TYPE] = &PyExc_TypeError,
                                         [FAN_ERR_VALUE] = &PyExc_ValueError,
                                         [FAN_ERR_OVERFLOW] = &PyExc_OverflowError,
                                         [FAN_ERR_BUFFER] = &PyExc_BufferError,
                                         [FAN_ERR_NOMEM] = &PyExc_MemoryError,
                                         [FAN_ERR_EXTERN] = NULL};
    fan_state *st = fan_state_get();
    PyObject *c = builtin[s]                  ? *builtin[s]
                  : !st                       ? NULL
                  : s == FAN_ERR_RACE         ? st->race_error
                  : s == FAN_ERR_DEVICE       ? st->device_error
                  : s == FAN_ERR_DEVICE_NOMEM ? st->device_oom_error
                  : s == FAN_ERR_CAPTURE      ? st->capture_error
                  : s == FAN_ERR_DEADLOCK
                      ? fan_lazy(&st->deadlock_error, "fanin.sim.machine", "DeadlockError")
                      : NULL;
    if (!c)
        PyErr_Clear(); /* a core without fanin.sim */
    return c ? c : PyExc_RuntimeError;
}

/* chain: makes `context` (taken) the __context__ of the live exception. */
static void chain(PyObject *context)
{
    PyObject *e;
    if (!context)
        return;
    e = fan_exception_take();
    if (!e) {
        fan_exception_put(context);
        return;
    }
    if (e == context)
        Py_DECREF(context);
    else
        PyException_SetContext(e, context);
    fan_exception_put(e);
}

/* set_field: an attribute of an exception; takes `value`; NULL: none. A field that cannot be set is
 * left out. */
static void set_field(PyObject *e, const char *name, PyObject *value)
{
    if (!value || PyObject_SetAttrString(e, name, value) < 0)
        PyErr_Clear();
    Py_XDECREF(value);
}

/* text_of: a message may carry names of the user's, cut anywhere. NULL of "". */
static PyObject *text_of(const char *text)
{
    return text[0] ? PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace") : NULL;
}

/* set_place: the fields of an exception about a place; `reason` is its message without the
 * place. */
static void set_place(PyObject *e, PyObject *object, int64_t slot, PyObject *slot_name, int64_t key,
                      PyObject *reason)
{
    set_field(e, "object", object);
    if (slot >= 0)
        set_field(e, "slot", PyLong_FromLongLong(slot));
    set_field(e, "slot_name", slot_name);
    if (key >= 0)
        set_field(e, "key", PyLong_FromLongLong(key));
    set_field(e, "reason", reason);
}

void fan_exception_note(PyObject *e, PyObject *note)
{
    PyObject *notes = e && note ? PyObject_GetAttrString(e, "__notes__") : NULL, *done = NULL;
    PyErr_Clear(); /* only the exception itself counts, here and below */
    bool has = notes && PySequence_Contains(notes, note) == 1;
    PyErr_Clear();
    if (e && note && !has)
        done = PyObject_CallMethod(e, "add_note", "O", note);
    PyErr_Clear();
    Py_XDECREF(done);
    Py_XDECREF(notes);
    Py_XDECREF(note);
}

/* note_place: adds to the live exception, which another library raised, what it was about. */
static void note_place(const fan_error *err)
{
    PyObject *e = fan_exception_take();
    PyObject *note = e ? text_of(err->text) : NULL;
    PyErr_Clear();
    fan_exception_note(e, note);
    fan_exception_put(e);
}

PyObject *fan_raise(fan_status s, const fan_error *err)
{
    PyObject *context, *e = NULL, *text;
    if (s == FAN_ERR_EXTERN) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_SystemError, "a callback failed and set no exception");
        if (err && err->text[0] && err->object[0])
            note_place(err);
        return NULL;
    }
    context = fan_exception_take();
    text = text_of(err && err->text[0] ? err->text : fan_status_word(s));
    if (text)
        e = PyObject_CallOneArg(class_of(s), text);
    if (e && (s == FAN_ERR_DEVICE || s == FAN_ERR_DEVICE_NOMEM))
        set_field(e, "code", PyLong_FromLong(err ? err->code : 0));
    if (e && err && err->text[0] && err->object[0]) {
        set_place(e, text_of(err->object), err->slot, text_of(err->slot_name), err->key,
                  text_of(err->text + err->reason));
        set_field(e, "expected", text_of(err->expected));
        set_field(e, "got", text_of(err->got));
    }
    if (e)
        PyErr_SetObject((PyObject *)Py_TYPE(e), e);
    chain(context);
    Py_XDECREF(text);
    Py_XDECREF(e);
    return NULL;
}

void fan_exception_replace_place(PyObject *e, PyObject *place, PyObject *reason)
{
    PyObject *args =
        place ? Py_BuildValue("(N)", PyUnicode_FromFormat("%U: %U", place, reason)) : NULL;
    if (!args || PyObject_SetAttrString(e, "args", args) < 0)
        PyErr_Clear();
    Py_XDECREF(args);
}

fan_status fan_from_python(fan_error *err)
{
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_SystemError, "a callback failed and set no exception");
    return fan_fail(err, FAN_ERR_EXTERN, "%s", fan_status_word(FAN_ERR_EXTERN));
}

fan_status fan_check_signals(fan_error *err)
{
    fan_gil gil;
    fan_status status = FAN_OK;
    if (!fan_gil_enter(&gil))
        return FAN_OK;
    if (PyErr_CheckSignals() < 0)
        status = fan_from_python(err);
    fan_gil_leave(&gil);
    return status;
}

const char *fan_type_text(const PyObject *o, char *buf, size_t size)
{
    const char *name = Py_TYPE(o)->tp_name;
    if (o == Py_None)
        return "None";
    PyOS_snprintf(buf, size, "%s %.200s", name[0] && strchr("AEIOaeio", name[0]) ? "an" : "a",
                  name);
    return buf;
}

static _Thread_local fan_error_context *where;

void fan_error_context_push(fan_error_context *w)
{
    w->outer = where;
    where = w;
}

void fan_error_context_pop(fan_error_context *w)
{
    where = w->outer;
}

fan_stream *fan_error_context_stream(void)
{
    return where ? where->stream : NULL;
}

/* prefix: "grads: slot 2 (w1), key 3: "; new reference. */
static PyObject *prefix(void)
{
    const fan_error_context *w = where;
    PyObject *place, *key, *all;
    if (!w || !w->buffer)
        return PyUnicode_FromString("");
    if (w->slot < 0)
        return PyUnicode_FromFormat("%s: ", w->buffer);
    place = w->slot_name
                ? PyUnicode_FromFormat("%s: slot %zd (%U)", w->buffer, w->slot, w->slot_name)
                : PyUnicode_FromFormat("%s: slot %zd", w->buffer, w->slot);
    key = w->key < 0 ? PyUnicode_FromString("")
                     : PyUnicode_FromFormat(", key %lld", (long long)w->key);
    all = place && key ? PyUnicode_FromFormat("%U%U: ", place, key) : NULL;
    Py_XDECREF(place);
    Py_XDECREF(key);
    return all;
}

int fan_refuse(PyObject *type, const char *fmt, ...)
{
    const fan_error_context *w = where;
    PyObject *before = prefix(), *text, *e;
    va_list args;
    va_start(args, fmt);
    text = PyUnicode_FromFormatV(fmt, args);
    va_end(args);
    if (before && text)
        PyErr_Format(type, "%U%U", before, text);
    if (before && text && w && w->buffer && (e = fan_exception_take())) {
        set_place(e, text_of(w->buffer), w->slot, Py_XNewRef(w->slot_name), w->key,
                  Py_NewRef(text));
        fan_exception_put(e);
    }
    Py_XDECREF(before);
    Py_XDECREF(text);
    return -1;
}

int fan_refuse_error(fan_status s, const fan_error *err)
{
    if (s == FAN_ERR_EXTERN || s == FAN_ERR_NOMEM)
        fan_raise(s, err);
    else
        fan_refuse(class_of(s), "%s", err->text);
    return -1;
}

int fan_set_error(PyObject *type, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    PyErr_FormatV(type, fmt, args);
    va_end(args);
    return -1;
}
