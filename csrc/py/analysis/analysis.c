/* analysis: the functions of fanin.analysis on memory: layouts, snapshots, and the strides of an
 * ndarray. fanin.analysis.memory has the classes. */
#include "analysis/snapshot.h"
#include "base/mem.h"
#include "py/arrays/region.h"
#include "py/base/args.h"

#define LAYOUT "fanin.layout"
#define SNAPSHOT "fanin.snapshot"

/* capsule_new: a capsule over zeroed memory, which `end` frees. */
static PyObject *capsule_new(size_t bytes, const char *name, PyCapsule_Destructor end)
{
    void *self = fan_calloc(bytes);
    if (!self)
        return PyErr_NoMemory();
    PyObject *capsule = PyCapsule_New(self, name, end);
    if (!capsule)
        fan_free(self);
    return capsule;
}

/* ---- layouts ---- */

typedef struct recorded {
    fan_layout *layout; /* NULL until it is recorded */
    fan_regions was;    /* the regions, for their dtypes, which it holds; no array */
    uint64_t budget;
} recorded;

static recorded *layout_of(PyObject *capsule)
{
    return PyCapsule_GetPointer(capsule, LAYOUT);
}

static void layout_free(PyObject *capsule)
{
    recorded *self = layout_of(capsule);
    fan_layout_free(self->layout);
    fan_regions_fini(&self->was);
    fan_free(self);
}

/* layout_record: records a layout, and returns its capsule with the component and the offset of
 * each array. */
static PyObject *layout_record(PyObject *capsule, recorded *self, PyObject *const *a)
{
    fan_regions *was = &self->was;
    if (fan_overlap_budget_arg(a[1], &self->budget) < 0)
        return NULL;
    if (fan_regions_read(a[0], "Layout", was) < 0)
        return NULL;
    Py_CLEAR(was->tuple);
    if (fan_regions_one_device(was->items, was->n, "Layout") < 0)
        return NULL;
    if (FAN_CHECK_UNLOCKED(fan_layout_new(was->items, was->n, self->budget, &self->layout, &err)) <
        0)
        return NULL;
    PyObject *components = PyList_New(0);
    PyObject *offsets = PyList_New(0);
    for (size_t i = 0; components && offsets && i < was->n; i++) {
        fan_list_add(&components, PyLong_FromSize_t(fan_layout_component(self->layout, i)));
        fan_list_add(&offsets, PyLong_FromUnsignedLongLong(fan_layout_offset(self->layout, i)));
    }
    return Py_BuildValue("(ONN)", capsule, fan_tuple_of(components), fan_tuple_of(offsets));
}

static PyObject *layout(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    PyObject *capsule = capsule_new(sizeof(recorded), LAYOUT, layout_free);
    if (!capsule)
        return NULL;
    PyObject *made = layout_record(capsule, layout_of(capsule), a);
    Py_DECREF(capsule);
    return made;
}

static PyObject *layout_check(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    const recorded *self = layout_of(a[0]);
    fan_difference d;
    fan_regions is;
    if (!self)
        return NULL;
    if (fan_regions_read(a[1], "Layout.check", &is) < 0)
        return NULL;
    if (is.n != self->was.n) {
        PyErr_Format(PyExc_ValueError,
                     "Layout.check: expected %zu arrays, as were recorded, got %zu", self->was.n,
                     is.n);
        fan_regions_fini(&is);
        return NULL;
    }
    /* an equal dtype that is another object gets the number of the recorded one */
    for (size_t i = 0; i < is.n; i++) {
        PyArray_Descr *now = is.descrs[i];
        PyArray_Descr *was = self->was.descrs[i];
        if (now && was && PyArray_EquivTypes(now, was))
            is.items[i].dtype = self->was.items[i].dtype;
    }
    int bad = FAN_CHECK(fan_layout_check(self->layout, is.items, self->budget, &d, &err));
    fan_regions_fini(&is);
    if (bad)
        return NULL;
    if (d.what == FAN_CHANGE_SAME)
        Py_RETURN_NONE;
    return Py_BuildValue("(nsN)", (Py_ssize_t)d.index, fan_change_word(d.what),
                         d.other == FAN_NO_OTHER ? Py_NewRef(Py_None) : PyLong_FromSize_t(d.other));
}

/* ---- snapshots ---- */

/* More bytes than these are copied and compared while other threads run. */
#define LONG_COPY ((size_t)1 << 18)

typedef struct copied {
    fan_snapshot *snapshot; /* NULL until it is made */
    fan_regions was;        /* where the arrays were; the Python object holds them */
} copied;

static copied *snapshot_of(PyObject *capsule)
{
    return PyCapsule_GetPointer(capsule, SNAPSHOT);
}

static void snapshot_free(PyObject *capsule)
{
    copied *self = snapshot_of(capsule);
    fan_snapshot_free(self->snapshot);
    fan_regions_fini(&self->was);
    fan_free(self);
}

/* is_long: whether an array has at least LONG_COPY bytes. */
static bool is_long(const fan_region *r)
{
    int64_t n = r->itemsize;
    for (int d = 0; d < r->ndim && n < (int64_t)LONG_COPY; d++) {
        if (r->strides[d] && __builtin_mul_overflow(n, r->shape[d], &n))
            return true;
    }
    return n >= (int64_t)LONG_COPY;
}

/* snapshot_copy: -1 with an exception. */
static int snapshot_copy(copied *self)
{
    const fan_regions *was = &self->was;
    fan_error err = {0};
    bool other_threads = false;
    fan_region *regions = fan_layout_regions(was->items, was->n);
    if (!regions) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < was->n; i++)
        other_threads |= is_long(&regions[i]);
    PyThreadState *left = NULL;
    if (other_threads)
        left = PyEval_SaveThread();
    fan_status status = fan_snapshot_new(regions, was->n, &self->snapshot, &err);
    if (left)
        PyEval_RestoreThread(left);
    fan_free(regions);
    if (status != FAN_OK)
        return fan_refuse_error(status, &err);
    return 0;
}

/* snapshot_record: copies the arrays, and returns the capsule with a tuple of them. */
static PyObject *snapshot_record(PyObject *capsule, copied *self, PyObject *arrays)
{
    PyObject *made = NULL;
    fan_regions *was = &self->was;
    if (fan_regions_read(arrays, "Snapshot", was) < 0)
        return NULL;
    for (size_t i = 0; i < was->n; i++) {
        if (was->items[i].device != 0) {
            return PyErr_Format(
                PyExc_TypeError,
                "Snapshot: array %zu is not on the host: expected memory that can be read", i);
        }
    }
    if (snapshot_copy(self) == 0)
        made = PyTuple_Pack(2, capsule, was->tuple);
    Py_CLEAR(was->tuple);
    return made;
}

static PyObject *snapshot(PyObject *Py_UNUSED(module), PyObject *arrays)
{
    PyObject *capsule = capsule_new(sizeof(copied), SNAPSHOT, snapshot_free);
    if (!capsule)
        return NULL;
    PyObject *made = snapshot_record(capsule, snapshot_of(capsule), arrays);
    Py_DECREF(capsule);
    return made;
}

/* snapshot_index: the number of an array; -1 with an exception, such as that of self NULL. */
static Py_ssize_t snapshot_index(const copied *self, PyObject *o, const char *call)
{
    if (!self)
        return -1;
    return fan_region_number(o, self->was.n, call);
}

static PyObject *snapshot_changed(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    PyObject *numbers = NULL;
    const copied *self = snapshot_of(a[0]);
    if (!self)
        return NULL;
    Py_ssize_t n = (Py_ssize_t)self->was.n;
    if (a[1] != Py_None) {
        numbers = PySequence_Fast(a[1], "Snapshot.changed: expected a sequence of positions");
        if (!numbers)
            return NULL;
        n = PySequence_Fast_GET_SIZE(numbers);
    }
    bool other_threads = fan_snapshot_bytes(self->snapshot) >= LONG_COPY;
    PyObject *found = PyList_New(0);
    for (Py_ssize_t k = 0; found && k < n; k++) {
        Py_ssize_t i = k;
        if (numbers)
            i = snapshot_index(self, PySequence_Fast_GET_ITEM(numbers, k), "Snapshot.changed");
        if (i < 0) {
            Py_CLEAR(found);
            break;
        }
        PyThreadState *left = NULL;
        if (other_threads)
            left = PyEval_SaveThread();
        bool changed = fan_snapshot_changed(self->snapshot, (size_t)i);
        if (left)
            PyEval_RestoreThread(left);
        if (changed)
            fan_list_add(&found, PyLong_FromSsize_t(i));
    }
    Py_XDECREF(numbers);
    return found;
}

static PyObject *snapshot_restore(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    const copied *self = snapshot_of(a[0]);
    Py_ssize_t i = snapshot_index(self, a[1], "Snapshot.restore");
    if (i < 0)
        return NULL;
    uint64_t data = fan_snapshot_data(self->snapshot, (size_t)i);
    if (a[2] != Py_None)
        data = PyLong_AsUnsignedLongLong(a[2]);
    if (data == UINT64_MAX && PyErr_Occurred())
        return NULL;
    Py_BEGIN_ALLOW_THREADS
        fan_snapshot_restore(self->snapshot, (size_t)i, data);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *snapshot_data(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    const copied *self = snapshot_of(a[0]);
    Py_ssize_t i = snapshot_index(self, a[1], "Snapshot.data");
    if (i < 0)
        return NULL;
    return PyLong_FromUnsignedLongLong(fan_snapshot_data(self->snapshot, (size_t)i));
}

/* has_moved: whether an array has another address, shape, strides or dtype. */
static bool has_moved(const fan_layout_item *was, const fan_layout_item *now)
{
    const fan_region *a = &was->region;
    const fan_region *b = &now->region;
    if (a->data != b->data)
        return true;
    if (a->itemsize != b->itemsize)
        return true;
    if (a->ndim != b->ndim)
        return true;
    if (was->dtype != now->dtype)
        return true;
    for (int i = 0; i < a->ndim; i++) {
        if (a->shape[i] != b->shape[i])
            return true;
        if (a->strides[i] != b->strides[i])
            return true;
    }
    return false;
}

static PyObject *snapshot_elsewhere(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    const copied *self = snapshot_of(a[0]);
    fan_regions now;
    if (!self)
        return NULL;
    if (fan_regions_read(a[1], "Snapshot.elsewhere", &now) < 0)
        return NULL;
    PyObject *found = PyList_New(0);
    for (size_t i = 0; found && i < now.n && i < self->was.n; i++) {
        if (has_moved(&self->was.items[i], &now.items[i]))
            fan_list_add(&found, PyLong_FromSize_t(i));
    }
    fan_regions_fini(&now);
    return found;
}

/* ---- ndarrays ---- */

/* restride: sets strides. `a.strides =` refuses strides that an array which owns its memory had
 * before: NumPy takes the bytes that the present strides reach for all of its memory. */
static PyObject *restride(PyObject *Py_UNUSED(module), PyObject *const *values)
{
    PyArrayObject *a = (PyArrayObject *)values[0];
    PyObject *strides = values[1];
    npy_intp to[FAN_MAX_NDIM];
    int ndim = PyArray_NDIM(a);
    if (ndim > FAN_MAX_NDIM || PyTuple_GET_SIZE(strides) != ndim) {
        return PyErr_Format(PyExc_ValueError, "restride: expected %d strides, got %zd", ndim,
                            PyTuple_GET_SIZE(strides));
    }
    for (int i = 0; i < ndim; i++) {
        to[i] = PyLong_AsSsize_t(PyTuple_GET_ITEM(strides, i));
        if (to[i] == -1 && PyErr_Occurred())
            return NULL;
    }
    for (int i = 0; i < ndim; i++)
        PyArray_STRIDES(a)[i] = to[i];
    PyArray_UpdateFlags(a, NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_F_CONTIGUOUS | NPY_ARRAY_ALIGNED);
    Py_RETURN_NONE;
}

#include "py/declared/analysis.h"
