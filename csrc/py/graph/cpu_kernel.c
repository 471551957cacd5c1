/* cpu_kernel: kernels that are Python callables, on the CPU (device/cpu/recording.h): a call with
 * its arguments, or NumPy's inner loop in its place; arrays and launches inside functions of graph
 * trees; recorded steps of
 * fanin.tape. */
#include "py/base/args.h"
#include "py/arrays/arrays.h"

#include "array/extents.h"
#include "array/overlap.h"
#include "base/fault.h"
#include "base/mem.h"
#include "device/cpu/recording.h"
#include "graph/tree.h"

#include <numpy/ufuncobject.h>

/* A call is a tuple: the callable, its name, None or the names of keyword arguments, the
 * arguments. */
#define CALL_ARGS 3
#define LOOP_ARGS 4
/* For larger arrays NumPy releases the interpreter's lock. */
#define LOOP_BYTES ((npy_intp)1 << 18)

static bool is_ufunc(PyObject *fn)
{
    return strcmp(Py_TYPE(fn)->tp_name, "numpy.ufunc") == 0;
}

/* check_kept: after the call: 0, or -1 with an exception if the callable kept an argument. */
static int check_kept(PyObject *call)
{
    if (is_ufunc(PyTuple_GET_ITEM(call, 0)))
        return 0;
    for (Py_ssize_t i = CALL_ARGS; i < PyTuple_GET_SIZE(call); i++)
        if (PyArray_Check(PyTuple_GET_ITEM(call, i)) && Py_REFCNT(PyTuple_GET_ITEM(call, i)) > 1)
            return fan_set_error(PyExc_RuntimeError,
                                 "kernel %R kept its argument %zd after its run, when the memory "
                                 "may be reused: keep a copy, "
                                 "view.copy()",
                                 PyTuple_GET_ITEM(call, 1), i - CALL_ARGS);
    return 0;
}

/* call_run: with the interpreter's lock. FAN_ERR_EXTERN, also if the callable keeps an argument. */
static fan_status call_run(void *ctx, fan_error *err)
{
    PyTupleObject *call = ctx;
    PyObject *names = call->ob_item[2] == Py_None ? NULL : call->ob_item[2];
    size_t n = (size_t)Py_SIZE(call) - CALL_ARGS - (names ? 1 : 0);
    PyObject *result = PyObject_Vectorcall(call->ob_item[0], call->ob_item + CALL_ARGS, n, names);
    if (!result)
        return fan_from_python(err);
    Py_DECREF(result);
    return check_kept((PyObject *)call) < 0 ? fan_from_python(err) : FAN_OK;
}

/* call_new: the call fn(*reads, *writes); `argument` converts each (i: its index among reads or
 * writes). New reference, or NULL with an exception. */
typedef PyObject *(*call_argument)(void *ctx, PyObject *name, PyObject *x, bool write,
                                   Py_ssize_t i);
static PyObject *call_new(PyObject *fn, PyObject *name, PyObject *const lists[2],
                          call_argument argument, void *ctx)
{
    Py_ssize_t reads = PyTuple_GET_SIZE(lists[0]), all = reads + PyTuple_GET_SIZE(lists[1]);
    bool by_out = is_ufunc(fn) && all == reads + 1;
    PyObject *call = PyTuple_New(all + CALL_ARGS),
             *names = by_out ? Py_BuildValue("(s)", "out") : Py_NewRef(Py_None);
    if (!call || !names) {
        Py_XDECREF(call);
        Py_XDECREF(names);
        return NULL;
    }
    PyTuple_SET_ITEM(call, 0, Py_NewRef(fn));
    PyTuple_SET_ITEM(call, 1, Py_NewRef(name));
    PyTuple_SET_ITEM(call, 2, names);
    for (Py_ssize_t i = 0; i < all; i++) {
        bool write = i >= reads;
        Py_ssize_t at = write ? i - reads : i;
        PyObject *made = argument(ctx, name, PyTuple_GET_ITEM(lists[write], at), write, at);
        if (!made) {
            Py_DECREF(call);
            return NULL;
        }
        PyTuple_SET_ITEM(call, i + CALL_ARGS, made);
    }
    return call;
}

/* call_record: adds the call to a recording; its first `reads` arguments are read, the others
 * written. how: its run, drop and ctx, which is taken also on failure. */
static fan_status call_record(fan_recording *r, PyObject *call, Py_ssize_t reads, fan_cpu_call how,
                              fan_error *err)
{
    Py_ssize_t all = PyTuple_GET_SIZE(call) - CALL_ARGS;
    fan_cpu_access *accesses = fan_calloc(((size_t)all + 1) * sizeof *accesses);
    const char *name = PyUnicode_AsUTF8(PyTuple_GET_ITEM(call, 1));
    if (!name) /* lone surrogates */
        PyErr_Clear();
    if (!accesses) {
        if (how.drop)
            how.drop(how.ctx);
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    }
    how.name = name ? name : "a kernel";
    how.accesses = accesses;
    for (Py_ssize_t i = 0; i < all; i++) {
        PyObject *x = PyTuple_GET_ITEM(call, i + CALL_ARGS);
        const char *lo;
        if (!PyArray_CheckExact(x))
            continue;
        fan_ndarray_extent(x, &lo, &accesses[how.n].bytes);
        accesses[how.n].data = lo;
        accesses[how.n++].write = i >= reads;
    }
    fan_status status = fan_recording_call(r, &how, err);
    fan_free(accesses);
    return status;
}

/* Title: Inner loops. A NumPy ufunc on arrays of one layout ends in one call of a C function, which
 * a replay calls directly, without the interpreter. If NumPy does more (casts, broadcasts, skips
 * gaps, calls the loop more than once), the replay calls the ufunc. A direct loop does not warn of
 * overflow or invalid values. */
typedef struct inner_loop {
    PyUFuncGenericFunction run;
    void *data;
    npy_intp count, steps[LOOP_ARGS];
    char *at[LOOP_ARGS];
    _Alignas(16) char numbers[LOOP_ARGS][32]; /* Python numbers, converted to the result's dtype */
} inner_loop;

static fan_status run_loop(void *ctx, fan_error *err)
{
    inner_loop *l = ctx;
    char *at[LOOP_ARGS];
    npy_intp count = l->count;
    (void)err;
    memcpy(at, l->at, sizeof at);
    l->run(at, &count, l->steps, l->data);
    return FAN_OK;
}

static void drop_loop(void *ctx)
{
    PyMem_RawFree(ctx);
}

/* loop_of: the index of a ufunc's loop for exactly these types; -1: none. */
static int loop_of(const PyUFuncObject *f, PyObject *const *args, PyArrayObject *out)
{
    for (int i = 0; i < f->ntypes; i++) {
        bool same = f->functions[i] != NULL;
        for (int j = 0; same && j < f->nargs; j++)
            same = f->types[i * f->nargs + j] ==
                   (char)PyArray_TYPE(PyArray_Check(args[j]) ? (PyArrayObject *)args[j] : out);
        if (same)
            return i;
    }
    return -1;
}

/* loop_takes: whether a direct loop can use an argument: an array laid out like the result, or a
 * number with floats. */
static bool loop_takes(PyObject *x, PyArrayObject *out)
{
    if (!PyArray_CheckExact(x))
        return PyTypeNum_ISFLOAT(PyArray_TYPE(out)) &&
               (PyFloat_CheckExact(x) || PyLong_CheckExact(x));
    PyArrayObject *a = (PyArrayObject *)x;
    bool disjoint = PyArray_BYTES(a) == PyArray_BYTES(out) ||
                    !fan_flats_meet(PyArray_BYTES(a), (uint64_t)PyArray_NBYTES(a),
                                    PyArray_BYTES(out), (uint64_t)PyArray_NBYTES(out));
    int both = PyArray_FLAGS(a) & PyArray_FLAGS(out); /* one inner loop covers all of it */
    return PyTypeNum_ISNUMBER(PyArray_TYPE(a)) && disjoint && both & NPY_ARRAY_ALIGNED &&
           both & (NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_F_CONTIGUOUS) &&
           PyArray_NDIM(a) == PyArray_NDIM(out) &&
           PyArray_CompareLists(PyArray_DIMS(a), PyArray_DIMS(out), PyArray_NDIM(a)) &&
           PyArray_ISNOTSWAPPED(a);
}

/* call_loop: how->run, drop and ctx of the direct loop; false, without an exception: there is
 * none. */
static bool call_loop(PyObject *call, fan_cpu_call *how)
{
    PyObject *const *args = ((PyTupleObject *)call)->ob_item + CALL_ARGS;
    Py_ssize_t n = Py_SIZE(call) - CALL_ARGS;
    if (!is_ufunc(PyTuple_GET_ITEM(call, 0)) || n < 2 || n > LOOP_ARGS)
        return false;
    const PyUFuncObject *f = (PyUFuncObject *)PyTuple_GET_ITEM(call, 0);
    if (f->core_enabled || f->nargs != n || f->nout != 1)
        return false;
    PyArrayObject *out = (PyArrayObject *)args[n - 1];
    bool simple =
        PyArray_SIZE(out) > 0 && PyArray_NBYTES(out) <= LOOP_BYTES && PyArray_ITEMSIZE(out) <= 32;
    for (Py_ssize_t i = 0; i < n && simple; i++)
        simple = loop_takes(args[i], out);
    int which = simple ? loop_of(f, args, out) : -1;
    inner_loop *l = which < 0 ? NULL : PyMem_RawCalloc(1, sizeof *l);
    if (!l)
        return false;
    l->run = f->functions[which];
    l->data = f->data ? f->data[which] : NULL;
    l->count = PyArray_SIZE(out);
    for (Py_ssize_t i = 0; i < n; i++) {
        bool array = PyArray_Check(args[i]);
        l->at[i] = array ? PyArray_BYTES((PyArrayObject *)args[i]) : l->numbers[i];
        if (array) {
            l->steps[i] = PyArray_ITEMSIZE((PyArrayObject *)args[i]);
        } else if (PyArray_SETITEM(out, l->numbers[i], args[i]) < 0) {
            PyErr_Clear();
            PyMem_RawFree(l);
            return false;
        }
    }
    how->run = run_loop;
    how->drop = drop_loop;
    how->ctx = l;
    return true;
}

/* ---- functions of graph trees ---- */

/* Title: Kernels of a tree. A recording has the call with views that were made once, or only the
 * direct loop. A view holds the whole memory that it lies in, the arena or the operand's, so a kept
 * view never reads freed memory; keeping one is an error anyway. */
typedef struct tree_kernel {
    PyObject *name, *call; /* held; call NULL: */
    fan_cpu_call loop;
} tree_kernel;

static void kernel_drop(void *ctx)
{
    tree_kernel *k = ctx;
    fan_gil gil;
    if (!fan_gil_enter(&gil))
        return; /* the interpreter has ended; the process frees it */
    if (k->loop.drop)
        k->loop.drop(k->loop.ctx);
    Py_XDECREF(k->call);
    Py_XDECREF(k->name);
    fan_free(k);
    fan_gil_leave(&gil);
}

static fan_status kernel_run(void *ctx, fan_error *err)
{
    tree_kernel *k = ctx;
    fan_gil gil;
    if (!k->call)
        return k->loop.run(k->loop.ctx, err);
    if (!fan_gil_enter(&gil))
        return fan_fail(err, FAN_ERR_STATE,
                        "the interpreter has ended: a Python kernel cannot run");
    fan_status status = call_run(k->call, err);
    fan_gil_leave(&gil);
    return status;
}

static void drop_storage(PyObject *capsule)
{
    fan_storage_drop(PyCapsule_GetPointer(capsule, FAN_KERNEL_MEMORY));
}

/* storage_capsule: takes the hold, also on failure. */
static PyObject *storage_capsule(fan_storage *s)
{
    PyObject *made = PyCapsule_New(s, FAN_KERNEL_MEMORY, drop_storage);
    if (!made)
        fan_storage_drop(s);
    return made;
}

/* view_of: an array of fanin's on the CPU as an ndarray for a kernel. */
static PyObject *view_of(const fan_array *a, bool write)
{
    fan_storage *whole = fan_tree_memory_under(a);
    PyObject *base = storage_capsule(fan_storage_hold(whole ? whole : a->storage));
    PyObject *made = base ? fan_ndarray_over(a, write, base) : NULL;
    Py_XDECREF(base);
    return made;
}

/* argument: converts an argument of a launch for its kernel; new reference. */
static PyObject *argument(void *Py_UNUSED(ctx), PyObject *name, PyObject *x, bool write,
                          Py_ssize_t i)
{
    fan_device *d = NULL;
    const fan_array *a = fan_array_arg(x, &d);
    if (a && d == fan_cpu()) {
        if (fan_array_usable(a) < 0)
            return NULL;
        if (!write || a->writable)
            return view_of(a, write);
        return PyErr_Format(PyExc_ValueError, "%U: writes[%zd] is read-only", name, i);
    }
    if (PyArray_CheckExact(x) && (!write || PyArray_ISWRITEABLE((PyArrayObject *)x)))
        return fan_ndarray_check_known(x, PyUnicode_AsUTF8(name)) < 0
                   ? NULL
                   : PyArray_View((PyArrayObject *)x, NULL, NULL);
    if (!write &&
        (PyLong_Check(x) || PyFloat_Check(x) || PyComplex_Check(x) || PyArray_IsScalar(x, Generic)))
        return Py_NewRef(x);
    if (!write && PySequence_Check(x) && !PyUnicode_Check(x) && !PyBytes_Check(x))
        return PyErr_Format(
            PyExc_TypeError,
            "%U: reads[%zd]: a kernel on the CPU reads arrays on the CPU and numbers, got %s: pass "
            "np.asarray(x) to the function as an operand, or give its numbers one by one",
            name, i, FAN_TYPE_TEXT(x));
    return PyErr_Format(PyExc_TypeError, "%U: %s[%zd]: a kernel on the CPU %s, got %s", name,
                        write ? "writes" : "reads", i,
                        write ? "writes writable arrays" : "reads arrays on the CPU and numbers",
                        FAN_TYPE_TEXT(x));
}

/* cpu_launch: calls fn(*reads, *writes) now, or at each launch of this thread's recording. */
static PyObject *cpu_launch(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    PyObject *call = call_new(a[0], a[1], a + 2, argument, NULL);
    fan_recording *r = fan_recording_here();
    fan_error err = {0};
    if (!call)
        return NULL;
    fan_status status;
    if (!r || !fan_recording_defers()) {
        status = call_run(call, &err);
    } else {
        tree_kernel *k = fan_calloc(sizeof *k);
        if (k) {
            k->name = Py_NewRef(PyTuple_GET_ITEM(call, 1));
            if (!call_loop(call, &k->loop))
                k->call = Py_NewRef(call);
        }
        const fan_cpu_call how = {.run = kernel_run, .drop = kernel_drop, .ctx = k};
        status = k ? call_record(r, call, PyTuple_GET_SIZE(a[2]), how, &err)
                   : fan_fail(&err, FAN_ERR_NOMEM, "out of memory");
    }
    Py_DECREF(call);
    return fan_done(status, &err);
}

/* cpu_empty: a new array of fanin's on the CPU; inside a function of a graph tree in the tree's
 * memory. */
static PyObject *cpu_empty(PyObject *Py_UNUSED(module), PyObject *const *values)
{
    PyObject *made = NULL;
    FAN_UNINITIALIZED int64_t dims[FAN_MAX_NDIM];
    fan_dtype d;
    fan_array *a = NULL;
    fan_error err = {0};
    int ndim;
    if ((ndim = fan_shape_tuple(values[0], dims)) < 0 || fan_dtype_parse(values[1], &d) < 0)
        return NULL;
    fan_status status = fan_device_array(fan_cpu(), NULL, d, ndim, dims, NULL, &a, &err);
    if (status != FAN_OK)
        return fan_raise(status, &err);
    made = fan_array_wrap(a, fan_cpu());
    fan_array_drop(a);
    return made;
}

static PyObject *cpu_wants_handles(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    return PyBool_FromLong(fan_wants_handles(NULL));
}

/* ---- recorded steps of fanin.tape ---- */

/* Title: Memory of a step. A recording is a capsule; what holds it holds the calls of its kernels
 * as well. Their arguments are views of its memory, or of operands, made once; those of its memory
 * have the capsule as their base, so they show the result of the last replay, and never freed
 * memory. */
static const char RECORDING[] = "fanin.recording";

static fan_recording *recording_of(PyObject *capsule)
{
    return PyCapsule_GetPointer(capsule, RECORDING);
}

static void recording_gone(PyObject *capsule)
{
    fan_recording_free(recording_of(capsule));
}

static PyObject *recording_new(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    fan_recording *r = fan_recording_new();
    /* which turns on access checks */
    bool checks = r && fan_recording_operand(r, NULL, 0, false, NULL) == FAN_OK;
    PyObject *made = checks ? PyCapsule_New(r, RECORDING, recording_gone) : NULL;
    if (!made)
        fan_recording_free(r);
    return made || PyErr_Occurred() ? made : PyErr_NoMemory();
}

static PyObject *recording_begin(PyObject *Py_UNUSED(module), PyObject *capsule)
{
    fan_recording *r = recording_of(capsule);
    fan_error err = {0};
    return r ? fan_done(fan_recording_begin(r, &err), &err) : NULL;
}

static PyObject *recording_end(PyObject *Py_UNUSED(module), PyObject *capsule)
{
    fan_recording *r = recording_of(capsule);
    fan_error err = {0};
    return r ? fan_done(fan_recording_end(r, &err), &err) : NULL;
}

static PyObject *recording_counts(PyObject *Py_UNUSED(module), PyObject *capsule)
{
    fan_recording *r = recording_of(capsule);
    if (!r)
        return NULL;
    fan_blocks *b = fan_recording_blocks(r);
    return Py_BuildValue("(nKn)", (Py_ssize_t)fan_recording_kernels(r),
                         (unsigned long long)fan_blocks_bytes(b), (Py_ssize_t)fan_blocks_live(b));
}

/* of all threads: address of an array -> number of recordings that lock it */
static PyObject *locked;

static long locks_of(PyObject *at)
{
    PyObject *n = at && locked ? PyDict_GetItemWithError(locked, at) : NULL;
    return n ? PyLong_AsLong(n) : 0;
}

/* recording_lock: an array is read-only while a recording locks it. Without memory nothing
 * changes. */
static PyObject *recording_lock(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    const long by = a[1] == Py_True ? 1 : -1;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(a[0]); i++) {
        PyArrayObject *x = (PyArrayObject *)PyList_GET_ITEM(a[0], i);
        PyObject *at = PyLong_FromVoidPtr(x), *n = PyLong_FromLong(locks_of(at) + by);
        bool ends = by < 0 && locks_of(at) <= 1;
        if (!locked)
            locked = PyDict_New();
        if (ends)
            PyArray_ENABLEFLAGS(x, NPY_ARRAY_WRITEABLE);
        if (ends && locks_of(at))
            (void)PyDict_DelItem(locked, at);
        else if (!ends && at && n && locked && PyDict_SetItem(locked, at, n) == 0)
            PyArray_CLEARFLAGS(x, NPY_ARRAY_WRITEABLE);
        PyErr_Clear();
        Py_XDECREF(at);
        Py_XDECREF(n);
    }
    Py_RETURN_NONE;
}

/* may_write: whether an array is writable, or was before it was locked. */
static bool may_write(PyArrayObject *a)
{
    PyObject *at = PyArray_ISWRITEABLE(a) ? NULL : PyLong_FromVoidPtr(a);
    bool may = PyArray_ISWRITEABLE(a) || locks_of(at) > 0;
    Py_XDECREF(at);
    return may;
}

static PyObject *recording_operand(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    fan_recording *r = recording_of(a[0]);
    const char *lo;
    size_t bytes;
    fan_error err = {0};
    if (!r)
        return NULL;
    fan_ndarray_extent(a[1], &lo, &bytes);
    bool may = may_write((PyArrayObject *)a[1]);
    fan_status status = fan_recording_operand(r, lo, bytes, may, &err);
    return status == FAN_OK ? PyBool_FromLong(may) : fan_raise(status, &err);
}

static PyObject *recording_knows(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    fan_recording *r = recording_of(a[0]);
    const char *lo;
    size_t bytes;
    if (!r)
        return NULL;
    fan_ndarray_extent(a[1], &lo, &bytes);
    return PyBool_FromLong(fan_recording_knows(r, lo, bytes, false));
}

/* ndarray_like: an ndarray with the dtype and layout of `a` over other memory. Takes `base` (NULL:
 * with an exception), also on failure. */
static PyObject *ndarray_like(PyArrayObject *a, char *data, PyObject *base, bool writable)
{
    if (!base)
        return NULL;
    PyArray_Descr *d = (PyArray_Descr *)Py_NewRef((PyObject *)PyArray_DESCR(a));
    PyObject *made =
        PyArray_NewFromDescr(&PyArray_Type, d, PyArray_NDIM(a), PyArray_DIMS(a), PyArray_STRIDES(a),
                             data, writable ? NPY_ARRAY_WRITEABLE : 0, NULL);
    if (!made)
        Py_DECREF(base);
    else if (PyArray_SetBaseObject((PyArrayObject *)made, base) < 0) /* takes it */
        Py_CLEAR(made);
    return made;
}

static PyObject *recording_empty(PyObject *Py_UNUSED(module), PyObject *like)
{
    PyArrayObject *a = (PyArrayObject *)like;
    const char *lo;
    size_t bytes;
    if (PyDataType_REFCHK(PyArray_DESCR(a)))
        return PyErr_Format(PyExc_TypeError, "an array of objects cannot be recorded");
    fan_ndarray_extent(like, &lo, &bytes);
    fan_storage *s = fan_storage_new(bytes);
    return s ? ndarray_like(a, (char *)s->data + (PyArray_BYTES(a) - lo), storage_capsule(s), true)
             : PyErr_NoMemory();
}

/* repeats: whether the array has a stride of 0, as broadcast ones do. */
static bool repeats(PyArrayObject *a)
{
    for (int i = 0; i < PyArray_NDIM(a); i++)
        if (PyArray_DIM(a, i) > 1 && PyArray_STRIDE(a, i) == 0)
            return true;
    return false;
}

/* step_view: a view for a kernel; if it writes, it may write into locked operands. New
 * reference. */
static PyObject *step_view(PyObject *capsule, PyArrayObject *a, bool writes)
{
    fan_recording *r = recording_of(capsule);
    const char *lo;
    size_t bytes;
    if (!r)
        return NULL;
    fan_ndarray_extent((PyObject *)a, &lo, &bytes);
    bool ours = !bytes || fan_blocks_have(fan_recording_blocks(r), lo, bytes);
    return ndarray_like(a, PyArray_BYTES(a), Py_NewRef(ours ? capsule : (PyObject *)a),
                        PyArray_ISWRITEABLE(a) ||
                            (writes && fan_recording_knows(r, lo, bytes, true)));
}

static PyObject *recording_view(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    return step_view(a[0], (PyArrayObject *)a[1], true);
}

/* step_run: runs a call, inside which .grad is an error (leaf.c, check_kernel). */
static fan_status step_run(void *call, fan_error *err)
{
    PyObject *before = fan_kernel_running_set(PyTuple_GET_ITEM((PyObject *)call, 1));
    fan_status status = call_run(call, err);
    (void)fan_kernel_running_set(before);
    return status;
}

/* step_argument: converts an argument of a kernel: a view, or a number. */
static PyObject *step_argument(void *capsule, PyObject *name, PyObject *x, bool write, Py_ssize_t i)
{
    if (PyArray_CheckExact(x))
        return step_view(capsule, (PyArrayObject *)x, write && !repeats((PyArrayObject *)x));
    if (!write && (PyLong_Check(x) || PyFloat_Check(x) || PyComplex_Check(x)))
        return Py_NewRef(x);
    return PyErr_Format(
        PyExc_TypeError, "%U: %s[%zd]: a kernel %s, got %s", name, write ? "writes" : "reads", i,
        write ? "writes ndarrays" : "reads ndarrays and Python's numbers", FAN_TYPE_TEXT(x));
}

static PyObject *recording_launch(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    enum {
        CAPSULE,
        CALLS,
        FN,
        NAME,
        READS
    };
    fan_recording *r = recording_of(a[CAPSULE]);
    PyObject *call = r ? call_new(a[FN], a[NAME], a + READS, step_argument, a[CAPSULE]) : NULL;
    fan_error err = {0};
    if (!call)
        return NULL;
    int bad = PyList_Append(a[CALLS], call);
    Py_DECREF(call); /* the list holds it */
    if (bad < 0)
        return NULL;
    fan_cpu_call how = {.run = step_run, .ctx = call};
    (void)call_loop(call, &how);
    fan_status status = call_record(r, call, PyTuple_GET_SIZE(a[READS]), how, &err);
    if (status == FAN_OK) {
        status = step_run(call, &err);
        if (status != FAN_OK)
            fan_recording_fail(r, "a kernel failed while it was recorded");
    }
    return fan_done(status, &err);
}

/* The bytes of an operand, and the first kernel that writes into them. */
typedef struct written {
    const char *lo;
    size_t bytes;
    const char *by;
} written;

static bool find_write(void *ctx, const char *name, const void *data, size_t bytes, bool write)
{
    written *w = ctx;
    if (write && fan_flats_meet(data, bytes, w->lo, w->bytes))
        w->by = name;
    return !w->by;
}

static PyObject *recording_writes(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    fan_recording *r = recording_of(a[0]);
    written w = {NULL, 0, NULL};
    if (!r)
        return NULL;
    fan_ndarray_extent(a[1], &w.lo, &w.bytes);
    fan_cpu_recorder.accesses(r, find_write, &w);
    return w.by ? PyUnicode_FromString(w.by) : Py_NewRef(Py_None);
}

/* The arrays of a call, as tuples of views: a replay needs the same number with the same
 * layouts. */
enum {
    COPIED,
    STATIC,
    GRADS,
    LISTS
};

/* view_matches: whether a call's array has the layout of a view of the recording and, unless it is
 * copied, its
 * address. */
static bool view_matches(PyObject *capsule, PyObject *x, PyObject *view, int list)
{
    if (view == Py_None || !PyArray_CheckExact(x))
        return x == view;
    PyArrayObject *a = (PyArrayObject *)x, *b = (PyArrayObject *)view;
    if (PyArray_NDIM(a) != PyArray_NDIM(b) ||
        !PyArray_CompareLists(PyArray_DIMS(a), PyArray_DIMS(b), PyArray_NDIM(a)) ||
        !PyArray_CompareLists(PyArray_STRIDES(a), PyArray_STRIDES(b), PyArray_NDIM(a)) ||
        !PyArray_EquivTypes(PyArray_DESCR(a), PyArray_DESCR(b)))
        return false;
    return list == COPIED || ((PyArray_BASE(b) == capsule || PyArray_DATA(a) == PyArray_DATA(b)) &&
                              may_write(a) == PyArray_ISWRITEABLE(b));
}

static PyObject *recording_fits(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    for (int i = 0; i < LISTS; i++) {
        PyObject *list = a[2 + i], *views = PyTuple_GET_ITEM(a[1], i);
        if (PyTuple_GET_SIZE(list) != PyTuple_GET_SIZE(views))
            Py_RETURN_FALSE;
        for (Py_ssize_t j = 0; j < PyTuple_GET_SIZE(list); j++)
            if (!view_matches(a[0], PyTuple_GET_ITEM(list, j), PyTuple_GET_ITEM(views, j), i) &&
                !FAN_FAULT(FITS_ANYTHING))
                Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

static fan_region region_of(PyArrayObject *a)
{
    _Static_assert(sizeof(npy_intp) == sizeof(int64_t), "shapes of NumPy's are those of the core");
    return (fan_region){(uint64_t)(uintptr_t)PyArray_DATA(a), PyArray_ITEMSIZE(a),
                        (const int64_t *)PyArray_DIMS(a), (const int64_t *)PyArray_STRIDES(a),
                        PyArray_NDIM(a)};
}

/* find_overlap: a copied argument must not overlap memory that the call writes: the copy would miss
 * those writes. NULL, or (index of the argument, name of the kernel or index of the gradient); also
 * NULL with an exception. `writes`: pairs of an operand and the kernel that writes into it. */
static PyObject *find_overlap(PyObject *writes, PyObject *copied, PyObject *grads)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(copied); i++) {
        PyArrayObject *x = (PyArrayObject *)PyTuple_GET_ITEM(copied, i);
        const char *lo, *at;
        size_t bytes, size;
        fan_ndarray_extent((PyObject *)x, &lo, &bytes);
        for (Py_ssize_t j = 0; j < PyTuple_GET_SIZE(writes); j++) {
            PyObject *pair = PyTuple_GET_ITEM(writes, j);
            fan_ndarray_extent(PyTuple_GET_ITEM(pair, 0), &at, &size);
            if (fan_flats_meet(lo, bytes, at, size))
                return Py_BuildValue("(nO)", i, PyTuple_GET_ITEM(pair, 1));
        }
        for (Py_ssize_t j = 0; j < PyTuple_GET_SIZE(grads); j++) {
            if (PyTuple_GET_ITEM(grads, j) == Py_None)
                continue;
            fan_region one = region_of(x),
                       two = region_of((PyArrayObject *)PyTuple_GET_ITEM(grads, j));
            fan_verdict v = FAN_OVERLAP_HARD;
            fan_error err = {0};
            if (fan_overlap(&one, &two, 0, NULL, NULL, &v, &err) != FAN_OK ||
                v != FAN_OVERLAP_DISJOINT)
                return Py_BuildValue("(nn)", i, j); /* also if that cannot be decided quickly */
        }
    }
    return NULL;
}

static PyObject *recording_overlaps(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    PyObject *found = find_overlap(a[0], a[1], a[2]);
    return found || PyErr_Occurred() ? found : Py_NewRef(Py_None);
}

/* stage_array: copies an array into one of the same layout; of one that repeats itself the
 * bytes. */
static int stage_array(PyArrayObject *to, PyArrayObject *from)
{
    const char *lo, *at;
    size_t bytes;
    fan_ndarray_extent((PyObject *)to, &at, &bytes);
    fan_ndarray_extent((PyObject *)from, &lo, &bytes);
    if (bytes >= (size_t)PyArray_NBYTES(from))
        return PyArray_CopyInto(to, from);
    memcpy((char *)(uintptr_t)at, lo, bytes);
    return 0;
}

/* stage_arrays: copies a call's arrays into the recording's memory: 0, or -1 with an exception. */
static int stage_arrays(PyObject *capsule, PyObject *views, PyObject *arrays)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arrays); i++) {
        PyObject *x = PyTuple_GET_ITEM(arrays, i), *view = PyTuple_GET_ITEM(views, i);
        if (view != Py_None && PyArray_BASE((PyArrayObject *)view) == capsule &&
            stage_array((PyArrayObject *)view, (PyArrayObject *)x) < 0)
            return -1;
    }
    return 0;
}

static PyObject *recording_replay(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    enum {
        CAPSULE,
        BOUND,
        WRITES,
        OF_CALL,
        GRADS_OF_CALL
    };
    fan_recording *r = recording_of(a[CAPSULE]);
    fan_error err = {0};
    if (!r)
        return NULL;
    if (PyCapsule_GetContext(a[CAPSULE]) || fan_recording_here())
        return PyErr_Format(PyExc_RuntimeError, "a recorded step cannot be replayed: %s",
                            fan_recording_here() ? "this thread is recording"
                                                 : "one of its kernels called it");
    PyObject *found = find_overlap(a[WRITES], a[OF_CALL], a[GRADS_OF_CALL]);
    if (found || PyErr_Occurred())
        return found;
    if (fan_get_debug())
        fan_blocks_poison(fan_recording_blocks(r));
    if (stage_arrays(a[CAPSULE], PyTuple_GET_ITEM(a[BOUND], COPIED), a[OF_CALL]) < 0 ||
        stage_arrays(a[CAPSULE], PyTuple_GET_ITEM(a[BOUND], GRADS), a[GRADS_OF_CALL]) < 0)
        return NULL;
    (void)PyCapsule_SetContext(a[CAPSULE], r); /* it is running */
    fan_status status = fan_recording_replay(r, &err);
    (void)PyCapsule_SetContext(a[CAPSULE], NULL);
    return fan_done(status, &err);
}

#include "py/declared/cpu_kernel.h"
