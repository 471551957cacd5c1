/* overlaps: fanin.Overlaps, what overlaps() answers. */
#include "py/verdict.h"

#include "base/interrupt.h"
#include "base/mem.h"
#include "py/region.h"

typedef struct overlaps_object {
    PyObject_HEAD fan_overlaps *l; /* never NULL after new, as `label` is not */
    uint32_t *label;               /* of each array: its component */
    size_t components;
    bool exact; /* no unknown verdict joined two arrays */
    uint64_t budget;
    /* Made when they are first asked for; NULL before. */
    PyObject *indices, *groups, *pairs, *unknown;
} overlaps_object;

static void overlaps_dealloc(PyObject *o)
{
    overlaps_object *self = (overlaps_object *)o;
    PyTypeObject *type = Py_TYPE(o);
    fan_overlaps_free(self->l);
    fan_free(self->label);
    Py_XDECREF(self->indices);
    Py_XDECREF(self->groups);
    Py_XDECREF(self->pairs);
    Py_XDECREF(self->unknown);
    type->tp_free(o);
    Py_DECREF(type);
}

PyObject *fan_overlaps_of(PyObject *arrays, uint64_t budget)
{
    PyTypeObject *type = fan_state_get()->overlaps_type;
    fan_regions r = {.n = 0};
    fan_region *regions = NULL;
    overlaps_object *self = NULL;
    fan_interrupt interrupt;
    fan_error err = {0};
    fan_status status;
    if (fan_regions_read(arrays, "overlaps", &r) < 0)
        return NULL;
    if (fan_regions_one_device(r.items, r.n, "overlaps") < 0)
        goto fail;
    self = (overlaps_object *)type->tp_alloc(type, 0);
    regions = fan_alloc(r.n * sizeof *regions);
    if (!self || !regions) {
        PyErr_NoMemory();
        goto fail;
    }
    self->budget = budget;
    self->label = fan_alloc(r.n * sizeof *self->label);
    if (!self->label) {
        PyErr_NoMemory();
        goto fail;
    }
    for (size_t i = 0; i < r.n; i++)
        regions[i] = r.items[i].region;
    Py_BEGIN_ALLOW_THREADS
        ;
        fan_interrupt_begin(&interrupt, fan_check_signals, &err);
        status = fan_overlaps_new(regions, r.n, &self->l, &err);
        if (status == FAN_OK)
            status = fan_overlaps_components(self->l, budget, self->label, &self->components, &self->exact, &err);
        status = fan_interrupt_end(&interrupt, status);
    Py_END_ALLOW_THREADS;
    if (status == FAN_OK)
        goto done;
    fan_raise(status, &err);
fail:
    Py_CLEAR(self);
done:
    fan_free(regions);
    fan_regions_fini(&r);
    return (PyObject *)self;
}

/* kept: what was made first, `made` or, where another thread was faster, its own. A new reference; NULL with an
 * exception. */
static PyObject *kept(PyObject **field, PyObject *made)
{
    if (*field)
        Py_XDECREF(made);
    else
        *field = made;
    return Py_XNewRef(*field);
}

/* tuple_of_lists: a tuple of tuples; takes `list`, a list of lists, which may be NULL. */
static PyObject *tuple_of_lists(PyObject *list)
{
    Py_ssize_t n = list ? PyList_GET_SIZE(list) : 0;
    PyObject *out = list ? PyTuple_New(n) : NULL;
    for (Py_ssize_t i = 0; out && i < n; i++) {
        PyObject *t = PyList_AsTuple(PyList_GET_ITEM(list, i));
        if (t)
            PyTuple_SET_ITEM(out, i, t);
        else
            Py_CLEAR(out);
    }
    Py_XDECREF(list);
    return out;
}

/* group: array i goes to the list of its component, which begins when its second member comes; `of` has each
 * component's first member, then its list's place + n. */
static int group(const overlaps_object *self, PyObject *lists, size_t *of, size_t i)
{
    size_t n = fan_overlaps_count(self->l), *place = &of[self->label[i]];
    PyObject *list, *number = PyLong_FromSize_t(i);
    int result = -1;
    if (!number)
        return -1;
    if (*place == SIZE_MAX) {
        *place = i;
        result = 0;
    } else if (*place < n) {
        list = Py_BuildValue("[nO]", (Py_ssize_t)*place, number);
        *place = n + (size_t)PyList_GET_SIZE(lists);
        result = list ? PyList_Append(lists, list) : -1;
        Py_XDECREF(list);
    } else {
        result = PyList_Append(PyList_GET_ITEM(lists, (Py_ssize_t)(*place - n)), number);
    }
    Py_DECREF(number);
    return result;
}

static PyObject *make_groups(const overlaps_object *self)
{
    size_t n = fan_overlaps_count(self->l), *of = fan_alloc(self->components * sizeof *of);
    PyObject *lists = PyList_New(0);
    if (!of || !lists) {
        PyErr_NoMemory();
        Py_CLEAR(lists);
    }
    for (size_t i = 0; lists && i < self->components; i++)
        of[i] = SIZE_MAX;
    for (size_t i = 0; lists && i < n; i++)
        if (group(self, lists, of, i) < 0)
            Py_CLEAR(lists);
    fan_free(of);
    if (lists && PyList_Sort(lists) < 0) /* they began when their second members came */
        Py_CLEAR(lists);
    return tuple_of_lists(lists);
}

static PyObject *overlaps_components(PyObject *o, void *Py_UNUSED(closure))
{
    overlaps_object *self = (overlaps_object *)o;
    return kept(&self->groups, self->groups ? NULL : make_groups(self));
}

static PyObject *make_indices(const overlaps_object *self)
{
    size_t n = fan_overlaps_count(self->l), *members = fan_calloc(self->components * sizeof *members);
    PyObject *list = PyList_New(0), *out = NULL;
    bool good = members && list;
    if (!good)
        PyErr_NoMemory();
    for (size_t i = 0; good && i < n; i++)
        members[self->label[i]]++;
    for (size_t i = 0; good && i < n; i++) {
        if (members[self->label[i]] < 2)
            continue;
        PyObject *number = PyLong_FromSize_t(i);
        good = number && PyList_Append(list, number) == 0;
        Py_XDECREF(number);
    }
    if (good)
        out = PyList_AsTuple(list);
    Py_XDECREF(list);
    fan_free(members);
    return out;
}

static PyObject *overlaps_indices(PyObject *o, void *Py_UNUSED(closure))
{
    overlaps_object *self = (overlaps_object *)o;
    return kept(&self->indices, self->indices ? NULL : make_indices(self));
}

/* pair_tuple: those of the pairs that are (not) unknown, or all. */
static PyObject *pair_tuple(const fan_pair *pairs, size_t n, bool only_unknown)
{
    PyObject *list = PyList_New(0), *out = NULL;
    bool good = list != NULL;
    for (size_t i = 0; good && i < n; i++) {
        if (only_unknown && pairs[i].verdict == FAN_OVERLAP_YES)
            continue;
        PyObject *pair = Py_BuildValue("(II)", pairs[i].one, pairs[i].two);
        good = pair && PyList_Append(list, pair) == 0;
        Py_XDECREF(pair);
    }
    if (good)
        out = PyList_AsTuple(list);
    Py_XDECREF(list);
    return out;
}

static int make_pairs(overlaps_object *self)
{
    fan_pair *pairs = NULL;
    size_t n = 0;
    fan_error err = {0};
    fan_status status;
    PyObject *all, *unknown;
    fan_interrupt interrupt;
    Py_BEGIN_ALLOW_THREADS
        ;
        fan_interrupt_begin(&interrupt, fan_check_signals, &err);
        status = fan_interrupt_end(&interrupt, fan_overlaps_pairs(self->l, self->budget, &pairs, &n, &err));
    Py_END_ALLOW_THREADS;
    if (status != FAN_OK) {
        fan_free(pairs);
        fan_raise(status, &err);
        return -1;
    }
    all = pair_tuple(pairs, n, false);
    unknown = all ? pair_tuple(pairs, n, true) : NULL;
    fan_free(pairs);
    if (!unknown || self->pairs) { /* another thread was faster */
        Py_XDECREF(all);
        Py_XDECREF(unknown);
        return unknown ? 0 : -1;
    }
    self->pairs = all;
    self->unknown = unknown;
    return 0;
}

static PyObject *overlaps_pairs(PyObject *o, void *Py_UNUSED(closure))
{
    overlaps_object *self = (overlaps_object *)o;
    if (!self->pairs && make_pairs(self) < 0)
        return NULL;
    return Py_NewRef(self->pairs);
}

static PyObject *overlaps_unknown(PyObject *o, void *Py_UNUSED(closure))
{
    overlaps_object *self = (overlaps_object *)o;
    if (!self->pairs && make_pairs(self) < 0)
        return NULL;
    return Py_NewRef(self->unknown);
}

static PyObject *overlaps_verdict(PyObject *o, PyObject *args)
{
    const overlaps_object *self = (overlaps_object *)o;
    PyObject *which[2];
    int64_t at[2];
    size_t n = fan_overlaps_count(self->l);
    if (!PyArg_ParseTuple(args, "OO:verdict", &which[0], &which[1]))
        return NULL;
    for (int i = 0; i < 2; i++) {
        if (fan_index(which[i], "verdict", PyExc_IndexError, &at[i]) < 0)
            return NULL;
        if ((uint64_t)at[i] >= n)
            return PyErr_Format(PyExc_IndexError, "verdict: there is no array %lld: expected 0 to %zu",
                                (long long)at[i], n - 1);
    }
    return fan_verdict_judge(fan_overlaps_region(self->l, (size_t)at[0]), fan_overlaps_region(self->l, (size_t)at[1]),
                             self->budget);
}

static Py_ssize_t overlaps_length(PyObject *o) { return (Py_ssize_t)fan_overlaps_count(((overlaps_object *)o)->l); }

/* overlaps_iter: through the pairs. */
static PyObject *overlaps_iter(PyObject *o)
{
    PyObject *pairs = overlaps_pairs(o, NULL), *out = pairs ? PyObject_GetIter(pairs) : NULL;
    Py_XDECREF(pairs);
    return out;
}

static PyObject *overlaps_repr(PyObject *o)
{
    const overlaps_object *self = (overlaps_object *)o;
    size_t n = fan_overlaps_count(self->l);
    PyObject *groups = overlaps_components(o, NULL), *indices = groups ? overlaps_indices(o, NULL) : NULL, *text = NULL;
    if (indices)
        text = PyUnicode_FromFormat("<fanin.Overlaps of %zu array%s: %s%zd share memory, in %zd component%s>", n,
                                    FAN_PLURAL(n), self->exact ? "" : "at most ", PyTuple_GET_SIZE(indices),
                                    PyTuple_GET_SIZE(groups), FAN_PLURAL(PyTuple_GET_SIZE(groups)));
    Py_XDECREF(groups);
    Py_XDECREF(indices);
    return text;
}

static PyObject *overlaps_exact(PyObject *o, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(((overlaps_object *)o)->exact);
}

static PyGetSetDef overlaps_getset[] = {
    {"components", overlaps_components, NULL,
     "The arrays that hang together: a tuple of tuples of indices, each of two or more, ascending.\n\nTwo arrays are "
     "in one component if a chain of overlaps leads "
     "from one to the other. Arrays that share memory with no other are in none.",
     NULL},
    {"exact", overlaps_exact, NULL,
     "Whether each component is exact.\n\nFalse: the budget ended before each question was answered, and `components` "
     "and `indices` may join arrays that share no byte; none that do is missing. A larger `budget`, or "
     "`float('inf')`, answers the rest.",
     NULL},
    {"indices", overlaps_indices, NULL, "The indices of all arrays that share memory with another one, ascending.",
     NULL},
    {"pairs", overlaps_pairs, NULL,
     "All pairs (i, j), i < j, of arrays that are not surely disjoint, ascending.\n\nMade when it is first asked for: "
     "there may be n * (n - 1) / 2.",
     NULL},
    {"unknown", overlaps_unknown, NULL, "Those of the pairs of which nobody could tell whether they overlap.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef overlaps_methods[] = {
    {"verdict", overlaps_verdict, METH_VARARGS,
     "verdict($self, i, j, /)\n--\n\nThe Verdict on arrays i and j, with its witness."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot overlaps_slots[] = {
    {Py_tp_doc,
     "Which of several arrays share memory, as `fanin.overlaps` found it.\n\n"
     "It knows addresses, shapes and strides as they were, and holds no array. What nobody could tell counts as an "
     "overlap. Its length is the number of arrays; to go through it is to go through `pairs`.\n\n"
     ">>> x = np.zeros(10)\n>>> found = fanin.overlaps([x[:4], x[2:6], x[6:], x[5:7]])\n"
     ">>> found.pairs\n((0, 1), (1, 3), (2, 3))\n>>> found.components, found.indices\n(((0, 1, 2, 3),), (0, 1, 2, 3))"},
    {Py_tp_dealloc, overlaps_dealloc},
    {Py_tp_repr, overlaps_repr},
    {Py_tp_iter, overlaps_iter},
    {Py_sq_length, overlaps_length},
    {Py_tp_methods, overlaps_methods},
    {Py_tp_getset, overlaps_getset},
    {0, NULL},
};

PyType_Spec fan_overlaps_spec = {
    .name = "fanin.Overlaps",
    .basicsize = sizeof(overlaps_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = overlaps_slots,
};
