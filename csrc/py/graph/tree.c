/* tree: fanin.GraphTree: made and freed; its steps, which are objects of their own; then its
 * methods: functions, close, pictures, statistics. */
#include "py/graph/tree_object.h"
#include "py/arrays/arrays.h"
#include "py/device/backends.h"
#include "py/base/args.h"

#include "base/mem.h"

#include <string.h>

static fan_graph_tree_object *tree_self(PyObject *o)
{
    return (fan_graph_tree_object *)o;
}

static PyObject *tree_new(PyTypeObject *type, PyObject *const *a)
{
    enum {
        DEVICE,
        MEMORY,
        LIMIT,
        STRICT,
        VERIFY
    };
    int64_t memory = (int64_t)64 << 20;
    int64_t limit = 8;
    int64_t verify = 0;
    fan_device *device = NULL;
    fan_error err = {0};
    fan_status status;
    if (fan_number_arg(a[MEMORY], "GraphTree: memory", &memory) < 0)
        return NULL;
    if (fan_number_arg(a[LIMIT], "GraphTree: limit", &limit) < 0)
        return NULL;
    if (fan_number_arg(a[VERIFY], "GraphTree: verify", &verify) < 0)
        return NULL;
    if (verify < 0 || verify > INT_MAX) {
        return PyErr_Format(
            PyExc_ValueError,
            "GraphTree: verify: expected a number of replays from 0 to 2**31 - 1, got %lld",
            (long long)verify);
    }
    if (memory < 256) {
        return PyErr_Format(PyExc_ValueError,
                            "GraphTree: memory is a number of bytes, at least 256");
    }
    if (limit < 1 || limit > 1 << 20) {
        return PyErr_Format(
            PyExc_ValueError,
            "GraphTree: limit is how often a function is recorded anew, 1 to 2**20");
    }
    if (fan_device_arg(a[DEVICE], &device) < 0)
        return NULL;
    if (!device) {
        return PyErr_Format(PyExc_TypeError,
                            "GraphTree: expected a device, as in \"sim:0\", not None");
    }
    fan_graph_tree_object *self = (fan_graph_tree_object *)type->tp_alloc(type, 0);
    if (!self) {
        fan_device_drop(device);
        return NULL;
    }
    self->d = device;
    self->verify = (unsigned)verify;
    fan_tree_options options = {
        .memory = (uint64_t)memory,
        .limit = (unsigned)limit,
        .strict = a[STRICT] == Py_True,
        .verify = self->verify,
    };
    Py_BEGIN_ALLOW_THREADS
        status = fan_tree_new(device, &options, &self->t, &err);
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
    Py_CLEAR(tree_self(o)->held);
    Py_BEGIN_ALLOW_THREADS
        fan_tree_drop(tree_self(o)->t);
        fan_device_drop(tree_self(o)->d);
    Py_END_ALLOW_THREADS
    type->tp_free(o);
    Py_DECREF(type);
}

/* ---- outputs that are held when their step ends ---- */

/* copy_one: the handle is of a copy from now on: 0, or -1 with an exception. */
static int copy_one(const fan_graph_tree_object *tree, PyObject *handle)
{
    fan_array_object *output = fan_array_self(handle);
    fan_error err = {0};
    fan_status status;
    fan_array *made = NULL;
    Py_BEGIN_ALLOW_THREADS
        status = fan_tree_copied(tree->t, output->a, &made, &err);
    Py_END_ALLOW_THREADS
    if (status != FAN_OK) {
        fan_raise(status, &err);
        return -1;
    }
    if (output->replaced || made == output->a) { /* another thread was faster */
        fan_array_drop(made);
        return 0;
    }
    output->replaced = output->a;
    output->a = made;
    return 0;
}

/* copy_held: before a step ends, if it is the last open one: copies the listed outputs that live:
 * 0, or -1 with the exception of the first that could not be copied; it ends with the step. */
static int copy_held(fan_graph_tree_object *tree)
{
    PyObject *raised = NULL;
    if (!tree->held || fan_tree_open_steps(tree->t) > 1)
        return 0;
    PyObject *list = tree->held;
    tree->held = NULL;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
        PyObject *handle = PyObject_CallNoArgs(PyList_GET_ITEM(list, i));
        bool lives = handle && handle != Py_None;
        if (!handle || (lives && copy_one(tree, handle) < 0)) {
            PyObject *one = fan_exception_take();
            if (raised)
                Py_XDECREF(one);
            else
                raised = one;
        }
        Py_XDECREF(handle);
    }
    Py_DECREF(list);
    if (!raised)
        return 0;
    fan_exception_put(raised);
    return -1;
}

/* end_step: 0, or -1 with the exception of a held output that could not be copied. */
static int end_step(fan_graph_tree_object *tree, const char *call_site)
{
    PyObject *before = fan_exception_take();
    int failed = copy_held(tree);
    PyObject *raised = fan_exception_take();
    Py_BEGIN_ALLOW_THREADS
        fan_tree_step_end(tree->t, call_site);
    Py_END_ALLOW_THREADS
    if (before) {
        Py_XDECREF(raised);
        raised = before;
    }
    fan_exception_put(raised);
    return failed;
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
        if (end_step(tree_self(self->tree), "the line that dropped it") < 0)
            PyErr_WriteUnraisable(NULL);
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
    if (self->entered && self->thread != fan_thread_id()) {
        return PyErr_Format(
            PyExc_RuntimeError,
            "the step was begun on another thread: use `with tree.step():` on each");
    }
    Py_BEGIN_ALLOW_THREADS
        status = fan_tree_step_begin(tree_self(self->tree)->t, &err);
    Py_END_ALLOW_THREADS
    if (status != FAN_OK)
        return fan_raise(status, &err);
    self->entered++;
    self->thread = fan_thread_id();
    return Py_NewRef(o);
}

static PyObject *step_exit(PyObject *o, PyObject *const *Py_UNUSED(a))
{
    graph_step *self = (graph_step *)o;
    char call_site[96];
    if (!self->entered)
        return PyErr_Format(PyExc_RuntimeError, "the step was not begun: use `with tree.step():`");
    if (self->thread != fan_thread_id()) {
        return PyErr_Format(PyExc_RuntimeError,
                            "the step was begun on another thread: end it there");
    }
    self->entered--;
    fan_call_site(call_site, sizeof call_site);
    if (end_step(tree_self(self->tree), call_site) < 0)
        return NULL;
    Py_RETURN_NONE;
}

#include "py/declared/GraphStep.h"

static PyType_Slot step_slots[] = {
    {Py_tp_doc, (void *)step_doc},
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

static PyObject *tree_close(PyObject *o, PyObject *Py_UNUSED(none))
{
    char call_site[96];
    fan_error err = {0};
    fan_status status;
    fan_call_site(call_site, sizeof call_site);
    Py_BEGIN_ALLOW_THREADS
        status = fan_tree_close(tree_self(o)->t, call_site, &err);
    Py_END_ALLOW_THREADS
    return fan_done(status, &err);
}

static PyObject *tree_enter(PyObject *o, PyObject *Py_UNUSED(none))
{
    return Py_NewRef(o);
}

static PyObject *tree_exit(PyObject *o, PyObject *const *Py_UNUSED(a))
{
    return tree_close(o, NULL);
}

/* ---- pipelines ---- */

static PyObject *tree_pipeline(PyObject *o, PyObject *const *a)
{
    if (!a[1])
        return fan_call(PIPELINES, "made", "(OO)", o, a[0]);
    return fan_call(PIPELINES, "made", "(OOO)", o, a[0], a[1]);
}

int fan_graph_run_begin(fan_graph_tree_object *tree, PyObject *list, fan_graph_run *run)
{
    fan_error err = {0};
    fan_status status;
    run->own = !fan_tree_in_step(tree->t);
    Py_BEGIN_ALLOW_THREADS
        status = fan_tree_step_begin(tree->t, &err);
    Py_END_ALLOW_THREADS
    if (status != FAN_OK) {
        fan_raise(status, &err);
        return -1;
    }
    run->outer = fan_graph_calls_set((fan_graph_calls){tree, list});
    return 0;
}

int fan_graph_run_end(fan_graph_tree_object *tree, const fan_graph_run *run)
{
    char call_site[96];
    (void)fan_graph_calls_set(run->outer);
    fan_call_site(call_site, sizeof call_site);
    return end_step(tree, call_site);
}

PyObject *fan_graph_copied(fan_graph_tree_object *self, PyObject *array)
{
    fan_error err = {0};
    fan_status status;
    fan_array *made = NULL;
    if (Py_TYPE(array) != fan_state_get()->array_type)
        return Py_NewRef(array);
    fan_array *a = fan_array_self(array)->a;
    Py_BEGIN_ALLOW_THREADS
        status = fan_tree_copied(self->t, a, &made, &err);
    Py_END_ALLOW_THREADS
    if (status != FAN_OK)
        return fan_raise(status, &err);
    PyObject *copy = NULL;
    if (made == a)
        copy = Py_NewRef(array);
    else
        copy = fan_array_wrap(made, self->d);
    fan_array_drop(made);
    return copy;
}

static PyObject *tree_copied(PyObject *o, PyObject *array)
{
    return fan_graph_copied(tree_self(o), array);
}

static PyObject *tree_warm_again(PyObject *o, PyObject *Py_UNUSED(none))
{
    fan_error err = {0};
    fan_status status;
    Py_BEGIN_ALLOW_THREADS
        status = fan_tree_warm_again(tree_self(o)->t, &err);
    Py_END_ALLOW_THREADS
    return fan_done(status, &err);
}

static PyObject *tree_function(PyObject *o, PyObject *const *a)
{
    return fan_graph_function_make(tree_self(o), a);
}

static PyObject *tree_plot(PyObject *o, PyObject *const *a)
{
    return fan_call(PICTURE, "plot", "(OO)", o, fan_or_none(a[0]));
}

static PyObject *tree_repr_svg(PyObject *o, PyObject *Py_UNUSED(none))
{
    return fan_call(PICTURE, "shown", "(O)", o);
}

static fan_tree_stats stats_of(PyObject *o)
{
    fan_tree_stats s;
    Py_BEGIN_ALLOW_THREADS
        fan_tree_get_stats(tree_self(o)->t, &s);
    Py_END_ALLOW_THREADS
    return s;
}

static PyObject *tree_get_stats(PyObject *o, void *Py_UNUSED(closure))
{
    fan_tree_stats s = stats_of(o);
    return fan_call(TREES, "GraphStats", "(KKKKKKKKKK)", s.nodes, s.bytes, s.in_use, s.high_water,
                    s.warmed, s.recorded, s.replayed, s.eager, s.restored, s.driver_bytes);
}

/* list_append: an item for the list of a visit, which has the tree's lock, not the interpreter's;
 * takes `one`. */
static void list_append(PyObject **list, PyObject *one)
{
    if (!*list || !one || PyList_Append(*list, one) < 0)
        Py_CLEAR(*list);
    Py_XDECREF(one);
}

static void recording_show(void *ctx, const fan_tree_recording_info *s)
{
    fan_gil gil;
    if (!fan_gil_enter(&gil))
        return;
    list_append(ctx,
                Py_BuildValue("(iisKKKNK)", s->node, s->parent, s->function, s->owns, s->reaches,
                              s->replays, PyBool_FromLong(s->current), s->kernels));
    fan_gil_leave(&gil);
}

static PyObject *tree_recordings(PyObject *o, PyObject *Py_UNUSED(none))
{
    PyObject *list = PyList_New(0);
    Py_BEGIN_ALLOW_THREADS
        fan_tree_visit(tree_self(o)->t, recording_show, &list);
    Py_END_ALLOW_THREADS
    if (list && PyList_Reverse(list) < 0) /* the first recording first */
        Py_CLEAR(list);
    return list;
}

static void piece_show(void *ctx, int node, uint64_t lo, uint64_t hi, bool owns)
{
    fan_gil gil;
    if (!fan_gil_enter(&gil))
        return;
    list_append(ctx, Py_BuildValue("(iKKN)", node, (unsigned long long)lo, (unsigned long long)hi,
                                   PyBool_FromLong(owns)));
    fan_gil_leave(&gil);
}

static PyObject *tree_memory(PyObject *o, PyObject *Py_UNUSED(none))
{
    PyObject *list = PyList_New(0);
    Py_BEGIN_ALLOW_THREADS
        fan_tree_visit_memory(tree_self(o)->t, piece_show, &list);
    Py_END_ALLOW_THREADS
    return list;
}

static PyObject *tree_get_recordings(PyObject *o, void *Py_UNUSED(closure))
{
    PyObject *rows = tree_recordings(o, NULL);
    if (!rows)
        return NULL;
    PyObject *memory = tree_memory(o, NULL);
    if (!memory) {
        Py_DECREF(rows);
        return NULL;
    }
    return fan_call(TREES, "recordings", "(NN)", rows, memory);
}

static PyObject *tree_get_closed(PyObject *o, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(stats_of(o).closed);
}

static PyObject *tree_get_device(PyObject *o, void *Py_UNUSED(closure))
{
    char text[32];
    return PyUnicode_FromString(fan_device_text(tree_self(o)->d, text, sizeof text));
}

static PyObject *tree_repr(PyObject *o)
{
    char text[32];
    return PyUnicode_FromFormat("<fanin.GraphTree on %s, %llu recordings>",
                                fan_device_text(tree_self(o)->d, text, sizeof text),
                                stats_of(o).nodes);
}

#include "py/declared/GraphTree.h"

static PyMemberDef members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(fan_graph_tree_object, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)tree_doc}, {Py_tp_new, tree_new_door},
    {Py_tp_dealloc, tree_dealloc}, {Py_tp_repr, tree_repr_step},
    {Py_tp_methods, tree_methods}, {Py_tp_members, members},
    {Py_tp_getset, tree_getset},   {0, NULL},
};

PyType_Spec fan_graph_tree_spec = {
    .name = "fanin.GraphTree",
    .basicsize = sizeof(fan_graph_tree_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
