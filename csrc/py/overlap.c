/* overlap: fanin.overlap, overlaps, overlaps_itself, and what they answer: fanin.Verdict, fanin.Overlaps. */
#include "base/mem.h"
#include "py/region.h"

/* ---- fanin.Verdict ---- */

typedef struct verdict_object {
    PyObject_HEAD PyObject *kind; /* a str; none of the three is ever NULL after new */
    PyObject *witness;            /* None, or two tuples of ints */
    PyObject *reason;             /* None, or a str */
} verdict_object;

/* verdict_make: takes the reference to `witness`, which may be NULL: with an exception, or, with none, None is meant.
 */
static PyObject *verdict_make(fan_verdict v, PyObject *witness)
{
    PyTypeObject *type = fan_state_get()->verdict_type;
    verdict_object *self;
    if (!witness && PyErr_Occurred())
        return NULL;
    self = (verdict_object *)type->tp_alloc(type, 0);
    if (!self) {
        Py_XDECREF(witness);
        return NULL;
    }
    self->witness = witness ? witness : Py_NewRef(Py_None);
    self->kind = PyUnicode_InternFromString(fan_verdict_kind(v));
    self->reason = v == FAN_OVERLAP_DISJOINT || v == FAN_OVERLAP_YES ? Py_NewRef(Py_None)
                                                                     : PyUnicode_FromString(fan_verdict_words(v));
    if (!self->kind || !self->reason)
        Py_CLEAR(self);
    return (PyObject *)self;
}

/* index_tuple: an element's indices. */
static PyObject *index_tuple(const int64_t *at, int n)
{
    PyObject *t = PyTuple_New(n);
    for (int i = 0; t && i < n; i++) {
        PyObject *x = PyLong_FromLongLong(at[i]);
        if (x)
            PyTuple_SET_ITEM(t, i, x);
        else
            Py_CLEAR(t);
    }
    return t;
}

/* verdict_of: `at` are the elements of an overlap. */
static PyObject *verdict_of(fan_verdict v, const fan_region *a, const fan_region *b, int64_t (*at)[FAN_MAX_NDIM])
{
    fan_state *st = fan_state_get();
    PyObject *one, *two, *both = NULL;
    if (v == FAN_OVERLAP_DISJOINT) {
        if (!st->disjoint)
            st->disjoint = verdict_make(v, NULL);
        return Py_XNewRef(st->disjoint);
    }
    if (v != FAN_OVERLAP_YES)
        return verdict_make(v, NULL);
    one = index_tuple(at[0], a->ndim);
    two = one ? index_tuple(at[1], b->ndim) : NULL;
    if (two)
        both = PyTuple_Pack(2, one, two);
    Py_XDECREF(one);
    Py_XDECREF(two);
    return both ? verdict_make(v, both) : NULL;
}

static void verdict_dealloc(PyObject *o)
{
    verdict_object *self = (verdict_object *)o;
    PyTypeObject *type = Py_TYPE(o);
    Py_XDECREF(self->kind);
    Py_XDECREF(self->witness);
    Py_XDECREF(self->reason);
    type->tp_free(o);
    Py_DECREF(type);
}

static int verdict_bool(PyObject *o)
{
    return PyUnicode_CompareWithASCIIString(((verdict_object *)o)->kind, "disjoint") != 0;
}

static PyObject *verdict_repr(PyObject *o)
{
    verdict_object *self = (verdict_object *)o;
    if (self->reason != Py_None)
        return PyUnicode_FromFormat("<fanin.Verdict: unknown: %U>", self->reason);
    if (self->witness != Py_None)
        return PyUnicode_FromFormat("<fanin.Verdict: overlap, at %R and %R>", PyTuple_GET_ITEM(self->witness, 0),
                                    PyTuple_GET_ITEM(self->witness, 1));
    return PyUnicode_FromString("<fanin.Verdict: disjoint>");
}

static PyObject *verdict_key(PyObject *o)
{
    verdict_object *self = (verdict_object *)o;
    return PyTuple_Pack(3, self->kind, self->witness, self->reason);
}

static PyObject *verdict_compare(PyObject *a, PyObject *b, int op)
{
    PyObject *one, *two, *answer = NULL;
    if (Py_TYPE(b) != Py_TYPE(a) || (op != Py_EQ && op != Py_NE))
        Py_RETURN_NOTIMPLEMENTED;
    one = verdict_key(a);
    two = one ? verdict_key(b) : NULL;
    if (two)
        answer = PyObject_RichCompare(one, two, op);
    Py_XDECREF(one);
    Py_XDECREF(two);
    return answer;
}

static Py_hash_t verdict_hash(PyObject *o)
{
    PyObject *key = verdict_key(o);
    Py_hash_t h = key ? PyObject_Hash(key) : -1;
    Py_XDECREF(key);
    return h;
}

static PyMemberDef verdict_members[] = {
    {"kind", T_OBJECT_EX, offsetof(verdict_object, kind), READONLY, "One of \"disjoint\", \"overlap\", \"unknown\"."},
    {"witness", T_OBJECT_EX, offsetof(verdict_object, witness), READONLY,
     "Of an overlap: an index into each array, two tuples of ints from 0 on, whose elements have a byte in common; "
     "else None."},
    {"reason", T_OBJECT_EX, offsetof(verdict_object, reason), READONLY,
     "Why the answer is \"unknown\", in words; else None."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot verdict_slots[] = {
    {Py_tp_doc, "Whether two arrays share a byte of memory: \"disjoint\", \"overlap\", or \"unknown\" and why.\n\n"
                "True in a condition unless they are surely disjoint: `if fanin.overlap(a, b): copy`. `witness` proves "
                "an overlap: the indices of\n"
                "an element of each array that hold one common byte. Verdicts are immutable, hashable, and equal if "
                "they say the same.\n\n"
                ">>> x = np.zeros((3, 4))\n>>> v = fanin.overlap(x[1:], x[:, 2])\n>>> v.kind, v.witness\n('overlap', "
                "((1, 2), (2,)))"},
    {Py_tp_dealloc, verdict_dealloc},
    {Py_tp_repr, verdict_repr},
    {Py_tp_richcompare, verdict_compare},
    {Py_tp_hash, verdict_hash},
    {Py_nb_bool, verdict_bool},
    {Py_tp_members, verdict_members},
    {0, NULL},
};

PyType_Spec fan_verdict_spec = {
    .name = "fanin.Verdict",
    .basicsize = sizeof(verdict_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = verdict_slots,
};

/* ---- arguments ---- */

/* budget_of: budget=None is the default. */
static int budget_of(PyObject *o, uint64_t *out)
{
    *out = FAN_OVERLAP_BUDGET;
    return o == Py_None ? 0 : fan_budget_arg(o, out);
}

/* arguments: `n` positional ones and budget=. -1 with an exception. */
static int arguments(const char *who, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames, Py_ssize_t n,
                     uint64_t *budget)
{
    Py_ssize_t named = kwnames ? PyTuple_GET_SIZE(kwnames) : 0;
    *budget = FAN_OVERLAP_BUDGET;
    if (nargs != n) {
        PyErr_Format(PyExc_TypeError, "%s() takes %zd positional argument%s but %zd were given", who, n,
                     n == 1 ? "" : "s", nargs);
        return -1;
    }
    for (Py_ssize_t i = 0; i < named; i++) {
        PyObject *name = PyTuple_GET_ITEM(kwnames, i);
        if (PyUnicode_CompareWithASCIIString(name, "budget") != 0) {
            PyErr_Format(PyExc_TypeError, "%s() got an unexpected keyword argument %R", who, name);
            return -1;
        }
        if (budget_of(args[nargs + i], budget) < 0)
            return -1;
    }
    return 0;
}

/* ---- pairs ---- */

/* judge: first a short search; what is hard is left to a thread of its own speed, without the GIL. b NULL: a itself. */
static PyObject *judge(const fan_region *a, const fan_region *b, uint64_t budget)
{
    FAN_RAW int64_t at[2][FAN_MAX_NDIM];
    FAN_RAW fan_error err;
    fan_verdict v;
    fan_status status;
    err.text[0] = '\0';
    status = b ? fan_overlap(a, b, 0, at[0], at[1], &v, &err) : fan_overlap_itself(a, 0, at[0], at[1], &v, &err);
    if (status == FAN_OK && v == FAN_OVERLAP_HARD && budget > 0) {
        Py_BEGIN_ALLOW_THREADS status = b ? fan_overlap(a, b, budget, at[0], at[1], &v, &err)
                                          : fan_overlap_itself(a, budget, at[0], at[1], &v, &err);
        Py_END_ALLOW_THREADS
    }
    return status == FAN_OK ? verdict_of(v, a, b ? b : a, at) : fan_raise(status, &err);
}

static PyObject *overlap(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    FAN_RAW int64_t dims[2][FAN_REGION_DIMS];
    fan_layout_item items[2];
    PyArray_Descr *descr;
    uint64_t budget;
    if (arguments("overlap", args, nargs, kwnames, 2, &budget) < 0)
        return NULL;
    for (int i = 0; i < 2; i++)
        if (fan_region_read(args[i], "overlap", i, dims[i], &items[i], &descr) < 0)
            return NULL;
    if (fan_regions_one_device(items, 2, "overlap") < 0)
        return NULL;
    return judge(&items[0].region, &items[1].region, budget);
}

static PyObject *overlaps_itself(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs,
                                 PyObject *kwnames)
{
    FAN_RAW int64_t dims[FAN_REGION_DIMS];
    fan_layout_item item;
    PyArray_Descr *descr;
    uint64_t budget;
    if (arguments("overlaps_itself", args, nargs, kwnames, 1, &budget) < 0 ||
        fan_region_read(args[0], "overlaps_itself", -1, dims, &item, &descr) < 0)
        return NULL;
    return judge(&item.region, NULL, budget);
}

/* ---- fanin.Overlaps ---- */

typedef struct overlaps_object {
    PyObject_HEAD fan_overlaps *l; /* never NULL after new, as `label` is not */
    uint32_t *label;               /* of each array: its component */
    size_t components;
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

static PyObject *overlaps(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    PyTypeObject *type = fan_state_get()->overlaps_type;
    fan_regions r = {.n = 0};
    fan_region *regions = NULL;
    overlaps_object *self = NULL;
    fan_error err = {0};
    fan_status status;
    uint64_t budget;
    if (arguments("overlaps", args, nargs, kwnames, 1, &budget) < 0 || fan_regions_read(args[0], "overlaps", &r) < 0)
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
    Py_BEGIN_ALLOW_THREADS status = fan_overlaps_new(regions, r.n, &self->l, &err);
    if (status == FAN_OK)
        status = fan_overlaps_components(self->l, budget, self->label, &self->components, &err);
    Py_END_ALLOW_THREADS if (status == FAN_OK) goto done;
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
    Py_BEGIN_ALLOW_THREADS status = fan_overlaps_pairs(self->l, self->budget, &pairs, &n, &err);
    Py_END_ALLOW_THREADS if (status != FAN_OK)
    {
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
    return judge(fan_overlaps_region(self->l, (size_t)at[0]), fan_overlaps_region(self->l, (size_t)at[1]),
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
        text = PyUnicode_FromFormat("<fanin.Overlaps of %zu array%s: %zd share memory, in %zd component%s>", n,
                                    FAN_PLURAL(n), PyTuple_GET_SIZE(indices), PyTuple_GET_SIZE(groups),
                                    FAN_PLURAL(PyTuple_GET_SIZE(groups)));
    Py_XDECREF(groups);
    Py_XDECREF(indices);
    return text;
}

static PyGetSetDef overlaps_getset[] = {
    {"components", overlaps_components, NULL,
     "The arrays that hang together: a tuple of tuples of indices, each of two or more, ascending.\n\nTwo arrays are "
     "in one component if a chain of overlaps leads "
     "from one to the other. Arrays that share memory with no other are in none.",
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

PyMethodDef fan_overlap_functions[] = {
    {"overlap", (PyCFunction)(void (*)(void))overlap, METH_FASTCALL | METH_KEYWORDS,
     "overlap(a, b, /, *, budget=None)\n--\n\n"
     "Whether arrays a and b share a byte of memory: exactly, for any shapes, strides and dtypes.\n\n"
     "Only addresses, shapes and strides are looked at: views of one array, of different dtypes, of a file that is "
     "mapped twice at different addresses (then they are\n"
     "disjoint). An array is an ndarray, a torch or JAX tensor, an array on a device of fanin's, or whatever has a "
     "buffer or DLPack. The answer is a Verdict, with a\n"
     "witness if they overlap. Of most pairs it is known in a fraction of a microsecond. A few strange ones need a "
     "table of at most `budget` bytes\n"
     "(default 256 MiB; math.inf: no bound); if that is not enough the verdict is \"unknown\", never a guess, and "
     "never an exponential search.\n\n"
     "Raises TypeError for what is no single array in memory (sparse, masked, a tracer), ValueError for arrays of "
     "different devices. Source: docs/analysis.md.\n\n"
     ">>> m = np.zeros((6, 9))\n>>> fanin.overlap(m[0:4, 0:4], m[2:6, 0:4])\n<fanin.Verdict: overlap, at (2, 0) and "
     "(0, 0)>\n"
     ">>> bool(fanin.overlap(m[:, 0], m[:, 1]))\nFalse"},
    {"overlaps", (PyCFunction)(void (*)(void))overlaps, METH_FASTCALL | METH_KEYWORDS,
     "overlaps(arrays, /, *, budget=None)\n--\n\n"
     "Which of several arrays share memory: the pairs, the components that they form, the indices of all that take "
     "part.\n\n"
     "`arrays` and `budget` (for each pair) are as in `overlap`. Near-linear in the number of arrays for pieces, "
     "columns, blocks, step slices and\n"
     "heads of common arrays; only `pairs` takes as long as there are pairs, and is made when it is asked for. Raises "
     "as `overlap` does, and names the array.\n"
     "Source: docs/analysis.md.\n\n"
     ">>> flat = np.zeros(100)\n>>> w, b = flat[:90].reshape(9, 10), flat[90:]\n>>> fanin.overlaps([w, b, flat[85:95], "
     "np.zeros(3)]).components\n((0, 1, 2),)\n"
     ">>> fanin.overlaps([w[:, i] for i in range(10)]).pairs\n()"},
    {"overlaps_itself", (PyCFunction)(void (*)(void))overlaps_itself, METH_FASTCALL | METH_KEYWORDS,
     "overlaps_itself(a, /, *, budget=None)\n--\n\n"
     "Whether two different elements of array a share a byte of memory, so that writing one changes the other.\n\n"
     "Exact as `overlap` is; the witness is the two indices. Raises as `overlap` does. Source: docs/analysis.md.\n\n"
     ">>> fanin.overlaps_itself(np.broadcast_to(np.zeros(3), (2, 3)))\n<fanin.Verdict: overlap, at (1, 0) and (0, 0)>\n"
     ">>> windows = np.lib.stride_tricks.sliding_window_view(np.zeros(5), 3)\n>>> "
     "fanin.overlaps_itself(windows).kind\n'overlap'"},
    {NULL, NULL, 0, NULL},
};
