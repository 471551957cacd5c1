/* graph_tree: fanin.GraphTree, and its steps. */
#include "py/graph_part.h"
#include "py/turn.h"

#include "base/mem.h"

#include <string.h>

static fan_graph_tree_object *tree_self(PyObject *o) { return (fan_graph_tree_object *)o; }

static PyObject *tree_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"device", "memory", "limit", "strict", "verify", NULL};
    PyObject *where;
    long long memory = (long long)64 << 20, limit = 8, verify = 0;
    int strict = 0;
    fan_device *d = NULL;
    fan_error err = {0};
    fan_status status;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$LLpL:GraphTree", names, &where, &memory, &limit, &strict,
                                     &verify))
        return NULL;
    if (verify < 0 || verify > INT_MAX)
        return PyErr_Format(PyExc_ValueError,
                            "GraphTree: verify: expected a number of replays from 0 to 2**31 - 1, got %lld", verify);
    if (memory < 256 || limit < 1 || limit > 1 << 20)
        return PyErr_Format(PyExc_ValueError, "GraphTree: %s",
                            memory < 256 ? "memory is a number of bytes, at least 256"
                                         : "limit is how often a function is recorded anew, 1 to 2**20");
    if (fan_device_arg(where, &d) < 0)
        return NULL;
    if (!d)
        return PyErr_Format(PyExc_TypeError, "GraphTree: expected a device, as in \"sim:0\", not None");
    fan_graph_tree_object *self = (fan_graph_tree_object *)type->tp_alloc(type, 0);
    if (!self) {
        fan_device_drop(d);
        return NULL;
    }
    self->d = d;
    self->verify = (unsigned)verify;
    fan_tree_options options = {
        .memory = (uint64_t)memory, .limit = (unsigned)limit, .strict = strict, .verify = (unsigned)verify};
    Py_BEGIN_ALLOW_THREADS
        status = fan_tree_new(d, &options, &self->t, &err);
    Py_END_ALLOW_THREADS
    if (status != FAN_OK) {
        fan_raise(status, &err);
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static void tree_dealloc(PyObject *o)
{
    PyTypeObject *type = Py_TYPE(o);
    if (tree_self(o)->weakrefs)
        PyObject_ClearWeakRefs(o);
    Py_BEGIN_ALLOW_THREADS
        fan_tree_drop(tree_self(o)->t);
        fan_device_drop(tree_self(o)->d);
    Py_END_ALLOW_THREADS
    type->tp_free(o);
    Py_DECREF(type);
}

/* ---- steps ---- */

typedef struct graph_step {
    PyObject_HEAD PyObject *tree; /* held */
    unsigned entered;
    uint64_t thread; /* that entered it */
} graph_step;

static void step_dealloc(PyObject *o)
{
    PyTypeObject *type = Py_TYPE(o);
    graph_step *self = (graph_step *)o;
    for (; self->entered > 0; self->entered--) { /* ends it here */
        Py_BEGIN_ALLOW_THREADS
            fan_tree_step_end(tree_self(self->tree)->t, "the line that dropped it");
        Py_END_ALLOW_THREADS
    }
    Py_XDECREF(self->tree);
    type->tp_free(o);
    Py_DECREF(type);
}

static PyObject *step_enter(PyObject *o, PyObject *Py_UNUSED(none))
{
    graph_step *self = (graph_step *)o;
    fan_error err = {0};
    fan_status status;
    if (self->entered && self->thread != fan_thread_id())
        return PyErr_Format(PyExc_RuntimeError,
                            "the step was begun on another thread: use `with tree.step():` on each");
    Py_BEGIN_ALLOW_THREADS
        status = fan_tree_step_begin(tree_self(self->tree)->t, &err);
    Py_END_ALLOW_THREADS
    if (status != FAN_OK)
        return fan_raise(status, &err);
    self->entered++;
    self->thread = fan_thread_id();
    return Py_NewRef(o);
}

static PyObject *step_exit(PyObject *o, PyObject *Py_UNUSED(args))
{
    graph_step *self = (graph_step *)o;
    char call_site[96];
    if (!self->entered)
        return PyErr_Format(PyExc_RuntimeError, "the step was not begun: use `with tree.step():`");
    if (self->thread != fan_thread_id())
        return PyErr_Format(PyExc_RuntimeError, "the step was begun on another thread: end it there");
    self->entered--;
    fan_call_site(call_site, sizeof call_site);
    Py_BEGIN_ALLOW_THREADS
        fan_tree_step_end(tree_self(self->tree)->t, call_site);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

FAN_TURN_NONE(step_enter, fan_seen_nothing)
FAN_TURN_ONE(step_exit, fan_seen_nothing)

static PyMethodDef step_methods[] = {
    {"__enter__", step_enter_turn, METH_NOARGS, "__enter__($self, /)\n--\n\nBegin the step."},
    {"__exit__", step_exit_turn, METH_VARARGS,
     "__exit__($self, /, *args)\n--\n\nEnd the step: its outputs must not be used from then on."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot step_slots[] = {
    {Py_tp_doc, "One iteration of a graph tree, made by `GraphTree.step`."},
    {Py_tp_dealloc, step_dealloc},
    {Py_tp_methods, step_methods},
    {0, NULL},
};

PyType_Spec fan_graph_step_spec = {
    .name = "fanin._core.GraphStep",
    .basicsize = sizeof(graph_step),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = step_slots,
};

static PyObject *tree_step(PyObject *o, PyObject *Py_UNUSED(none))
{
    PyTypeObject *type = fan_state_get()->graph_step_type;
    graph_step *made = (graph_step *)type->tp_alloc(type, 0);
    if (made)
        made->tree = Py_NewRef(o);
    return (PyObject *)made;
}

/* ---- functions, close, plot, statistics ---- */

static PyObject *tree_function(PyObject *o, PyObject *args, PyObject *kwargs)
{
    return fan_graph_function_make(tree_self(o), args, kwargs);
}

static PyObject *tree_close(PyObject *o, PyObject *Py_UNUSED(none))
{
    char call_site[96];
    fan_error err = {0};
    fan_status status;
    fan_call_site(call_site, sizeof call_site);
    Py_BEGIN_ALLOW_THREADS
        status = fan_tree_close(tree_self(o)->t, call_site, &err);
    Py_END_ALLOW_THREADS
    if (status != FAN_OK)
        return fan_raise(status, &err);
    Py_RETURN_NONE;
}

static PyObject *tree_enter(PyObject *o, PyObject *Py_UNUSED(none)) { return Py_NewRef(o); }

static PyObject *tree_exit(PyObject *o, PyObject *Py_UNUSED(args)) { return tree_close(o, NULL); }

static PyObject *tree_plot(PyObject *o, PyObject *args, PyObject *kwargs)
{
    PyObject *module = PyImport_ImportModule("fanin.graph.trees"), *made = NULL, *all, *plot;
    plot = module ? PyObject_GetAttrString(module, "plot") : NULL;
    all = plot ? PyTuple_New(PyTuple_GET_SIZE(args) + 1) : NULL;
    if (all) {
        PyTuple_SET_ITEM(all, 0, Py_NewRef(o));
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); i++)
            PyTuple_SET_ITEM(all, i + 1, Py_NewRef(PyTuple_GET_ITEM(args, i)));
        made = PyObject_Call(plot, all, kwargs);
    }
    Py_XDECREF(all);
    Py_XDECREF(plot);
    Py_XDECREF(module);
    return made;
}

static PyObject *tree_stats(PyObject *o, void *Py_UNUSED(closure))
{
    fan_tree_stats s;
    PyObject *type = fan_lazy(&fan_state_get()->graph_stats_type, "fanin.graph.trees", "GraphStats");
    if (!type)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
        fan_tree_get_stats(tree_self(o)->t, &s);
    Py_END_ALLOW_THREADS
    return PyObject_CallFunction(type, "KKKKKKKKKK", (unsigned long long)s.nodes, (unsigned long long)s.bytes,
                                 (unsigned long long)s.in_use, (unsigned long long)s.high_water,
                                 (unsigned long long)s.warmed, (unsigned long long)s.recorded,
                                 (unsigned long long)s.replayed, (unsigned long long)s.eager,
                                 (unsigned long long)s.restored, (unsigned long long)s.driver_bytes);
}

/* A list of structs, collected without the interpreter's lock, which a body on another thread may need. */
typedef struct structs {
    char *all;
    size_t n, cap;
    bool failed;
} structs;

static void structs_add(structs *found, const void *one, size_t size)
{
    if (fan_grow((void **)&found->all, &found->cap, found->n + 1, size))
        found->failed = true;
    else
        memcpy(found->all + found->n++ * size, one, size);
}

/* structs_list: a Python list of show(struct); frees the structs. */
static PyObject *structs_list(structs *found, size_t size, PyObject *(*show)(const void *one))
{
    PyObject *list = found->failed ? PyErr_NoMemory() : PyList_New((Py_ssize_t)found->n);
    for (size_t i = 0; list && i < found->n; i++) {
        PyObject *one = show(found->all + i * size);
        if (one)
            PyList_SET_ITEM(list, (Py_ssize_t)i, one);
        else
            Py_CLEAR(list);
    }
    fan_free(found->all);
    return list;
}

static void recording_add(void *ctx, const fan_tree_recording_info *s) { structs_add(ctx, s, sizeof *s); }

static PyObject *recording_show(const void *one)
{
    const fan_tree_recording_info *s = one;
    return Py_BuildValue("(iisKKKO)", s->node, s->parent, s->function, (unsigned long long)s->owns,
                         (unsigned long long)s->reaches, (unsigned long long)s->replays,
                         s->current ? Py_True : Py_False);
}

static PyObject *tree_recordings(PyObject *o, PyObject *Py_UNUSED(none))
{
    structs found = {.n = 0};
    Py_BEGIN_ALLOW_THREADS
        fan_tree_visit(tree_self(o)->t, recording_add, &found);
    Py_END_ALLOW_THREADS
    return structs_list(&found, sizeof(fan_tree_recording_info), recording_show);
}

typedef struct piece {
    int node;
    bool owns;
    uint64_t lo, hi;
} piece;

static void piece_add(void *ctx, int node, uint64_t lo, uint64_t hi, bool owns)
{
    structs_add(ctx, &(piece){node, owns, lo, hi}, sizeof(piece));
}

static PyObject *piece_show(const void *one)
{
    const piece *s = one;
    return Py_BuildValue("(iKKO)", s->node, (unsigned long long)s->lo, (unsigned long long)s->hi,
                         s->owns ? Py_True : Py_False);
}

static PyObject *tree_memory(PyObject *o, PyObject *Py_UNUSED(none))
{
    structs found = {.n = 0};
    Py_BEGIN_ALLOW_THREADS
        fan_tree_visit_memory(tree_self(o)->t, piece_add, &found);
    Py_END_ALLOW_THREADS
    return structs_list(&found, sizeof(piece), piece_show);
}

static PyObject *tree_closed(PyObject *o, void *Py_UNUSED(closure))
{
    bool closed;
    Py_BEGIN_ALLOW_THREADS
        closed = fan_tree_closed(tree_self(o)->t);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(closed);
}

static PyObject *tree_device(PyObject *o, void *Py_UNUSED(closure))
{
    char text[32];
    return PyUnicode_FromString(fan_device_text(tree_self(o)->d, text, sizeof text));
}

static PyObject *tree_repr(PyObject *o)
{
    char text[32];
    fan_tree_stats s;
    Py_BEGIN_ALLOW_THREADS
        fan_tree_get_stats(tree_self(o)->t, &s);
    Py_END_ALLOW_THREADS
    return PyUnicode_FromFormat("<fanin.GraphTree on %s, %llu recordings>",
                                fan_device_text(tree_self(o)->d, text, sizeof text), (unsigned long long)s.nodes);
}

FAN_TURN_NAMED(tree_function, fan_seen_nothing)
FAN_TURN_NONE(tree_close, fan_seen_nothing)
FAN_TURN_ONE(tree_exit, fan_seen_nothing)
FAN_TURN_GET(tree_stats, fan_seen_nothing)
FAN_TURN_GET(tree_closed, fan_seen_nothing)
FAN_TURN_NONE(tree_recordings, fan_seen_nothing)
FAN_TURN_NONE(tree_memory, fan_seen_nothing)
FAN_TURN_REPR(tree_repr, fan_seen_nothing)

static PyMethodDef methods[] = {
    {"function", (PyCFunction)(void (*)(void))tree_function_turn, METH_VARARGS | METH_KEYWORDS,
     "function($self, /, fn, *, roles=\"auto\", keep=False, key=None)\n"
     "--\n"
     "\n"
     "Make a function of arrays that is warmed up, then recorded, and from then on replayed.\n"
     "\n"
     "Parameters\n"
     "----------\n"
     "fn : callable\n"
     "    Gets arrays, and returns an array, None, or a tuple or list of them.\n"
     "roles : str, or sequence of str\n"
     "    For all operands, or for each: \"copy\" (copied in before each replay), \"static\" (stays where it is),\n"
     "    \"accumulate\" (the caller's memory, added into), \"auto\" (an output of this step is used in place, all\n"
     "    else is copied).\n"
     "keep : bool, or sequence of bool\n"
     "    Outputs that are copied out of the tree's memory, and outlive the step.\n"
     "key : callable, optional\n"
     "    Called with the operands; calls with different results have different recordings."},
    {"step", tree_step, METH_NOARGS,
     "step($self, /)\n--\n\nOne iteration: `with tree.step():`. Outputs of its calls must not be used after its end."},
    {"close", tree_close_turn, METH_NOARGS,
     "close($self, /)\n--\n\nFree all recordings and the memory; later calls fail."},
    {"plot", (PyCFunction)(void (*)(void))tree_plot, METH_VARARGS | METH_KEYWORDS,
     "plot($self, path=None, /)\n--\n\nA picture of the tree, as a matplotlib figure; also written to `path` if "
     "given. ImportError without matplotlib; OSError if it cannot be written."},
    {"_recordings", tree_recordings_turn, METH_NOARGS,
     "_recordings($self, /)\n--\n\n(node, parent, function, owns, reaches, replays, on the path) of each recording."},
    {"_memory", tree_memory_turn, METH_NOARGS,
     "_memory($self, /)\n--\n\n(node, from, to, as an output) of each piece of the tree's memory that a recording "
     "uses."},
    {"__enter__", tree_enter, METH_NOARGS, "__enter__($self, /)\n--\n\nThe tree."},
    {"__exit__", tree_exit_turn, METH_VARARGS, "__exit__($self, /, *args)\n--\n\nClose it."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef getset[] = {
    {"stats", tree_stats_turn, NULL, "The numbers of recordings, bytes and calls: a GraphStats.", NULL},
    {"closed", tree_closed_turn, NULL, "Whether it was closed.", NULL},
    {"device", tree_device, NULL, "The name of its device, as in \"sim:0\".", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(fan_graph_tree_object, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc,
     "GraphTree(device, *, memory=67108864, limit=8, strict=False, verify=0)\n"
     "--\n"
     "\n"
     "Functions of arrays on a device that are recorded once and replayed, in one range of memory.\n"
     "\n"
     "    tree = fanin.GraphTree(\"cpu\")          # or \"cuda:0\", \"sim:0\"\n"
     "    step = tree.function(lambda x, w: np.tanh(x @ w), roles=(\"copy\", \"static\"))\n"
     "    for x in batches:\n"
     "        with tree.step():\n"
     "            y = step(x, w)\n"
     "            print(step.last.did, y.numpy())   # warmed, recorded, replayed, replayed, ..\n\n"
     "On the CPU operands are ndarrays, and outputs are handles whose values `numpy()` copies\n"
     "(docs/graph-trees.md).\n\n"
     "Parameters\n"
     "----------\n"
     "device : str\n"
     "    \"cpu\", or a device with streams.\n"
     "memory : int\n"
     "    Bytes of the range.\n"
     "limit : int\n"
     "    The number of further recordings because an operand is at another place; then the operand is copied.\n"
     "strict : bool\n"
     "    Raise an error for a static operand at another place.\n"
     "verify : int\n"
     "    The first `verify` replays of each recording also run the plain function; a difference in any bit is a\n"
     "    CaptureError that names the array."},
    {Py_tp_new, tree_new},
    {Py_tp_dealloc, tree_dealloc},
    {Py_tp_repr, tree_repr_turn},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {Py_tp_getset, getset},
    {0, NULL},
};

PyType_Spec fan_graph_tree_spec = {
    .name = "fanin.GraphTree",
    .basicsize = sizeof(fan_graph_tree_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
