/* errors: the core's error box and Python's exceptions, each turned into the other.
 *
 * In order: the live exception of a thread; fan_raise, from a status to an exception; the other
 * way; the context of a call (buffer, slot, key), which fan_refuse puts before a message. */
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
    if (!PyErr_ExceptionMatches(end))
        return;
    PyObject *cause = fan_exception_take();
    PyErr_Format(PyExc_RuntimeError, "%s: a callback raised %s, which does not end the iteration",
                 iteration, Py_TYPE(cause)->tp_name);
    PyObject *replacement = fan_exception_take();
    PyException_SetCause(replacement, Py_NewRef(cause));
    PyException_SetContext(replacement, cause);
    fan_exception_put(replacement);
}

/* class_of_fanin: the class of fanin for a status; borrowed; NULL: it has none, or the core is
 * without fanin.sim. */
static PyObject *class_of_fanin(fan_status s)
{
    fan_state *state = fan_state_get();
    if (!state)
        return NULL;
    switch (s) {
    case FAN_ERR_RACE:
        return state->race_error;
    case FAN_ERR_DEVICE:
        return state->device_error;
    case FAN_ERR_DEVICE_NOMEM:
        return state->device_oom_error;
    case FAN_ERR_CAPTURE:
        return state->capture_error;
    case FAN_ERR_DEADLOCK:
        return fan_lazy(&state->deadlock_error, "fanin.sim.machine", "DeadlockError");
    default:
        return NULL;
    }
}

/* class_of: the class of the exception for a status; borrowed. */
static PyObject *class_of(fan_status s)
{
    static PyObject **const builtin[] = {[FAN_ERR_INDEX] = &PyExc_IndexError,
                                         [FAN_ERR_TYPE] = &PyExc_TypeError,
                                         [FAN_ERR_VALUE] = &PyExc_ValueError,
                                         [FAN_ERR_OVERFLOW] = &PyExc_OverflowError,
                                         [FAN_ERR_BUFFER] = &PyExc_BufferError,
                                         [FAN_ERR_NOMEM] = &PyExc_MemoryError,
                                         [FAN_ERR_EXTERN] = NULL};
    if (builtin[s])
        return *builtin[s];
    PyObject *c = class_of_fanin(s);
    if (c)
        return c;
    PyErr_Clear();
    return PyExc_RuntimeError;
}

/* chain: makes `context` (taken) the __context__ of the live exception. */
static void chain(PyObject *context)
{
    if (!context)
        return;
    PyObject *e = fan_exception_take();
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

/* set_field: sets an attribute of an exception; takes `value`; NULL: none. A field that cannot be
 * set is left out. */
static void set_field(PyObject *e, const char *name, PyObject *value)
{
    if (!value || PyObject_SetAttrString(e, name, value) < 0)
        PyErr_Clear();
    Py_XDECREF(value);
}

/* text_of: a str of a message, which may carry names of the user's, cut anywhere. NULL of "". */
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
    if (!e || !note) {
        PyErr_Clear();
        Py_XDECREF(note);
        return;
    }
    PyObject *notes = PyObject_GetAttrString(e, "__notes__");
    PyErr_Clear(); /* only the exception itself counts, here and below */
    bool has = notes && PySequence_Contains(notes, note) == 1;
    PyErr_Clear();
    PyObject *done = has ? NULL : PyObject_CallMethod(e, "add_note", "O", note);
    PyErr_Clear();
    Py_XDECREF(done);
    Py_XDECREF(notes);
    Py_DECREF(note);
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

/* error_object: an exception of a status; new reference; NULL: another one is live. `has_text`: err
 * has a message. */
static PyObject *error_object(fan_status s, const fan_error *err, bool has_text)
{
    PyObject *text = text_of(has_text ? err->text : fan_status_word(s));
    if (!text)
        return NULL;
    PyObject *e = PyObject_CallOneArg(class_of(s), text);
    Py_DECREF(text);
    if (!e)
        return NULL;
    if (s == FAN_ERR_DEVICE || s == FAN_ERR_DEVICE_NOMEM)
        set_field(e, "code", PyLong_FromLong(err ? err->code : 0));
    if (has_text && err->object[0]) {
        set_place(e, text_of(err->object), err->slot, text_of(err->slot_name), err->key,
                  text_of(err->text + err->reason));
        set_field(e, "expected", text_of(err->expected));
        set_field(e, "got", text_of(err->got));
    }
    return e;
}

PyObject *fan_raise(fan_status s, const fan_error *err)
{
    bool has_text = err && err->text[0];
    if (s == FAN_ERR_EXTERN) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_SystemError, "a callback failed and set no exception");
        if (has_text && err->object[0])
            note_place(err);
        return NULL;
    }
    PyObject *context = fan_exception_take();
    PyObject *e = error_object(s, err, has_text);
    if (e)
        PyErr_SetObject((PyObject *)Py_TYPE(e), e);
    chain(context);
    Py_XDECREF(e);
    return NULL;
}

void fan_exception_replace_place(PyObject *e, PyObject *place, PyObject *reason)
{
    PyObject *args = NULL;
    if (place)
        args = Py_BuildValue("(N)", PyUnicode_FromFormat("%U: %U", place, reason));
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
    bool vowel = name[0] && strchr("AEIOaeio", name[0]);
    PyOS_snprintf(buf, size, "%s %.200s", vowel ? "an" : "a", name);
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

/* prefix: the place of the call, as "grads: slot 2 (w1), key 3: "; new reference. */
static PyObject *prefix(void)
{
    const fan_error_context *w = where;
    PyObject *place;
    if (!w || !w->buffer)
        return PyUnicode_FromString("");
    if (w->slot < 0)
        return PyUnicode_FromFormat("%s: ", w->buffer);
    if (w->slot_name)
        place = PyUnicode_FromFormat("%s: slot %zd (%U)", w->buffer, w->slot, w->slot_name);
    else
        place = PyUnicode_FromFormat("%s: slot %zd", w->buffer, w->slot);
    if (!place)
        return NULL;
    PyObject *all;
    if (w->key >= 0)
        all = PyUnicode_FromFormat("%U, key %lld: ", place, (long long)w->key);
    else
        all = PyUnicode_FromFormat("%U: ", place);
    Py_DECREF(place);
    return all;
}

int fan_refuse(PyObject *type, const char *fmt, ...)
{
    const fan_error_context *w = where;
    PyObject *before = prefix();
    va_list args;
    va_start(args, fmt);
    PyObject *text = PyUnicode_FromFormatV(fmt, args);
    va_end(args);
    if (!before || !text)
        goto done;
    PyErr_Format(type, "%U%U", before, text);
    if (!w || !w->buffer)
        goto done;
    PyObject *e = fan_exception_take();
    if (e) {
        PyObject *slot_name = Py_XNewRef(w->slot_name);
        set_place(e, text_of(w->buffer), w->slot, slot_name, w->key, Py_NewRef(text));
        fan_exception_put(e);
    }
done:
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
