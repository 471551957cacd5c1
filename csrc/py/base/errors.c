/* errors: the core's error box and Python's exceptions, each turned into the other.
 *
 * In order: the live exception of a thread; the exception about a place (base/status.h writes the
 * place, a producer's text may replace it); fan_raise, from a status to an exception; the other
 * way; the context of a call (buffer, slot, key), of which fan_refuse makes a place. */
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
                                         [FAN_ERR_ZERO_DIVISION] = &PyExc_ZeroDivisionError,
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

/* text_of: a str of a message, which may carry names of the user's, cut anywhere. */
static PyObject *text_of(const char *text)
{
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

/* set_text: as set_field; NULL, "": none. */
static void set_text(PyObject *e, const char *name, const char *text)
{
    if (text && text[0])
        set_field(e, name, text_of(text));
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
    if (!has)
        Py_XSETREF(notes, PyObject_CallMethod(e, "add_note", "O", note));
    PyErr_Clear();
    Py_XDECREF(notes);
    Py_DECREF(note);
}

/* note_place: adds to the live exception, which another library raised, what it was about. */
static void note_place(const fan_error *err)
{
    PyObject *e = fan_exception_take();
    fan_exception_note(e, text_of(err->text));
    fan_exception_put(e);
}

/* The innermost places of this thread, and the innermost producer. */
static _Thread_local fan_error_context *where;
static _Thread_local const fan_error_producer *producers;

/* producer_of: the innermost producer of a gradient for this place; NULL: none. */
static const fan_error_producer *producer_of(const fan_place *at)
{
    const fan_error_producer *p = producers;
    while (p && (at->slot < 0 || strcmp(p->buffer, at->object) != 0))
        p = p->outer;
    return p;
}

/* error_at: an exception with the fields of its place (object NULL: none): the message is `before`
 * (FAN_ERROR_TEXT bytes, overwritten), or its producer's text, and then `reason`, which is taken
 * (NULL: after an error). New reference; NULL: another exception is live. */
static PyObject *error_at(PyObject *class, const fan_place *at, char *before, PyObject *reason)
{
    const fan_error_producer *producer = producer_of(at);
    if (producer) {
        producer->text(producer->source, before, FAN_ERROR_TEXT);
        fan_append(before, FAN_ERROR_TEXT, ": ");
    }
    PyObject *text = NULL;
    PyObject *e = NULL;
    if (reason)
        text = PyUnicode_FromFormat("%s%U", before, reason);
    if (text)
        e = PyObject_CallOneArg(class, text);
    if (e && at->object) {
        set_text(e, "object", at->object);
        if (at->slot >= 0)
            set_field(e, "slot", PyLong_FromLongLong(at->slot));
        set_text(e, "slot_name", at->slot_name);
        if (at->key >= 0)
            set_field(e, "key", PyLong_FromLongLong(at->key));
        set_field(e, "reason", Py_NewRef(reason));
    }
    Py_XDECREF(text);
    Py_XDECREF(reason);
    return e;
}

/* error_object: an exception of a status; new reference; NULL: another one is live. */
static PyObject *error_object(fan_status s, const fan_error *err)
{
    FAN_UNINITIALIZED char before[FAN_ERROR_TEXT];
    fan_place at = {.slot = -1};
    const char *message = fan_status_word(s);
    before[0] = '\0';
    bool has_text = err && err->text[0];
    if (has_text)
        message = err->text;
    if (has_text && err->object[0]) {
        at = (fan_place){err->object, err->slot, err->slot_name, err->key};
        PyOS_snprintf(before, sizeof before, "%.*s", (int)err->reason, message);
        message += err->reason;
    }
    PyObject *e = error_at(class_of(s), &at, before, text_of(message));
    if (!e)
        return NULL;
    if (s == FAN_ERR_DEVICE || s == FAN_ERR_DEVICE_NOMEM)
        set_field(e, "code", PyLong_FromLong(err ? err->code : 0));
    if (at.object) {
        set_text(e, "expected", err->expected);
        set_text(e, "got", err->got);
    }
    return e;
}

PyObject *fan_raise(fan_status s, const fan_error *err)
{
    if (s == FAN_ERR_EXTERN) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_SystemError, "a callback failed and set no exception");
        if (err && err->text[0] && err->object[0])
            note_place(err);
        return NULL;
    }
    PyObject *context = fan_exception_take();
    PyObject *e = error_object(s, err);
    if (e)
        PyErr_SetObject((PyObject *)Py_TYPE(e), e);
    chain(context);
    Py_XDECREF(e);
    return NULL;
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
    const char *article = "a";
    if (name[0] && strchr("AEIOaeio", name[0]))
        article = "an";
    PyOS_snprintf(buf, size, "%s %.200s", article, name);
    return buf;
}

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
    if (!where)
        return NULL;
    return where->stream;
}

void fan_error_producer_push(fan_error_producer *p)
{
    p->outer = producers;
    producers = p;
}

void fan_error_producer_pop(const fan_error_producer *p)
{
    producers = p->outer;
}

int fan_refuse(PyObject *type, const char *fmt, ...)
{
    FAN_UNINITIALIZED char before[FAN_ERROR_TEXT];
    fan_place at = {.slot = -1};
    va_list args;
    va_start(args, fmt);
    PyObject *reason = PyUnicode_FromFormatV(fmt, args);
    va_end(args);
    before[0] = '\0';
    if (where && where->buffer) {
        at = (fan_place){
            .object = where->buffer,
            .slot = where->slot,
            .key = where->key,
        };
        if (where->slot_name)
            at.slot_name = PyUnicode_AsUTF8(where->slot_name);
        fan_place_append(&at, before, sizeof before);
    }
    if (reason)
        PyErr_Clear();
    PyObject *e = error_at(type, &at, before, reason);
    if (e)
        PyErr_SetObject((PyObject *)Py_TYPE(e), e);
    Py_XDECREF(e);
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
