#include "py/verdict.h"

#include "py/args.h"

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
    one = fan_ints(a->ndim, at[0]);
    two = one ? fan_ints(b->ndim, at[1]) : NULL;
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
     "For an overlap: an index into each array, two tuples of non-negative ints, whose elements share a byte;\n"
     "else None."},
    {"reason", T_OBJECT_EX, offsetof(verdict_object, reason), READONLY, "The reason for \"unknown\"; else None."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot verdict_slots[] = {
    {Py_tp_doc,
     "Whether two arrays share a byte of memory: \"disjoint\", \"overlap\", or \"unknown\" with the reason.\n\n"
     "True in a condition unless they are surely disjoint: `if fanin.overlap(a, b): copy`. `witness` proves an\n"
     "overlap: the indices of an element of each array that share a byte. Verdicts are immutable, hashable, and\n"
     "compare by value.\n\n"
     ">>> x = np.zeros((3, 4))\n"
     ">>> v = fanin.overlap(x[1:], x[:, 2])\n"
     ">>> v.kind, v.witness\n"
     "('overlap', ((1, 2), (2,)))"},
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

PyObject *fan_verdict_judge(const fan_region *a, const fan_region *b, uint64_t budget)
{
    FAN_UNINITIALIZED int64_t at[2][FAN_MAX_NDIM];
    FAN_UNINITIALIZED fan_error err;
    fan_verdict v;
    fan_status status;
    err.text[0] = '\0';
    status = b ? fan_overlap(a, b, 0, at[0], at[1], &v, &err) : fan_overlap_itself(a, 0, at[0], at[1], &v, &err);
    if (status == FAN_OK && v == FAN_OVERLAP_HARD && budget > 0) {
        Py_BEGIN_ALLOW_THREADS
            status = b ? fan_overlap(a, b, budget, at[0], at[1], &v, &err)
                       : fan_overlap_itself(a, budget, at[0], at[1], &v, &err);
        Py_END_ALLOW_THREADS
    }
    return status == FAN_OK ? verdict_of(v, a, b ? b : a, at) : fan_raise(status, &err);
}
