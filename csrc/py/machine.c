/* machine: the simulated machine as Python has it. fanin/sim.py builds on `_core.Machine`: spawn, join, the context
 * manager.
 *
 * A kernel of the user's waits in a queue with its function and the geometry of its arrays, not with the arrays: what
 * keeps memory alive until the work has run is the rules' business, and holding it here would hide their faults.
 *
 * Title: Kept views. A kernel's views are made when it runs and end with it: their memory may be another array's the
 * moment after. Each has an owner, a capsule that holds the machine, and whoever keeps a view, or a view of it, keeps
 * that owner: so once the kernel is through, an owner that still has other references shows a view that was kept, and
 * that is an error. What was kept is mapped as long as it is kept; only its bytes may be anyone's. The views in the
 * traceback of a kernel that raised show what was there then.
 *
 * Title: Cycles. A kernel that waits holds its function, and that may hold the machine, or a graph of its. To the
 * collector the machine holds the functions of all its kernels, and a graph, whose kernels are among them, its machine.
 * Arrays and streams hold neither: where the machine is collected although one of them could still have run what is
 * queued, that says so when it is run.
 */
#include "py/machine.h"
#include "py/turn.h"

#include "base/mem.h"
#include "buffer/sync.h"
#include "device/sim/explore.h"

#include <stdio.h>
#include <string.h>

typedef struct machine_object machine_object;

/* A queued kernel. The list and `fn` belong to the GIL. */
typedef struct kernel {
    struct kernel *prev, *next; /* among its machine's */
    machine_object *owner;      /* NULL once that is gone */
    fan_sim *m;                 /* no hold: whoever runs it has one */
    PyObject *fn;               /* NULL: forgotten, it does nothing */
    bool lost;                  /* .. for its machine was collected: it says so */
    PyObject *name;             /* a str */
    size_t reads, n;
    fan_array *views[]; /* reads, then writes; geometry alone */
} kernel;

/* Who acts next among the host threads. */
typedef struct chooser {
    enum { BY_SEED, FOLLOW, GIVE_UP } mode;
    PyObject *search; /* FOLLOW: the capsule, held */
    fan_explore *x;   /* FOLLOW: what is in it */
} chooser;

struct machine_object {
    PyObject_HEAD fan_sim *m; /* held */
    int devices;
    kernel *kernels;
    chooser chooser;
};

static machine_object *self_of(PyObject *o) { return (machine_object *)o; }

/* The machines entered on this thread: a list in the thread's own dictionary; borrowed. NULL without exception where
 * there is none. */
static PyObject *entered(void)
{
    PyObject *mine = PyThreadState_GetDict();
    return mine ? PyDict_GetItemString(mine, "fanin.machines") : NULL;
}

static machine_object *innermost(void)
{
    PyObject *list = entered();
    Py_ssize_t n = list ? PyList_GET_SIZE(list) : 0;
    return n ? self_of(PyList_GET_ITEM(list, n - 1)) : NULL;
}

int fan_machine_count(void)
{
    machine_object *self = innermost();
    return self ? self->devices : 0;
}

fan_device *fan_machine_device(long index)
{
    machine_object *self = innermost();
    if (!self) {
        PyErr_Format(PyExc_ValueError,
                     "device \"sim:%ld\": no simulated machine is entered on this thread: with fanin.sim.Machine(): ..",
                     index);
        return NULL;
    }
    if (index < 0 || index >= self->devices) {
        PyErr_Format(PyExc_ValueError,
                     "device \"sim:%ld\": this machine has %d device%s; say fanin.sim.Machine(devices=%ld)", index,
                     self->devices, self->devices == 1 ? "" : "s", index + 1);
        return NULL;
    }
    return fan_device_hold(fan_sim_device(self->m, (int)index));
}

fan_stream *fan_machine_stream(fan_device *d, uint64_t handle)
{
    PyObject *list = entered();
    char text[32];
    if (handle == 1) {
        fan_stream *s = d->backend->current(d);
        if (!s)
            PyErr_NoMemory();
        return s;
    }
    for (Py_ssize_t i = list ? PyList_GET_SIZE(list) : 0; i-- > 0;) {
        machine_object *self = self_of(PyList_GET_ITEM(list, i));
        fan_stream *s = fan_sim_of(d) == self->m ? fan_sim_find(self->m, d->index, handle) : NULL;
        if (s)
            return s;
    }
    PyErr_Format(PyExc_ValueError, "no stream of %s has the handle %llu: Machine.stream makes one",
                 fan_device_text(d, text, sizeof text), (unsigned long long)handle);
    return NULL;
}

/* Call-outs of the machine */

static void hook_site(void *Py_UNUSED(ctx), char *buf, size_t size)
{
    fan_gil gil;
    buf[0] = '\0';
    if (!fan_gil_enter(&gil))
        return;
    fan_call_site(buf, size);
    fan_gil_leave(&gil);
}

static void *before_block(void *Py_UNUSED(ctx)) { return fan_python.leave(); }

static void after_block(void *Py_UNUSED(ctx), void *left) { fan_python.enter(left); }

/* An event that was never recorded is warned of where the user waits for it (stream.c): `warn` is left out. */
static const fan_sim_hooks hooks = {.site = hook_site, .before_block = before_block, .after_block = after_block};

/* Choosing */

static int choose(void *ctx, uint32_t enabled)
{
    chooser *c = ctx;
    return c->mode == FOLLOW ? fan_explore_choose(c->x, enabled) : -1;
}

static int pick(void *ctx, int n)
{
    chooser *c = ctx;
    return c->mode == FOLLOW ? fan_explore_pick(c->x, n) : 0;
}

static void touched(void *ctx, uint64_t object, fan_touch how)
{
    chooser *c = ctx;
    if (c->mode == FOLLOW)
        (void)fan_explore_touched(c->x, object, how); /* the search keeps its failure */
}

static void set_chooser(machine_object *self, chooser c)
{
    PyObject *search = self->chooser.search;
    self->chooser = c;
    if (c.mode == BY_SEED)
        fan_sim_set_chooser(self->m, NULL);
    else
        fan_sim_set_chooser(
            self->m, &(fan_sim_chooser){.choose = choose, .touched = touched, .pick = pick, .ctx = &self->chooser});
    Py_XDECREF(search);
}

/* Kernels */

static void unlink_kernel(kernel *k)
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

static void kernel_free(kernel *k)
{
    for (size_t i = 0; i < k->n; i++)
        fan_array_drop(k->views[i]);
    Py_XDECREF(k->fn);
    Py_XDECREF(k->name);
    fan_free(k);
}

static void kernel_fini(void *ctx)
{
    kernel *k = ctx;
    fan_gil gil;
    if (!fan_gil_enter(&gil))
        return; /* too late for Python: left to the end of the process */
    unlink_kernel(k);
    kernel_free(k);
    fan_gil_leave(&gil);
}

static void drop_hold(PyObject *capsule) { fan_sim_drop(PyCapsule_GetPointer(capsule, "fanin.machine")); }

static PyObject *ndarray_over(const fan_array *a, bool write, PyObject *base)
{
    npy_intp dims[FAN_MAX_NDIM], strides[FAN_MAX_NDIM];
    PyArray_Descr *descr = fan_descr_of_dtype(a->dtype);
    PyObject *made;
    if (!descr)
        return NULL;
    for (int i = 0; i < a->ndim; i++) {
        dims[i] = (npy_intp)a->shape[i];
        strides[i] = (npy_intp)a->strides[i];
    }
    made = PyArray_NewFromDescr(&PyArray_Type, descr, a->ndim, dims, strides, a->data, write ? NPY_ARRAY_WRITEABLE : 0,
                                NULL);
    if (made && PyArray_SetBaseObject((PyArrayObject *)made, Py_NewRef(base)) < 0)
        Py_CLEAR(made);
    return made;
}

static PyObject *owner_new(kernel *k)
{
    PyObject *made = PyCapsule_New(fan_sim_hold(k->m), "fanin.machine", drop_hold);
    if (!made)
        fan_sim_drop(k->m);
    return made;
}

/* kept: the first view whose owner somebody else has (Kept views), or -1. */
static Py_ssize_t kept(PyObject *owners)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(owners); i++)
        if (Py_REFCNT(PyTuple_GET_ITEM(owners, i)) > 1)
            return i;
    return -1;
}

/* check_kept: 0, or -1 with an exception where a view outlives its kernel. A cycle that nobody else reaches is taken
 * apart first. */
static int check_kept(const kernel *k, PyObject *owners)
{
    Py_ssize_t i = kept(owners);
    if (i < 0)
        return 0;
    int was = PyGC_Enable();
    PyGC_Collect();
    if (!was)
        PyGC_Disable();
    if ((i = kept(owners)) < 0)
        return 0;
    bool write = (size_t)i >= k->reads;
    PyErr_Format(
        PyExc_RuntimeError,
        "kernel %R kept %s[%zd] past its run, when its memory may be another array's; keep a copy: view.copy()",
        k->name, write ? "writes" : "reads", write ? i - (Py_ssize_t)k->reads : i);
    return -1;
}

/* snapshot: the bytes of a view as they are now, as bytes; *lo: where the first of them lies. */
static PyObject *snapshot(const fan_array *a, const char **lo)
{
    const char *first = a->data, *last = a->data;
    for (int i = 0; i < a->ndim; i++) {
        int64_t way = (a->shape[i] - 1) * a->strides[i];
        first += way < 0 ? way : 0;
        last += way > 0 ? way : 0;
    }
    *lo = first;
    return PyBytes_FromStringAndSize(first, a->size ? last - first + (Py_ssize_t)fan_dtype_size(a->dtype) : 0);
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
        PyObject *locals = PyFrame_GetLocals(((PyTracebackObject *)at)->tb_frame),
                 *next = (PyObject *)((PyTracebackObject *)at)->tb_next;
        PyObject *values = locals ? PyMapping_Values(locals) : NULL;
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

/* end_views: a kernel raised, and the frames of its traceback have its views: they show from now on what was there
 * then, and no other array's bytes. What was made of them elsewhere keeps their memory mapped (Kept views). */
static void end_views(const kernel *k, PyObject *args)
{
    PyObject *raised = fan_exception_take();
    for (size_t i = 0; i < k->n; i++) {
        PyArrayObject_fields *view = (PyArrayObject_fields *)PyTuple_GET_ITEM(args, (Py_ssize_t)i);
        const char *lo;
        PyObject *bytes = Py_REFCNT(view) > 1 ? snapshot(k->views[i], &lo) : NULL;
        PyObject *base = bytes ? PyTuple_Pack(2, bytes, view->base) : NULL;
        if (base) {
            redirect((PyObject *)view, bytes, lo);
            PyObject *e = Py_NewRef(raised);
            for (int far = 0; e && far < CONTEXTS; far++) { /* .. and what it was raised in the handling of */
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

static PyObject *kernel_call(kernel *k)
{
    PyObject *fn = k->fn, *args, *owners, *result = NULL;
    if (!fn && k->lost)
        return PyErr_Format(
            PyExc_RuntimeError,
            "kernel %R cannot run: its machine was collected with it, for nobody else had it; keep the machine",
            k->name);
    if (!fn)
        return Py_NewRef(Py_None);
    Py_INCREF(fn);
    args = PyTuple_New((Py_ssize_t)k->n);
    owners = PyTuple_New((Py_ssize_t)k->n);
    for (size_t i = 0; args && owners && i < k->n; i++) {
        PyObject *owner = owner_new(k), *view = owner ? ndarray_over(k->views[i], i >= k->reads, owner) : NULL;
        if (owner)
            PyTuple_SET_ITEM(owners, (Py_ssize_t)i, owner);
        if (!view)
            Py_CLEAR(args);
        else
            PyTuple_SET_ITEM(args, (Py_ssize_t)i, view);
    }
    if (args && owners && !(result = PyObject_Call(fn, args, NULL)))
        end_views(k, args);
    Py_XDECREF(args);
    Py_DECREF(fn);
    if (result) { /* what it returned is let go of: it may be a view */
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
    PyObject *live, *result;
    if (!fan_gil_enter(&gil))
        return fan_fail(err, FAN_ERR_STATE, "the interpreter is gone: a kernel of Python's cannot run");
    live = fan_exception_take(); /* of a kernel that ran before: the first one counts */
    result = kernel_call(ctx);
    if (!result && live) {
        PyErr_WriteUnraisable(((kernel *)ctx)->fn);
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

/* arrays_arg: a tuple, so that nobody takes an array away while it is looked at. */
static PyObject *arrays_arg(PyObject *o, const char *words)
{
    PyObject *made = NULL;
    if (Py_TYPE(o) == fan_state_get()->array_type)
        PyErr_SetString(PyExc_TypeError, words);
    else
        made = PySequence_Tuple(o);
    if (!made && PyErr_ExceptionMatches(PyExc_TypeError))
        PyErr_SetString(PyExc_TypeError, words);
    return made;
}

/* views_of: the arrays of a tuple: their geometry into k, the arrays themselves into `arrays`. -1 with an exception. */
static int views_of(machine_object *self, PyObject *seq, bool write, kernel *k, fan_array **arrays)
{
    static const char *const what[] = {"reads", "writes"};
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(seq); i++) {
        PyObject *o = PyTuple_GET_ITEM(seq, i);
        fan_device *d = NULL;
        fan_array *a = fan_array_arg(o, &d);
        PyArray_Descr *descr;
        fan_storage *st;
        fan_error err = {0};
        fan_status status = FAN_ERR_NOMEM;
        if (!a) {
            PyErr_Format(PyExc_TypeError,
                         "launch: %s[%zd] is no array of this machine but %.80s; Machine.array makes one", what[write],
                         i, Py_TYPE(o)->tp_name);
            return -1;
        }
        if (fan_sim_of(d) != self->m) {
            PyErr_Format(PyExc_ValueError, "launch: %s[%zd] belongs to another machine", what[write], i);
            return -1;
        }
        if (write && !a->writable) {
            PyErr_Format(PyExc_ValueError, "launch: writes[%zd] is read-only: it is a broadcast view", i);
            return -1;
        }
        if (!(descr = fan_descr_of_dtype(a->dtype)))
            return -1;
        Py_DECREF(descr);
        st = fan_storage_wrap(a->storage->data, a->storage->bytes, NULL, NULL);
        if (st)
            status = fan_array_view(st, a->data, a->dtype, a->ndim, a->shape, a->strides, write, &k->views[k->n], &err);
        fan_storage_drop(st);
        if (status != FAN_OK) {
            fan_raise(status, &err);
            return -1;
        }
        arrays[k->n++] = a;
        k->reads += !write;
    }
    return 0;
}

/* name_of: what a kernel is called: `name`, or the function's own; new reference. */
static PyObject *name_of(PyObject *name, PyObject *fn)
{
    PyObject *own;
    if (name != Py_None)
        return PyUnicode_Check(name)
                   ? Py_NewRef(name)
                   : PyErr_Format(PyExc_TypeError, "launch: name is a string, not %.80s", Py_TYPE(name)->tp_name);
    own = PyObject_GetAttrString(fn, "__name__");
    if (own && PyUnicode_Check(own))
        return own;
    Py_XDECREF(own);
    PyErr_Clear();
    return PyUnicode_FromString("kernel");
}

/* Making and unmaking */

static PyObject *machine_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"devices",  "seed",      "schedule",     "starve", "memory",
                            "run_work", "launch_us", "gbytes_per_s", NULL};
    fan_sim_config config = {0};
    fan_error err = {0};
    fan_status status;
    int schedule = 0, run_work = 1;
    unsigned long long seed = 0, starve = 0;
    Py_ssize_t memory = 0;
    machine_object *self;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "i|KiKnpdd:Machine", names, &config.devices, &seed, &schedule,
                                     &starve, &memory, &run_work, &config.launch_us, &config.gbytes_per_s))
        return NULL;
    config.seed = seed;
    config.starve = starve;
    config.schedule = (fan_sim_schedule)schedule;
    config.memory = memory > 0 ? (size_t)memory : 0;
    config.run_work = run_work;
    self = (machine_object *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->devices = config.devices;
    status = fan_sim_new(&config, &hooks, &self->m, &err);
    if (status != FAN_OK) {
        self->m = NULL;
        Py_DECREF(self);
        return fan_raise(status, &err);
    }
    return (PyObject *)self;
}

/* forget: what is queued of the user's will do nothing; lost: or say that it is lost. */
static void forget(machine_object *self, bool lost)
{
    while (self->kernels) {
        kernel *k = self->kernels;
        PyObject *fn = k->fn;
        unlink_kernel(k);
        k->fn = NULL;
        k->lost = lost;
        Py_XDECREF(fn); /* may run anything: the list is whole */
    }
}

static void machine_dealloc(PyObject *o)
{
    machine_object *self = self_of(o);
    PyTypeObject *type = Py_TYPE(o);
    PyObject_GC_UnTrack(o);
    if (self->m) {
        set_chooser(self, (chooser){.mode = BY_SEED});
        while (self->kernels) /* the machine may live on in its arrays, and so may its work */
            unlink_kernel(self->kernels);
        fan_sim_drop(self->m);
    }
    type->tp_free(o);
    Py_DECREF(type);
}

static int machine_traverse(PyObject *o, visitproc visit, void *arg)
{
    const machine_object *self = self_of(o);
    Py_VISIT(Py_TYPE(o));
    Py_VISIT(self->chooser.search);
    for (const kernel *k = self->kernels; k; k = k->next)
        Py_VISIT(k->fn);
    return 0;
}

static int machine_clear(PyObject *o)
{
    forget(self_of(o), true);
    return 0;
}

/* By the collector before anything of a cycle is taken apart, with a reference of its own: no function runs that has
 * been. Else on the way to dealloc. */
static void machine_finalize(PyObject *o)
{
    if (Py_REFCNT(o) > 1)
        forget(self_of(o), true);
}

PyObject *fan_raise_sim(fan_status status, const fan_error *err)
{
    PyObject *sim, *type;
    if (status != FAN_ERR_DEADLOCK)
        return fan_raise(status, err);
    sim = PyImport_ImportModule("fanin.sim");
    type = sim ? PyObject_GetAttrString(sim, "DeadlockError") : NULL;
    if (type)
        PyErr_SetString(type, err->text);
    Py_XDECREF(type);
    Py_XDECREF(sim);
    return NULL;
}

static PyObject *done(fan_status status, const fan_error *err)
{
    if (status != FAN_OK)
        return fan_raise_sim(status, err);
    Py_RETURN_NONE;
}

static fan_device *device_at(machine_object *self, int index)
{
    fan_device *d = fan_sim_device(self->m, index);
    if (!d)
        PyErr_Format(PyExc_ValueError, "device %d: this machine has %d device%s, numbered from 0", index, self->devices,
                     self->devices == 1 ? "" : "s");
    return d;
}

/* Streams, events, memory, work */

static PyObject *machine_stream(PyObject *o, PyObject *args)
{
    machine_object *self = self_of(o);
    int device, blocking;
    fan_stream *s = NULL;
    fan_error err = {0};
    fan_status status;
    PyObject *made;
    if (!PyArg_ParseTuple(args, "ip:_stream", &device, &blocking) || !device_at(self, device))
        return NULL;
    status = fan_sim_stream(self->m, device, blocking, &s, &err);
    if (status != FAN_OK)
        return fan_raise(status, &err);
    fan_sim_list(self->m, s);
    made = fan_stream_wrap(s);
    fan_stream_drop(s);
    return made;
}

static PyObject *machine_event(PyObject *o, PyObject *args)
{
    int device;
    fan_device *d;
    fan_event *e = NULL;
    fan_error err = {0};
    fan_status status;
    PyObject *made;
    if (!PyArg_ParseTuple(args, "i:_event", &device) || !(d = device_at(self_of(o), device)))
        return NULL;
    status = fan_event_new(d, &e, &err);
    if (status != FAN_OK)
        return fan_raise(status, &err);
    made = fan_event_wrap(e);
    fan_event_drop(e);
    return made;
}

static PyObject *wrap_new(machine_object *self, int device, fan_status status, fan_array *a, const fan_error *err)
{
    PyObject *made;
    if (status != FAN_OK)
        return fan_raise(status, err);
    made = fan_array_wrap(a, fan_sim_device(self->m, device));
    fan_array_drop(a);
    return made;
}

static PyObject *machine_array(PyObject *o, PyObject *args)
{
    machine_object *self = self_of(o);
    PyArrayObject *from;
    int device;
    int64_t shape[FAN_MAX_NDIM], strides[FAN_MAX_NDIM];
    fan_array *init = NULL, *a = NULL;
    fan_storage *st;
    fan_dtype dtype;
    fan_error err = {0};
    fan_status status = FAN_ERR_NOMEM;
    if (!PyArg_ParseTuple(args, "O!i:_array", &PyArray_Type, &from, &device) || !device_at(self, device))
        return NULL;
    dtype = fan_dtype_of_descr(PyArray_DESCR(from));
    if (dtype == FAN_DT_NONE)
        return PyErr_Format(PyExc_TypeError, "Machine.array: dtype %R cannot be summed, so no device has it",
                            PyArray_DESCR(from));
    if (PyArray_NDIM(from) > FAN_MAX_NDIM)
        return PyErr_Format(PyExc_ValueError, "Machine.array: at most %d dimensions are supported", FAN_MAX_NDIM);
    for (int i = 0; i < PyArray_NDIM(from); i++) {
        shape[i] = PyArray_DIM(from, i);
        strides[i] = PyArray_STRIDE(from, i);
    }
    st = fan_storage_wrap(PyArray_DATA(from), 0, NULL, NULL);
    if (st)
        status = fan_array_view(st, PyArray_BYTES(from), dtype, PyArray_NDIM(from), shape, strides, false, &init, &err);
    if (status == FAN_OK)
        status = fan_sim_array(self->m, device, dtype, init->ndim, init->shape, init, &a, &err);
    fan_array_drop(init);
    fan_storage_drop(st);
    return wrap_new(self, device, status, a, &err);
}

static PyObject *machine_empty(PyObject *o, PyObject *args)
{
    machine_object *self = self_of(o);
    PyObject *wish, *dtype_wish;
    int device, ndim;
    int64_t shape[FAN_MAX_NDIM];
    fan_dtype dtype;
    fan_array *a = NULL;
    fan_error err = {0};
    fan_status status;
    if (!PyArg_ParseTuple(args, "OOi:_empty", &wish, &dtype_wish, &device) || !device_at(self, device))
        return NULL;
    if (fan_dtype_parse(dtype_wish, &dtype) < 0 || (ndim = fan_shape_arg(wish, shape)) < 0)
        return NULL;
    if (dtype == FAN_DT_NONE)
        dtype = FAN_DT_FLOAT64;
    status = fan_sim_array(self->m, device, dtype, ndim, shape, NULL, &a, &err);
    return wrap_new(self, device, status, a, &err);
}

static PyObject *machine_launch(PyObject *o, PyObject *args)
{
    machine_object *self = self_of(o);
    PyObject *where, *fn, *reads, *writes, *name, *title = NULL, *result = NULL;
    double us;
    fan_stream *s = NULL;
    kernel *k = NULL;
    fan_array **arrays = NULL;
    fan_error err = {0};
    fan_status status;
    size_t n;
    if (!PyArg_ParseTuple(args, "OOOOOd:_launch", &where, &fn, &reads, &writes, &name, &us))
        return NULL;
    if (!PyCallable_Check(fn))
        return PyErr_Format(PyExc_TypeError,
                            "launch: the kernel is called with NumPy views when it runs, and %.80s cannot be called",
                            Py_TYPE(fn)->tp_name);
    reads = arrays_arg(reads, "launch: reads is a sequence of arrays, as in reads=[x]");
    writes = reads ? arrays_arg(writes, "launch: writes is a sequence of arrays, as in writes=[y]") : NULL;
    title = writes ? name_of(name, fn) : NULL;
    if (!title || !PyUnicode_AsUTF8(title) || fan_stream_arg(where, &s) < 0)
        goto done;
    if (!s || fan_sim_of(s->device) != self->m) {
        PyErr_Format(PyExc_ValueError, "launch: %R is no stream of this machine", where);
        goto done;
    }
    n = (size_t)(PyTuple_GET_SIZE(reads) + PyTuple_GET_SIZE(writes));
    k = fan_calloc(sizeof *k + n * sizeof(fan_array *));
    arrays = fan_alloc((n + 1) * sizeof *arrays);
    if (!k || !arrays) {
        PyErr_NoMemory();
        goto done;
    }
    k->m = self->m;
    if (views_of(self, reads, false, k, arrays) < 0 || views_of(self, writes, true, k, arrays) < 0)
        goto done;
    k->fn = Py_NewRef(fn);
    k->name = Py_NewRef(title);
    k->owner = self;
    k->next = self->kernels;
    if (k->next)
        k->next->prev = k;
    self->kernels = k;
    {
        fan_sim_kernel job = {.name = PyUnicode_AsUTF8(title),
                              .fn = kernel_run,
                              .fini = kernel_fini,
                              .ctx = k,
                              .reads = arrays,
                              .nreads = k->reads,
                              .writes = arrays + k->reads,
                              .nwrites = k->n - k->reads,
                              .us = us};
        Py_BEGIN_ALLOW_THREADS status = fan_sim_launch(self->m, s, &job, &err);
        Py_END_ALLOW_THREADS
    }
    if (status == FAN_OK) {
        k = NULL; /* the machine's now */
        result = Py_NewRef(Py_None);
    } else {
        unlink_kernel(k);
        fan_raise(status, &err);
    }
done:
    if (k)
        kernel_free(k);
    fan_free(arrays);
    fan_stream_drop(s);
    Py_XDECREF(title);
    Py_XDECREF(reads);
    Py_XDECREF(writes);
    return result;
}

static PyObject *machine_synchronize(PyObject *o, PyObject *Py_UNUSED(none))
{
    fan_error err = {0};
    fan_status status;
    Py_BEGIN_ALLOW_THREADS status = fan_sim_synchronize(self_of(o)->m, &err);
    Py_END_ALLOW_THREADS return done(status, &err);
}

static PyObject *machine_step(PyObject *o, PyObject *Py_UNUSED(none))
{
    fan_error err = {0};
    fan_status status;
    bool ran = false;
    Py_BEGIN_ALLOW_THREADS status = fan_sim_step(self_of(o)->m, &ran, &err);
    Py_END_ALLOW_THREADS return status == FAN_OK ? PyBool_FromLong(ran) : fan_raise_sim(status, &err);
}

static PyObject *machine_pending(PyObject *o, PyObject *Py_UNUSED(none))
{
    fan_error err = {0};
    return done(fan_sim_pending(self_of(o)->m, &err), &err);
}

static PyObject *machine_forget(PyObject *o, PyObject *Py_UNUSED(none))
{
    forget(self_of(o), false);
    Py_RETURN_NONE;
}

static PyObject *machine_check(PyObject *o, PyObject *on)
{
    int yes = PyObject_IsTrue(on);
    if (yes < 0)
        return NULL;
    fan_sim_check(self_of(o)->m, yes);
    Py_RETURN_NONE;
}

/* Capture */

typedef struct graph_object {
    PyObject_HEAD fan_sim_graph *g; /* held */
    PyObject *machine;              /* whose it is */
} graph_object;

static void graph_dealloc(PyObject *o)
{
    graph_object *self = (graph_object *)o;
    PyTypeObject *type = Py_TYPE(o);
    PyObject_GC_UnTrack(o);
    Py_BEGIN_ALLOW_THREADS fan_sim_graph_drop(self->g);
    Py_END_ALLOW_THREADS Py_XDECREF(self->machine);
    type->tp_free(o);
    Py_DECREF(type);
}

static int graph_traverse(PyObject *o, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(o));
    Py_VISIT(((graph_object *)o)->machine);
    return 0;
}

static int graph_clear(PyObject *o)
{
    Py_CLEAR(((graph_object *)o)->machine);
    return 0;
}

static PyObject *graph_repr(PyObject *o)
{
    PyObject *machine = ((graph_object *)o)->machine;
    return machine ? PyUnicode_FromFormat("<fanin.sim graph of %R>", machine)
                   : PyUnicode_FromString("<fanin.sim graph>");
}

static PyType_Slot graph_slots[] = {
    {Py_tp_doc, "What was captured on a simulated machine: Machine.launch_graph queues it."},
    {Py_tp_dealloc, graph_dealloc},
    {Py_tp_traverse, graph_traverse},
    {Py_tp_clear, graph_clear},
    {Py_tp_repr, graph_repr},
    {0, NULL},
};

PyType_Spec fan_graph_spec = {
    .name = "fanin._core.Graph",
    .basicsize = sizeof(graph_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = graph_slots,
};

/* stream_here: a stream of this machine; a hold, or NULL with an exception. */
static fan_stream *stream_here(machine_object *self, PyObject *o)
{
    fan_stream *s = NULL;
    if (fan_stream_arg(o, &s) < 0)
        return NULL;
    if (s && fan_sim_of(s->device) == self->m)
        return s;
    fan_stream_drop(s);
    PyErr_SetString(PyExc_ValueError, "expected a stream of this machine");
    return NULL;
}

static PyObject *machine_begin_capture(PyObject *o, PyObject *args)
{
    PyObject *where;
    int mode;
    fan_error err = {0};
    fan_stream *s;
    if (!PyArg_ParseTuple(args, "Oi:_begin_capture", &where, &mode) || !(s = stream_here(self_of(o), where)))
        return NULL;
    fan_status status = fan_sim_capture_begin(self_of(o)->m, s, mode, &err);
    fan_stream_drop(s);
    return done(status, &err);
}

static PyObject *machine_end_capture(PyObject *o, PyObject *where)
{
    fan_error err = {0};
    fan_sim_graph *g = NULL;
    fan_stream *s = stream_here(self_of(o), where);
    if (!s)
        return NULL;
    fan_status status = fan_sim_capture_end(self_of(o)->m, s, &g, &err);
    fan_stream_drop(s);
    if (status != FAN_OK)
        return fan_raise_sim(status, &err);
    PyTypeObject *type = fan_state_get()->graph_type;
    graph_object *made = (graph_object *)type->tp_alloc(type, 0);
    if (!made) {
        fan_sim_graph_drop(g);
        return NULL;
    }
    made->g = g;
    made->machine = Py_NewRef(o);
    return (PyObject *)made;
}

static PyObject *machine_launch_graph(PyObject *o, PyObject *args)
{
    PyObject *graph, *where;
    fan_error err = {0};
    fan_sim_graph *g;
    fan_stream *s;
    fan_status status;
    if (!PyArg_ParseTuple(args, "OO:_launch_graph", &graph, &where))
        return NULL;
    if (Py_TYPE(graph) != fan_state_get()->graph_type)
        return PyErr_Format(PyExc_TypeError, "launch_graph: expected a graph, as end_capture gives it, not %.80s",
                            Py_TYPE(graph)->tp_name);
    if (((graph_object *)graph)->machine != o)
        return PyErr_Format(PyExc_ValueError, "launch_graph: %R is of another machine", graph);
    g = ((graph_object *)graph)->g;
    if (!(s = stream_here(self_of(o), where)))
        return NULL;
    Py_BEGIN_ALLOW_THREADS status = fan_sim_graph_launch(g, s, &err);
    Py_END_ALLOW_THREADS fan_stream_drop(s);
    return done(status, &err);
}

static PyObject *machine_capture_state(PyObject *o, PyObject *where)
{
    fan_stream *s = stream_here(self_of(o), where);
    if (!s)
        return NULL;
    int state = fan_sim_capture_state(self_of(o)->m, s, NULL, NULL);
    fan_stream_drop(s);
    return PyLong_FromLong(state);
}

static PyObject *machine_unsafe(PyObject *o, PyObject *Py_UNUSED(none))
{
    fan_error err = {0};
    return done(fan_sim_unsafe(self_of(o)->m, "an unsafe call", &err), &err);
}

static PyObject *machine_leave_out(PyObject *o, PyObject *words)
{
    uint64_t bits = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(words); i++) {
        PyObject *word = PyTuple_GET_ITEM(words, i);
        const char *text = PyUnicode_Check(word) ? PyUnicode_AsUTF8(word) : NULL;
        uint64_t here = text ? fan_plan_bits(text) : 0;
        if (!here) {
            char every[FAN_PLAN_COUNT * 16] = "";
            if (PyErr_Occurred())
                return NULL;
            for (int k = 0; k < FAN_PLAN_COUNT; k++)
                fan_append(every, sizeof every, "%s%s", k ? ", " : "", fan_plan_word(k));
            return PyErr_Format(PyExc_ValueError,
                                "leave_out: no plan has %R. A word names a rule, as in \"S12\", or one of: %s", word,
                                every);
        }
        bits |= here;
    }
    fan_sim_leave_out(self_of(o)->m, bits);
    Py_RETURN_NONE;
}

static PyObject *machine_fail_at(PyObject *o, PyObject *args)
{
    long long index;
    int memory = 0;
    if (!PyArg_ParseTuple(args, "L|p:_fail_at", &index, &memory))
        return NULL;
    fan_sim_fail_at(self_of(o)->m, index, memory ? FAN_ERR_DEVICE_NOMEM : FAN_ERR_DEVICE);
    Py_RETURN_NONE;
}

/* Host threads */

static PyObject *machine_spawn(PyObject *o, PyObject *Py_UNUSED(none))
{
    fan_error err = {0};
    int actor = -1;
    fan_status status = fan_sim_spawn(self_of(o)->m, &actor, &err);
    return status == FAN_OK ? PyLong_FromLong(actor) : fan_raise(status, &err);
}

static PyObject *machine_thread_begin(PyObject *o, PyObject *arg)
{
    int actor = (int)PyLong_AsLong(arg);
    bool go;
    if (actor == -1 && PyErr_Occurred())
        return NULL;
    Py_BEGIN_ALLOW_THREADS go = fan_sim_thread_begin(self_of(o)->m, actor);
    Py_END_ALLOW_THREADS return PyBool_FromLong(go);
}

static PyObject *machine_thread_end(PyObject *o, PyObject *arg)
{
    int actor = (int)PyLong_AsLong(arg);
    if (actor == -1 && PyErr_Occurred())
        return NULL;
    Py_BEGIN_ALLOW_THREADS fan_sim_thread_end(self_of(o)->m, actor);
    Py_END_ALLOW_THREADS Py_RETURN_NONE;
}

static PyObject *machine_join(PyObject *o, PyObject *Py_UNUSED(none))
{
    machine_object *self = self_of(o);
    fan_error err = {0};
    fan_status status;
    Py_BEGIN_ALLOW_THREADS status = fan_sim_join(self->m, &err);
    Py_END_ALLOW_THREADS return done(status, &err);
}

static PyObject *machine_stuck(PyObject *o, PyObject *arg)
{
    int actor = (int)PyLong_AsLong(arg);
    if (actor == -1 && PyErr_Occurred())
        return NULL;
    return PyBool_FromLong(fan_sim_stuck(self_of(o)->m, actor));
}

static PyObject *machine_enter(PyObject *o, PyObject *Py_UNUSED(none))
{
    PyObject *mine = PyThreadState_GetDict(), *list = entered();
    if (!mine)
        return PyErr_NoMemory();
    if (!list) {
        if (!(list = PyList_New(0)))
            return NULL;
        if (PyDict_SetItemString(mine, "fanin.machines", list) < 0) {
            Py_DECREF(list);
            return NULL;
        }
        Py_DECREF(list); /* the dictionary holds it */
    }
    if (PyList_Append(list, o) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *machine_leave(PyObject *o, PyObject *Py_UNUSED(none))
{
    PyObject *list = entered();
    for (Py_ssize_t i = list ? PyList_GET_SIZE(list) : 0; i-- > 0;)
        if (PyList_GET_ITEM(list, i) == o) {
            if (PySequence_DelItem(list, i) < 0)
                return NULL;
            break;
        }
    Py_RETURN_NONE;
}

static fan_explore *search_of(PyObject *capsule) { return PyCapsule_GetPointer(capsule, "fanin.explore"); }

static PyObject *machine_follow(PyObject *o, PyObject *capsule)
{
    fan_explore *x = search_of(capsule);
    if (!x)
        return NULL;
    set_chooser(self_of(o), (chooser){.mode = FOLLOW, .x = x, .search = Py_NewRef(capsule)});
    Py_RETURN_NONE;
}

static PyObject *machine_give_up(PyObject *o, PyObject *Py_UNUSED(none))
{
    set_chooser(self_of(o), (chooser){.mode = GIVE_UP});
    Py_RETURN_NONE;
}

static PyObject *machine_get_devices(PyObject *o, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(self_of(o)->devices);
}

static PyObject *machine_get_seed(PyObject *o, void *Py_UNUSED(closure))
{
    return PyLong_FromUnsignedLongLong(fan_sim_seed(self_of(o)->m));
}

static PyObject *machine_get_races(PyObject *o, void *Py_UNUSED(closure))
{
    return PyLong_FromUnsignedLongLong(fan_sim_races(self_of(o)->m));
}

static PyObject *machine_get_calls(PyObject *o, void *Py_UNUSED(closure))
{
    return PyLong_FromUnsignedLongLong(fan_sim_calls(self_of(o)->m));
}

static PyObject *machine_get_unsound(PyObject *o, void *Py_UNUSED(closure))
{
    return PyLong_FromUnsignedLongLong(fan_sim_unsound(self_of(o)->m));
}

static PyObject *machine_get_host_us(PyObject *o, void *Py_UNUSED(closure))
{
    return PyFloat_FromDouble(fan_sim_host_us(self_of(o)->m));
}

static PyObject *machine_get_device_us(PyObject *o, void *Py_UNUSED(closure))
{
    return PyFloat_FromDouble(fan_sim_device_us(self_of(o)->m));
}

static PyObject *machine_get_abandoned(PyObject *o, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(fan_sim_abandoned(self_of(o)->m));
}

/* text_of: a string of unknown length from a function that truncates. */
static PyObject *text_of(void (*fill)(const void *from, char *buf, size_t size), const void *from)
{
    PyObject *made = NULL;
    size_t size = 256;
    char *buf = NULL, *more;
    do {
        size *= 4;
        if (!(more = fan_realloc(buf, size))) {
            fan_free(buf);
            return PyErr_NoMemory();
        }
        buf = more;
        buf[0] = '\0';
        fill(from, buf, size);
    } while (strlen(buf) == size - 1);
    made = PyUnicode_FromString(buf);
    fan_free(buf);
    return made;
}

static void fill_host_schedule(const void *from, char *buf, size_t size) { fan_sim_host_schedule(from, buf, size); }

static void fill_explore_schedule(const void *from, char *buf, size_t size) { fan_explore_schedule(from, buf, size); }

static PyObject *machine_get_host_schedule(PyObject *o, void *Py_UNUSED(closure))
{
    return text_of(fill_host_schedule, self_of(o)->m);
}

static PyObject *machine_get_streams(PyObject *o, void *Py_UNUSED(closure))
{
    fan_stream **all = NULL;
    size_t n = 0;
    fan_error err = {0};
    fan_status status = fan_sim_listed(self_of(o)->m, &all, &n, &err);
    PyObject *made = status == FAN_OK ? PyTuple_New((Py_ssize_t)n) : fan_raise(status, &err);
    for (size_t i = 0; made && i < n; i++) {
        PyObject *s = fan_stream_wrap(all[i]);
        if (!s)
            Py_CLEAR(made);
        else
            PyTuple_SET_ITEM(made, (Py_ssize_t)i, s);
    }
    while (n > 0)
        fan_stream_drop(all[--n]);
    fan_free(all);
    return made;
}

static PyObject *machine_limit(PyObject *o, PyObject *arg)
{
    size_t steps = PyLong_AsSize_t(arg);
    if (steps == (size_t)-1 && PyErr_Occurred())
        return NULL;
    fan_sim_limit(self_of(o)->m, steps);
    Py_RETURN_NONE;
}

static PyObject *machine_break(PyObject *o, PyObject *text)
{
    const char *words = PyUnicode_AsUTF8(text);
    return words ? PyLong_FromLong(fan_sim_break(self_of(o)->m, words)) : NULL;
}

static PyObject *machine_get_steps(PyObject *o, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(fan_sim_steps(self_of(o)->m));
}

static PyObject *machine_saw_thread(PyObject *o, PyObject *arg)
{
    int actor = (int)PyLong_AsLong(arg);
    if (actor == -1 && PyErr_Occurred())
        return NULL;
    fan_sim_saw_thread(self_of(o)->m, actor);
    Py_RETURN_NONE;
}

static PyObject *machine_after_thread(PyObject *o, PyObject *arg)
{
    fan_error err = {0};
    int actor = (int)PyLong_AsLong(arg);
    if (actor == -1 && PyErr_Occurred())
        return NULL;
    return done(fan_sim_after_thread(self_of(o)->m, actor, &err), &err);
}

static void seen_calls(PyObject *o, PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(nargs),
                       PyObject *Py_UNUSED(kwnames))
{
    fan_sim_saw_all(self_of(o)->m);
}

FAN_TURN_TUPLE(machine_stream, fan_seen_nothing)
FAN_TURN_TUPLE(machine_event, fan_seen_nothing)
FAN_TURN_TUPLE(machine_array, fan_seen_nothing)
FAN_TURN_TUPLE(machine_empty, fan_seen_nothing)
FAN_TURN_TUPLE(machine_launch, fan_seen_nothing)
FAN_TURN_NONE(machine_synchronize, fan_seen_nothing)
FAN_TURN_NONE(machine_step, fan_seen_nothing)
FAN_TURN_TUPLE(machine_begin_capture, fan_seen_nothing)
FAN_TURN_ONE(machine_end_capture, fan_seen_nothing)
FAN_TURN_TUPLE(machine_launch_graph, fan_seen_nothing)
FAN_TURN_ONE(machine_capture_state, fan_seen_nothing)
FAN_TURN_NONE(machine_unsafe, fan_seen_nothing)
FAN_TURN_TUPLE(machine_leave_out, seen_calls)
FAN_TURN_NONE(machine_spawn, fan_seen_nothing)
FAN_TURN_ONE(machine_saw_thread, fan_seen_nothing)
FAN_TURN_GET(machine_get_races, seen_calls)
FAN_TURN_GET(machine_get_calls, seen_calls)
FAN_TURN_GET(machine_get_unsound, seen_calls)
FAN_TURN_GET(machine_get_host_us, seen_calls)
FAN_TURN_GET(machine_get_device_us, seen_calls)
FAN_TURN_GET(machine_get_host_schedule, seen_calls)
FAN_TURN_GET(machine_get_streams, seen_calls)

static PyMethodDef methods[] = {
    {"_stream", machine_stream_turn, METH_VARARGS, "_stream($self, device, blocking, /)\n--\n\nA new stream."},
    {"_event", machine_event_turn, METH_VARARGS, "_event($self, device, /)\n--\n\nA new event."},
    {"_array", machine_array_turn, METH_VARARGS, "_array($self, ndarray, device, /)\n--\n\nA copy on a device."},
    {"_empty", machine_empty_turn, METH_VARARGS,
     "_empty($self, shape, dtype, device, /)\n--\n\nPoisoned memory on a device."},
    {"_launch", machine_launch_turn, METH_VARARGS,
     "_launch($self, stream, fn, reads, writes, name, us, /)\n--\n\nQueue a kernel."},
    {"_synchronize", machine_synchronize_turn, METH_NOARGS, "_synchronize($self, /)\n--\n\nRun all that is queued."},
    {"_step", machine_step_turn, METH_NOARGS,
     "_step($self, /)\n--\n\nRun one thing that is queued; False where nothing can run."},
    {"_pending", machine_pending, METH_NOARGS, "_pending($self, /)\n--\n\nRaise a race that no call has raised yet."},
    {"_forget", machine_forget, METH_NOARGS, "_forget($self, /)\n--\n\nWhat is queued of the user's will do nothing."},
    {"_check", machine_check, METH_O, "_check($self, on, /)\n--\n\nSwitch the checker on or off."},
    {"_begin_capture", machine_begin_capture_turn, METH_VARARGS,
     "_begin_capture($self, stream, mode, /)\n--\n\nCapture what is queued on a stream."},
    {"_end_capture", machine_end_capture_turn, METH_O,
     "_end_capture($self, stream, /)\n--\n\nThe graph of what was captured."},
    {"_launch_graph", machine_launch_graph_turn, METH_VARARGS,
     "_launch_graph($self, graph, stream, /)\n--\n\nQueue a graph."},
    {"_capture_state", machine_capture_state_turn, METH_O,
     "_capture_state($self, stream, /)\n--\n\n0: not captured, 1: captured, 2: the capture is broken."},
    {"_unsafe", machine_unsafe_turn, METH_NOARGS,
     "_unsafe($self, /)\n--\n\nA call that CUDA forbids beside a capture."},
    {"_leave_out", machine_leave_out_turn, METH_VARARGS,
     "_leave_out($self, /, *words)\n--\n\nLeave out these of the plans, and no others."},
    {"_fail_at", machine_fail_at, METH_VARARGS,
     "_fail_at($self, index, memory=False, /)\n--\n\nThe backend's call number `index` from now fails, once; below 0: "
     "none does."},
    {"_spawn", machine_spawn_turn, METH_NOARGS, "_spawn($self, /)\n--\n\nRegister a host thread; its number."},
    {"_thread_begin", machine_thread_begin, METH_O,
     "_thread_begin($self, actor, /)\n--\n\nFirst on the new thread; False: return at once."},
    {"_thread_end", machine_thread_end, METH_O, "_thread_end($self, actor, /)\n--\n\nLast on the thread."},
    {"_saw_thread", machine_saw_thread_turn, METH_O,
     "_saw_thread($self, actor, /)\n--\n\nThe calling thread asks how another one ended."},
    {"_after_thread", machine_after_thread, METH_O,
     "_after_thread($self, actor, /)\n--\n\nA thread that has ended comes before what this one does next."},
    {"_limit", machine_limit, METH_O,
     "_limit($self, steps, /)\n--\n\nHost threads that act more often come to no end."},
    {"_break", machine_break, METH_O,
     "_break($self, text, /)\n--\n\nThe thread that acts does not come back: its number, or -1."},
    {"_join", machine_join, METH_NOARGS, "_join($self, /)\n--\n\nRun the host threads to their end."},
    {"_stuck", machine_stuck, METH_O, "_stuck($self, actor, /)\n--\n\nAfter a deadlock: its thread will never end."},
    {"_enter", machine_enter, METH_NOARGS, "_enter($self, /)\n--\n\n\"sim:0\" names its first device on this thread."},
    {"_leave", machine_leave, METH_NOARGS, "_leave($self, /)\n--\n\nTake back the innermost _enter."},
    {"_follow", machine_follow, METH_O, "_follow($self, search, /)\n--\n\nA search chooses among the host threads."},
    {"_give_up", machine_give_up, METH_NOARGS, "_give_up($self, /)\n--\n\nThe host threads are told to end."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef getset[] = {
    {"devices", machine_get_devices, NULL, "How many devices it has.", NULL},
    {"seed", machine_get_seed, NULL, "The seed that picks what runs next.", NULL},
    {"races", machine_get_races_turn, NULL, "How many races were found.", NULL},
    {"_steps", machine_get_steps, NULL, "How often one of the host threads was chosen.", NULL},
    {"_calls", machine_get_calls_turn, NULL, "Calls of the backend so far.", NULL},
    {"_unsound", machine_get_unsound_turn, NULL, "Waits left out whose order did not hold: must be 0.", NULL},
    {"host_us", machine_get_host_us_turn, NULL, "The clock of the host, in microseconds.", NULL},
    {"device_us", machine_get_device_us_turn, NULL, "When the last work queued ends, in microseconds.", NULL},
    {"abandoned", machine_get_abandoned, NULL, "True after the host threads were told to end.", NULL},
    {"host_schedule", machine_get_host_schedule_turn, NULL,
     "Which host thread acted, step by step: one character each.", NULL},
    {"streams", machine_get_streams_turn, NULL, "The streams that were made and that somebody has still.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "The core of fanin.sim.Machine."},
    {Py_tp_new, machine_new},
    {Py_tp_dealloc, machine_dealloc},
    {Py_tp_traverse, machine_traverse},
    {Py_tp_clear, machine_clear},
    {Py_tp_finalize, machine_finalize},
    {Py_tp_methods, methods},
    {Py_tp_getset, getset},
    {0, NULL},
};

PyType_Spec fan_machine_spec = {
    .name = "fanin._core.Machine",
    .basicsize = sizeof(machine_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};

/* The search of explore, in a capsule */

static void free_search(PyObject *capsule) { fan_explore_free(search_of(capsule)); }

static PyObject *explore_new(PyObject *Py_UNUSED(module), PyObject *args)
{
    int reduce;
    unsigned long long limit;
    fan_explore *x;
    PyObject *capsule;
    if (!PyArg_ParseTuple(args, "pK:explore_new", &reduce, &limit))
        return NULL;
    if (!(x = fan_explore_new(reduce, limit)))
        return PyErr_NoMemory();
    fan_explore_prune(x);
    if (!(capsule = PyCapsule_New(x, "fanin.explore", free_search)))
        fan_explore_free(x);
    return capsule;
}

static PyObject *explore_begin(PyObject *Py_UNUSED(module), PyObject *capsule)
{
    fan_explore *x = search_of(capsule);
    return x ? PyBool_FromLong(fan_explore_begin(x)) : NULL;
}

static PyObject *explore_end(PyObject *Py_UNUSED(module), PyObject *capsule)
{
    fan_explore *x = search_of(capsule);
    if (!x)
        return NULL;
    fan_explore_end(x);
    if (fan_explore_status(x) != FAN_OK)
        return fan_raise(fan_explore_status(x), NULL);
    Py_RETURN_NONE;
}

static PyObject *explore_replay(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *capsule;
    const char *schedule;
    fan_explore *x;
    fan_status status;
    if (!PyArg_ParseTuple(args, "Os:explore_replay", &capsule, &schedule) || !(x = search_of(capsule)))
        return NULL;
    status = fan_explore_replay(x, schedule);
    if (status == FAN_ERR_VALUE)
        return PyErr_Format(PyExc_ValueError,
                            "replay: '%s' is no schedule: it has one character for each step, 0-9 and a-v, and Y or N "
                            "for each answer to a query",
                            schedule);
    return status == FAN_OK ? Py_NewRef(Py_None) : fan_raise(status, NULL);
}

static PyObject *explore_sample(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *capsule;
    unsigned long long seed;
    fan_explore *x;
    if (!PyArg_ParseTuple(args, "OK:explore_sample", &capsule, &seed) || !(x = search_of(capsule)))
        return NULL;
    fan_explore_sample(x, seed);
    Py_RETURN_NONE;
}

static PyObject *explore_state(PyObject *Py_UNUSED(module), PyObject *capsule)
{
    fan_explore *x = search_of(capsule);
    PyObject *schedule = x ? text_of(fill_explore_schedule, x) : NULL;
    if (!schedule)
        return NULL;
    return Py_BuildValue("{s:K,s:K,s:K,s:O,s:O,s:N}", "anew", (unsigned long long)fan_explore_anew(x), "runs",
                         (unsigned long long)fan_explore_runs(x), "abandoned",
                         (unsigned long long)fan_explore_abandoned(x), "complete",
                         fan_explore_complete(x) ? Py_True : Py_False, "strayed",
                         fan_explore_strayed(x) ? Py_True : Py_False, "schedule", schedule);
}

PyMethodDef fan_machine_functions[] = {
    {"explore_new", explore_new, METH_VARARGS,
     "explore_new(reduce, limit, /)\n--\n\nA search over the orders of host threads."},
    {"explore_begin", explore_begin, METH_O,
     "explore_begin(search, /)\n--\n\nStart the next run; False when all have been run."},
    {"explore_end", explore_end, METH_O, "explore_end(search, /)\n--\n\nEnd a run."},
    {"explore_state", explore_state, METH_O,
     "explore_state(search, /)\n--\n\nanew, runs, abandoned, complete, strayed, schedule."},
    {"explore_replay", explore_replay, METH_VARARGS,
     "explore_replay(search, schedule, /)\n--\n\nThe next run follows a schedule."},
    {"explore_sample", explore_sample, METH_VARARGS,
     "explore_sample(search, seed, /)\n--\n\nThe next run is a sample."},
    {NULL, NULL, 0, NULL},
};
