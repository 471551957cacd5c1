/* trace: the ring of base/trace.h as a Python object. fanin._trace makes lines, pictures and files
 * of it. */
#include "py/base/args.h"

#include "base/thread.h"
#include "base/trace.h"
#include "buffer/digest.h"

typedef struct trace_object {
    PyObject_HEAD fan_trace *t; /* owned; never NULL after new */
    bool digests;               /* its lines have digests (fan_digests_hold) */
} trace_object;

static fan_trace *trace_of(PyObject *o)
{
    return ((trace_object *)o)->t;
}

static PyObject *trace_new(PyTypeObject *type, PyObject *const *a)
{
    int64_t capacity = 0;
    if (fan_number_arg(a[0], "trace: capacity", &capacity) < 0)
        return NULL;
    if (capacity < 1) {
        return PyErr_Format(PyExc_ValueError,
                            "trace: capacity: expected a positive integer, got %R", a[0]);
    }
    trace_object *self = (trace_object *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->t = fan_trace_new((size_t)capacity);
    if (!self->t) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    self->digests = a[1] == Py_True;
    if (self->digests) {
        fan_trace_want_digests(self->t);
        fan_digests_hold();
    }
    return (PyObject *)self;
}

static void trace_free(PyObject *o)
{
    fan_trace_free(trace_of(o));
    if (((const trace_object *)o)->digests)
        fan_digests_drop();
}

FAN_DEALLOC(trace_dealloc, trace_free(o))

static PyObject *trace_begin(PyObject *o, PyObject *Py_UNUSED(none))
{
    fan_trace_begin(trace_of(o));
    Py_RETURN_NONE;
}

static PyObject *trace_end(PyObject *o, PyObject *Py_UNUSED(none))
{
    fan_trace_end(trace_of(o));
    Py_RETURN_NONE;
}

static PyObject *line_of(const fan_trace_line *l)
{
    static const char *const words[] = {
#define X(NAME, word) word,
        FAN_TRACE_LIST(X)
#undef X
    };
    PyObject *label =
        PyUnicode_DecodeUTF8(l->label, (Py_ssize_t)strnlen(l->label, FAN_TRACE_LABEL), "replace");
    char how[2] = {l->how, '\0'};
    uint64_t digest = l->digest;
    if (!label)
        return NULL;
    if (l->kind == FAN_TRACE_DIGEST && !digest && l->event)
        digest = fan_digest_later(l->event);
    return Py_BuildValue(
        "(ssOiiIKLKKKKKKddNKLIKKKK)", words[l->kind], how, l->in_place ? Py_True : Py_False,
        (int)l->device, (int)l->slot, (unsigned int)l->count, (unsigned long long)l->buffer,
        (long long)l->key, (unsigned long long)l->rules, (unsigned long long)l->stream,
        (unsigned long long)l->other, (unsigned long long)l->event, (unsigned long long)l->bytes,
        (unsigned long long)l->host_ns, l->start_us, l->end_us, label,
        (unsigned long long)l->work.pass, (long long)l->work.node, (unsigned int)l->work.worker,
        (unsigned long long)l->to, (unsigned long long)l->begin_ns, (unsigned long long)l->thread,
        (unsigned long long)digest);
}

/* trace_read: reports a read to the search of host orders. Any call of the recorded thread, which
 * counts itself in its footprint, may add lines. */
static const fan_trace *trace_read(PyObject *o)
{
    fan_sched_access(FAN_THING_COUNTERS, 0, FAN_SCHED_DECIDE);
    return trace_of(o);
}

static PyObject *trace_lines(PyObject *o, PyObject *Py_UNUSED(none))
{
    const fan_trace *t = trace_read(o);
    size_t n = fan_trace_count(t);
    PyObject *made = PyList_New(0);
    for (size_t i = 0; made && i < n; i++)
        fan_list_add(&made, line_of(fan_trace_at(t, i)));
    return made;
}

static PyObject *trace_get_dropped(PyObject *o, void *Py_UNUSED(closure))
{
    return PyLong_FromUnsignedLongLong(fan_trace_dropped(trace_read(o)));
}

static Py_ssize_t trace_length(PyObject *o)
{
    if (fan_sched_active() && fan_sched_enter_or_raise() < 0)
        return -1;
    size_t n = fan_trace_count(trace_read(o));
    fan_sched_leave();
    return (Py_ssize_t)n;
}

static PyObject *trace_settle(PyObject *Py_UNUSED(o), PyObject *Py_UNUSED(none))
{
    void *left = fan_allow_threads_begin();
    fan_digests_settle();
    fan_allow_threads_end(left);
    Py_RETURN_NONE;
}

#include "py/declared/Trace.h"

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)trace_doc},
    {Py_tp_new, trace_new_door},
    {Py_tp_dealloc, trace_dealloc},
    {Py_mp_length, trace_length},
    {Py_tp_methods, trace_methods},
    {Py_tp_getset, trace_getset},
    {0, NULL},
};

PyType_Spec fan_trace_spec = {
    .name = "fanin._core.Trace",
    .basicsize = sizeof(trace_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};
