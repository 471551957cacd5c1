/* hooks: functions that users register on nodes (E9): per slot, before the node, after it; of a
 * leaf, after its accumulation. They run in this order.
 *
 * A node's hooks are tuples that are replaced and never changed, so a running hook may add or
 * remove hooks. */
#include "py/engine/node_object.h"

#include "base/mem.h"

#include <string.h>

static PyObject *hook_fn(PyObject *hook)
{
    return PyTuple_GET_ITEM(hook, 0);
}

/* ---- add and remove ---- */

node_more *fan_node_more(node_object *self)
{
    if (self->more)
        return self->more;
    self->more = fan_calloc(sizeof *self->more);
    if (!self->more)
        PyErr_NoMemory();
    return self->more;
}

/* tuple_quietly: a new tuple without garbage collection, which might change the hooks. */
static PyObject *tuple_quietly(Py_ssize_t n)
{
    int ran = PyGC_Disable();
    PyObject *all = PyTuple_New(n);
    if (ran)
        PyGC_Enable();
    return all;
}

static Py_ssize_t hooks_count(PyObject *hooks)
{
    if (!hooks)
        return 0;
    return PyTuple_GET_SIZE(hooks);
}

/* hooks_replace: *hooks becomes a tuple with `hook` after all its items, of which `at` is the
 * number; hook NULL: without the item at `at`. */
static int hooks_replace(PyObject **hooks, Py_ssize_t at, PyObject *hook)
{
    PyObject *before = *hooks;
    PyObject *all = NULL;
    Py_ssize_t n = hooks_count(before);
    Py_ssize_t put = 0;
    if (hook || n > 1) {
        all = tuple_quietly(hook ? n + 1 : n - 1);
        if (!all)
            return -1;
    }
    for (Py_ssize_t i = 0; all && i < n; i++) {
        if (i != at)
            PyTuple_SET_ITEM(all, put++, Py_NewRef(PyTuple_GET_ITEM(before, i)));
    }
    if (hook)
        PyTuple_SET_ITEM(all, put, Py_NewRef(hook));
    *hooks = all;
    Py_XDECREF(before);
    return 0;
}

PyObject *fan_hooks_add(node_object *owner, PyObject *fn, fan_hook_when when, uint32_t slot)
{
    PyObject *type = fan_lazy(&fan_state_get()->hook_type, "fanin._engine", "HookHandle");
    if (!PyCallable_Check(fn)) {
        return PyErr_Format(PyExc_TypeError, "hook: expected a function, got %s",
                            FAN_TYPE_TEXT(fn));
    }
    if (when == FAN_HOOK_POST && fan_node_is_boxed(owner)) {
        return PyErr_Format(PyExc_ValueError,
                            "%s: register_posthook: a hook after the node gets its sums, which the "
                            "function of a node with boxed=True may have dropped: give "
                            "boxed=False, or register_prehook",
                            fan_node_name(&owner->node).text);
    }
    fan_sched_access(FAN_THING_GRAPH, 0, FAN_SCHED_WRITE);
    if (!type || !fan_node_more(owner))
        return NULL;
    PyObject *hook = Py_BuildValue("(OI)", fn, slot);
    if (!hook)
        return NULL;
    PyObject *handle =
        PyObject_CallFunction(type, "NO", PyWeakref_NewRef((PyObject *)owner, NULL), hook);
    PyObject **hooks = &owner->more->hooks[when];
    if (handle && hooks_replace(hooks, hooks_count(*hooks), hook) < 0)
        Py_CLEAR(handle);
    Py_DECREF(hook);
    return handle;
}

PyObject *fan_hooks_remove(node_object *owner, PyObject *hook)
{
    fan_sched_access(FAN_THING_GRAPH, 0, FAN_SCHED_WRITE);
    for (int when = 0; owner->more && when < FAN_HOOK_TIMES; when++) {
        PyObject **hooks = &owner->more->hooks[when];
        Py_ssize_t n = hooks_count(*hooks);
        Py_ssize_t at = 0;
        while (at < n && PyTuple_GET_ITEM(*hooks, at) != hook)
            at++;
        if (at < n)
            return fan_none_unless(hooks_replace(hooks, at, NULL) < 0);
    }
    Py_RETURN_NONE;
}

/* ---- what functions and hooks return ---- */

/* The result of value_text. */
typedef struct fan_value_label {
    char text[256];
} fan_value_label;

/* refuse_number: the error of a result that holds another number of gradients. */
__attribute__((noinline, cold)) static void refuse_number(PyObject *result, const fan_node *n,
                                                          const char *who, uint32_t expected)
{
    const fan_node_label name = fan_node_name(n);
    const char *advice = "";
    if (!who)
        who = name.text;
    if (result == Py_None)
        advice = ": does it lack a return?";
    if (PyTuple_Check(result) || PyList_Check(result)) {
        PyErr_Format(PyExc_ValueError,
                     "%s returned an invalid number of gradients: expected %u, got %zd", who,
                     expected, PySequence_Fast_GET_SIZE(result));
    } else if (expected == 0) {
        PyErr_Format(PyExc_ValueError,
                     "%s returned an invalid number of gradients: expected 0, got %s", who,
                     FAN_TYPE_TEXT(result));
    } else {
        PyErr_Format(PyExc_TypeError,
                     "%s returned an invalid number of gradients: expected a tuple of %u, got %s%s",
                     who, expected, FAN_TYPE_TEXT(result), advice);
    }
}

int fan_gradients_of(PyObject *result, const fan_node *n, const char *who, void **gradients,
                     uint32_t ngradients)
{
    bool several = PyTuple_Check(result) || PyList_Check(result);
    if (several && PySequence_Fast_GET_SIZE(result) == (Py_ssize_t)ngradients) {
        for (uint32_t i = 0; i < ngradients; i++) {
            PyObject *one = PySequence_Fast_GET_ITEM(result, (Py_ssize_t)i);
            gradients[i] = Py_XNewRef(fan_given(one));
        }
        Py_DECREF(result);
        return 0;
    }
    bool one = ngradients == 1 || (ngradients == 0 && result == Py_None);
    if (several || !one) {
        refuse_number(result, n, who, ngradients);
        Py_DECREF(result);
        return -1;
    }
    if (result != Py_None)
        gradients[0] = result;
    else
        Py_DECREF(result);
    return 0;
}

/* value_text: for a message, the shape, dtype and device of a value, or the class of an object
 * without them. */
static fan_value_label value_text(PyObject *o, const fan_value *v)
{
    fan_value_label made;
    const int64_t *shape;
    const char *word = "";
    char device[32], text[160];
    int ndim = fan_value_shape(v, &shape);
    if (ndim < 0) {
        if (PyArray_Check(o))
            word = ", which sums by its own +: return np.asarray(x)";
        PyOS_snprintf(made.text, sizeof made.text, "%s%s", FAN_TYPE_TEXT(o), word);
        return made;
    }
    if (v->form == FAN_FORM_SPARSE)
        word = "sparse ";
    fan_device *where = v->device ? v->device : fan_cpu();
    PyOS_snprintf(made.text, sizeof made.text, "%s%s %s on %s", word,
                  fan_shape_text(ndim, shape, text, sizeof text), fan_dtype_name(v->dtype),
                  fan_device_text(where, device, sizeof device));
    return made;
}

static bool same_plain(PyObject *was, PyObject *is)
{
    FAN_UNINITIALIZED fan_plain_kind one, two;
    char *data;
    if (!fan_plain_import(was, &one, &data) || !fan_plain_import(is, &two, &data))
        return false;
    if (one.dtype != two.dtype || one.ndim != two.ndim)
        return false;
    return memcmp(one.shape, two.shape, (size_t)one.ndim * sizeof *one.shape) == 0;
}

/* same_value: of one form, shape, dtype and device; objects have no dtype or shape. */
static bool same_value(const fan_value *a, const fan_value *b)
{
    const int64_t *shape, *other;
    int ndim = fan_value_shape(a, &shape);
    int other_ndim = fan_value_shape(b, &other);
    if (a->form != b->form)
        return false;
    if (ndim < 0)
        return true;
    if (ndim != other_ndim || a->dtype != b->dtype || a->device != b->device)
        return false;
    return ndim == 0 || memcmp(shape, other, (size_t)ndim * sizeof *shape) == 0;
}

/* check_replaced: of the same shape, dtype and device: 0, or -1 with an exception. */
static int check_replaced(PyObject *was, PyObject *is, const char *who, const char *at)
{
    fan_value a, b;
    if (same_plain(was, is))
        return 0;
    if (fan_import(was, false, true, &a) < 0)
        return -1;
    if (fan_import(is, false, true, &b) < 0) {
        fan_value_release(&a);
        return -1;
    }
    int bad = 0;
    if (!same_value(&a, &b)) {
        const fan_value_label before = value_text(was, &a);
        bool objects = b.form == FAN_FORM_OBJECT && a.form != FAN_FORM_OBJECT && PyArray_Check(is);
        PyArray_Descr *dtype = NULL;
        if (objects)
            dtype = PyArray_DESCR((PyArrayObject *)is);
        if (dtype && fan_dtype_of_descr(dtype) == FAN_DT_NONE) {
            bad = fan_set_error(fan_state_get()->dtype_error,
                                "%s returned an invalid gradient%s: expected %s, got an array of "
                                "dtype %S: x.astype(..)",
                                who, at, before.text, (PyObject *)dtype);
        } else {
            bad = fan_set_error(PyExc_ValueError,
                                "%s returned an invalid gradient%s: expected %s, got %s", who, at,
                                before.text, value_text(is, &b).text);
        }
    }
    fan_value_release(&a);
    fan_value_release(&b);
    return bad;
}

/* sum_replace: *sum becomes `to`, whose hold it takes. Undefined sums stay undefined, and defined
 * ones defined. `at`: the index in the hook's result, " at index 1"; "": there is none. */
static int sum_replace(void **sum, PyObject *to, const char *who, const char *at)
{
    PyObject *was = *sum;
    bool none = fan_is_no_gradient(to);
    int bad = 0;
    if (!was != none) {
        const char *expected = "None, as there is no sum";
        const char *got = FAN_TYPE_TEXT(to);
        if (was)
            expected = "a gradient, as there is a sum";
        if (none && to != Py_None)
            got = "an array of float0";
        bad = fan_set_error(PyExc_ValueError,
                            "%s returned an invalid gradient%s: expected %s, got %s", who, at,
                            expected, got);
    } else if (was && to != was) {
        bad = check_replaced(was, to, who, at);
    }
    if (!bad && was) {
        *sum = to;
        to = was;
    }
    Py_DECREF(to);
    return bad;
}

static PyObject *tuple_of(void **sums, uint32_t n)
{
    PyObject *all = PyTuple_New(n);
    for (uint32_t i = 0; all && i < n; i++)
        PyTuple_SET_ITEM(all, i, Py_NewRef(fan_or_none(sums[i])));
    return all;
}

/* ---- run ---- */

/* call_slot_hook: calls a hook of a slot whose sum is defined, and replaces the sum by what it
 * returns. */
static int call_slot_hook(node_object *self, PyObject *hook, uint32_t slot, void **sum)
{
    FAN_UNINITIALIZED fan_guards guards;
    if (fan_guards_begin(&guards, sum, 1) < 0)
        return -1;
    PyObject *to = PyObject_CallOneArg(hook_fn(hook), *sum);
    if (fan_guards_end(&guards, &self->node) < 0)
        Py_CLEAR(to);
    if (!to)
        return -1;
    if (to == Py_None) {
        Py_DECREF(to);
        return 0;
    }
    char who[192];
    PyOS_snprintf(who, sizeof who, "a hook of slot %u of %s", slot,
                  fan_node_name(&self->node).text);
    return sum_replace(sum, to, who, "");
}

static int hooks_slots(node_object *self, void **sums)
{
    PyObject *all = Py_XNewRef(self->more->hooks[FAN_HOOK_SLOT]);
    int bad = 0;
    for (Py_ssize_t i = 0; all && i < PyTuple_GET_SIZE(all) && !bad; i++) {
        PyObject *hook = PyTuple_GET_ITEM(all, i);
        uint32_t slot = (uint32_t)PyLong_AsUnsignedLong(PyTuple_GET_ITEM(hook, 1));
        if (sums[slot])
            bad = call_slot_hook(self, hook, slot, &sums[slot]);
    }
    Py_XDECREF(all);
    return bad;
}

/* hooks_copy: A copy of a slot's sum, whose memory may be the caller's or another node's (A14).
 * torch's own copies keep their history. */
static PyObject *hooks_copy(const node_object *self, uint32_t slot, PyObject *sum)
{
    bool is_torch = PyObject_HasAttrString(sum, "grad_fn") && PyObject_HasAttrString(sum, "clone");
    if (is_torch)
        return PyObject_CallMethod(sum, "clone", NULL);
    return fan_node_sum(self, slot, sum, NULL, (fan_node_sum_options){.writable = true});
}

/* hooks_keep: retain_grad. */
static int hooks_keep(node_object *self, void **sums)
{
    PyObject *kept = Py_XNewRef(self->more->kept);
    int bad = 0;
    for (uint32_t i = 0; kept && i < self->node.inputs && !bad; i++) {
        if (!sums[i])
            continue;
        PyObject *slot = PyLong_FromUnsignedLong(i);
        PyObject *was = NULL;
        PyObject *now = NULL;
        if (slot)
            was = PyDict_GetItemWithError(kept, slot);
        if (was) {
            Py_INCREF(was); /* an object's own + may change the dict */
            if (was == Py_None)
                now = hooks_copy(self, i, sums[i]);
            else
                now = fan_add_two(was, sums[i]);
            Py_DECREF(was);
        }
        if (now)
            bad = PyDict_SetItem(kept, slot, now);
        else if (PyErr_Occurred())
            bad = -1;
        Py_XDECREF(now);
        Py_XDECREF(slot);
    }
    Py_XDECREF(kept);
    return bad;
}

bool fan_hooks_produced(const void *node_hooks, uint32_t index)
{
    PyObject *produced = PyTuple_GET_ITEM((PyObject *)(uintptr_t)node_hooks, 2);
    return produced != Py_None && PyByteArray_AS_STRING(produced)[index];
}

int fan_hooks_of_node(node_object *self, void **node_hooks)
{
    const node_more *more = self->more;
    if (!more || (!more->hooks[FAN_HOOK_PRE] && !more->hooks[FAN_HOOK_POST]))
        return 0;
    PyObject *all = tuple_quietly(3);
    PyObject *post = more->hooks[FAN_HOOK_POST];
    PyObject *produced = NULL;
    uint32_t n = self->node.nedges;
    if (!all)
        return -1;
    PyTuple_SET_ITEM(all, 0, Py_NewRef(fan_or_none(more->hooks[FAN_HOOK_PRE])));
    PyTuple_SET_ITEM(all, 1, Py_NewRef(fan_or_none(post)));
    if (post) { /* whether a post-hook returned each gradient */
        produced = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)n);
        if (!produced) {
            Py_DECREF(all);
            return -1;
        }
        memset(PyByteArray_AS_STRING(produced), 0, n);
    }
    PyTuple_SET_ITEM(all, 2, fan_take_or_none(produced));
    *node_hooks = all;
    return 0;
}

fan_status fan_hooks_sums(fan_node *n, void **sums, void **node_hooks, fan_error *err)
{
    node_object *self = fan_node_object(n);
    const node_more *more = self->more;
    if (!more)
        return FAN_OK;
    bool around = more->hooks[FAN_HOOK_PRE] || more->hooks[FAN_HOOK_POST];
    bool of_slots = more->hooks[FAN_HOOK_SLOT] || more->kept;
    if (!around && !of_slots)
        return FAN_OK;
    if (fan_box_all(sums, n->inputs) < 0 || fan_hooks_of_node(self, node_hooks) < 0)
        return fan_from_python(err);
    if (hooks_slots(self, sums) < 0 || hooks_keep(self, sums) < 0)
        return fan_from_python(err);
    return FAN_OK;
}

static PyObject *hooks_in(PyObject *node_hooks, Py_ssize_t which)
{
    if (!node_hooks)
        return NULL;
    return fan_given(PyTuple_GET_ITEM(node_hooks, which));
}

/* call_pre: the result of a pre-hook; NULL with an exception. */
static PyObject *call_pre(const node_object *self, PyObject *hook, void **sums)
{
    FAN_UNINITIALIZED fan_guards guards;
    uint32_t n = self->node.inputs;
    if (fan_guards_begin(&guards, sums, n) < 0)
        return NULL;
    PyObject *all_sums = tuple_of(sums, n);
    PyObject *to = NULL;
    if (all_sums)
        to = PyObject_CallOneArg(hook_fn(hook), all_sums);
    if (fan_guards_end(&guards, &self->node) < 0)
        Py_CLEAR(to);
    Py_XDECREF(all_sums);
    return to;
}

/* replace_all: the sums become those in `to`, what a pre-hook returned. */
static int replace_all(const node_object *self, void **sums, PyObject *to)
{
    uint32_t n = self->node.inputs;
    char who[192], at[24];
    PyOS_snprintf(who, sizeof who, "a pre-hook of %s", fan_node_name(&self->node).text);
    if (!PyTuple_Check(to) || PyTuple_GET_SIZE(to) != (Py_ssize_t)n) {
        return fan_set_error(PyExc_TypeError, "%s returned no tuple of %u sum%s: got %s", who, n,
                             FAN_PLURAL(n), FAN_TYPE_TEXT(to));
    }
    int bad = 0;
    for (uint32_t k = 0; k < n && !bad; k++) {
        PyOS_snprintf(at, sizeof at, " at index %u", k);
        bad = sum_replace(&sums[k], Py_NewRef(PyTuple_GET_ITEM(to, k)), who, at);
    }
    return bad;
}

int fan_hooks_pre(node_object *self, PyObject *node_hooks, void **sums)
{
    PyObject *all = hooks_in(node_hooks, 0);
    int bad = 0;
    for (Py_ssize_t i = 0; all && i < PyTuple_GET_SIZE(all) && !bad; i++) {
        PyObject *to = call_pre(self, PyTuple_GET_ITEM(all, i), sums);
        if (!to)
            return -1;
        if (to != Py_None)
            bad = replace_all(self, sums, to);
        Py_DECREF(to);
    }
    return bad;
}

/* call_post: the result of a post-hook, NULL with an exception. *were: the tuple of gradients that
 * it got. */
static PyObject *call_post(const node_object *self, PyObject *fn, void **sums, void **gradients,
                           uint32_t ngradients, PyObject **were)
{
    FAN_UNINITIALIZED fan_guards of_sums;
    FAN_UNINITIALIZED fan_guards of_gradients;
    *were = NULL;
    if (fan_guards_begin(&of_sums, sums, self->node.inputs) < 0)
        return NULL;
    if (fan_guards_begin(&of_gradients, gradients, ngradients) < 0) {
        (void)fan_guards_end(&of_sums, NULL);
        return NULL;
    }
    *were = tuple_of(gradients, ngradients);
    PyObject *both[2] = {tuple_of(sums, self->node.inputs), *were};
    PyObject *to = NULL;
    if (both[0] && both[1])
        to = PyObject_Vectorcall(fn, both, 2, NULL);
    if (fan_guards_end(&of_gradients, &self->node) < 0 || fan_guards_end(&of_sums, &self->node) < 0)
        Py_CLEAR(to);
    Py_XDECREF(both[0]);
    return to;
}

/* gradients_replace: the gradients become the result of a post-hook, which it takes; `were`: the
 * gradients that the hook got. */
static int gradients_replace(const node_object *self, PyObject *result, PyObject *were,
                             void **gradients, uint32_t ngradients, char *produced)
{
    for (uint32_t k = 0; k < ngradients; k++) {
        PyObject *was = gradients[k];
        gradients[k] = NULL;
        Py_XDECREF(was);
    }
    char who[192];
    PyOS_snprintf(who, sizeof who, "a post-hook of %s", fan_node_name(&self->node).text);
    if (fan_gradients_of(result, &self->node, who, gradients, ngradients) < 0)
        return -1;
    for (uint32_t k = 0; k < ngradients; k++) {
        if (gradients[k] && gradients[k] != PyTuple_GET_ITEM(were, k))
            produced[k] = 1;
    }
    return 0;
}

int fan_hooks_post(node_object *self, PyObject *node_hooks, void **sums, void **gradients,
                   uint32_t ngradients)
{
    PyObject *all = hooks_in(node_hooks, 1);
    int bad = 0;
    for (Py_ssize_t i = 0; all && i < PyTuple_GET_SIZE(all) && !bad; i++) {
        PyObject *were;
        PyObject *to =
            call_post(self, hook_fn(PyTuple_GET_ITEM(all, i)), sums, gradients, ngradients, &were);
        if (to && to != Py_None) {
            char *produced = PyByteArray_AS_STRING(PyTuple_GET_ITEM(node_hooks, 2));
            bad = gradients_replace(self, to, were, gradients, ngradients, produced);
        } else {
            bad = fan_drop_result(to);
        }
        Py_XDECREF(were);
    }
    return bad;
}

int fan__hooks_accumulated(node_object *self, PyObject *node_hooks)
{
    PyObject *all = hooks_in(node_hooks, 1);
    for (Py_ssize_t i = 0; all && i < PyTuple_GET_SIZE(all); i++) {
        PyObject *ignored =
            PyObject_CallOneArg(hook_fn(PyTuple_GET_ITEM(all, i)), (PyObject *)self);
        if (!ignored)
            return -1;
        Py_DECREF(ignored);
    }
    return 0;
}
