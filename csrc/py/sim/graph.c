/* machine_graph: fanin._core.Graph, a captured graph of a simulated machine. */
#include "py/sim/machine_object.h"
#include "py/base/handles.h"

typedef struct graph_object {
    PyObject_HEAD fan_sim_graph *g; /* held */
    PyObject *machine;              /* held */
} graph_object;

static void graph_dealloc(PyObject *o)
{
    graph_object *self = (graph_object *)o;
    PyTypeObject *type = Py_TYPE(o);
    PyObject_GC_UnTrack(o);
    Py_BEGIN_ALLOW_THREADS
        fan_sim_graph_drop(self->g);
    Py_END_ALLOW_THREADS
    Py_XDECREF(self->machine);
    type->tp_free(o);
    Py_DECREF(type);
}

static int graph_traverse(PyObject *o, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(o));
    Py_VISIT(((graph_object *)o)->machine);
    return 0;
}

static int graph_clear(PyObject *o)
{
    Py_CLEAR(((graph_object *)o)->machine);
    return 0;
}

static PyObject *graph_repr(PyObject *o)
{
    PyObject *machine = ((graph_object *)o)->machine;
    return machine ? PyUnicode_FromFormat("<fanin.sim graph of %R>", machine)
                   : PyUnicode_FromString("<fanin.sim graph>");
}

static PyType_Slot graph_slots[] = {
    {Py_tp_doc, "A captured graph of a simulated machine: Machine.launch_graph queues it."},
    {Py_tp_dealloc, graph_dealloc},
    {Py_tp_traverse, graph_traverse},
    {Py_tp_clear, graph_clear},
    {Py_tp_repr, graph_repr},
    {0, NULL},
};

PyType_Spec fan_graph_spec = {
    .name = "fanin._core.Graph",
    .basicsize = sizeof(graph_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = graph_slots,
};

/* stream_here: a stream of this machine; a hold, or NULL with an exception. */
static fan_stream *stream_here(machine_object *self, PyObject *o)
{
    fan_stream *s = NULL;
    if (fan_stream_arg(o, &s) < 0)
        return NULL;
    if (s && fan_sim_of(s->device) == self->m)
        return s;
    fan_stream_drop(s);
    PyErr_SetString(PyExc_ValueError, "expected a stream of this machine");
    return NULL;
}

PyObject *fan_machine_begin_capture(PyObject *o, PyObject *args)
{
    PyObject *where;
    int mode;
    fan_error err = {0};
    fan_stream *s;
    if (!PyArg_ParseTuple(args, "Oi:_begin_capture", &where, &mode) || !(s = stream_here(fan_machine_self(o), where)))
        return NULL;
    fan_status status = fan_sim_capture_begin(fan_machine_self(o)->m, s, mode, &err);
    fan_stream_drop(s);
    return fan_sim_done(status, &err);
}

PyObject *fan_machine_end_capture(PyObject *o, PyObject *where)
{
    fan_error err = {0};
    fan_sim_graph *g = NULL;
    fan_stream *s = stream_here(fan_machine_self(o), where);
    if (!s)
        return NULL;
    fan_status status = fan_sim_capture_end(fan_machine_self(o)->m, s, &g, &err);
    fan_stream_drop(s);
    if (status != FAN_OK)
        return fan_raise_sim(status, &err);
    PyTypeObject *type = fan_state_get()->graph_type;
    graph_object *made = (graph_object *)type->tp_alloc(type, 0);
    if (!made) {
        fan_sim_graph_drop(g);
        return NULL;
    }
    made->g = g;
    made->machine = Py_NewRef(o);
    return (PyObject *)made;
}

PyObject *fan_machine_launch_graph(PyObject *o, PyObject *args)
{
    PyObject *graph, *where;
    fan_error err = {0};
    fan_sim_graph *g;
    fan_stream *s;
    fan_status status;
    if (!PyArg_ParseTuple(args, "OO:_launch_graph", &graph, &where))
        return NULL;
    if (Py_TYPE(graph) != fan_state_get()->graph_type)
        return PyErr_Format(PyExc_TypeError, "launch_graph: expected a graph, as end_capture gives it, not %.80s",
                            Py_TYPE(graph)->tp_name);
    if (((graph_object *)graph)->machine != o)
        return PyErr_Format(PyExc_ValueError, "launch_graph: %R is of another machine", graph);
    g = ((graph_object *)graph)->g;
    if (!(s = stream_here(fan_machine_self(o), where)))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
        status = fan_sim_graph_launch(g, s, &err);
    Py_END_ALLOW_THREADS
    fan_stream_drop(s);
    return fan_sim_done(status, &err);
}
