/* trace: the ring of base/trace.h as Python has it. _trace makes lines, pictures and files of it. */
#include "py/base/py.h"

#include "base/thread.h"
#include "base/trace.h"
#include "buffer/rules.h"

typedef struct trace_object {
    PyObject_HEAD fan_trace *t; /* owned; never NULL after new */
} trace_object;

static fan_trace *trace_of(PyObject *o) { return ((trace_object *)o)->t; }

static PyObject *trace_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"capacity", NULL};
    Py_ssize_t capacity;
    trace_object *self;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "n:Trace", names, &capacity))
        return NULL;
    if (capacity < 1)
        return PyErr_Format(PyExc_ValueError, "trace: capacity: expected a positive integer, got %zd", capacity);
    self = (trace_object *)type->tp_alloc(type, 0);
    if (self && !(self->t = fan_trace_new((size_t)capacity))) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static void trace_dealloc(PyObject *o)
{
    PyTypeObject *type = Py_TYPE(o);
    fan_trace_free(trace_of(o));
    type->tp_free(o);
    Py_DECREF(type);
}

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

static const char *kind_word(int kind)
{
    static const char *const words[] = {
#define X(NAME, word) word,
        FAN_TRACE_LIST(X)
#undef X
    };
    return words[kind];
}

/* trace_rules: rule bits as a tuple of words: ("S4", "S9"). */
static PyObject *trace_rules(uint64_t rules)
{
    Py_ssize_t i = 0;
    PyObject *made = PyTuple_New(__builtin_popcountll(rules));
    for (int bit = 0; made && bit < FAN_S_RULES + FAN_A_RULES; bit++) {
        PyObject *word;
        if (!(rules >> bit & 1u))
            continue;
        word = bit < FAN_S_RULES ? PyUnicode_FromFormat("S%d", bit + 1)
                                 : PyUnicode_FromFormat("A%d", bit + 1 - FAN_S_RULES);
        if (!word)
            Py_CLEAR(made);
        else
            PyTuple_SET_ITEM(made, i++, word);
    }
    return made;
}

static PyObject *line_of(const fan_trace_line *l)
{
    PyObject *label = PyUnicode_DecodeUTF8(l->label, (Py_ssize_t)strnlen(l->label, FAN_TRACE_LABEL), "replace");
    PyObject *rules = label ? trace_rules(l->rules) : NULL;
    char how[2] = {l->how, '\0'};
    if (!rules) {
        Py_XDECREF(label);
        return NULL;
    }
    return Py_BuildValue("(ssOiiIKLNKKKKKddNKKIKKK)", kind_word(l->kind), how, l->in_place ? Py_True : Py_False,
                         (int)l->device, (int)l->slot, (unsigned int)l->count, (unsigned long long)l->buffer,
                         (long long)l->key, rules, (unsigned long long)l->stream, (unsigned long long)l->other,
                         (unsigned long long)l->event, (unsigned long long)l->bytes, (unsigned long long)l->host_ns,
                         l->start_us, l->end_us, label, (unsigned long long)l->work.pass,
                         (unsigned long long)l->work.node, (unsigned int)l->work.worker, (unsigned long long)l->to,
                         (unsigned long long)l->begin_ns, (unsigned long long)l->thread);
}

static PyObject *trace_lines(PyObject *o, PyObject *Py_UNUSED(none))
{
    fan_trace *t = trace_of(o);
    size_t n = fan_trace_count(t);
    PyObject *made = PyList_New((Py_ssize_t)n);
    for (size_t i = 0; made && i < n; i++) {
        PyObject *line = line_of(fan_trace_at(t, i));
        if (!line)
            Py_CLEAR(made);
        else
            PyList_SET_ITEM(made, (Py_ssize_t)i, line);
    }
    return made;
}

static PyObject *trace_dropped(PyObject *o, void *Py_UNUSED(closure))
{
    return PyLong_FromUnsignedLongLong(fan_trace_dropped(trace_of(o)));
}

static Py_ssize_t trace_length(PyObject *o) { return (Py_ssize_t)fan_trace_count(trace_of(o)); }

static PyMethodDef methods[] = {
    {"begin", trace_begin, METH_NOARGS, "begin($self, /)\n--\n\nRecord what this thread does from now on."},
    {"end", trace_end, METH_NOARGS, "end($self, /)\n--\n\nRecord no more."},
    {"lines", trace_lines, METH_NOARGS, "lines($self, /)\n--\n\nThe lines, oldest first, as tuples."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef getset[] = {
    {"dropped", trace_dropped, NULL, "How many lines were pushed out by newer ones.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Trace(capacity)\n--\n\nThe core of fanin.trace: a ring of lines."},
    {Py_tp_new, trace_new},
    {Py_tp_dealloc, trace_dealloc},
    {Py_mp_length, trace_length},
    {Py_tp_methods, methods},
    {Py_tp_getset, getset},
    {0, NULL},
};

PyType_Spec fan_trace_spec = {
    .name = "fanin._core.Trace",
    .basicsize = sizeof(trace_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};
