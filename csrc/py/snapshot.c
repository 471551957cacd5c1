/* snapshot: fanin._core.Snapshot, the bytes of several arrays, kept, to be compared and put back. */
#include "array/snapshot.h"
#include "base/mem.h"
#include "py/region.h"

/* More bytes than these are copied and compared while other threads run. */
#define LONG_COPY ((size_t)1 << 18)

typedef struct snapshot_object {
    PyObject_HEAD fan_snapshot *s; /* never NULL after new */
    fan_regions was;               /* where they lay; it holds them, so their memory is alive as long as the snapshot */
    size_t n;
} snapshot_object;

static int snapshot_traverse(PyObject *o, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(o));
    Py_VISIT(((snapshot_object *)o)->was.tuple);
    return 0;
}

static int snapshot_clear(PyObject *o)
{
    Py_CLEAR(((snapshot_object *)o)->was.tuple);
    return 0;
}

static void snapshot_dealloc(PyObject *o)
{
    PyTypeObject *type = Py_TYPE(o);
    PyObject_GC_UnTrack(o);
    fan_regions_fini(&((snapshot_object *)o)->was);
    fan_snapshot_free(((snapshot_object *)o)->s);
    type->tp_free(o);
    Py_DECREF(type);
}

/* on_host: TypeError where memory is none that can be read here. */
static int on_host(const fan_regions *r)
{
    for (size_t i = 0; i < r->n; i++)
        if (r->items[i].device != 0) {
            PyErr_Format(PyExc_TypeError, "Snapshot: array %zu is not on the host: expected memory that can be read",
                         i);
            return -1;
        }
    return 0;
}

static int extent(const fan_regions *r, size_t i)
{
    int64_t n = r->items[i].region.itemsize;
    for (int d = 0; d < r->items[i].region.ndim && n < (int64_t)LONG_COPY; d++)
        if (r->items[i].region.strides[d] && __builtin_mul_overflow(n, r->items[i].region.shape[d], &n))
            return 1;
    return n >= (int64_t)LONG_COPY;
}

static int copy(snapshot_object *self)
{
    const fan_regions *r = &self->was;
    fan_region *regions = fan_alloc(r->n * sizeof *regions);
    fan_error err = {0};
    fan_status status;
    int is_long = 0;
    if (!regions) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < r->n; i++) {
        regions[i] = r->items[i].region;
        is_long |= extent(r, i);
    }
    if (is_long) {
        Py_BEGIN_ALLOW_THREADS
            status = fan_snapshot_new(regions, r->n, &self->s, &err);
        Py_END_ALLOW_THREADS
    } else {
        status = fan_snapshot_new(regions, r->n, &self->s, &err);
    }
    fan_free(regions);
    if (status == FAN_OK)
        return 0;
    fan_raise(status, &err);
    return -1;
}

static PyObject *snapshot_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"", NULL};
    PyObject *arrays;
    snapshot_object *self;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:Snapshot", names, &arrays))
        return NULL;
    self = (snapshot_object *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    if (fan_regions_read(arrays, "Snapshot", &self->was) == 0 && on_host(&self->was) == 0) {
        self->n = self->was.n;
        if (copy(self) == 0)
            return (PyObject *)self;
    }
    Py_DECREF(self);
    return NULL;
}

/* place_of: the number of an array; -1 with IndexError. */
static Py_ssize_t place_of(const snapshot_object *self, PyObject *o, const char *who)
{
    int64_t i;
    if (fan_index(o, who, PyExc_IndexError, &i) < 0)
        return -1;
    if ((uint64_t)i < self->n)
        return (Py_ssize_t)i;
    PyErr_Format(PyExc_IndexError, "%s: there is no array %lld: expected 0 to %zd", who, (long long)i,
                 (Py_ssize_t)self->n - 1);
    return -1;
}

static bool ask(const snapshot_object *self, size_t i)
{
    bool changed;
    if (fan_snapshot_bytes(self->s) < LONG_COPY)
        return fan_snapshot_changed(self->s, i);
    Py_BEGIN_ALLOW_THREADS
        changed = fan_snapshot_changed(self->s, i);
    Py_END_ALLOW_THREADS
    return changed;
}

static PyObject *snapshot_changed(PyObject *o, PyObject *which)
{
    const snapshot_object *self = (snapshot_object *)o;
    PyObject *numbers =
                 which == Py_None ? NULL : PySequence_Fast(which, "Snapshot.changed: expected a sequence of positions"),
             *found;
    if (which != Py_None && !numbers)
        return NULL;
    Py_ssize_t n = numbers ? PySequence_Fast_GET_SIZE(numbers) : (Py_ssize_t)self->n;
    found = PyList_New(0);
    for (Py_ssize_t k = 0; found && k < n; k++) {
        Py_ssize_t i = numbers ? place_of(self, PySequence_Fast_GET_ITEM(numbers, k), "Snapshot.changed") : k;
        if (i < 0) {
            Py_CLEAR(found);
            break;
        }
        if (!ask(self, (size_t)i))
            continue;
        PyObject *x = PyLong_FromSsize_t(i);
        if (!x || PyList_Append(found, x) < 0)
            Py_CLEAR(found);
        Py_XDECREF(x);
    }
    Py_XDECREF(numbers);
    return found;
}

static PyObject *snapshot_restore(PyObject *o, PyObject *args)
{
    const snapshot_object *self = (snapshot_object *)o;
    PyObject *which, *where = Py_None;
    uint64_t data;
    Py_ssize_t i;
    if (!PyArg_ParseTuple(args, "O|O:restore", &which, &where))
        return NULL;
    i = place_of(self, which, "Snapshot.restore");
    if (i < 0)
        return NULL;
    data = where == Py_None ? fan_snapshot_data(self->s, (size_t)i) : PyLong_AsUnsignedLongLong(where);
    if (data == UINT64_MAX && PyErr_Occurred())
        return NULL;
    Py_BEGIN_ALLOW_THREADS
        fan_snapshot_restore(self->s, (size_t)i, data);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *snapshot_data(PyObject *o, PyObject *which)
{
    const snapshot_object *self = (snapshot_object *)o;
    Py_ssize_t i = place_of(self, which, "Snapshot.data");
    return i < 0 ? NULL : PyLong_FromUnsignedLongLong(fan_snapshot_data(self->s, (size_t)i));
}

/* lies_so: whether two regions are one place and one geometry. */
static bool lies_so(const fan_region *a, const fan_region *b)
{
    size_t n = (size_t)a->ndim * sizeof *a->shape;
    return a->data == b->data && a->itemsize == b->itemsize && a->ndim == b->ndim &&
           (n == 0 || (memcmp(a->shape, b->shape, n) == 0 && memcmp(a->strides, b->strides, n) == 0));
}

static PyObject *snapshot_elsewhere(PyObject *o, PyObject *Py_UNUSED(ignored))
{
    const snapshot_object *self = (snapshot_object *)o;
    FAN_UNINITIALIZED int64_t dims[FAN_REGION_DIMS];
    PyObject *found = PyList_New(0);
    for (size_t i = 0; found && i < self->n; i++) {
        fan_layout_item now;
        PyArray_Descr *descr;
        PyObject *x;
        if (fan_region_read(PyTuple_GET_ITEM(self->was.tuple, (Py_ssize_t)i), "Snapshot.elsewhere", (Py_ssize_t)i, dims,
                            &now, &descr) < 0) {
            Py_CLEAR(found);
            break;
        }
        if (lies_so(&now.region, &self->was.items[i].region) && now.dtype == self->was.items[i].dtype)
            continue;
        x = PyLong_FromSize_t(i);
        if (!x || PyList_Append(found, x) < 0)
            Py_CLEAR(found);
        Py_XDECREF(x);
    }
    return found;
}

static PyObject *snapshot_nbytes(PyObject *o, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(fan_snapshot_bytes(((snapshot_object *)o)->s));
}

static Py_ssize_t snapshot_length(PyObject *o) { return (Py_ssize_t)((snapshot_object *)o)->n; }

static PyMethodDef methods[] = {
    {"changed", snapshot_changed, METH_O,
     "changed($self, which, /)\n--\n\n"
     "The positions, among `which` (None: all), of arrays with a changed byte; the memory must still exist."},
    {"restore", snapshot_restore, METH_VARARGS,
     "restore($self, i, data=None, /)\n--\n\n"
     "Write back the bytes of array i that differ, at their old place, or for an array of the same geometry\n"
     "whose first element is at `data`."},
    {"elsewhere", snapshot_elsewhere, METH_NOARGS,
     "elsewhere($self, /)\n--\n\n"
     "The positions of arrays that are now at another place, or have another shape, strides or dtype."},
    {"data", snapshot_data, METH_O, "data($self, i, /)\n--\n\nWhere the first element of array i was."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef getset[] = {
    {"nbytes", snapshot_nbytes, NULL, "How many bytes are kept: those that the arrays show, of each about once.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc,
     "Snapshot(arrays, /)\n--\n\n"
     "A copy of the bytes of several arrays on the host, to compare with later and to restore.\n\n"
     "It holds the arrays and assumes that their memory stays in place; a caller who moves an array's memory\n"
     "must not compare it."},
    {Py_tp_new, snapshot_new},
    {Py_tp_dealloc, snapshot_dealloc},
    {Py_tp_traverse, snapshot_traverse},
    {Py_tp_clear, snapshot_clear},
    {Py_sq_length, snapshot_length},
    {Py_tp_methods, methods},
    {Py_tp_getset, getset},
    {0, NULL},
};

PyType_Spec fan_snapshot_spec = {
    .name = "fanin._core.Snapshot",
    .basicsize = sizeof(snapshot_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};
