/* pass: fanin.backward and fanin.grad (engine/engine.h). */
#include "py/engine/node_object.h"
#include "py/base/args.h"

#include "base/mem.h"
#include "base/workers.h"

#include <string.h>

/* ---- arguments ---- */

/* The arguments of a call as the core takes them: borrowed from `roots` and `inputs`; gradients are
 * held. */
typedef struct pass_parts {
    PyObject *roots, *inputs; /* tuples, held */
    bool is_walk;             /* without workers= */
    PyObject *one;            /* the function of one=; borrowed; NULL: none */
    fan_backward_config config;
} pass_parts;

/* slot_any: a slot that is no small int in range: 0, or -1 with an exception. */
__attribute__((noinline, cold)) static int slot_any(const pass_parts *parts, const char *what,
                                                    size_t index, const node_object *n,
                                                    PyObject *slot, uint32_t *out)
{
    char name[128], whole[64];
    int64_t i = fan_small_index(slot);
    PyOS_snprintf(whole, sizeof whole, "%s: %s %zu", parts->config.call, what, index);
    fan_error_context w = {.buffer = whole, .slot = -1, .key = -1};
    int bad = 0;
    fan_error_context_push(&w);
    if (strcmp(what, "root") == 0 && (!PyIndex_Check(slot) || fan_is_array(slot)))
        bad = fan_refuse(PyExc_TypeError,
                         "slot: expected an integer, got %s: give (node, slot, gradient)",
                         FAN_TYPE_TEXT(slot));
    else if (i < 0)
        bad = fan_slot_index(slot, "slot", &i);
    if (!bad && i >= (int64_t)n->node.inputs)
        bad = fan_refuse(PyExc_IndexError, "expected a slot from 0 to %u of %s, got %lld",
                         n->node.inputs - 1, fan_node_name(&n->node, name, sizeof name),
                         (long long)i);
    fan_error_context_pop(&w);
    *out = (uint32_t)i;
    return bad;
}

/* slot_of: the index of a slot: 0, or -1 with an exception. */
static int slot_of(const pass_parts *parts, const char *what, size_t index, const node_object *n,
                   PyObject *slot, uint32_t *out)
{
    int64_t i = fan_small_index(slot);
    *out = (uint32_t)i;
    return i >= 0 && i < (int64_t)n->node.inputs ? 0 : slot_any(parts, what, index, n, slot, out);
}

/* one_of: the gradient of a root without one: 1, of the shape and dtype that its slot declares; new
 * reference. */
static PyObject *one_of(const pass_parts *parts, size_t index, const node_object *n, uint32_t slot)
{
    const fan_slot_spec *spec =
        n->more && n->more->slots.specs ? &n->more->slots.specs[slot] : NULL;
    char name[128], shape[160], device[32];
    npy_intp dims[FAN_MAX_NDIM];
    int64_t size = 1;
    PyObject *made = NULL, *one;
    for (int i = 0; spec && spec->has_shape && i < spec->ndim; i++) {
        dims[i] = (npy_intp)spec->shape[i];
        size = dims[i] == 1 ? size : 0;
    }
    fan_node_name(&n->node, name, sizeof name);
    if (!spec || !spec->has_shape)
        return PyErr_Format(PyExc_ValueError,
                            "%s: root %zu (%s, slot %u): the slot declares no shape: give its "
                            "gradient, (node, slot, gradient)",
                            parts->config.call, index, name, slot);
    if (!size || (spec->device && spec->device != fan_cpu()))
        return PyErr_Format(
            PyExc_ValueError,
            "%s: root %zu (%s, slot %u): the default gradient, one, is for one element on the CPU, "
            "and the slot "
            "is of shape %s on %s: give its gradient, (node, slot, gradient)",
            parts->config.call, index, name, slot,
            fan_shape_text(spec->ndim, spec->shape, shape, sizeof shape),
            fan_device_text(spec->device ? spec->device : fan_cpu(), device, sizeof device));
    PyArray_Descr *d = spec->dtype == FAN_DT_NONE ? PyArray_DescrFromType(NPY_DOUBLE)
                                                  : fan_descr_of_dtype(spec->dtype);
    if (!d)
        return NULL;
    made = PyArray_NewFromDescr(&PyArray_Type, d, spec->ndim, dims, NULL, NULL, 0, NULL);
    one = made ? PyLong_FromLong(1) : NULL;
    if (!one || PyArray_FillWithScalar((PyArrayObject *)made, one) < 0)
        Py_CLEAR(made);
    Py_XDECREF(one);
    return made;
}

/* refuse_words: TypeError with a text, whose reference it takes; NULL: an exception is set. Returns
 * -1. */
static int refuse_words(PyObject *text)
{
    if (text)
        PyErr_SetObject(PyExc_TypeError, text);
    Py_XDECREF(text);
    return -1;
}

/* sequence_of: a tuple of the items; refuses a single node, which is iterable only by mistake. */
static int sequence_of(const pass_parts *parts, const char *what, PyObject *o, PyObject **out)
{
    if (fan_node_arg(o) ||
        (PyTuple_Check(o) && PyTuple_GET_SIZE(o) >= 2 && fan_node_arg(PyTuple_GET_ITEM(o, 0)) &&
         !fan_node_arg(PyTuple_GET_ITEM(o, 1)) && !PyTuple_Check(PyTuple_GET_ITEM(o, 1))))
        return fan_set_error(PyExc_TypeError,
                             "%s: %s: expected a sequence, got one of them: give [it]",
                             parts->config.call, what);
    char named[64];
    if (PyList_CheckExact(o) || PyTuple_CheckExact(o)) /* the usual case */
        return (*out = PySequence_Tuple(o)) ? 0 : -1;
    if (fan_is_array(o))
        return refuse_words(
            fan_call("fanin._mistakes", "no_sequence", "(ssO)", parts->config.call, what, o));
    PyOS_snprintf(named, sizeof named, "%s: %s", parts->config.call, what);
    return fan_sequence_arg(o, named, out);
}

static int function_arg(const fan_backward_config *c, PyObject *o, const char *what, void **out)
{
    *out = o == Py_None ? NULL : o;
    if (!*out || PyCallable_Check(o))
        return 0;
    return fan_set_error(PyExc_TypeError, "%s: %s: expected a function, got %s", c->call, what,
                         FAN_TYPE_TEXT(o));
}

/* The parameters of backward and, but for the last one, grad, and, but for the last two, walk, as
 * core.pyi declares them. */
enum {
    ROOTS,
    INPUTS,
    KEEP_GRAPH,
    CREATE_GRAPH,
    DETECT,
    SCHEDULE,
    PROGRESS,
    ONE,
    BUDGET,
    WORKERS,
    REDUCER
};

static int parse(pass_parts *parts, PyObject *const *a)
{
    fan_backward_config *c = &parts->config;
    void *one = NULL;
    if (c->capture && strcmp(c->call, "grad") == 0 && a[INPUTS] == Py_None) {
        return fan_set_error(PyExc_TypeError, "grad() needs 'inputs'");
    }
    c->detect = fan_state_get()->detect;
    c->create_graph = a[CREATE_GRAPH] == Py_True;
    if (a[DETECT] && a[DETECT] != Py_None)
        c->detect = a[DETECT] == Py_True;
    c->budget = fan_state_get()->budget;
    if (a[BUDGET] && a[BUDGET] != Py_None && fan_buffer_budget_arg(a[BUDGET], &c->budget) < 0)
        return -1;
    /* The nodes that create_graph records lead back over this graph. */
    c->keep_graph =
        a[KEEP_GRAPH] && a[KEEP_GRAPH] != Py_None ? a[KEEP_GRAPH] == Py_True : c->create_graph;
    if (sequence_of(parts, "roots", a[ROOTS], &parts->roots) < 0 ||
        (a[INPUTS] && a[INPUTS] != Py_None &&
         sequence_of(parts, "inputs", a[INPUTS], &parts->inputs) < 0))
        return -1;
    if (function_arg(c, a[SCHEDULE], "schedule", &c->schedule) < 0 ||
        function_arg(c, a[PROGRESS], "progress", &c->progress) < 0 ||
        function_arg(c, a[ONE], "one", &one) < 0)
        return -1;
    parts->one = one;
    PyObject *workers = parts->is_walk ? NULL : a[WORKERS];
    int64_t n = workers ? fan_small_index(workers) : 1;
    char named[64];
    if (n < 1 || n > FAN_WORKERS_MOST) {
        PyOS_snprintf(named, sizeof named, "%s: workers", c->call);
        if (fan_index(workers, named, NULL, &n) < 0)
            return -1;
    }
    if (n < 1 || n > FAN_WORKERS_MOST)
        return fan_set_error(PyExc_ValueError,
                             "%s: expected a number of threads from 1 to %d, got %R", named,
                             FAN_WORKERS_MOST, workers);
    if (n > 1 && (c->schedule || c->create_graph))
        return fan_set_error(
            PyExc_ValueError, "%s: %s: give it without workers=%lld", c->call,
            c->schedule
                ? "schedule= picks the next node of one worker"
                : "create_graph=True numbers the new nodes in the order of their creation, and the "
                  "order of later sums depends on these numbers",
            (long long)n);
    /* a graph tree's function has one; the bits are the same */
    c->workers = fan_wants_handles(NULL) ? 1 : (uint32_t)n;
    size_t nroots = (size_t)PyTuple_GET_SIZE(parts->roots),
           nwanted = parts->inputs ? (size_t)PyTuple_GET_SIZE(parts->inputs) : 0;
    c->limited = parts->inputs != NULL;
    if (c->limited && !nwanted)
        return fan_set_error(PyExc_ValueError,
                             "%s: inputs: expected at least one, or None for all leaves", c->call);
    c->roots = fan_calloc(nroots * sizeof *c->roots);
    c->wanted = fan_calloc(nwanted * sizeof *c->wanted);
    if (!c->roots || !c->wanted) {
        PyErr_NoMemory();
        return -1;
    }
    c->nroots = nroots;
    c->nwanted = nwanted;
    char text[208], name[128];
    for (size_t i = 0; i < nwanted; i++) {
        fan_wanted *w = &c->wanted[i];
        PyObject *item = PyTuple_GET_ITEM(parts->inputs, (Py_ssize_t)i);
        bool tuple = PyTuple_Check(item) && PyTuple_GET_SIZE(item) == 2;
        PyObject *node = tuple ? PyTuple_GET_ITEM(item, 0) : item;
        const node_object *to = fan_node_arg(node);
        if (!to)
            return refuse_words(fan_call("fanin._mistakes", "no_node", "(ssnOs)", c->call, "input",
                                         (Py_ssize_t)i, item,
                                         fan_no_node_text(item, node, text, sizeof text)));
        w->node = (fan_node *)(uintptr_t)&to->node;
        w->slot = 0;
        if (tuple && slot_of(parts, "input", i, to, PyTuple_GET_ITEM(item, 1), &w->slot) < 0)
            return -1;
        if (!c->capture && !to->node.ops->leaf)
            return fan_set_error(
                PyExc_TypeError,
                "%s: input %zu: %s is no leaf and keeps no gradient: fanin.grad(roots, inputs) "
                "returns that of any node",
                c->call, i, fan_node_name(&to->node, name, sizeof name));
    }
    for (size_t i = 0; i < nroots; i++) {
        fan_root *r = &c->roots[i];
        PyObject *item = PyTuple_GET_ITEM(parts->roots, (Py_ssize_t)i);
        bool tuple =
            PyTuple_Check(item) && PyTuple_GET_SIZE(item) >= 2 && PyTuple_GET_SIZE(item) <= 3;
        PyObject *node = tuple ? PyTuple_GET_ITEM(item, 0) : item;
        node_object *to = fan_node_arg(node);
        PyObject *gradient =
            tuple && PyTuple_GET_SIZE(item) == 3 ? PyTuple_GET_ITEM(item, 2) : Py_None;
        uint32_t slot = 0;
        if (!to)
            return refuse_words(fan_call("fanin._mistakes", "no_node", "(ssnOs)", c->call, "root",
                                         (Py_ssize_t)i, item,
                                         fan_no_node_text(item, node, text, sizeof text)));
        if (tuple && slot_of(parts, "root", i, to, PyTuple_GET_ITEM(item, 1), &slot) < 0)
            return -1;
        gradient = gradient != Py_None ? Py_NewRef(gradient)
                   : parts->one        ? PyObject_CallFunction(parts->one, "OI", to, (unsigned)slot)
                                       : one_of(parts, i, to, slot);
        if (gradient == Py_None) {
            Py_DECREF(gradient);
            return fan_set_error(
                PyExc_TypeError,
                "%s: root %zu (%s, slot %u): one= returned None; expected a gradient", c->call, i,
                fan_node_name(&to->node, name, sizeof name), slot);
        }
        *r = (fan_root){&to->node, slot, gradient};
        if (!gradient)
            return -1;
    }
    return 0;
}

fan_backward *fan_task_begin_args(const char *call, PyObject *const *a, bool capture,
                                  size_t *nwanted)
{
    pass_parts parts = {
        .is_walk = strcmp(call, "walk") == 0,
        .config = {.frontend = &fan_python_engine, .call = call, .capture = capture}};
    fan_backward *p = NULL;
    fan_sched_access(FAN_THING_GRAPH, 0, FAN_SCHED_WRITE);
    if (parse(&parts, a) == 0) {
        (void)FAN_CHECK(fan_backward_begin(&parts.config, &p, &err));
        *nwanted = parts.config.nwanted;
    }
    for (size_t i = 0; parts.config.roots && i < parts.config.nroots; i++)
        Py_XDECREF((PyObject *)parts.config.roots[i].gradient);
    fan_free(parts.config.roots);
    fan_free(parts.config.wanted);
    Py_XDECREF(parts.roots);
    Py_XDECREF(parts.inputs);
    return p;
}

/* ---- backward, grad ---- */

int fan_task_run(fan_backward *p)
{
    FAN_UNINITIALIZED fan_error err;
    fan_status status;
    fan_error_clear(&err);
    status = fan_backward_seed(p, &err);
    if (status == FAN_OK)
        status = fan_backward_run(p, &err);
    if (status == FAN_OK)
        status = fan_backward_join(p, &err);
    if (status != FAN_OK)
        fan_task_failed(p, status, &err);
    return status == FAN_OK ? 0 : -1;
}

void fan_task_end(fan_backward *p)
{
    PyObject *live = fan_exception_take();
    fan_backward_end(p);
    fan_exception_put(live);
}

static int backward_run(PyObject *const *a)
{
    size_t nwanted;
    fan_backward *p = fan_task_begin_args("backward", a, false, &nwanted);
    int bad = p ? fan_task_run(p) : -1;
    fan_task_end(p);
    return bad;
}

/* backward: a reducer takes its leaves' sums, and accumulates their sums over ranks at the end. The
 * pass's exception is raised also if the reducer has another. */
static PyObject *backward(PyObject *Py_UNUSED(m), PyObject *const *a)
{
    PyObject *reducer = a[REDUCER], *block, *begun, *error;
    if (!reducer || reducer == Py_None)
        return backward_run(a) < 0 ? NULL : Py_NewRef(Py_None);
    if (a[CREATE_GRAPH] == Py_True)
        return PyErr_Format(
            PyExc_ValueError,
            "backward: a pass with reducer= cannot record itself (create_graph=True)");
    if (!PyObject_HasAttrString(reducer, "_reduced")) {
        return PyErr_Format(PyExc_TypeError,
                            "backward: reducer: expected a fanin.dist.Reducer, got %s",
                            FAN_TYPE_TEXT(reducer));
    }
    block = PyObject_CallMethod(reducer, "_reduced", NULL);
    begun = block ? fan_block_begin(block) : NULL;
    if (!begun) {
        Py_XDECREF(block);
        return NULL;
    }
    Py_DECREF(begun);
    int bad = backward_run(a);
    error = fan_exception_take();
    if (fan_block_end(block, error) < 0)
        bad = -1;
    Py_DECREF(block);
    if (error && PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception))
        Py_DECREF(error); /* Ctrl-C at the end goes before the error of the pass */
    else if (error)
        fan_exception_put(error);
    return bad ? NULL : Py_NewRef(Py_None);
}

/* leaf_of_arg: a Leaf, borrowed; NULL with an exception. */
static leaf_object *leaf_of_arg(PyObject *o)
{
    node_object *n = fan_node_arg(o);
    if (n && n->node.ops->leaf)
        return (leaf_object *)n;
    PyErr_Format(PyExc_TypeError, "expected a fanin.Leaf, got %s", FAN_TYPE_TEXT(o));
    return NULL;
}

static PyObject *leaf_divert(PyObject *Py_UNUSED(m), PyObject *const *a)
{
    leaf_object *leaf = leaf_of_arg(a[0]);
    char name[128];
    if (!leaf)
        return NULL;
    if (leaf->divert)
        return PyErr_Format(PyExc_RuntimeError,
                            "%s: another fanin.dist.Reducer takes its gradients now",
                            fan_node_name(&leaf->base.node, name, sizeof name));
    if (a[2] != Py_None && !PyDict_Check(a[2]))
        return PyErr_Format(PyExc_TypeError, "expected a dict, got %s", FAN_TYPE_TEXT(a[2]));
    leaf->divert = PyTuple_Pack(3, a[1], a[2], a[3]);
    if (!leaf->divert)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *leaf_undivert(PyObject *Py_UNUSED(m), PyObject *const *a)
{
    leaf_object *leaf = leaf_of_arg(a[0]);
    if (!leaf)
        return NULL;
    if (leaf->divert && PyTuple_GET_ITEM(leaf->divert, 0) == a[1])
        Py_CLEAR(leaf->divert);
    Py_RETURN_NONE;
}

static PyObject *leaf_dtype(PyObject *Py_UNUSED(m), PyObject *o)
{
    const leaf_object *leaf = leaf_of_arg(o);
    if (!leaf)
        return NULL;
    const node_more *more = leaf->base.more;
    fan_dtype dtype = more && more->slots.specs ? more->slots.specs[0].dtype : FAN_DT_NONE;
    if (dtype == FAN_DT_NONE)
        Py_RETURN_NONE;
    return PyUnicode_FromString(fan_dtype_name(dtype));
}

static PyObject *leaf_accumulate(PyObject *Py_UNUSED(m), PyObject *const *a)
{
    leaf_object *leaf = leaf_of_arg(a[0]);
    Py_ssize_t i = PyLong_AsSsize_t(a[2]);
    void *hooks = NULL,
         *sum = !leaf || PyErr_Occurred() ? NULL : Py_XNewRef(PyList_GetItem(a[1], i));
    if (!sum || fan_hooks_of_node(&leaf->base, &hooks) < 0) {
        Py_XDECREF((PyObject *)sum);
        return NULL;
    }
    /* the only reference may become .grad itself (L3) */
    PyList_SetItem(a[1], i, Py_NewRef(Py_None));
    int bad =
        fan_leaf_accumulate(leaf, &sum, false) < 0 || fan_hooks_accumulated(&leaf->base, hooks) < 0;
    Py_XDECREF((PyObject *)sum);
    Py_XDECREF((PyObject *)hooks);
    return bad ? NULL : Py_NewRef(Py_None);
}

static PyObject *grad(PyObject *Py_UNUSED(m), PyObject *const *a)
{
    size_t nwanted = 0;
    fan_backward *p = fan_task_begin_args("grad", a, true, &nwanted);
    PyObject *sums = p && fan_task_run(p) == 0 ? PyList_New((Py_ssize_t)nwanted) : NULL;
    for (size_t i = 0; sums && i < nwanted; i++) {
        void *sum = fan_backward_result(p, i);
        if (fan_box(&sum) < 0) {
            fan_object_drop(sum);
            Py_CLEAR(sums);
        } else {
            PyList_SET_ITEM(sums, (Py_ssize_t)i, sum ? (PyObject *)sum : Py_NewRef(Py_None));
        }
    }
    fan_task_end(p);
    return sums;
}

#include "py/declared/pass.h"
