/* kernel: a kernel of the user's on a simulated machine.
 *
 * It waits in a queue with its function and the geometry of its arrays, not with the arrays: what
 * keeps memory alive until the work has run is the rules' business, and holding it here would hide
 * their faults.
 *
 * Title: Kept views. A kernel's views are made when it runs and end with it: their memory may be
 * another array's the moment after. Each has an owner, a capsule that holds the machine; keeping a
 * view, or a view of it, keeps that owner: so once the kernel is through, an owner that still has
 * other references shows a view that was kept, and that is an error. The memory of a kept view
 * stays mapped as long as the view; only its bytes may belong to others. The views in the traceback
 * of a kernel that raised show what was there then.
 *
 * In order: a kernel's memory; kept views; the views of a kernel that raised; the run; the
 * launch. */
#include "py/base/args.h"
#include "py/arrays/arrays.h"
#include "py/sim/machine_object.h"

#include "base/mem.h"

#include <string.h>

void fan_kernel_unlink(fan_kernel *k)
{
    if (k->prev)
        k->prev->next = k->next;
    else if (k->owner)
        k->owner->kernels = k->next;
    if (k->next)
        k->next->prev = k->prev;
    k->prev = k->next = NULL;
    k->owner = NULL;
}

static void kernel_free(fan_kernel *k)
{
    for (size_t i = 0; i < k->n; i++)
        fan_array_drop(k->views[i]);
    Py_XDECREF(k->fn);
    Py_XDECREF(k->name);
    fan_free(k);
}

static void kernel_fini(void *ctx)
{
    fan_kernel *k = ctx;
    fan_gil gil;
    if (!fan_gil_enter(&gil))
        return; /* too late for Python: left to the end of the process */
    fan_kernel_unlink(k);
    kernel_free(k);
    fan_gil_leave(&gil);
}

static void drop_hold(PyObject *capsule)
{
    fan_sim_drop(PyCapsule_GetPointer(capsule, "fanin.machine"));
}

/* kept: the first view whose owner has other references (Kept views), or -1. */
static Py_ssize_t kept(PyObject *owners)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(owners); i++) {
        if (Py_REFCNT(PyTuple_GET_ITEM(owners, i)) > 1)
            return i;
    }
    return -1;
}

/* check_kept: 0, or -1 with an exception where a view outlives its kernel. An unreachable cycle is
 * taken apart first. */
static int check_kept(const fan_kernel *k, PyObject *owners)
{
    Py_ssize_t i = kept(owners);
    if (i < 0)
        return 0;
    int was = PyGC_Enable();
    PyGC_Collect();
    if (!was)
        PyGC_Disable();
    i = kept(owners);
    if (i < 0)
        return 0;
    const char *list = "reads";
    if ((size_t)i >= k->reads) {
        list = "writes";
        i -= (Py_ssize_t)k->reads;
    }
    return fan_set_error(PyExc_RuntimeError,
                         "kernel %R kept %s[%zd] past its run, when its memory may be another "
                         "array's; keep a copy: view.copy()",
                         k->name, list, i);
}

/* snapshot: the bytes of a view as they are now, as bytes; *lo: where the first of them lies. */
static PyObject *snapshot(const fan_array *a, const char **lo)
{
    const char *first = a->data;
    const char *last = a->data;
    for (int i = 0; i < a->ndim && a->size; i++) { /* of nothing, steps lead out of the memory */
        int64_t way = (a->shape[i] - 1) * a->strides[i];
        if (way < 0)
            first += way;
        else
            last += way;
    }
    *lo = first;
    Py_ssize_t bytes = 0;
    if (a->size)
        bytes = last - first + (Py_ssize_t)fan_dtype_size(a->dtype);
    return PyBytes_FromStringAndSize(first, bytes);
}

static void redirect(PyObject *o, const PyObject *bytes, const char *lo)
{
    PyArrayObject_fields *array = (PyArrayObject_fields *)o;
    ptrdiff_t at = array->data - lo;
    if (at >= 0 && at < PyBytes_GET_SIZE(bytes))
        array->data = PyBytes_AS_STRING(bytes) + at;
}

/* redirect_parts: the views of `view` that the frames of a traceback hold. */
static void redirect_parts(PyObject *raised, PyObject *view, const PyObject *bytes, const char *lo)
{
    PyObject *at = PyException_GetTraceback(raised);
    while (at && PyTraceBack_Check(at)) {
        PyObject *locals = PyFrame_GetLocals(((PyTracebackObject *)at)->tb_frame);
        PyObject *next = (PyObject *)((PyTracebackObject *)at)->tb_next;
        PyObject *values = NULL;
        if (locals)
            values = PyMapping_Values(locals);
        for (Py_ssize_t i = 0; values && i < PyList_GET_SIZE(values); i++) {
            PyObject *o = PyList_GET_ITEM(values, i);
            if (PyArray_Check(o) && PyArray_BASE((PyArrayObject *)o) == view)
                redirect(o, bytes, lo);
        }
        PyErr_Clear();
        Py_XDECREF(values);
        Py_XDECREF(locals);
        Py_XINCREF(next);
        Py_SETREF(at, next);
    }
    Py_XDECREF(at);
}

#define CONTEXTS 100

/* end_views: a kernel raised, and the frames of its traceback have its views: they show from now on
 * what was there then, and no other array's bytes. Views of them that other code made keep their
 * memory mapped (Kept views). */
static void end_views(const fan_kernel *k, PyObject *args)
{
    PyObject *raised = fan_exception_take();
    for (size_t i = 0; i < k->n; i++) {
        PyArrayObject_fields *view = (PyArrayObject_fields *)PyTuple_GET_ITEM(args, (Py_ssize_t)i);
        const char *lo;
        if (Py_REFCNT(view) == 1)
            continue;
        PyObject *bytes = snapshot(k->views[i], &lo);
        PyObject *base = NULL;
        if (bytes)
            base = PyTuple_Pack(2, bytes, view->base);
        if (base) {
            redirect((PyObject *)view, bytes, lo);
            PyObject *e = Py_NewRef(raised);
            /* .. and the exceptions in whose handling it was raised */
            for (int far = 0; e && far < CONTEXTS; far++) {
                redirect_parts(e, (PyObject *)view, bytes, lo);
                Py_SETREF(e, PyException_GetContext(e));
            }
            Py_XDECREF(e);
            Py_SETREF(view->base, base);
        }
        Py_XDECREF(bytes);
    }
    PyErr_Clear(); /* for want of memory they show what comes */
    fan_exception_put(raised);
}

static PyObject *kernel_call(fan_kernel *k)
{
    PyObject *fn = k->fn;
    PyObject *result = NULL;
    if (!fn && k->lost) {
        return PyErr_Format(PyExc_RuntimeError,
                            "kernel %R cannot run: its machine was collected with it: keep a "
                            "reference to the machine",
                            k->name);
    }
    if (!fn)
        return Py_NewRef(Py_None);
    Py_INCREF(fn);
    PyObject *args = PyTuple_New((Py_ssize_t)k->n);
    PyObject *owners = PyTuple_New((Py_ssize_t)k->n);
    for (size_t i = 0; args && owners && i < k->n; i++) {
        PyObject *owner = PyCapsule_New(fan_sim_hold(k->m), "fanin.machine", drop_hold);
        PyObject *view = NULL;
        if (owner) {
            PyTuple_SET_ITEM(owners, (Py_ssize_t)i, owner);
            view = fan_ndarray_over(k->views[i], i >= k->reads, owner);
        } else {
            fan_sim_drop(k->m);
        }
        if (!view)
            Py_CLEAR(args);
        else
            PyTuple_SET_ITEM(args, (Py_ssize_t)i, view);
    }
    bool ready = args && owners;
    if (ready)
        result = PyObject_Call(fn, args, NULL);
    if (ready && !result)
        end_views(k, args);
    Py_XDECREF(args);
    Py_DECREF(fn);
    if (result) { /* drops what it returned, which may be a view */
        Py_SETREF(result, Py_NewRef(Py_None));
        if (check_kept(k, owners) < 0)
            Py_CLEAR(result);
    }
    Py_XDECREF(owners);
    return result;
}

static fan_status kernel_run(void *ctx, fan_error *err)
{
    fan_status status = FAN_OK;
    fan_gil gil;
    if (!fan_gil_enter(&gil)) {
        return fan_fail(err, FAN_ERR_STATE,
                        "the interpreter is gone: a kernel of Python's cannot run");
    }
    PyObject *live = fan_exception_take(); /* of a kernel that ran before: the first one counts */
    PyObject *result = kernel_call(ctx);
    if (!result && live) {
        PyErr_WriteUnraisable(((fan_kernel *)ctx)->fn);
        status = FAN_ERR_EXTERN;
    } else if (!result) {
        status = fan_from_python(err);
    }
    Py_XDECREF(result);
    if (live)
        fan_exception_put(live);
    fan_gil_leave(&gil);
    return status;
}

/* views_of: the arrays of a tuple: their geometry into k, the arrays themselves into `arrays`. -1
 * with an exception. */
static int views_of(machine_object *self, PyObject *seq, bool write, fan_kernel *k,
                    fan_array **arrays)
{
    static const char *const what[] = {"reads", "writes"};
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(seq); i++) {
        PyObject *o = PyTuple_GET_ITEM(seq, i);
        fan_device *d = NULL;
        fan_array *a = fan_array_arg(o, &d);
        fan_error err = {0};
        fan_status status = FAN_ERR_NOMEM;
        if (!a) {
            return fan_set_error(
                PyExc_TypeError,
                "launch: %s[%zd] is no array of this machine but %.80s; Machine.array makes one",
                what[write], i, Py_TYPE(o)->tp_name);
        }
        if (fan_sim_of(d) != self->m) {
            return fan_set_error(PyExc_ValueError, "launch: %s[%zd] belongs to another machine",
                                 what[write], i);
        }
        if (fan_array_usable(a) < 0)
            return -1;
        if (write && !a->writable) {
            return fan_set_error(PyExc_ValueError,
                                 "launch: writes[%zd] is read-only: it is a broadcast view", i);
        }
        PyArray_Descr *descr = fan_descr_of_dtype(a->dtype);
        if (!descr)
            return -1;
        Py_DECREF(descr);
        fan_storage *st = fan_storage_wrap(a->storage->data, a->storage->bytes, NULL, NULL);
        if (st) {
            status = fan_array_view(st, a->data, a->dtype, a->ndim, a->shape, a->strides, write,
                                    &k->views[k->n], &err);
        }
        fan_storage_drop(st);
        if (status != FAN_OK)
            return fan_check(status, &err);
        arrays[k->n++] = a;
        k->reads += !write;
    }
    return 0;
}

/* operands_of: the arrays of a launch, as a new kernel has them; *arrays is the caller's to free.
 * NULL with an exception. */
static fan_kernel *operands_of(machine_object *self, PyObject *reads, PyObject *writes,
                               fan_array ***arrays)
{
    size_t n = (size_t)(PyTuple_GET_SIZE(reads) + PyTuple_GET_SIZE(writes));
    fan_kernel *k = fan_calloc(sizeof *k + n * sizeof(fan_array *));
    *arrays = fan_alloc((n + 1) * sizeof **arrays);
    if (!k || !*arrays) {
        fan_free(k);
        PyErr_NoMemory();
        return NULL;
    }
    k->m = self->m;
    if (views_of(self, reads, false, k, *arrays) == 0 &&
        views_of(self, writes, true, k, *arrays) == 0)
        return k;
    kernel_free(k);
    return NULL;
}

void fan_machine_refuse_stream(const char *call, PyObject *o, const fan_stream *s)
{
    const char *whose = "";
    if (s && fan_sim_of(s->device))
        whose = " of another machine";
    PyErr_Format(PyExc_ValueError, "%s: stream: expected a stream of this machine, got %R%s", call,
                 o, whose);
}

PyObject *fan_machine_launch(PyObject *o, PyObject *const *a)
{
    machine_object *self = fan_machine_self(o);
    PyObject *where = a[0];
    PyObject *title = a[4];
    double us = PyFloat_AsDouble(a[5]);
    int64_t level = 1;
    fan_stream *s = NULL;
    if (PyErr_Occurred() || !fan_text_arg(title))
        return NULL;
    if (fan_number_arg(a[6], "stacklevel", &level) < 0)
        return NULL;
    if (fan_stream_arg(where, &s) < 0)
        return NULL;
    PyObject *result = NULL;
    fan_array **arrays = NULL;
    fan_kernel *k = NULL;
    if (s && fan_sim_of(s->device) == self->m)
        k = operands_of(self, a[2], a[3], &arrays);
    else
        fan_machine_refuse_stream("launch", where, s);
    if (k) {
        k->fn = Py_NewRef(a[1]);
        k->name = Py_NewRef(title);
        k->owner = self;
        k->next = self->kernels;
        if (k->next)
            k->next->prev = k;
        self->kernels = k;
        fan_sim_kernel job = {
            .name = PyUnicode_AsUTF8(k->name),
            .fn = kernel_run,
            .fini = kernel_fini,
            .ctx = k,
            .reads = arrays,
            .nreads = k->reads,
            .writes = arrays + k->reads,
            .nwrites = k->n - k->reads,
            .us = us,
        };
        level = fan_call_site_level(level);
        int bad = FAN_CHECK_UNLOCKED(fan_sim_launch(self->m, s, &job, &err));
        (void)fan_call_site_level(level);
        if (!bad) { /* which has k from now on */
            result = Py_NewRef(Py_None);
        } else {
            fan_kernel_unlink(k);
            kernel_free(k);
        }
    }
    fan_free(arrays);
    fan_stream_drop(s);
    return result;
}
