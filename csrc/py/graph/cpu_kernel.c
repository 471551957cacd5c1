/* cpu_kernel: kernels that are Python callables, on the CPU (device/cpu/recording.h).
 *
 * Sections: a call with its arguments; NumPy's inner loop in its place; and arrays and launches
 * inside functions of graph trees. */
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
#define LOOP_BYTES                                                                 \
    ((npy_intp)1 << 18) /* for larger arrays NumPy releases the interpreter's lock \
                         */

static bool is_ufunc(PyObject *fn)
{
    return strcmp(Py_TYPE(fn)->tp_name, "numpy.ufunc") == 0;
}

/* name_text: a kernel's name in UTF-8, which lives as long as the name. */
static const char *name_text(PyObject *name)
{
    const char *text = PyUnicode_AsUTF8(name);
    if (!text) /* lone surrogates */
        PyErr_Clear();
    return text ? text : "a kernel";
}

/* check_kept: after the call: 0, or -1 with an exception if the callable kept an argument. */
static int check_kept(PyObject *call)
{
    if (is_ufunc(PyTuple_GET_ITEM(call, 0)))
        return 0;
    for (Py_ssize_t i = CALL_ARGS; i < PyTuple_GET_SIZE(call); i++) {
        PyObject *x = PyTuple_GET_ITEM(call, i);
        if (PyArray_Check(x) && Py_REFCNT(x) > 1) {
            return fan_set_error(PyExc_RuntimeError,
                                 "kernel %R kept its argument %zd after its run, when the memory "
                                 "may be reused: keep a copy, view.copy()",
                                 PyTuple_GET_ITEM(call, 1), i - CALL_ARGS);
        }
    }
    return 0;
}

/* call_run: with the interpreter's lock; inside, .grad is an error (leaf.c, check_kernel).
 * FAN_ERR_EXTERN, also if the callable keeps an argument. */
static fan_status call_run(void *ctx, fan_error *err)
{
    PyTupleObject *call = ctx;
    PyObject *names = call->ob_item[2] == Py_None ? NULL : call->ob_item[2];
    size_t n = (size_t)Py_SIZE(call) - CALL_ARGS - (names != NULL);
    PyObject *before = fan_kernel_running_set(call->ob_item[1]);
    PyObject *result = PyObject_Vectorcall(call->ob_item[0], call->ob_item + CALL_ARGS, n, names);
    (void)fan_kernel_running_set(before);
    if (!result)
        return fan_from_python(err);
    Py_DECREF(result);
    if (check_kept((PyObject *)call) < 0)
        return fan_from_python(err);
    return FAN_OK;
}

/* call_record: adds the call to a recording; its first `reads` arguments are read, the others
 * written. added: its run, drop and ctx, which is taken also on failure. */
static fan_status call_record(fan_recording *recording, PyObject *call, Py_ssize_t reads,
                              fan_cpu_call added, fan_error *err)
{
    Py_ssize_t all = PyTuple_GET_SIZE(call);
    fan_cpu_access *accesses = fan_calloc((size_t)all * sizeof *accesses);
    if (!accesses) {
        added.drop(added.ctx);
        return fan_fail(err, FAN_ERR_NOMEM, "out of memory");
    }
    added.name = name_text(PyTuple_GET_ITEM(call, 1));
    added.accesses = accesses;
    for (Py_ssize_t i = CALL_ARGS; i < all; i++) {
        PyObject *x = PyTuple_GET_ITEM(call, i);
        if (!PyArray_CheckExact(x))
            continue;
        fan_cpu_access *access = &accesses[added.n++];
        const char *lo;
        fan_ndarray_extent(x, &lo, &access->bytes);
        access->data = lo;
        access->write = i >= reads + CALL_ARGS;
    }
    fan_status status = fan_recording_call(recording, &added, err);
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
    npy_intp count;
    npy_intp steps[LOOP_ARGS];
    char *at[LOOP_ARGS];
    _Alignas(16) char numbers[LOOP_ARGS][32]; /* Python numbers, converted to the result's dtype */
} inner_loop;

static fan_status run_loop(void *ctx, fan_error *err)
{
    inner_loop *loop = ctx;
    char *at[LOOP_ARGS];
    npy_intp count = loop->count;
    (void)err;
    memcpy(at, loop->at, sizeof at);
    loop->run(at, &count, loop->steps, loop->data);
    return FAN_OK;
}

/* loop_of: the index of a ufunc's loop for exactly these types; -1: none. */
static int loop_of(const PyUFuncObject *ufunc, PyObject *const *args, PyArrayObject *out)
{
    for (int i = 0; i < ufunc->ntypes; i++) {
        bool same = ufunc->functions[i] != NULL;
        for (int j = 0; same && j < ufunc->nargs; j++) {
            PyArrayObject *like = out;
            if (PyArray_Check(args[j]))
                like = (PyArrayObject *)args[j];
            same = ufunc->types[i * ufunc->nargs + j] == (char)PyArray_TYPE(like);
        }
        if (same)
            return i;
    }
    return -1;
}

/* loop_takes: whether a direct loop can use an argument: an array laid out like the result, or a
 * number with floats. */
static bool loop_takes(PyObject *x, PyArrayObject *out)
{
    if (!PyArray_CheckExact(x)) {
        bool number = PyFloat_CheckExact(x) || PyLong_CheckExact(x);
        return number && PyTypeNum_ISFLOAT(PyArray_TYPE(out));
    }
    PyArrayObject *a = (PyArrayObject *)x;
    int ndim = PyArray_NDIM(a);
    int both = PyArray_FLAGS(a) & PyArray_FLAGS(out);
    if (!PyTypeNum_ISNUMBER(PyArray_TYPE(a)))
        return false;
    if (!PyArray_ISNOTSWAPPED(a))
        return false;
    /* one inner loop covers all of it */
    if (!(both & NPY_ARRAY_ALIGNED))
        return false;
    if (!(both & (NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_F_CONTIGUOUS)))
        return false;
    if (ndim != PyArray_NDIM(out))
        return false;
    if (!PyArray_CompareLists(PyArray_DIMS(a), PyArray_DIMS(out), ndim))
        return false;
    return PyArray_BYTES(a) == PyArray_BYTES(out) ||
           !fan_flats_meet(PyArray_BYTES(a), (uint64_t)PyArray_NBYTES(a), PyArray_BYTES(out),
                           (uint64_t)PyArray_NBYTES(out));
}

/* call_loop: writes run, drop and ctx of the direct loop into *added; false, without an exception:
 * there is none. */
static bool call_loop(PyObject *call, fan_cpu_call *added)
{
    PyObject *const *args = ((PyTupleObject *)call)->ob_item + CALL_ARGS;
    Py_ssize_t n = Py_SIZE(call) - CALL_ARGS;
    const PyUFuncObject *ufunc = (PyUFuncObject *)PyTuple_GET_ITEM(call, 0);
    if (!is_ufunc((PyObject *)ufunc))
        return false;
    if (n < 2 || n > LOOP_ARGS)
        return false;
    if (ufunc->core_enabled)
        return false;
    if (ufunc->nargs != n)
        return false;
    if (ufunc->nout != 1)
        return false;
    PyArrayObject *out = (PyArrayObject *)args[n - 1];
    if (PyArray_SIZE(out) == 0)
        return false;
    if (PyArray_NBYTES(out) > LOOP_BYTES)
        return false;
    if (PyArray_ITEMSIZE(out) > 32)
        return false;
    for (Py_ssize_t i = 0; i < n; i++) {
        if (!loop_takes(args[i], out))
            return false;
    }
    int which = loop_of(ufunc, args, out);
    if (which < 0)
        return false;
    inner_loop *loop = PyMem_RawCalloc(1, sizeof *loop);
    if (!loop)
        return false;
    loop->run = ufunc->functions[which];
    if (ufunc->data)
        loop->data = ufunc->data[which];
    loop->count = PyArray_SIZE(out);
    for (Py_ssize_t i = 0; i < n; i++) {
        if (PyArray_Check(args[i])) {
            PyArrayObject *array = (PyArrayObject *)args[i];
            loop->at[i] = PyArray_BYTES(array);
            loop->steps[i] = PyArray_ITEMSIZE(array);
            continue;
        }
        loop->at[i] = loop->numbers[i];
        if (PyArray_SETITEM(out, loop->numbers[i], args[i]) < 0) {
            PyErr_Clear();
            PyMem_RawFree(loop);
            return false;
        }
    }
    added->run = run_loop;
    added->drop = PyMem_RawFree;
    added->ctx = loop;
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
    if (!fan_gil_enter(&gil)) {
        return fan_fail(err, FAN_ERR_STATE,
                        "the interpreter has ended: a Python kernel cannot run");
    }
    fan_status status = call_run(k->call, err);
    fan_gil_leave(&gil);
    return status;
}

static void drop_storage(PyObject *capsule)
{
    fan_storage_drop(PyCapsule_GetPointer(capsule, FAN_KERNEL_MEMORY));
}

/* view_of: an array of fanin's on the CPU as an ndarray for a kernel. */
static PyObject *view_of(const fan_array *a, bool write)
{
    fan_storage *memory = fan_tree_memory_under(a);
    memory = fan_storage_hold(memory ? memory : a->storage);
    PyObject *base = PyCapsule_New(memory, FAN_KERNEL_MEMORY, drop_storage);
    if (!base) {
        fan_storage_drop(memory);
        return NULL;
    }
    PyObject *made = fan_ndarray_over(a, write, base);
    Py_DECREF(base);
    return made;
}

/* ndarray_view: an ndarray for a kernel; writable where the kernel writes, also if the ndarray is
 * locked. */
static PyObject *ndarray_view(PyArrayObject *x, bool write)
{
    PyObject *made = PyArray_View(x, NULL, NULL);
    if (made && write)
        PyArray_ENABLEFLAGS((PyArrayObject *)made, NPY_ARRAY_WRITEABLE);
    return made;
}

/* read_number: a number as it is, or NULL with an exception: reads[i] is none. */
static PyObject *read_number(PyObject *name, PyObject *x, Py_ssize_t i)
{
    bool number = PyLong_Check(x) || PyFloat_Check(x) || PyComplex_Check(x);
    if (number || PyArray_IsScalar(x, Generic))
        return Py_NewRef(x);
    bool text = PyUnicode_Check(x) || PyBytes_Check(x);
    const char *advice = "";
    if (PySequence_Check(x) && !text) {
        advice = ": pass np.asarray(x) to the function as an operand, or give its numbers one by "
                 "one";
    }
    return PyErr_Format(
        PyExc_TypeError,
        "%U: reads[%zd]: a kernel on the CPU reads arrays on the CPU and numbers, got %s%s", name,
        i, FAN_TYPE_TEXT(x), advice);
}

/* argument: converts an argument of a launch for its kernel (i: its index among reads or writes);
 * new reference. */
static PyObject *argument(PyObject *name, PyObject *x, bool write, Py_ssize_t i)
{
    fan_device *device = NULL;
    const fan_array *a = fan_array_arg(x, &device);
    if (a && device == fan_cpu()) {
        if (fan_array_usable(a) < 0)
            return NULL;
        if (!write || a->writable)
            return view_of(a, write);
        return PyErr_Format(PyExc_ValueError, "%U: writes[%zd] is read-only", name, i);
    }
    if (PyArray_CheckExact(x) && (!write || fan_ndarray_may_write((PyArrayObject *)x))) {
        if (fan_ndarray_check_known(x, name_text(name)) < 0)
            return NULL;
        return ndarray_view((PyArrayObject *)x, write);
    }
    if (!write)
        return read_number(name, x, i);
    return PyErr_Format(PyExc_TypeError,
                        "%U: writes[%zd]: a kernel on the CPU writes writable arrays, got %s", name,
                        i, FAN_TYPE_TEXT(x));
}

/* call_new: the call fn(*reads, *writes). New reference, or NULL with an exception. */
static PyObject *call_new(PyObject *fn, PyObject *name, PyObject *const lists[2])
{
    Py_ssize_t reads = PyTuple_GET_SIZE(lists[0]);
    Py_ssize_t all = reads + PyTuple_GET_SIZE(lists[1]);
    PyObject *call = PyTuple_New(all + CALL_ARGS);
    if (!call)
        return NULL;
    bool by_out = is_ufunc(fn) && all == reads + 1;
    PyTuple_SET_ITEM(call, 0, Py_NewRef(fn));
    PyTuple_SET_ITEM(call, 1, Py_NewRef(name));
    PyObject *names = NULL;
    if (by_out)
        names = Py_BuildValue("(s)", "out");
    else
        names = Py_NewRef(Py_None);
    PyTuple_SET_ITEM(call, 2, names);
    bool made = names != NULL;
    for (Py_ssize_t i = 0; made && i < all; i++) {
        bool write = i >= reads;
        Py_ssize_t at = i;
        if (write)
            at -= reads;
        PyObject *x = argument(name, PyTuple_GET_ITEM(lists[write], at), write, at);
        PyTuple_SET_ITEM(call, i + CALL_ARGS, x);
        made = x != NULL;
    }
    if (!made)
        Py_CLEAR(call);
    return call;
}

/* cpu_launch: calls fn(*reads, *writes) now, or at each launch of this thread's recording. */
static PyObject *cpu_launch(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    fan_recording *recording = fan_recording_here();
    fan_error err = {0};
    fan_status status;
    PyObject *call = call_new(a[0], a[1], a + 2);
    if (!call)
        return NULL;
    if (!recording) {
        status = call_run(call, &err);
        Py_DECREF(call);
        return fan_done(status, &err);
    }
    tree_kernel *kernel = fan_calloc(sizeof *kernel);
    if (!kernel) {
        Py_DECREF(call);
        return fan_done(fan_fail(&err, FAN_ERR_NOMEM, "out of memory"), &err);
    }
    kernel->name = Py_NewRef(PyTuple_GET_ITEM(call, 1));
    if (!call_loop(call, &kernel->loop))
        kernel->call = Py_NewRef(call);
    const fan_cpu_call added = {
        .run = kernel_run,
        .drop = kernel_drop,
        .ctx = kernel,
    };
    status = call_record(recording, call, PyTuple_GET_SIZE(a[2]), added, &err);
    Py_DECREF(call);
    return fan_done(status, &err);
}

/* cpu_empty: a new array of fanin's on the CPU; inside a function of a graph tree in the tree's
 * memory. */
static PyObject *cpu_empty(PyObject *Py_UNUSED(module), PyObject *const *values)
{
    FAN_UNINITIALIZED int64_t dims[FAN_MAX_NDIM];
    fan_dtype dtype;
    fan_array *a = NULL;
    fan_error err = {0};
    int ndim = fan_shape_tuple(values[0], dims);
    if (ndim < 0)
        return NULL;
    if (fan_dtype_parse(values[1], &dtype) < 0)
        return NULL;
    fan_status status = fan_device_array(fan_cpu(), NULL, dtype, ndim, dims, NULL, &a, &err);
    if (status != FAN_OK)
        return fan_raise(status, &err);
    PyObject *made = fan_array_wrap(a, fan_cpu());
    fan_array_drop(a);
    return made;
}

static PyObject *cpu_wants_handles(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    return PyBool_FromLong(fan_wants_handles(NULL));
}

#include "py/declared/cpu_kernel.h"
