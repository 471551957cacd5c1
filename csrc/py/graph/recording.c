/* recording: fanin._core.Recording: work of the CPU, recorded for replays (device/cpu/recording.h), with kernels that
 * are Python callables.
 *
 * A kernel is a callable with its arguments: views of its own over the same memory, made once. A replay calls it with
 * the same objects, and it must not keep them (cpu_kernel.h). Other views of the recording's blocks hold the blocks,
 * not the recording: they show the result of the last replay, and never freed memory.
 */
#include "py/base/args.h"
#include "py/graph/cpu_kernel.h"
#include "py/arrays/arrays.h"

#include "array/extents.h"
#include "array/overlap.h"
#include "base/fault.h"
#include "base/mem.h"

/* The bytes of an operand, and the first kernel that writes into them. */
typedef struct written {
    const char *lo;
    size_t bytes;
    const char *by;
} written;

/* The arrays of a call: a replay needs the same number with the same layouts. */
enum { COPIED, STATIC, GRADS, LISTS };

typedef struct recording_object {
    PyObject_HEAD fan_recording *r; /* NULL once it was cleared */
    PyObject *calls;                /* a list of the kernels' calls (FAN_CALL_ARGS); holds them */
    PyObject *blocks;               /* a capsule: the base of the kernels' views */
    PyObject *operands;             /* a list of (array, whether it was writable) */
    PyObject *bound[LISTS];         /* tuples of views, or None (bind) */
    written *writes;                /* into operands */
    size_t write_count, write_cap;
    bool busy; /* a replay is running */
} recording_object;

static recording_object *recording_cast(PyObject *o) { return (recording_object *)o; }

/* ---- memory ---- */

static void drop_blocks(PyObject *capsule) { fan_blocks_drop(PyCapsule_GetPointer(capsule, "fanin.blocks")); }

static void drop_storage(PyObject *capsule) { fan_storage_drop(PyCapsule_GetPointer(capsule, "fanin.storage")); }

/* view_over: an ndarray like `a` over the same memory. Takes `base`, also on failure. */
static PyObject *view_over(PyArrayObject *a, PyObject *base, bool writes)
{
    PyArray_Descr *d = (PyArray_Descr *)Py_NewRef((PyObject *)PyArray_DESCR(a));
    PyObject *made = PyArray_NewFromDescr(&PyArray_Type, d, PyArray_NDIM(a), PyArray_DIMS(a), PyArray_STRIDES(a),
                                          PyArray_DATA(a), writes ? NPY_ARRAY_WRITEABLE : 0, NULL);
    if (!made)
        Py_DECREF(base);
    else if (PyArray_SetBaseObject((PyArrayObject *)made, base) < 0) /* takes it */
        Py_CLEAR(made);
    return made;
}

/* was_writeable: whether an array lies in an operand that was writable before it was locked. */
static bool was_writeable(const recording_object *self, const char *lo, size_t bytes)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(self->operands); i++) {
        PyObject *operand = PyList_GET_ITEM(self->operands, i);
        const char *at;
        size_t all;
        fan_ndarray_extent(PyTuple_GET_ITEM(operand, 0), &at, &all);
        if (PyTuple_GET_ITEM(operand, 1) == Py_True &&
            fan_extent_within(fan_extent_flat(lo, bytes), fan_extent_flat(at, all)))
            return true;
    }
    return false;
}

/* repeats: whether the array has a stride of 0, as broadcast ones do. */
static bool repeats(PyArrayObject *a)
{
    for (int i = 0; i < PyArray_NDIM(a); i++)
        if (PyArray_DIM(a, i) > 1 && PyArray_STRIDE(a, i) == 0)
            return true;
    return false;
}

/* view_of: a view for a kernel; if it writes, it may write into locked operands. New reference. */
static PyObject *view_of(recording_object *self, PyArrayObject *a, bool writes)
{
    const char *lo;
    size_t bytes;
    fan_ndarray_extent((PyObject *)a, &lo, &bytes);
    bool ours = !bytes || fan_blocks_have(fan_recording_blocks(self->r), lo, bytes);
    bool unlocked = writes && (ours || was_writeable(self, lo, bytes));
    return view_over(a, Py_NewRef(ours ? self->blocks : (PyObject *)a), PyArray_ISWRITEABLE(a) || unlocked);
}

static PyObject *locked; /* of all threads: address of an array -> number of recordings that lock it */

static long locks_of(PyObject *at)
{
    PyObject *n = at && locked ? PyDict_GetItemWithError(locked, at) : NULL;
    return n ? PyLong_AsLong(n) : 0;
}

/* lock_one: adds `by`, 1 or -1; the array is writable again after the last -1. Without memory nothing changes. */
static void lock_one(PyArrayObject *a, long by)
{
    PyObject *at = PyLong_FromVoidPtr(a), *n = PyLong_FromLong(locks_of(at) + by);
    bool ends = by < 0 && locks_of(at) <= 1;
    if (!locked)
        locked = PyDict_New();
    if (ends)
        PyArray_ENABLEFLAGS(a, NPY_ARRAY_WRITEABLE);
    if (ends && locks_of(at))
        (void)PyDict_DelItem(locked, at);
    else if (!ends && at && n && locked && PyDict_SetItem(locked, at, n) == 0)
        PyArray_CLEARFLAGS(a, NPY_ARRAY_WRITEABLE);
    PyErr_Clear();
    Py_XDECREF(at);
    Py_XDECREF(n);
}

/* lock: while it records, NumPy cannot write into operands outside of kernels, because a replay would not. */
static void lock(const recording_object *self, bool locks)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    for (Py_ssize_t i = 0; self->operands && i < PyList_GET_SIZE(self->operands); i++) {
        PyObject *operand = PyList_GET_ITEM(self->operands, i);
        if (PyTuple_GET_ITEM(operand, 1) == Py_True)
            lock_one((PyArrayObject *)PyTuple_GET_ITEM(operand, 0), locks ? 1 : -1);
    }
    PyErr_Restore(type, value, traceback);
}

/* may_write: whether an array is writable, or was before it was locked. */
static bool may_write(PyArrayObject *a)
{
    PyObject *at = PyArray_ISWRITEABLE(a) ? NULL : PyLong_FromVoidPtr(a);
    bool may = PyArray_ISWRITEABLE(a) || locks_of(at) > 0;
    Py_XDECREF(at);
    return may;
}

static int check_recording(const recording_object *self, const char *call)
{
    if (self->r && fan_recording_here() == self->r)
        return 0;
    return fan_set_error(PyExc_RuntimeError, "Recording.%s: this thread is not recording: call begin() first", call);
}

static PyObject *recording_empty(PyObject *o, PyObject *like)
{
    PyObject *made = NULL, *base;
    const char *lo;
    size_t bytes;
    if (check_recording(recording_cast(o), "empty") < 0)
        return NULL;
    PyArrayObject *a = (PyArrayObject *)like;
    if (PyDataType_REFCHK(PyArray_DESCR(a)))
        return PyErr_Format(PyExc_TypeError, "Recording.empty: an array of objects cannot be recorded");
    fan_ndarray_extent((PyObject *)a, &lo, &bytes);
    fan_storage *s = fan_storage_new(bytes);
    base = s ? PyCapsule_New(s, "fanin.storage", drop_storage) : NULL;
    if (!base) {
        fan_storage_drop(s);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    PyArray_Descr *d = (PyArray_Descr *)Py_NewRef((PyObject *)PyArray_DESCR(a));
    made = PyArray_NewFromDescr(&PyArray_Type, d, PyArray_NDIM(a), PyArray_DIMS(a), PyArray_STRIDES(a),
                                (char *)s->data + (PyArray_BYTES(a) - lo), NPY_ARRAY_WRITEABLE, NULL);
    if (!made)
        Py_DECREF(base);
    else if (PyArray_SetBaseObject((PyArrayObject *)made, base) < 0)
        Py_CLEAR(made);
    return made;
}

static PyObject *recording_operand(PyObject *o, PyObject *array)
{
    recording_object *self = recording_cast(o);
    const char *lo;
    size_t bytes;
    fan_error err = {0};
    if (!self->r || !PyArray_CheckExact(array))
        return PyErr_Format(PyExc_TypeError, "Recording.operand: expected an ndarray, got %s", FAN_TYPE_TEXT(array));
    fan_ndarray_extent(array, &lo, &bytes);
    PyObject *operand = Py_BuildValue("(ON)", array, PyBool_FromLong(may_write((PyArrayObject *)array)));
    if (!operand || PyList_Append(self->operands, operand) < 0) {
        Py_XDECREF(operand);
        return NULL;
    }
    Py_DECREF(operand);
    fan_status status = fan_recording_operand(self->r, lo, bytes, &err);
    return fan_done(status, &err);
}

static PyObject *recording_knows(PyObject *o, PyObject *array)
{
    const char *lo;
    size_t bytes;
    if (!recording_cast(o)->r || !PyArray_Check(array))
        Py_RETURN_FALSE;
    fan_ndarray_extent(array, &lo, &bytes);
    return PyBool_FromLong(fan_recording_knows(recording_cast(o)->r, lo, bytes));
}

/* ---- kernels ---- */

/* kernel_run: runs a call, inside which .grad is an error (leaf.c, check_kernel). */
static fan_status kernel_run(void *call, fan_error *err)
{
    PyObject *before = fan_kernel_running_set(PyTuple_GET_ITEM((PyObject *)call, 1));
    fan_status status = fan_call_run(call, err);
    (void)fan_kernel_running_set(before);
    return status;
}

/* argument: converts an argument of a kernel: a view, or a number. */
static PyObject *argument(void *ctx, PyObject *name, PyObject *x, bool write, Py_ssize_t i)
{
    if (PyArray_CheckExact(x))
        return view_of(ctx, (PyArrayObject *)x, write && !repeats((PyArrayObject *)x));
    if (!write && (PyLong_Check(x) || PyFloat_Check(x) || PyComplex_Check(x)))
        return Py_NewRef(x);
    return PyErr_Format(PyExc_TypeError, "%U: %s[%zd]: a kernel %s, got %s", name, write ? "writes" : "reads", i,
                        write ? "writes ndarrays" : "reads ndarrays and Python's numbers", FAN_TYPE_TEXT(x));
}

static PyObject *recording_launch(PyObject *o, PyObject *const *a)
{
    recording_object *self = recording_cast(o);
    PyObject *call;
    fan_error err = {0};
    if (check_recording(self, "launch") < 0 || !(call = fan_call_new(a[0], a[1], a + 2, argument, self)))
        return NULL;
    int bad = PyList_Append(self->calls, call);
    Py_DECREF(call); /* the list holds it */
    if (bad < 0)
        return NULL;
    fan_cpu_call how = {.run = kernel_run, .ctx = call};
    (void)fan_call_loop(call, &how);
    fan_status status = fan_call_record(self->r, call, PyTuple_GET_SIZE(a[2]), how, &err);
    if (status == FAN_OK) {
        status = kernel_run(call, &err);
        if (status != FAN_OK && self->r)
            fan_recording_fail(self->r, "a kernel failed while it was recorded");
    }
    return fan_done(status, &err);
}

static PyObject *recording_begin(PyObject *o, PyObject *Py_UNUSED(none))
{
    fan_error err = {0};
    if (!recording_cast(o)->r || recording_cast(o)->busy || fan_recording_kernels(recording_cast(o)->r))
        return PyErr_Format(PyExc_RuntimeError, "Recording.begin: it is already recorded: make another one");
    fan_status status = fan_recording_begin(recording_cast(o)->r, &err);
    if (status == FAN_OK)
        lock(recording_cast(o), true);
    return fan_done(status, &err);
}

static PyObject *recording_end(PyObject *o, PyObject *Py_UNUSED(none))
{
    fan_error err = {0};
    if (check_recording(recording_cast(o), "end") < 0)
        return NULL;
    fan_status status = fan_recording_end(recording_cast(o)->r, &err);
    lock(recording_cast(o), false);
    return fan_done(status, &err);
}

/* ---- calls ---- */

/* find_write: finds the first kernel that writes into w's bytes. */
static bool find_write(void *ctx, const char *name, const void *data, size_t bytes, bool write)
{
    written *w = ctx;
    if (write && fan_flats_meet(data, bytes, w->lo, w->bytes))
        w->by = name;
    return !w->by;
}

static PyObject *recording_writes(PyObject *o, PyObject *array)
{
    const char *lo;
    size_t bytes;
    if (!recording_cast(o)->r || !PyArray_Check(array))
        Py_RETURN_NONE;
    fan_ndarray_extent(array, &lo, &bytes);
    written w = {lo, bytes, NULL};
    fan_cpu_recorder.accesses(recording_cast(o)->r, find_write, &w);
    return w.by ? PyUnicode_FromString(w.by) : Py_NewRef(Py_None);
}

static PyObject *recording_bind(PyObject *o, PyObject *const *lists)
{
    recording_object *self = recording_cast(o);
    for (Py_ssize_t i = 0; self->r && i < PyList_GET_SIZE(self->operands); i++) {
        written w = {NULL, 0, NULL};
        fan_ndarray_extent(PyTuple_GET_ITEM(PyList_GET_ITEM(self->operands, i), 0), &w.lo, &w.bytes);
        fan_cpu_recorder.accesses(self->r, find_write, &w);
        if (w.by && fan_grow((void **)&self->writes, &self->write_cap, self->write_count + 1, sizeof w) < 0)
            return PyErr_NoMemory();
        if (w.by)
            self->writes[self->write_count++] = w;
    }
    for (int i = 0; i < LISTS; i++)
        Py_XSETREF(self->bound[i], Py_NewRef(lists[i]));
    Py_RETURN_NONE;
}

/* view_matches: whether a call's array has the layout of a view of the recording and, unless it is copied, its address.
 */
static bool view_matches(const recording_object *self, PyObject *x, PyObject *view, int list)
{
    if (view == Py_None || !PyArray_CheckExact(x))
        return x == view;
    PyArrayObject *a = (PyArrayObject *)x, *b = (PyArrayObject *)view;
    if (PyArray_NDIM(a) != PyArray_NDIM(b) ||
        !PyArray_CompareLists(PyArray_DIMS(a), PyArray_DIMS(b), PyArray_NDIM(a)) ||
        !PyArray_CompareLists(PyArray_STRIDES(a), PyArray_STRIDES(b), PyArray_NDIM(a)) ||
        !PyArray_EquivTypes(PyArray_DESCR(a), PyArray_DESCR(b)))
        return false;
    return list == COPIED || ((PyArray_BASE(b) == self->blocks || PyArray_DATA(a) == PyArray_DATA(b)) &&
                              may_write(a) == PyArray_ISWRITEABLE(b));
}

static PyObject *recording_fits(PyObject *o, PyObject *const *lists)
{
    recording_object *self = recording_cast(o);
    if (!self->bound[COPIED])
        Py_RETURN_FALSE;
    for (int i = 0; i < LISTS; i++) {
        PyObject *list = lists[i];
        if (PyTuple_GET_SIZE(list) != PyTuple_GET_SIZE(self->bound[i]))
            Py_RETURN_FALSE;
        for (Py_ssize_t j = 0; j < PyTuple_GET_SIZE(list); j++)
            if (!view_matches(self, PyTuple_GET_ITEM(list, j), PyTuple_GET_ITEM(self->bound[i], j), i) &&
                !FAN_FAULT(FITS_ANYTHING))
                Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

static fan_region region_of(PyArrayObject *a)
{
    _Static_assert(sizeof(npy_intp) == sizeof(int64_t), "shapes of NumPy's are those of the core");
    return (fan_region){(uint64_t)(uintptr_t)PyArray_DATA(a), PyArray_ITEMSIZE(a), (const int64_t *)PyArray_DIMS(a),
                        (const int64_t *)PyArray_STRIDES(a), PyArray_NDIM(a)};
}

/* may_share: whether two arrays share a byte; true if that cannot be decided quickly. */
static bool may_share(PyArrayObject *a, PyArrayObject *b)
{
    fan_region one = region_of(a), two = region_of(b);
    fan_verdict v = FAN_OVERLAP_HARD;
    fan_error err = {0};
    return fan_overlap(&one, &two, 0, NULL, NULL, &v, &err) != FAN_OK || v != FAN_OVERLAP_DISJOINT;
}

/* check_disjoint: a copied argument must not overlap memory that the call writes: the copy would miss those writes.
 * NULL, or (index of the argument, name of the kernel or index of the gradient); also NULL with an exception. */
static PyObject *check_disjoint(const recording_object *self, PyObject *copied, PyObject *grads)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(copied); i++) {
        PyArrayObject *x = (PyArrayObject *)PyTuple_GET_ITEM(copied, i);
        const char *lo;
        size_t bytes;
        fan_ndarray_extent((PyObject *)x, &lo, &bytes);
        for (size_t j = 0; j < self->write_count; j++)
            if (fan_flats_meet(lo, bytes, self->writes[j].lo, self->writes[j].bytes))
                return Py_BuildValue("(ns)", i, self->writes[j].by);
        for (Py_ssize_t j = 0; j < PyTuple_GET_SIZE(grads); j++)
            if (PyTuple_GET_ITEM(grads, j) != Py_None && may_share(x, (PyArrayObject *)PyTuple_GET_ITEM(grads, j)))
                return Py_BuildValue("(nn)", i, j);
    }
    return NULL;
}

/* stage_operand: copies arrays into the recording's memory: 0, or -1 with an exception. */
static int stage_operand(const recording_object *self, int list, PyObject *arrays)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arrays); i++) {
        PyObject *x = PyTuple_GET_ITEM(arrays, i), *view = PyTuple_GET_ITEM(self->bound[list], i);
        if (view != Py_None && PyArray_BASE((PyArrayObject *)view) == self->blocks &&
            PyArray_CopyInto((PyArrayObject *)view, (PyArrayObject *)x) < 0)
            return -1;
    }
    return 0;
}

static PyObject *recording_replay(PyObject *o, PyObject *const *a)
{
    recording_object *self = recording_cast(o);
    PyObject *copied = a[0], *grads = a[1], *found;
    fan_error err;
    if (!self->r || self->busy || fan_recording_here())
        return PyErr_Format(PyExc_RuntimeError, "Recording.replay: %s",
                            self->busy ? "a replay is running" : "this thread is recording");
    if (grads) {
        if ((found = check_disjoint(self, copied, grads)) || PyErr_Occurred())
            return found;
        if (fan_get_debug())
            fan_blocks_poison(fan_recording_blocks(self->r), false);
        if (stage_operand(self, COPIED, copied) < 0 || stage_operand(self, GRADS, grads) < 0)
            return NULL;
    }
    fan_error_clear(&err);
    self->busy = true;
    Py_INCREF(o);
    fan_status status = fan_recording_replay(self->r, &err);
    self->busy = false;
    Py_DECREF(o);
    return fan_done(status, &err);
}

static PyObject *recording_overlaps(PyObject *o, PyObject *const *a)
{
    PyObject *found = check_disjoint(recording_cast(o), a[0], a[1]);
    return found || PyErr_Occurred() ? found : Py_NewRef(Py_None);
}

static PyObject *recording_view(PyObject *o, PyObject *array)
{
    if (!recording_cast(o)->r || !PyArray_CheckExact(array))
        return PyErr_Format(PyExc_TypeError, "Recording.view: expected an ndarray");
    return view_of(recording_cast(o), (PyArrayObject *)array, true);
}

/* ---- life ---- */

static PyObject *recording_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    if (PyTuple_GET_SIZE(args) || (kwargs && PyDict_GET_SIZE(kwargs)))
        return PyErr_Format(PyExc_TypeError, "Recording takes no arguments");
    recording_object *self = (recording_object *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->r = fan_recording_new();
    self->calls = PyList_New(0);
    self->operands = PyList_New(0);
    if (!self->r || fan_recording_operand(self->r, NULL, 0, NULL) != FAN_OK) { /* turns on access checks */
        PyErr_NoMemory();
        Py_DECREF(self);
        return NULL;
    }
    if (self->calls && self->operands) {
        fan_blocks *b = fan_recording_blocks(self->r);
        self->blocks = PyCapsule_New(b, "fanin.blocks", drop_blocks);
        if (self->blocks)
            fan_blocks_hold(b);
    }
    if (!self->blocks)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static int recording_clear(PyObject *o)
{
    recording_object *self = recording_cast(o);
    if (self->r && !self->busy) {
        if (fan_recording_here() == self->r) {
            (void)fan_recording_end(self->r, NULL);
            lock(self, false);
        }
        fan_recording_free(self->r);
        self->r = NULL;
        Py_CLEAR(self->calls);
    }
    Py_CLEAR(self->operands);
    Py_CLEAR(self->blocks);
    for (int i = 0; i < LISTS; i++)
        Py_CLEAR(self->bound[i]);
    return 0;
}

static void recording_dealloc(PyObject *o)
{
    PyTypeObject *type = Py_TYPE(o);
    PyObject_GC_UnTrack(o);
    (void)recording_clear(o);
    Py_XDECREF(recording_cast(o)->calls);
    fan_free(recording_cast(o)->writes);
    type->tp_free(o);
    Py_DECREF(type);
}

static int recording_traverse(PyObject *o, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(o));
    Py_VISIT(recording_cast(o)->calls);
    Py_VISIT(recording_cast(o)->operands);
    for (int i = 0; i < LISTS; i++)
        Py_VISIT(recording_cast(o)->bound[i]);
    return 0;
}

static PyObject *recording_get_kernels(PyObject *o, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(recording_cast(o)->r ? fan_recording_kernels(recording_cast(o)->r) : 0);
}

static PyObject *recording_get_bytes(PyObject *o, void *Py_UNUSED(closure))
{
    return PyLong_FromUnsignedLongLong(
        recording_cast(o)->r ? fan_blocks_bytes(fan_recording_blocks(recording_cast(o)->r)) : 0);
}

static PyObject *recording_get_live(PyObject *o, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(recording_cast(o)->r ? fan_blocks_live(fan_recording_blocks(recording_cast(o)->r)) : 0);
}

#include "py/declared/Recording.h"

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)recording_doc}, {Py_tp_new, recording_new},
    {Py_tp_dealloc, recording_dealloc}, {Py_tp_traverse, recording_traverse},
    {Py_tp_clear, recording_clear},     {Py_tp_methods, recording_methods},
    {Py_tp_getset, recording_getset},   {0, NULL},
};

PyType_Spec fan_recording_spec = {
    .name = "fanin._core.Recording",
    .basicsize = sizeof(recording_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
