/* pipeline: the call of a pipeline of a graph tree (fanin.graph.pipelines, whose class is
 * derived from this one): pieces, which are functions of the tree, and host parts between them.
 *
 * Sections: what passes between parts; the two forms, a list and a generator function; the call,
 * which is a step, or a part of one; and the type. In C, because a replay takes microseconds. What
 * is rare (messages, results in containers, uploads) are methods in Python. */
#include "py/graph/tree_object.h"
#include "py/arrays/arrays.h"
#include "py/base/args.h"
#include "py/base/handles.h"

typedef struct graph_pipeline {
    PyObject_HEAD vectorcallfunc call;
    fan_graph_tree_object *tree; /* held */
    PyObject *body;              /* a generator function; NULL: `parts` */
    PyObject *parts;             /* a tuple of pieces and host parts in turn */
    PyObject *stop;              /* the class of what a host part returns to end the step early */
    PyObject *numpy;             /* the name */
    /* of the last call: functions of the tree, each followed by its outcome unless it failed */
    PyObject *calls;
    uint64_t thread; /* that calls it; 0: none */
    PyObject *weakrefs;
} graph_pipeline;

static graph_pipeline *pipeline_self(PyObject *o)
{
    return (graph_pipeline *)o;
}

static bool is_output(const PyObject *o)
{
    return Py_TYPE(o) == fan_state_get()->array_type;
}

/* ---- between parts ---- */

/* is_given: whether what a host part returned is an operand as it is. */
static bool is_given(const graph_pipeline *self, PyObject *o)
{
    if (PyArray_IsScalar(o, Inexact))
        return false;
    return !PyArray_Check(o) || !self->tree->d->backend->has_streams;
}

/* given_to_piece: what a host part returned, as operands; takes `out`. */
static PyObject *given_to_piece(graph_pipeline *self, PyObject *out)
{
    bool ready = true;
    if (PyTuple_CheckExact(out) || PyList_CheckExact(out)) {
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(out); i++)
            ready &= is_given(self, PySequence_Fast_GET_ITEM(out, i));
    } else {
        ready = is_given(self, out);
    }
    if (ready)
        return out;
    PyObject *made = PyObject_CallMethod((PyObject *)self, "_given", "(O)", out);
    Py_DECREF(out);
    return made;
}

/* call_part: calls a part with what the one before returned. */
static PyObject *call_part(PyObject *part, PyObject *out)
{
    if (out == Py_None)
        return PyObject_CallNoArgs(part);
    if (PyTuple_CheckExact(out))
        return PyObject_CallObject(part, out);
    if (!PyList_CheckExact(out))
        return PyObject_CallOneArg(part, out);
    PyObject *all = PyList_AsTuple(out); /* the part may change the list */
    PyObject *result = NULL;
    if (all)
        result = PyObject_CallObject(part, all);
    Py_XDECREF(all);
    return result;
}

/* ---- the two forms ---- */

static PyObject *run_parts(graph_pipeline *self, PyObject *const *args, size_t n, PyObject *names)
{
    Py_ssize_t count = PyTuple_GET_SIZE(self->parts);
    PyObject *out = PyObject_Vectorcall(PyTuple_GET_ITEM(self->parts, 0), args, n, names);
    for (Py_ssize_t i = 1; out && i < count; i++) {
        bool is_piece = i % 2 == 0;
        if (is_piece)
            out = given_to_piece(self, out);
        if (!out)
            break;
        PyObject *next = call_part(PyTuple_GET_ITEM(self->parts, i), out);
        Py_SETREF(out, next); /* what the next part does not get lives no longer */
        if (out && (PyObject *)Py_TYPE(out) == self->stop) {
            Py_SETREF(out, PyObject_GetAttrString(out, "result"));
            break;
        }
    }
    return out;
}

/* values_of: the values of what a generator yielded, read on the host. */
static PyObject *values_of(graph_pipeline *self, PyObject *wanted)
{
    if (!is_output(wanted))
        return PyObject_CallMethod((PyObject *)self, "_values", "(O)", wanted);
    PyObject *values = PyObject_CallMethodNoArgs(wanted, self->numpy);
    if (values) /* what is written into them would reach no piece */
        PyArray_CLEARFLAGS((PyArrayObject *)values, NPY_ARRAY_WRITEABLE);
    return values;
}

/* throw_at: raises the live exception at the yield of a generator; as PyIter_Send. */
static PySendResult throw_at(PyObject *generator, PyObject **result)
{
    PyObject *raised = fan_exception_take();
    *result = PyObject_CallMethod(generator, "throw", "(O)", raised);
    Py_XDECREF(raised);
    if (*result)
        return PYGEN_NEXT;
    if (!PyErr_ExceptionMatches(PyExc_StopIteration))
        return PYGEN_ERROR;
    PyObject *stop = fan_exception_take();
    *result = PyObject_GetAttrString(stop, "value");
    Py_DECREF(stop);
    return *result ? PYGEN_RETURN : PYGEN_ERROR;
}

static PyObject *run_body(graph_pipeline *self, PyObject *const *args, size_t n, PyObject *names)
{
    PyObject *generator = PyObject_Vectorcall(self->body, args, n, names);
    if (!generator)
        return NULL;
    PyObject *result = NULL;
    PySendResult sent = PyIter_Send(generator, Py_None, &result);
    while (sent == PYGEN_NEXT) {
        PyObject *values = values_of(self, result);
        Py_CLEAR(result); /* else the outputs would live on in the next piece */
        if (values)
            sent = PyIter_Send(generator, values, &result);
        else
            sent = throw_at(generator, &result);
        Py_XDECREF(values);
    }
    Py_DECREF(generator);
    return result;
}

/* ---- the call ---- */

/* kept: results of a step of its own: outputs are copied; takes `result`. */
static PyObject *kept(graph_pipeline *self, PyObject *result)
{
    if (result == Py_None)
        return result;
    PyObject *made;
    if (is_output(result))
        made = fan_graph_copied(self->tree, result);
    else
        made = PyObject_CallMethod((PyObject *)self, "_kept", "(O)", result);
    Py_DECREF(result);
    return made;
}

/* note_place: the live exception gets a note that names where the call failed. */
static void note_place(graph_pipeline *self, bool begun, bool own)
{
    PyObject *raised = fan_exception_take();
    PyObject *done = PyObject_CallMethod((PyObject *)self, "_note", "(Oii)", raised, begun, own);
    if (!done)
        PyErr_Clear(); /* the exception itself counts */
    Py_XDECREF(done);
    fan_exception_put(raised);
}

static int begin_now(graph_pipeline *self, PyObject *calls, fan_graph_run *run)
{
    if (self->thread) {
        PyObject *refused = PyObject_CallMethod((PyObject *)self, "_refuse", "(i)",
                                                self->thread == fan_thread_id());
        Py_XDECREF(refused);
        return -1;
    }
    if (fan_graph_run_begin(self->tree, calls, run) < 0) {
        note_place(self, false, false);
        return -1;
    }
    self->thread = fan_thread_id();
    return 0;
}

/* begin: the step begins, as a step of an explored schedule: 0, or -1 with an exception. */
static int begin(graph_pipeline *self, PyObject *calls, fan_graph_run *run)
{
    if (!fan_sched_active())
        return begin_now(self, calls, run);
    if (fan_step_begin_one((PyObject *)self->tree, NULL) < 0)
        return -1;
    fan_sched_access(FAN_THING_GRAPH, 0, FAN_SCHED_WRITE);
    int failed = begin_now(self, calls, run);
    fan_sched_leave();
    return failed;
}

/* end: -1 with the exception of an output that could not be copied; a live exception stays. */
static int end(graph_pipeline *self, const fan_graph_run *run)
{
    bool scheduled = fan_sched_active();
    if (scheduled && fan_step_begin_one((PyObject *)self->tree, NULL) < 0)
        scheduled = false; /* the machine ends: the step, too */
    self->thread = 0;
    int failed = fan_graph_run_end(self->tree, run);
    if (scheduled)
        fan_sched_leave();
    return failed;
}

/* changed: reports to the Python part that the last call had other pieces than the one before: 0,
 * or -1 with an exception. */
static int changed(graph_pipeline *self, PyObject *before)
{
    int same = PyObject_RichCompareBool(self->calls, before, Py_EQ);
    if (same)
        return same < 0 ? -1 : 0;
    PyObject *done = PyObject_CallMethod((PyObject *)self, "_changed", NULL);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static PyObject *pipeline_call(PyObject *o, PyObject *const *args, size_t nargsf, PyObject *names)
{
    graph_pipeline *self = pipeline_self(o);
    size_t n = (size_t)PyVectorcall_NARGS(nargsf);
    fan_graph_run run;
    if (!self->calls)
        return PyErr_Format(PyExc_RuntimeError, "a pipeline is called that was freed");
    PyObject *calls = PyList_New(0);
    if (!calls)
        return NULL;
    if (begin(self, calls, &run) < 0) {
        Py_DECREF(calls);
        return NULL;
    }
    Py_INCREF(o);
    PyObject *before = self->calls;
    self->calls = calls;
    PyObject *result;
    if (self->body)
        result = run_body(self, args, n, names);
    else
        result = run_parts(self, args, n, names);
    if (result && run.own)
        result = kept(self, result);
    if (!result)
        note_place(self, true, run.own);
    if (end(self, &run) < 0)
        Py_CLEAR(result);
    if (result && changed(self, before) < 0)
        Py_CLEAR(result);
    Py_DECREF(before);
    Py_DECREF(o);
    return result;
}

/* ---- the type ---- */

static int pipeline_traverse(PyObject *o, visitproc visit, void *arg)
{
    graph_pipeline *self = pipeline_self(o);
    Py_VISIT(Py_TYPE(o));
    Py_VISIT(self->tree);
    Py_VISIT(self->body);
    Py_VISIT(self->parts);
    Py_VISIT(self->stop);
    Py_VISIT(self->calls);
    return 0;
}

static int pipeline_clear(PyObject *o)
{
    graph_pipeline *self = pipeline_self(o);
    Py_CLEAR(self->body);
    Py_CLEAR(self->parts);
    Py_CLEAR(self->stop);
    Py_CLEAR(self->calls);
    return 0;
}

static void pipeline_dealloc(PyObject *o)
{
    graph_pipeline *self = pipeline_self(o);
    PyTypeObject *type = Py_TYPE(o);
    PyObject_GC_UnTrack(o);
    if (self->weakrefs)
        PyObject_ClearWeakRefs(o);
    (void)pipeline_clear(o);
    Py_CLEAR(self->numpy);
    Py_CLEAR(self->tree);
    type->tp_free(o);
    Py_DECREF(type);
}

static PyObject *pipeline_new(PyTypeObject *type, PyObject *const *a)
{
    enum {
        TREE,
        BODY,
        PARTS,
        STOP
    };
    if (Py_TYPE(a[TREE]) != fan_state_get()->graph_tree_type) {
        return PyErr_Format(PyExc_TypeError, "a pipeline needs a GraphTree, not a %.80s",
                            Py_TYPE(a[TREE])->tp_name);
    }
    bool has_parts = PyTuple_Check(a[PARTS]) && PyTuple_GET_SIZE(a[PARTS]) > 0;
    if (a[BODY] == Py_None && !has_parts)
        return PyErr_Format(PyExc_TypeError, "a pipeline needs a generator function, or parts");
    graph_pipeline *self = (graph_pipeline *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->call = pipeline_call;
    self->tree = (fan_graph_tree_object *)Py_NewRef(a[TREE]);
    if (a[BODY] != Py_None)
        self->body = Py_NewRef(a[BODY]);
    self->parts = Py_NewRef(a[PARTS]);
    self->stop = Py_NewRef(a[STOP]);
    self->calls = PyList_New(0);
    self->numpy = PyUnicode_InternFromString("numpy");
    if (!self->calls || !self->numpy)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static PyObject *pipeline_get_calls(PyObject *o, void *Py_UNUSED(closure))
{
    PyObject *calls = pipeline_self(o)->calls;
    return PyList_GetSlice(calls, 0, PyList_GET_SIZE(calls)); /* a copy: a call may be running */
}

static PyObject *pipeline_get_tree(PyObject *o, void *Py_UNUSED(closure))
{
    return Py_NewRef((PyObject *)pipeline_self(o)->tree);
}

#include "py/declared/CorePipeline.h"

static PyMemberDef pipeline_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(graph_pipeline, call), READONLY, NULL},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(graph_pipeline, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot pipeline_slots[] = {
    {Py_tp_doc, (void *)pipeline_doc},
    {Py_tp_new, pipeline_new_door},
    {Py_tp_dealloc, pipeline_dealloc},
    {Py_tp_traverse, pipeline_traverse},
    {Py_tp_clear, pipeline_clear},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_getset, pipeline_getset},
    {Py_tp_members, pipeline_members},
    {0, NULL},
};

PyType_Spec fan_graph_pipeline_spec = {
    .name = "fanin._core.CorePipeline",
    .basicsize = sizeof(graph_pipeline),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE |
             Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_HAVE_VECTORCALL,
    .slots = pipeline_slots,
};
