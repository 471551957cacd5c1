/* walk: `fanin.walk(roots)`: a pass whose nodes the caller runs (E16).
 *
 * First the end of a walk; then `next`, which prepares the sums of a node; then `give`, which
 * delivers its gradients; last the type, the function and `explain`. */
#include "py/engine/node_object.h"
#include "py/base/args.h"

#include "base/mem.h"

typedef struct walk_object {
    PyObject_HEAD fan_pass *pass; /* NULL: it has ended */
    node_object *now;             /* held: the node that waits for give(); NULL: none */
    /* .. its sums, a tuple; of a boxed node a list of those that other code holds, too */
    PyObject *sums;
    fan_guards guards; /* .. of sums with other references */
    /* .. and its post-hooks (engine/engine.h, hooks); NULL: none */
    PyObject *node_hooks;
    PyObject *last; /* the text of `explain` at an early end; NULL: none */
    bool busy;      /* a call is running */
} walk_object;

static walk_object *walk_cast(PyObject *o)
{
    return (walk_object *)o;
}

static void walk_end(walk_object *self)
{
    PyObject *live = fan_exception_take();
    (void)fan_guards_end(&self->guards, NULL);
    const walk_object was = *self;
    self->pass = NULL; /* before any drop, which may run arbitrary code */
    self->now = NULL;
    self->sums = NULL;
    self->node_hooks = NULL;
    fan_pass_end(was.pass);
    Py_XDECREF((PyObject *)was.now);
    Py_XDECREF(was.sums);
    Py_XDECREF(was.node_hooks);
    fan_exception_put(live);
}

static int walk_check_idle(walk_object *self)
{
    if (!self->busy)
        return 0;
    return fan_set_error(PyExc_RuntimeError,
                         "walk: a call of this pass is running, on this thread or another");
}

/* keep_last: the text of `explain`, for use after the end. */
static void keep_last(walk_object *self)
{
    PyObject *live = fan_exception_take();
    if (self->pass)
        Py_XSETREF(self->last, fan_explain_pass(self->pass, NULL));
    PyErr_Clear();
    fan_exception_put(live);
}

/* walk_failed: ends the pass with an exception; NULL. */
static PyObject *walk_failed(walk_object *self, fan_status status, const fan_error *err)
{
    fan_py_pass_failed(self->pass, status, err);
    keep_last(self);
    walk_end(self);
    return NULL;
}

/* walk_depth_add: one more nested pass on this thread: 0, or -1: the pass has ended. */
static int walk_depth_add(walk_object *self)
{
    if (fan_pass_depth(1))
        return 0;
    FAN_UNINITIALIZED fan_error err;
    fan_error_clear(&err);
    walk_failed(self, fan_pass_too_deep(&err), &err);
    return -1;
}

/* sums_now: writes self->sums: the tuple of the current node's sums, after the hooks that run
 * before it; of a boxed node a list. */
static fan_status sums_now(walk_object *self, fan_error *err)
{
    uint32_t n = self->now->node.inputs;
    void **sums = fan_calloc(n * sizeof *sums);
    void *node_hooks = NULL;
    fan_streams_outer outer;
    if (!sums)
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    fan_pass_enter(self->pass, &outer);
    fan_status status = fan_pass_sums(self->pass, sums, &node_hooks, err);
    if (status == FAN_OK && node_hooks && fan_hooks_pre(self->now, node_hooks, sums) < 0)
        status = fan_from_python(err);
    fan_streams_leave(&outer);
    self->node_hooks = node_hooks;
    if (status == FAN_OK && fan_box_all(sums, n) < 0)
        status = fan_from_python(err);
    bool boxed = fan_node_is_boxed(self->now);
    if (status == FAN_OK) {
        if (boxed)
            self->sums = PyList_New(n);
        else
            self->sums = PyTuple_New(n);
        if (!self->sums || fan_guards_begin(&self->guards, sums, n) < 0)
            status = fan_from_python(err);
    }
    for (uint32_t i = 0; i < n; i++) {
        if (status == FAN_OK && boxed)
            PyList_SET_ITEM(self->sums, i, fan_take_or_none(sums[i]));
        else if (status == FAN_OK)
            PyTuple_SET_ITEM(self->sums, i, fan_take_or_none(sums[i]));
        else if (sums[i])
            fan_object_drop(sums[i]);
    }
    fan_free(sums);
    return status;
}

/* pair_of_node: the current node with its sums; a boxed one's are the caller's alone from then on.
 */
static PyObject *pair_of_node(walk_object *self)
{
    PyObject *pair = PyTuple_Pack(2, (PyObject *)self->now, self->sums);
    if (!pair || !fan_node_is_boxed(self->now))
        return pair;
    PyObject *shared = fan_guards_shared(&self->guards);
    if (shared)
        Py_SETREF(self->sums, shared);
    else
        Py_CLEAR(pair);
    return pair;
}

static PyObject *next_node(walk_object *self)
{
    FAN_UNINITIALIZED fan_error err;
    fan_status status = FAN_OK;
    fan_node *n = NULL;
    fan_error_clear(&err);
    if (!fan_pass_seeded(self->pass))
        status = fan_pass_seed(self->pass, &err);
    if (status == FAN_OK)
        status = fan_pass_next(self->pass, &n, &err);
    if (status == FAN_OK && !n) {
        status = fan_pass_join(self->pass, &err);
        if (status != FAN_OK)
            return walk_failed(self, status, &err);
        walk_end(self);
        return NULL;
    }
    if (status == FAN_OK) {
        self->now = fan_node_object(n);
        Py_INCREF((PyObject *)self->now);
        fan_pass_walk_runs(self->pass, true);
        status = sums_now(self, &err);
        if (status == FAN_OK && n->freed_by) /* by a pass inside a hook */
            status = fan_node_freed(n, &err);
        fan_pass_walk_runs(self->pass, false);
    }
    if (status != FAN_OK)
        return walk_failed(self, status, &err);
    return pair_of_node(self);
}

static PyObject *walk_next(PyObject *o)
{
    walk_object *self = walk_cast(o);
    if (walk_check_idle(self) < 0 || !self->pass)
        return NULL;
    if (self->now) {
        return PyErr_Format(PyExc_RuntimeError,
                            "walk: give() the gradients of %s before the next node",
                            fan_node_name(&self->now->node).text);
    }
    PyObject *pair = NULL;
    self->busy = true;
    if (walk_depth_add(self) == 0)
        pair = next_node(self);
    fan_pass_depth(-1);
    self->busy = false;
    if (!pair && PyErr_Occurred())
        fan_iteration_failed("walk", PyExc_StopIteration);
    return pair;
}

/* gradients_check: writes what the node's function would have returned to gradients[n], and calls
 * the post-hooks: 0, or -1 with an exception. */
static int gradients_check(walk_object *self, PyObject *result, void **sums, void **gradients,
                           uint32_t n)
{
    bool boxed = fan_node_is_boxed(self->now); /* without post-hooks, which would get the sums */
    for (uint32_t i = 0; i < self->now->node.inputs && !boxed; i++)
        sums[i] = fan_given(PyTuple_GET_ITEM(self->sums, i));
    if (fan_guards_end(&self->guards, &self->now->node) < 0)
        return -1;
    if (fan_gradients_of(Py_NewRef(result), &self->now->node, NULL, gradients, n) < 0)
        return -1;
    if (!self->node_hooks)
        return 0;
    return fan_hooks_post(self->now, self->node_hooks, sums, gradients, n);
}

/* gradients_given: checks and delivers what the node's function would have returned; 0, or -1: the
 * pass has ended. */
static int gradients_given(walk_object *self, PyObject *result)
{
    uint32_t n = fan_pass_edges(self->pass);
    void **gradients = fan_calloc(n * sizeof *gradients);
    void **sums = fan_calloc(self->now->node.inputs * sizeof *sums);
    FAN_UNINITIALIZED fan_error err;
    fan_status status = FAN_ERR_NOMEM;
    fan_streams_outer outer;
    fan_error_clear(&err);
    fan_pass_walk_runs(self->pass, true);
    fan_pass_enter(self->pass, &outer);
    if (gradients && sums) {
        if (gradients_check(self, result, sums, gradients, n) == 0) {
            status = fan_pass_give(self->pass, gradients, self->node_hooks, &err);
        } else {
            status = fan_from_python(&err);
            for (uint32_t i = 0; i < n; i++)
                Py_XDECREF((PyObject *)gradients[i]);
        }
    }
    fan_streams_leave(&outer);
    fan_free(gradients);
    fan_free(sums);
    if (status != FAN_OK) {
        walk_failed(self, status, &err);
        return -1;
    }
    (void)fan_guards_end(&self->guards, NULL);
    Py_CLEAR(self->now);
    Py_CLEAR(self->sums);
    Py_CLEAR(self->node_hooks);
    return 0;
}

static PyObject *walk_give(PyObject *o, PyObject *result)
{
    walk_object *self = walk_cast(o);
    if (walk_check_idle(self) < 0)
        return NULL;
    if (!self->now) {
        return PyErr_Format(PyExc_RuntimeError,
                            "walk: no node waits for gradients: call next() first");
    }
    self->busy = true;
    int bad = walk_depth_add(self);
    if (!bad)
        bad = gradients_given(self, result);
    fan_pass_depth(-1);
    self->busy = false;
    return fan_none_unless(bad);
}

static PyObject *walk_close(PyObject *o, PyObject *Py_UNUSED(none))
{
    if (walk_check_idle(walk_cast(o)) < 0)
        return NULL;
    keep_last(walk_cast(o));
    walk_end(walk_cast(o));
    Py_RETURN_NONE;
}

/* ---- Walk ---- */

typedef struct visitor {
    visitproc visit;
    void *arg;
} visitor;

static int visit_object(void *object, void *arg)
{
    const visitor *v = arg;
    if (fan_is_unboxed(object))
        return 0;
    return v->visit((PyObject *)object, v->arg);
}

static int visit_node(fan_node *n, void *arg)
{
    const visitor *v = arg;
    return v->visit((PyObject *)fan_node_object(n), v->arg);
}

static int walk_traverse(PyObject *o, visitproc visit, void *arg)
{
    walk_object *self = walk_cast(o);
    visitor v = {visit, arg};
    Py_VISIT(Py_TYPE(o));
    Py_VISIT((PyObject *)self->now);
    Py_VISIT(self->sums);
    Py_VISIT(self->node_hooks);
    if (!self->pass)
        return 0;
    return fan_pass_visit(self->pass, visit_object, visit_node, &v);
}

static int walk_clear(PyObject *o)
{
    walk_end(walk_cast(o));
    return 0;
}

static void walk_dealloc(PyObject *o)
{
    PyTypeObject *type = Py_TYPE(o);
    PyObject_GC_UnTrack(o);
    walk_end(walk_cast(o));
    Py_CLEAR(walk_cast(o)->last);
    type->tp_free(o);
    Py_DECREF(type);
}

static PyObject *walk(PyObject *Py_UNUSED(m), PyObject *const *a)
{
    PyTypeObject *type = fan_state_get()->walk_type;
    size_t nwanted;
    fan_pass *pass = fan_py_pass_begin("walk", a, &nwanted);
    if (!pass)
        return NULL;
    walk_object *self = (walk_object *)type->tp_alloc(type, 0);
    if (self)
        self->pass = pass;
    else
        fan_pass_end(pass);
    return (PyObject *)self;
}

static PyObject *walk_explain(PyObject *o, PyObject *const *a)
{
    const walk_object *self = walk_cast(o);
    PyObject *given = fan_given(a[0]);
    const fan_node *only = NULL;
    if (given) {
        const node_object *node = fan_node_arg(given);
        if (!node) {
            return PyErr_Format(PyExc_TypeError,
                                "explain: expected a fanin.Node, a fanin.Leaf or None, got %s",
                                FAN_TYPE_TEXT(given));
        }
        only = &node->node;
    }
    if (self->pass)
        return fan_explain_pass(self->pass, only);
    if (self->last)
        return Py_NewRef(self->last);
    return PyUnicode_FromString("");
}

#include "py/declared/Walk.h"

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)walk_doc},   {Py_tp_dealloc, walk_dealloc},
    {Py_tp_traverse, walk_traverse}, {Py_tp_clear, walk_clear},
    {Py_tp_iter, PyObject_SelfIter}, {Py_tp_iternext, walk_next_step},
    {Py_tp_methods, walk_methods},   {0, NULL},
};

PyType_Spec fan_pass_walk_spec = {
    .name = "fanin._core.Walk",
    .basicsize = sizeof(walk_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};

#include "py/declared/walk.h"
