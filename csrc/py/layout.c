/* layout: fanin._core.Layout, a recorded layout of several arrays that later ones are held against. */
#include "base/mem.h"
#include "py/region.h"

typedef struct layout_object {
    PyObject_HEAD fan_layout *l; /* never NULL after new */
    fan_regions was;             /* what was recorded: for the dtypes, which it holds */
    uint64_t budget;
} layout_object;

static void layout_dealloc(PyObject *o)
{
    layout_object *self = (layout_object *)o;
    PyTypeObject *type = Py_TYPE(o);
    fan_layout_free(self->l);
    fan_regions_fini(&self->was);
    type->tp_free(o);
    Py_DECREF(type);
}

static PyObject *layout_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"", "budget", NULL};
    PyObject *arrays, *budget = Py_None;
    fan_error err = {0};
    fan_status status;
    layout_object *self;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$O:Layout", names, &arrays, &budget))
        return NULL;
    self = (layout_object *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->budget = FAN_OVERLAP_BUDGET;
    if ((budget != Py_None && fan_budget_arg(budget, &self->budget) < 0) ||
        fan_regions_read(arrays, "Layout", &self->was) < 0)
        goto fail;
    Py_CLEAR(self->was.tuple); /* a layout holds no array */
    if (fan_regions_one_device(self->was.items, self->was.n, "Layout") < 0)
        goto fail;
    Py_BEGIN_ALLOW_THREADS
        status = fan_layout_new(self->was.items, self->was.n, self->budget, &self->l, &err);
    Py_END_ALLOW_THREADS
    if (status == FAN_OK)
        return (PyObject *)self;
    fan_raise(status, &err);
fail:
    Py_DECREF(self);
    return NULL;
}

/* same_dtypes: ndarrays' dtypes that are equal, but other objects, get the number of those recorded. */
static void same_dtypes(const layout_object *self, fan_regions *is)
{
    for (size_t i = 0; i < is->n; i++)
        if (is->descrs[i] && self->was.descrs[i] && is->descrs[i] != self->was.descrs[i] &&
            PyArray_EquivTypes(is->descrs[i], self->was.descrs[i]))
            is->items[i].dtype = self->was.items[i].dtype;
}

static PyObject *layout_check(PyObject *o, PyObject *arrays)
{
    const layout_object *self = (layout_object *)o;
    fan_difference d;
    fan_error err = {0};
    fan_status status;
    fan_regions is;
    if (fan_regions_read(arrays, "Layout.check", &is) < 0)
        return NULL;
    if (is.n != self->was.n) {
        PyErr_Format(PyExc_ValueError, "Layout.check: expected %zu arrays, as were recorded, got %zu", self->was.n,
                     is.n);
        fan_regions_fini(&is);
        return NULL;
    }
    same_dtypes(self, &is);
    status = fan_layout_check(self->l, is.items, self->budget, &d, &err);
    fan_regions_fini(&is);
    if (status != FAN_OK)
        return fan_raise(status, &err);
    if (d.what == FAN_CHANGE_SAME)
        Py_RETURN_NONE;
    if (d.other == FAN_NO_OTHER)
        return Py_BuildValue("(nsO)", (Py_ssize_t)d.index, fan_change_word(d.what), Py_None);
    return Py_BuildValue("(nsn)", (Py_ssize_t)d.index, fan_change_word(d.what), (Py_ssize_t)d.other);
}

static Py_ssize_t layout_length(PyObject *o) { return (Py_ssize_t)fan_layout_count(((layout_object *)o)->l); }

static PyObject *layout_components(PyObject *o, void *Py_UNUSED(closure))
{
    const layout_object *self = (layout_object *)o;
    PyObject *t = PyTuple_New(layout_length(o));
    for (size_t i = 0; t && i < self->was.n; i++) {
        PyObject *x = PyLong_FromSize_t(fan_layout_component(self->l, i));
        if (x)
            PyTuple_SET_ITEM(t, (Py_ssize_t)i, x);
        else
            Py_CLEAR(t);
    }
    return t;
}

static PyObject *layout_offsets(PyObject *o, void *Py_UNUSED(closure))
{
    const layout_object *self = (layout_object *)o;
    PyObject *t = PyTuple_New(layout_length(o));
    for (size_t i = 0; t && i < self->was.n; i++) {
        PyObject *x = PyLong_FromUnsignedLongLong(fan_layout_offset(self->l, i));
        if (x)
            PyTuple_SET_ITEM(t, (Py_ssize_t)i, x);
        else
            Py_CLEAR(t);
    }
    return t;
}

static PyMethodDef methods[] = {
    {"check", layout_check, METH_O,
     "check($self, arrays, /)\n--\n\nNone if as many arrays lie as those that were recorded; else what differs first: "
     "(index, what, other index or None).\n\n"
     "what is \"dtype\", \"device\", \"shape\", \"strides\", \"read-only\", \"writable\", \"apart\" (shares no memory "
     "any more with what `other` hangs together with), \"offset\"\n"
     "(lies elsewhere, seen from `other`) or \"overlap\" (shares memory with `other`, and did not). ValueError for "
     "another number of arrays."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef getset[] = {
    {"components", layout_components, NULL,
     "For each array the number of its component, by first members; an array that shares with nobody has one of its "
     "own.",
     NULL},
    {"offsets", layout_offsets, NULL,
     "For each array the bytes from the first byte of its component to its element [0, 0, ..].", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc,
     "Layout(arrays, /, *, budget=None)\n--\n\nHow several arrays lie in memory: dtypes, shapes, strides, who shares "
     "with whom and where.\n\n"
     "It knows numbers, and holds no array. Strides along axes of extent 1 mean nothing and are not compared."},
    {Py_tp_new, layout_new},
    {Py_tp_dealloc, layout_dealloc},
    {Py_sq_length, layout_length},
    {Py_tp_methods, methods},
    {Py_tp_getset, getset},
    {0, NULL},
};

PyType_Spec fan_layout_spec = {
    .name = "fanin._core.Layout",
    .basicsize = sizeof(layout_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
