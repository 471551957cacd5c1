/* pass: fanin.backward and fanin.grad (engine/engine.h).
 *
 * The arguments, in the order in which they are read: options, sequences, workers, inputs, roots;
 * then the passes; then what a reducer calls of leaves. */
#include "py/engine/node_object.h"
#include "py/base/args.h"

#include "base/mem.h"
#include "base/trace.h"
#include "base/workers.h"
#include "buffer/digest.h"

#include <string.h>

/* ---- arguments ---- */

/* The arguments of a call as the core takes them: borrowed from `roots` and `inputs`; gradients are
 * held. */
typedef struct pass_parts {
    PyObject *roots, *inputs; /* tuples, held; inputs NULL: all leaves */
    bool is_walk;             /* without workers= */
    bool is_order;            /* without gradients: the pass does not run */
    PyObject *one;            /* the function of one=; borrowed; NULL: none */
    fan_pass_config config;
} pass_parts;

/* slot_any: a slot that is no small int in range: 0, or -1 with an exception. */
__attribute__((noinline, cold)) static int slot_any(const pass_parts *parts, const char *what,
                                                    size_t index, const node_object *n,
                                                    PyObject *slot, uint32_t *out)
{
    char whole[64];
    int64_t i = fan_small_index(slot);
    PyOS_snprintf(whole, sizeof whole, "%s: %s %zu", parts->config.call, what, index);
    fan_error_context w = {.buffer = whole, .slot = -1, .key = -1};
    int bad = 0;
    fan_error_context_push(&w);
    bool is_index = PyIndex_Check(slot) && !fan_is_array(slot);
    if (!is_index && strcmp(what, "root") == 0) {
        bad = fan_refuse(PyExc_TypeError,
                         "slot: expected an integer, got %s: give (node, slot, gradient)",
                         FAN_TYPE_TEXT(slot));
    } else if (i < 0)
        bad = fan_slot_index(slot, "slot", &i);
    if (!bad && i >= (int64_t)n->node.inputs) {
        bad = fan_refuse(PyExc_IndexError, "expected a slot from 0 to %u of %s, got %lld",
                         n->node.inputs - 1, fan_node_name(&n->node).text, (long long)i);
    }
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
    if (i >= 0 && i < (int64_t)n->node.inputs)
        return 0;
    return slot_any(parts, what, index, n, slot, out);
}

/* one_of: the gradient of a root without one: 1, of the shape and dtype that its slot declares; new
 * reference. */
static PyObject *one_of(const pass_parts *parts, size_t index, const node_object *n, uint32_t slot)
{
    const fan_slot_spec *spec = fan_node_specs(&n->node);
    const fan_node_label name = fan_node_name(&n->node);
    char shape[160], device[32];
    if (spec)
        spec += slot;
    if (!spec || !spec->has_shape) {
        return PyErr_Format(PyExc_ValueError,
                            "%s: root %zu (%s, slot %u): the slot declares no shape: give its "
                            "gradient, (node, slot, gradient)",
                            parts->config.call, index, name.text, slot);
    }
    npy_intp dims[FAN_MAX_NDIM];
    bool one_element = true;
    for (int i = 0; i < spec->ndim; i++) {
        dims[i] = (npy_intp)spec->shape[i];
        if (dims[i] != 1)
            one_element = false;
    }
    fan_device *where = spec->device ? spec->device : fan_cpu();
    if (!one_element || where != fan_cpu()) {
        return PyErr_Format(
            PyExc_ValueError,
            "%s: root %zu (%s, slot %u): the default gradient, one, is for one element on the CPU, "
            "and the slot is of shape %s on %s: give its gradient, (node, slot, gradient)",
            parts->config.call, index, name.text, slot,
            fan_shape_text(spec->ndim, spec->shape, shape, sizeof shape),
            fan_device_text(where, device, sizeof device));
    }
    fan_dtype dtype = FAN_DT_FLOAT64;
    if (spec->dtype != FAN_DT_NONE)
        dtype = spec->dtype;
    PyArray_Descr *d = fan_descr_of_dtype(dtype);
    if (!d)
        return NULL;
    PyObject *made = PyArray_NewFromDescr(&PyArray_Type, d, spec->ndim, dims, NULL, NULL, 0, NULL);
    PyObject *one = NULL;
    if (made)
        one = PyLong_FromLong(1);
    if (!one || PyArray_FillWithScalar((PyArrayObject *)made, one) < 0)
        Py_CLEAR(made);
    Py_XDECREF(one);
    return made;
}

/* sequence_of: a tuple of the items. Python reads, or refuses, other objects than a list and a
 * tuple of nodes or tuples. */
static int sequence_of(const pass_parts *parts, const char *what, PyObject *o, PyObject **out)
{
    bool usual = PyList_CheckExact(o) || PyTuple_CheckExact(o);
    PyObject *first = o;
    if (PyTuple_Check(o) && PyTuple_GET_SIZE(o) > 1) {
        PyObject *second = PyTuple_GET_ITEM(o, 1);
        usual = PyTuple_Check(second) || fan_node_arg(second);
        first = PyTuple_GET_ITEM(o, 0);
    }
    if (usual)
        *out = PySequence_Tuple(o);
    else {
        *out = fan_call("fanin._mistakes", "roots_or_inputs", "(ssOO)", parts->config.call, what, o,
                        fan_or_none(fan_node_arg(first)));
    }
    if (!*out)
        return -1;
    return 0;
}

static int function_arg(const fan_pass_config *c, PyObject *o, const char *what, void **out)
{
    *out = fan_given(o);
    if (!*out || PyCallable_Check(o))
        return 0;
    return fan_set_error(PyExc_TypeError, "%s: %s: expected a function, got %s", c->call, what,
                         FAN_TYPE_TEXT(o));
}

/* flag_of: whether a flag is set; `otherwise`: if it is not given. */
static bool flag_of(PyObject *given, bool otherwise)
{
    if (!fan_given(given))
        return otherwise;
    return given == Py_True;
}

static int pass_read_options(pass_parts *parts, PyObject *const *a)
{
    fan_pass_config *c = &parts->config;
    const fan_state *st = fan_state_get();
    c->create_graph = a[FAN_PASS_CREATE_GRAPH] == Py_True;
    c->detect = flag_of(a[FAN_PASS_DETECT], st->detect);
    c->budget = st->budget;
    if (fan_given(a[FAN_PASS_BUDGET]) && fan_buffer_budget_arg(a[FAN_PASS_BUDGET], &c->budget) < 0)
        return -1;
    /* The nodes that create_graph records lead back over this graph. */
    c->keep_graph = flag_of(a[FAN_PASS_KEEP_GRAPH], c->create_graph);
    return 0;
}

/* pass_read_weight: of backward alone. A weight of 1 changes nothing. */
static int pass_read_weight(pass_parts *parts, PyObject *const *a)
{
    fan_pass_config *c = &parts->config;
    if (c->capture || parts->is_walk || !fan_given(a[FAN_PASS_WEIGHT]))
        return 0;
    fan_error_context w = {.buffer = c->call, .slot = -1, .key = -1};
    fan_error_context_push(&w);
    int bad = fan_weight_arg(a[FAN_PASS_WEIGHT], "weight", &c->weight);
    fan_error_context_pop(&w);
    if (c->weight.re == 1 && c->weight.im == 0)
        c->weight.on = false;
    c->reduced = fan_given(a[FAN_PASS_REDUCER]) != NULL;
    return bad;
}

static int pass_read_functions(pass_parts *parts, PyObject *const *a)
{
    fan_pass_config *c = &parts->config;
    void *one = NULL;
    if (function_arg(c, a[FAN_PASS_SCHEDULE], "schedule", &c->schedule) < 0)
        return -1;
    if (function_arg(c, a[FAN_PASS_PROGRESS], "progress", &c->progress) < 0)
        return -1;
    if (function_arg(c, a[FAN_PASS_ONE], "one", &one) < 0)
        return -1;
    parts->one = one;
    return 0;
}

static bool is_count_of_workers(int64_t n)
{
    return n >= 1 && n <= FAN_WORKERS_MOST;
}

static int pass_read_workers(pass_parts *parts, PyObject *const *a)
{
    fan_pass_config *c = &parts->config;
    PyObject *workers = NULL;
    int64_t n = 1;
    if (!parts->is_walk)
        workers = a[FAN_PASS_WORKERS];
    if (workers)
        n = fan_small_index(workers);
    if (!is_count_of_workers(n)) {
        char named[64];
        PyOS_snprintf(named, sizeof named, "%s: workers", c->call);
        if (fan_index(workers, named, NULL, &n) < 0)
            return -1;
        if (!is_count_of_workers(n)) {
            return fan_set_error(PyExc_ValueError,
                                 "%s: expected a number of threads from 1 to %d, got %R", named,
                                 FAN_WORKERS_MOST, workers);
        }
    }
    const char *reason = NULL;
    if (c->schedule)
        reason = "schedule= picks the next node of one worker";
    else if (c->create_graph) {
        reason = "create_graph=True numbers the new nodes in the order of their creation, and the "
                 "order of later sums depends on these numbers";
    }
    if (n > 1 && reason) {
        return fan_set_error(PyExc_ValueError, "%s: %s: give it without workers=%lld", c->call,
                             reason, (long long)n);
    }
    /* a graph tree's function has one; the bits are the same */
    c->workers = (uint32_t)n;
    if (fan_wants_handles(NULL))
        c->workers = 1;
    return 0;
}

/* read_node: a node, or a tuple of from 2 to `most` items that begins with a node and a slot. */
static int read_node(const pass_parts *parts, const char *what, size_t index, PyObject *item,
                     Py_ssize_t most, node_object **to, uint32_t *slot)
{
    bool tuple =
        PyTuple_Check(item) && PyTuple_GET_SIZE(item) >= 2 && PyTuple_GET_SIZE(item) <= most;
    PyObject *node = item;
    if (tuple)
        node = PyTuple_GET_ITEM(item, 0);
    *slot = 0;
    *to = fan_node_arg(node);
    if (!*to) {
        const char *got = FAN_TYPE_TEXT(item);
        char text[208];
        if (PyObject_TypeCheck(node, fan_state_get()->node_type)) {
            PyOS_snprintf(text, sizeof text, "a %.160s whose Node.__init__ has not run",
                          Py_TYPE(node)->tp_name);
            got = text;
        }
        return fan_drop_result(fan_call("fanin._mistakes", "no_node", "(ssnOs)", parts->config.call,
                                        what, (Py_ssize_t)index, item, got));
    }
    if (!tuple)
        return 0;
    return slot_of(parts, what, index, *to, PyTuple_GET_ITEM(item, 1), slot);
}

static int pass_read_inputs(pass_parts *parts)
{
    fan_pass_config *c = &parts->config;
    for (size_t i = 0; i < c->nwanted; i++) {
        fan_wanted *wanted = &c->wanted[i];
        PyObject *item = PyTuple_GET_ITEM(parts->inputs, (Py_ssize_t)i);
        node_object *to;
        if (read_node(parts, "input", i, item, 2, &to, &wanted->slot) < 0)
            return -1;
        wanted->node = &to->node;
        if (!c->capture && !to->node.ops->leaf) {
            return fan_set_error(
                PyExc_TypeError,
                "%s: input %zu: %s is no leaf and keeps no gradient: fanin.grad(roots, inputs) "
                "returns that of any node",
                c->call, i, fan_node_name(&to->node).text);
        }
    }
    return 0;
}

/* gradient_of_root: the caller's, else that of one=, else one; new reference. */
static PyObject *gradient_of_root(const pass_parts *parts, size_t index, PyObject *item,
                                  node_object *to, uint32_t slot)
{
    if (PyTuple_Check(item) && PyTuple_GET_SIZE(item) == 3) {
        PyObject *given = PyTuple_GET_ITEM(item, 2);
        if (given != Py_None)
            return Py_NewRef(given);
    }
    if (!parts->one)
        return one_of(parts, index, to, slot);
    PyObject *gradient = PyObject_CallFunction(parts->one, "OI", to, (unsigned)slot);
    if (gradient == Py_None) {
        Py_CLEAR(gradient);
        PyErr_Format(PyExc_TypeError,
                     "%s: root %zu (%s, slot %u): one= returned None; expected a gradient",
                     parts->config.call, index, fan_node_name(&to->node).text, slot);
    }
    return gradient;
}

static int pass_read_roots(pass_parts *parts)
{
    fan_pass_config *c = &parts->config;
    for (size_t i = 0; i < c->nroots; i++) {
        PyObject *item = PyTuple_GET_ITEM(parts->roots, (Py_ssize_t)i);
        node_object *to;
        uint32_t slot;
        if (read_node(parts, "root", i, item, 3, &to, &slot) < 0)
            return -1;
        PyObject *gradient = NULL;
        if (!parts->is_order) {
            gradient = gradient_of_root(parts, i, item, to, slot);
            if (!gradient)
                return -1;
        }
        c->roots[i] = (fan_root){&to->node, slot, gradient};
    }
    return 0;
}

/* parse: fan_py_pass_begin drops what it wrote, also after an error. */
static int parse(pass_parts *parts, PyObject *const *a)
{
    fan_pass_config *c = &parts->config;
    if (c->capture && a[FAN_PASS_INPUTS] == Py_None)
        return fan_set_error(PyExc_TypeError, "grad() needs 'inputs'");
    if (pass_read_options(parts, a) < 0 || pass_read_weight(parts, a) < 0)
        return -1;
    if (sequence_of(parts, "roots", a[FAN_PASS_ROOTS], &parts->roots) < 0)
        return -1;
    c->limited = fan_given(a[FAN_PASS_INPUTS]);
    if (parts->is_order)
        c->capture = c->limited; /* inputs= may name nodes, as for grad() */
    if (c->limited && sequence_of(parts, "inputs", a[FAN_PASS_INPUTS], &parts->inputs) < 0)
        return -1;
    if (pass_read_functions(parts, a) < 0 || pass_read_workers(parts, a) < 0)
        return -1;

    size_t nroots = (size_t)PyTuple_GET_SIZE(parts->roots);
    size_t nwanted = 0;
    if (c->limited)
        nwanted = (size_t)PyTuple_GET_SIZE(parts->inputs);
    if (c->limited && !nwanted) {
        return fan_set_error(PyExc_ValueError,
                             "%s: inputs: expected at least one, or None for all leaves", c->call);
    }
    c->roots = fan_calloc(nroots * sizeof *c->roots);
    c->wanted = fan_calloc(nwanted * sizeof *c->wanted);
    if (!c->roots || !c->wanted)
        return fan_no_memory();
    c->nroots = nroots;
    c->nwanted = nwanted;
    if (pass_read_inputs(parts) < 0)
        return -1;
    return pass_read_roots(parts);
}

fan_pass *fan_py_pass_begin(const char *call, PyObject *const *a, size_t *nwanted)
{
    pass_parts parts = {.is_walk = strcmp(call, "walk") == 0,
                        .is_order = strcmp(call, "order") == 0,
                        .config = {.frontend = &fan_python_engine,
                                   .call = call,
                                   .capture = strcmp(call, "grad") == 0}};
    fan_pass *pass = NULL;
    fan_sched_access(FAN_THING_GRAPH, 0, FAN_SCHED_WRITE);
    if (parse(&parts, a) == 0) {
        (void)FAN_CHECK(fan_pass_begin(&parts.config, &pass, &err));
        *nwanted = parts.config.nwanted;
    }
    for (size_t i = 0; parts.config.roots && i < parts.config.nroots; i++)
        Py_XDECREF((PyObject *)parts.config.roots[i].gradient);
    fan_free(parts.config.roots);
    fan_free(parts.config.wanted);
    Py_XDECREF(parts.roots);
    Py_XDECREF(parts.inputs);
    return pass;
}

/* ---- backward, grad ---- */

int fan_py_pass_run(fan_pass *pass)
{
    FAN_UNINITIALIZED fan_error err;
    fan_error_clear(&err);
    fan_status status = fan_pass_seed(pass, &err);
    if (status == FAN_OK)
        status = fan_pass_run(pass, &err);
    if (status == FAN_OK)
        status = fan_pass_join(pass, &err);
    if (status == FAN_OK)
        return 0;
    fan_py_pass_failed(pass, status, &err);
    return -1;
}

void fan_py_pass_end(fan_pass *pass)
{
    PyObject *live = fan_exception_take();
    fan_pass_end(pass);
    fan_exception_put(live);
}

/* The last pass that this thread began with backward(): a reducer's leaves accumulate after it. */
static _Thread_local uint64_t last_pass;

static int backward_run(PyObject *const *a)
{
    size_t nwanted;
    fan_pass *pass = fan_py_pass_begin("backward", a, &nwanted);
    if (!pass)
        return -1;
    int bad = fan_py_pass_run(pass);
    last_pass = fan_pass_id(pass);
    fan_py_pass_end(pass);
    return bad;
}

/* backward: a reducer takes its leaves' sums, and accumulates their sums over ranks at the end. The
 * pass's exception is raised also if the reducer has another. */
static PyObject *backward(PyObject *Py_UNUSED(m), PyObject *const *a)
{
    PyObject *reducer = a[FAN_PASS_REDUCER];
    if (!fan_given(reducer))
        return fan_none_unless(backward_run(a) < 0);
    if (a[FAN_PASS_CREATE_GRAPH] == Py_True) {
        return PyErr_Format(
            PyExc_ValueError,
            "backward: a pass with reducer= cannot record itself (create_graph=True)");
    }
    PyObject *method = fan_state_get()->str_reduced;
    if (!PyObject_HasAttr(reducer, method)) {
        return PyErr_Format(PyExc_TypeError,
                            "backward: reducer: expected a fanin.dist.Reducer, got %s",
                            FAN_TYPE_TEXT(reducer));
    }
    PyObject *const given[] = {reducer, Py_False, fan_or_none(a[FAN_PASS_WEIGHT])};
    PyObject *block = PyObject_VectorcallMethod(method, given, 3, NULL);
    if (!block)
        return NULL;
    if (fan_drop_result(fan_block_begin(block)) < 0) {
        Py_DECREF(block);
        return NULL;
    }
    int bad = backward_run(a);
    PyObject *error = fan_exception_take();
    if (fan_block_end(block, error) < 0)
        bad = -1;
    Py_DECREF(block);
    /* Ctrl-C at the end goes before the error of the pass. */
    bool interrupted = PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception);
    if (interrupted)
        Py_XDECREF(error);
    else if (error)
        fan_exception_put(error);
    return fan_none_unless(bad);
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

/* divert_one: `taker` is (leaf, to, keeping), as for leaves_divert. Returns 0, or -1 with an
 * exception. */
static int divert_one(PyObject *taker, bool keeps)
{
    leaf_object *leaf = leaf_of_arg(PyTuple_GET_ITEM(taker, 0));
    if (!leaf)
        return -1;
    if (leaf->divert) {
        return fan_set_error(PyExc_RuntimeError,
                             "%s: another fanin.dist.Reducer takes its gradients now",
                             fan_node_name(&leaf->base.node).text);
    }
    PyObject *to = PyTuple_GET_ITEM(taker, 1);
    if (keeps) {
        /* with an earlier gradient it would be added, from memory that is not in a cache */
        PyObject *grad = fan_leaf_grad_now(leaf);
        if (PyErr_Occurred())
            return -1;
        if (!grad)
            to = PyTuple_GET_ITEM(taker, 2);
        Py_XDECREF(grad);
    }
    leaf->divert = Py_NewRef(to);
    return 0;
}

static PyObject *leaves_divert(PyObject *Py_UNUSED(m), PyObject *const *a)
{
    if (!PyList_Check(a[0]))
        return PyErr_Format(PyExc_TypeError, "expected a list, got %s", FAN_TYPE_TEXT(a[0]));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(a[0]); i++) {
        if (divert_one(PyList_GET_ITEM(a[0], i), a[1] == Py_True) < 0)
            return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *leaves_undivert(PyObject *Py_UNUSED(m), PyObject *takers)
{
    if (!PyList_Check(takers))
        return PyErr_Format(PyExc_TypeError, "expected a list, got %s", FAN_TYPE_TEXT(takers));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(takers); i++) {
        PyObject *taker = PyList_GET_ITEM(takers, i);
        leaf_object *leaf = leaf_of_arg(PyTuple_GET_ITEM(taker, 0));
        if (!leaf)
            return NULL;
        PyObject *to = leaf->divert;
        if (to == PyTuple_GET_ITEM(taker, 1) || to == PyTuple_GET_ITEM(taker, 2))
            Py_CLEAR(leaf->divert);
    }
    Py_RETURN_NONE;
}

static PyObject *leaf_dtype(PyObject *Py_UNUSED(m), PyObject *o)
{
    const leaf_object *leaf = leaf_of_arg(o);
    if (!leaf)
        return NULL;
    const fan_slot_spec *spec = fan_node_specs(&leaf->base.node);
    if (!spec || spec->dtype == FAN_DT_NONE)
        Py_RETURN_NONE;
    return PyUnicode_FromString(fan_dtype_name(spec->dtype));
}

/* digest_reduced: writes the digest of what a reducer's leaf has after the pass. */
static void digest_reduced(leaf_object *leaf)
{
    if (!fan_trace_digests())
        return;
    const fan_trace_work work = {.pass = last_pass, .node = leaf->base.node.number};
    fan_trace_line line = {
        .kind = FAN_TRACE_DIGEST,
        .how = FAN_DIGEST_LEAF,
        .device = -1,
        .slot = 0,
        .key = -1,
        .to = leaf->base.node.number,
        .start_us = -1,
        .end_us = -1,
    };
    PyObject *gradient = fan_leaf_grad_now(leaf);
    if (!gradient)
        PyErr_Clear();
    fan_digest(gradient, NULL, 0, &line);
    fan_trace_work outer = fan_trace_work_begin(work);
    fan_trace_put(&line);
    (void)fan_trace_work_begin(outer);
    Py_XDECREF(gradient);
}

/* accumulate_sum: takes the reference `taken`; the only one to a sum may become .grad itself (L3).
 * Returns 0, or -1 with an exception. */
static int accumulate_sum(PyObject *o, PyObject *taken)
{
    void *sum = taken;
    void *hooks = NULL;
    int bad = -1;
    if (!fan_node_arg(o)) { /* a tensor's */
        PyObject *none = PyObject_CallMethodOneArg(o, fan_state_get()->str_accumulate, taken);
        Py_DECREF(taken);
        return fan_drop_result(none);
    }
    leaf_object *leaf = leaf_of_arg(o);
    if (leaf && fan_hooks_of_node(&leaf->base, &hooks) == 0)
        bad = fan_leaf_accumulate(leaf, &sum, false, (fan_weight){.on = false});
    if (!bad)
        digest_reduced(leaf);
    if (!bad)
        bad = fan_hooks_accumulated(&leaf->base, hooks);
    Py_XDECREF((PyObject *)sum);
    Py_XDECREF((PyObject *)hooks);
    return bad;
}

static PyObject *leaves_accumulate(PyObject *Py_UNUSED(m), PyObject *const *a)
{
    int64_t i;
    if (fan_index(a[2], "first", PyExc_ValueError, &i) < 0)
        return NULL;
    bool fits = PyList_Check(a[0]) && PyList_Check(a[1]);
    if (!fits || PyList_GET_SIZE(a[0]) != PyList_GET_SIZE(a[1]))
        return PyErr_Format(PyExc_ValueError, "expected lists of leaves and their sums");
    for (; i < PyList_GET_SIZE(a[1]) && i < PyList_GET_SIZE(a[0]); i++) {
        PyObject *sum = Py_NewRef(PyList_GET_ITEM(a[1], i));
        PyObject *leaf = Py_NewRef(PyList_GET_ITEM(a[0], i));
        (void)PyList_SetItem(a[1], i, Py_NewRef(Py_None));
        int bad = 0;
        if (sum == Py_None)
            Py_DECREF(sum);
        else
            bad = accumulate_sum(leaf, sum);
        Py_DECREF(leaf);
        if (bad < 0)
            return Py_BuildValue("(LN)", (long long)i, fan_exception_take());
    }
    Py_RETURN_NONE;
}

static PyObject *grad(PyObject *Py_UNUSED(m), PyObject *const *a)
{
    size_t nwanted;
    fan_pass *pass = fan_py_pass_begin("grad", a, &nwanted);
    PyObject *sums = NULL;
    if (!pass)
        return NULL;
    if (fan_py_pass_run(pass) == 0)
        sums = PyList_New((Py_ssize_t)nwanted);
    for (size_t i = 0; sums && i < nwanted; i++) {
        void *sum = fan_pass_result(pass, i);
        if (fan_box(&sum) < 0) {
            fan_object_drop(sum);
            Py_CLEAR(sums);
        } else {
            PyList_SET_ITEM(sums, (Py_ssize_t)i, fan_take_or_none(sum));
        }
    }
    fan_py_pass_end(pass);
    return sums;
}

/* ---- order ---- */

/* steps_list: of each step the node, the step that made it ready (-1: the roots), whether its
 * function runs; NULL with an exception. */
static PyObject *steps_list(const fan_pass_step *steps, uint32_t n)
{
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list && i < n; i++) {
        const fan_pass_step *step = &steps[i];
        long long after = -1;
        if (step->after != UINT32_MAX)
            after = step->after;
        fan_list_add(&list, Py_BuildValue("(OLO)", (PyObject *)fan_node_object(step->node), after,
                                          step->runs ? Py_True : Py_False));
    }
    return list;
}

static PyObject *order_steps(PyObject *Py_UNUSED(m), PyObject *const *a)
{
    PyObject *const args[FAN_PASS_ARGS] = {[FAN_PASS_ROOTS] = a[0], [FAN_PASS_INPUTS] = a[1]};
    size_t nwanted;
    fan_pass *pass = fan_py_pass_begin("order", args, &nwanted);
    if (!pass)
        return NULL;
    uint32_t ran, all;
    (void)fan_pass_at(pass, &ran, &all);
    PyObject *list = NULL;
    fan_pass_step *steps = fan_alloc(all * sizeof *steps);
    if (!steps)
        (void)fan_no_memory();
    else if (FAN_CHECK(fan_pass_order(pass, steps, &err)) == 0)
        list = steps_list(steps, all);
    fan_free(steps);
    fan_py_pass_end(pass);
    return list;
}

#include "py/declared/pass.h"
