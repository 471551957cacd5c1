/* machine: the simulated machine as Python has it. fanin/sim builds on `_core.Machine`: spawn, join, the context
 * manager.
 *
 * Title: Cycles. A kernel that waits holds its function, and that may hold the machine, or a graph of its. To the
 * collector the machine holds the functions of all its kernels, and a graph, whose kernels are among them, its machine.
 * Arrays and streams hold neither: where the machine is collected although one of them could still have run what is
 * queued, that raises when it is run.
 */
#include "base/mem.h"
#include "py/args.h"
#include "py/machine_part.h"
#include "py/turn.h"

static void hook_site(void *Py_UNUSED(ctx), char *buf, size_t size)
{
    fan_gil gil;
    buf[0] = '\0';
    if (!fan_gil_enter(&gil))
        return;
    fan_call_site(buf, size);
    fan_gil_leave(&gil);
}

static void *before_block(void *Py_UNUSED(ctx)) { return fan_allow_threads_begin(); }

static void after_block(void *Py_UNUSED(ctx), void *left) { fan_allow_threads_end(left); }

/* An event that was never recorded is warned of where the user waits for it (stream.c): `warn` is left out. */
static const fan_sim_hooks hooks = {.call_site = hook_site, .before_block = before_block, .after_block = after_block};

/* The choice among the host threads */

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

static void touched(void *ctx, uint64_t object, fan_sched_mode how)
{
    chooser *c = ctx;
    if (c->mode == FOLLOW)
        (void)fan_explore_access(c->x, object, how); /* the search keeps its failure */
}

static void machine_set_chooser(machine_object *self, chooser c)
{
    PyObject *search = self->chooser.search;
    self->chooser = c;
    if (c.mode == BY_SEED)
        fan_sim_set_chooser(self->m, NULL);
    else
        fan_sim_set_chooser(
            self->m, &(fan_sim_chooser){.choose = choose, .access = touched, .pick = pick, .ctx = &self->chooser});
    Py_XDECREF(search);
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

/* forget: the user's queued functions will do nothing; lost: or raise that they are lost. */
static void forget(machine_object *self, bool lost)
{
    while (self->kernels) {
        fan_kernel *k = self->kernels;
        PyObject *fn = k->fn;
        fan_kernel_unlink(k);
        k->fn = NULL;
        k->lost = lost;
        Py_XDECREF(fn); /* may run anything: the list is whole */
    }
}

static void machine_dealloc(PyObject *o)
{
    machine_object *self = fan_machine_self(o);
    PyTypeObject *type = Py_TYPE(o);
    PyObject_GC_UnTrack(o);
    if (self->m) {
        machine_set_chooser(self, (chooser){.mode = BY_SEED});
        while (self->kernels) /* the machine may live on in its arrays, and so may its work */
            fan_kernel_unlink(self->kernels);
        fan_sim_drop(self->m);
    }
    type->tp_free(o);
    Py_DECREF(type);
}

static int machine_traverse(PyObject *o, visitproc visit, void *arg)
{
    const machine_object *self = fan_machine_self(o);
    Py_VISIT(Py_TYPE(o));
    Py_VISIT(self->chooser.search);
    for (const fan_kernel *k = self->kernels; k; k = k->next)
        Py_VISIT(k->fn);
    return 0;
}

static int machine_clear(PyObject *o)
{
    forget(fan_machine_self(o), true);
    return 0;
}

/* By the collector before anything of a cycle is taken apart, with a reference of its own: no function runs that has
 * been. Else on the way to dealloc. */
static void machine_finalize(PyObject *o)
{
    if (Py_REFCNT(o) > 1)
        forget(fan_machine_self(o), true);
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
    machine_object *self = fan_machine_self(o);
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
    if (!PyArg_ParseTuple(args, "i:_event", &device) || !(d = device_at(fan_machine_self(o), device)))
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
    machine_object *self = fan_machine_self(o);
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
        return PyErr_Format(fan_state_get()->dtype_error,
                            "Machine.array: the array has dtype %S, which no device sums; expected bool, int8..64, "
                            "uint8..64, float or complex in native byte order: x.astype(..)",
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
    machine_object *self = fan_machine_self(o);
    PyObject *wish, *dtype_wish;
    int device, ndim;
    int64_t shape[FAN_MAX_NDIM];
    fan_dtype dtype;
    fan_array *a = NULL;
    fan_error err = {0};
    fan_status status;
    if (!PyArg_ParseTuple(args, "OOi:_empty", &wish, &dtype_wish, &device) || !device_at(self, device))
        return NULL;
    if (fan_dtype_parse(dtype_wish, &dtype) < 0 || (ndim = fan_ints_arg(wish, shape)) < 0)
        return NULL;
    if (dtype == FAN_DT_NONE)
        dtype = FAN_DT_FLOAT64;
    status = fan_sim_array(self->m, device, dtype, ndim, shape, NULL, &a, &err);
    return wrap_new(self, device, status, a, &err);
}

static PyObject *machine_synchronize(PyObject *o, PyObject *Py_UNUSED(none))
{
    fan_error err = {0};
    fan_status status;
    Py_BEGIN_ALLOW_THREADS
        status = fan_sim_synchronize(fan_machine_self(o)->m, &err);
    Py_END_ALLOW_THREADS
    return fan_sim_done(status, &err);
}

static PyObject *machine_step(PyObject *o, PyObject *Py_UNUSED(none))
{
    fan_error err = {0};
    fan_status status;
    bool ran = false;
    Py_BEGIN_ALLOW_THREADS
        status = fan_sim_step(fan_machine_self(o)->m, &ran, &err);
    Py_END_ALLOW_THREADS
    return status == FAN_OK ? PyBool_FromLong(ran) : fan_raise_sim(status, &err);
}

static PyObject *machine_pending(PyObject *o, PyObject *Py_UNUSED(none))
{
    fan_error err = {0};
    return fan_sim_done(fan_sim_pending(fan_machine_self(o)->m, &err), &err);
}

static PyObject *machine_forget(PyObject *o, PyObject *Py_UNUSED(none))
{
    forget(fan_machine_self(o), false);
    Py_RETURN_NONE;
}

static PyObject *machine_check(PyObject *o, PyObject *on)
{
    int yes = PyObject_IsTrue(on);
    if (yes < 0)
        return NULL;
    fan_sim_check(fan_machine_self(o)->m, yes);
    Py_RETURN_NONE;
}

static PyObject *machine_leave_out(PyObject *o, PyObject *words)
{
    uint64_t bits;
    if (fan_plans_arg(words, &bits) < 0)
        return NULL;
    fan_sim_leave_out(fan_machine_self(o)->m, bits);
    Py_RETURN_NONE;
}

/* Host threads */

static int actor_arg(PyObject *o, int *actor)
{
    *actor = (int)PyLong_AsLong(o);
    return *actor == -1 && PyErr_Occurred() ? -1 : 0;
}

static PyObject *machine_spawn(PyObject *o, PyObject *Py_UNUSED(none))
{
    fan_error err = {0};
    int actor = -1;
    fan_status status = fan_sim_spawn(fan_machine_self(o)->m, &actor, &err);
    return status == FAN_OK ? PyLong_FromLong(actor) : fan_raise(status, &err);
}

static PyObject *machine_thread_begin(PyObject *o, PyObject *arg)
{
    int actor;
    bool go;
    if (actor_arg(arg, &actor) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
        go = fan_sim_thread_begin(fan_machine_self(o)->m, actor);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(go);
}

static PyObject *machine_thread_apart(PyObject *Py_UNUSED(o), PyObject *arg)
{
    int number;
    if (actor_arg(arg, &number) < 0)
        return NULL;
    fan_sim_thread_apart(number);
    Py_RETURN_NONE;
}

static PyObject *machine_thread_end(PyObject *o, PyObject *arg)
{
    int actor;
    if (actor_arg(arg, &actor) < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
        fan_sim_thread_end(fan_machine_self(o)->m, actor);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *machine_join(PyObject *o, PyObject *Py_UNUSED(none))
{
    machine_object *self = fan_machine_self(o);
    fan_error err = {0};
    fan_status status;
    Py_BEGIN_ALLOW_THREADS
        status = fan_sim_join(self->m, &err);
    Py_END_ALLOW_THREADS
    return fan_sim_done(status, &err);
}

static PyObject *machine_stuck(PyObject *o, PyObject *arg)
{
    int actor;
    if (actor_arg(arg, &actor) < 0)
        return NULL;
    return PyBool_FromLong(fan_sim_stuck(fan_machine_self(o)->m, actor));
}

static PyObject *machine_limit(PyObject *o, PyObject *arg)
{
    size_t steps = PyLong_AsSize_t(arg);
    if (steps == (size_t)-1 && PyErr_Occurred())
        return NULL;
    fan_sim_limit(fan_machine_self(o)->m, steps);
    Py_RETURN_NONE;
}

static PyObject *machine_break(PyObject *o, PyObject *text)
{
    const char *words = PyUnicode_AsUTF8(text);
    return words ? PyLong_FromLong(fan_sim_break(fan_machine_self(o)->m, words)) : NULL;
}

static PyObject *machine_saw_thread(PyObject *o, PyObject *arg)
{
    int actor;
    if (actor_arg(arg, &actor) < 0)
        return NULL;
    fan_sim_read_thread(fan_machine_self(o)->m, actor);
    Py_RETURN_NONE;
}

static PyObject *machine_after_thread(PyObject *o, PyObject *arg)
{
    fan_error err = {0};
    int actor;
    if (actor_arg(arg, &actor) < 0)
        return NULL;
    return fan_sim_done(fan_sim_after_thread(fan_machine_self(o)->m, actor, &err), &err);
}

static PyObject *machine_follow(PyObject *o, PyObject *capsule)
{
    fan_explore *x = fan_search_of(capsule);
    if (!x)
        return NULL;
    machine_set_chooser(fan_machine_self(o), (chooser){.mode = FOLLOW, .x = x, .search = Py_NewRef(capsule)});
    Py_RETURN_NONE;
}

static PyObject *machine_give_up(PyObject *o, PyObject *Py_UNUSED(none))
{
    machine_set_chooser(fan_machine_self(o), (chooser){.mode = GIVE_UP});
    Py_RETURN_NONE;
}

/* What can be read */

#define GETTER(name, value) \
    static PyObject *machine_get_##name(PyObject *o, void *Py_UNUSED(closure)) { return value; }

static void fill_host_schedule(const void *from, char *buf, size_t size) { fan_sim_host_schedule(from, buf, size); }

GETTER(devices, PyLong_FromLong(fan_machine_self(o)->devices))
GETTER(seed, PyLong_FromUnsignedLongLong(fan_sim_seed(fan_machine_self(o)->m)))
GETTER(races, PyLong_FromUnsignedLongLong(fan_sim_races(fan_machine_self(o)->m)))
GETTER(host_us, PyFloat_FromDouble(fan_sim_host_us(fan_machine_self(o)->m)))
GETTER(device_us, PyFloat_FromDouble(fan_sim_device_us(fan_machine_self(o)->m)))
GETTER(abandoned, PyBool_FromLong(fan_sim_abandoned(fan_machine_self(o)->m)))
GETTER(steps, PyLong_FromSize_t(fan_sim_steps(fan_machine_self(o)->m)))
GETTER(host_schedule, fan_text_filled(fill_host_schedule, fan_machine_self(o)->m))

static PyObject *machine_get_streams(PyObject *o, void *Py_UNUSED(closure))
{
    fan_stream **all = NULL;
    size_t n = 0;
    fan_error err = {0};
    fan_status status = fan_sim_listed(fan_machine_self(o)->m, &all, &n, &err);
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

static void seen_calls(PyObject *o, PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(nargs),
                       PyObject *Py_UNUSED(kwnames))
{
    fan_sim_read_all(fan_machine_self(o)->m);
}

FAN_TURN_TUPLE(machine_stream, fan_seen_nothing)
FAN_TURN_TUPLE(machine_event, fan_seen_nothing)
FAN_TURN_TUPLE(machine_array, fan_seen_nothing)
FAN_TURN_TUPLE(machine_empty, fan_seen_nothing)
FAN_TURN_TUPLE(fan_machine_launch, fan_seen_nothing)
FAN_TURN_NONE(machine_synchronize, fan_seen_nothing)
FAN_TURN_NONE(machine_step, fan_seen_nothing)
FAN_TURN_TUPLE(fan_machine_begin_capture, fan_seen_nothing)
FAN_TURN_ONE(fan_machine_end_capture, fan_seen_nothing)
FAN_TURN_TUPLE(fan_machine_launch_graph, fan_seen_nothing)
static PyObject *machine_enter(PyObject *o, PyObject *Py_UNUSED(none))
{
    fan_error err = {0};
    return fan_sim_done(fan_sim_enter(fan_machine_self(o)->m, &err), &err);
}

static PyObject *machine_leave(PyObject *o, PyObject *Py_UNUSED(none))
{
    fan_sim_leave(fan_machine_self(o)->m);
    Py_RETURN_NONE;
}

FAN_TURN_TUPLE(machine_leave_out, fan_seen_options) /* each plan hangs on it */
FAN_TURN_NONE(machine_spawn, fan_seen_nothing)
FAN_TURN_ONE(machine_saw_thread, fan_seen_nothing)
FAN_TURN_GET(machine_get_races, seen_calls)
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
    {"_launch", fan_machine_launch_turn, METH_VARARGS,
     "_launch($self, stream, fn, reads, writes, name, us, /)\n--\n\nQueue a kernel."},
    {"_synchronize", machine_synchronize_turn, METH_NOARGS, "_synchronize($self, /)\n--\n\nRun all that is queued."},
    {"_step", machine_step_turn, METH_NOARGS,
     "_step($self, /)\n--\n\nRun one thing that is queued; False where nothing can run."},
    {"_pending", machine_pending, METH_NOARGS, "_pending($self, /)\n--\n\nRaise a race that no call has raised yet."},
    {"_forget", machine_forget, METH_NOARGS, "_forget($self, /)\n--\n\nWhat is queued of the user's will do nothing."},
    {"_check", machine_check, METH_O, "_check($self, on, /)\n--\n\nSwitch the checker on or off."},
    {"_begin_capture", fan_machine_begin_capture_turn, METH_VARARGS,
     "_begin_capture($self, stream, mode, /)\n--\n\nCapture what is queued on a stream."},
    {"_end_capture", fan_machine_end_capture_turn, METH_O,
     "_end_capture($self, stream, /)\n--\n\nThe graph of what was captured."},
    {"_launch_graph", fan_machine_launch_graph_turn, METH_VARARGS,
     "_launch_graph($self, graph, stream, /)\n--\n\nQueue a graph."},
    {"_leave_out", machine_leave_out_turn, METH_VARARGS,
     "_leave_out($self, /, *words)\n--\n\nLeave out these of the plans, and no others."},
    {"_spawn", machine_spawn_turn, METH_NOARGS, "_spawn($self, /)\n--\n\nRegister a host thread; its number."},
    {"_thread_apart", machine_thread_apart, METH_O,
     "_thread_apart($self, number, /)\n--\n\nThreads of other numbers share no host memory and no graph with it."},
    {"_thread_begin", machine_thread_begin, METH_O,
     "_thread_begin($self, actor, /)\n--\n\nFirst on the new thread; False: return at once."},
    {"_thread_end", machine_thread_end, METH_O, "_thread_end($self, actor, /)\n--\n\nLast on the thread."},
    {"_saw_thread", machine_saw_thread_turn, METH_O,
     "_saw_thread($self, actor, /)\n--\n\n"
     "The calling thread reads how another one ended."},
    {"_after_thread", machine_after_thread, METH_O,
     "_after_thread($self, actor, /)\n--\n\nA thread that has ended comes before what this one does next."},
    {"_limit", machine_limit, METH_O,
     "_limit($self, steps, /)\n--\n\nHost threads that act more often come to no end."},
    {"_break", machine_break, METH_O,
     "_break($self, text, /)\n--\n\n"
     "The thread that acts does not return: its number, or -1."},
    {"_join", machine_join, METH_NOARGS, "_join($self, /)\n--\n\nRun the host threads to their end."},
    {"_stuck", machine_stuck, METH_O, "_stuck($self, actor, /)\n--\n\nAfter a deadlock: its thread will never end."},
    {"_enter", machine_enter, METH_NOARGS, "_enter($self, /)\n--\n\n\"sim:0\" names its first device on this thread."},
    {"_leave", machine_leave, METH_NOARGS, "_leave($self, /)\n--\n\nTake back the innermost _enter."},
    {"_follow", machine_follow, METH_O, "_follow($self, search, /)\n--\n\nA search chooses among the host threads."},
    {"_give_up", machine_give_up, METH_NOARGS,
     "_give_up($self, /)\n--\n\n"
     "End the host threads."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef getset[] = {
    {"devices", machine_get_devices, NULL, "How many devices it has.", NULL},
    {"seed", machine_get_seed, NULL, "The seed that picks what runs next.", NULL},
    {"races", machine_get_races_turn, NULL, "How many races were found.", NULL},
    {"_steps", machine_get_steps, NULL, "How often one of the host threads was chosen.", NULL},
    {"host_us", machine_get_host_us_turn, NULL, "The clock of the host, in microseconds.", NULL},
    {"device_us", machine_get_device_us_turn, NULL, "When the last work queued ends, in microseconds.", NULL},
    {"abandoned", machine_get_abandoned, NULL, "True after _give_up().", NULL},
    {"host_schedule", machine_get_host_schedule_turn, NULL,
     "Which host thread acted, step by step: one character each.", NULL},
    {"streams", machine_get_streams_turn, NULL, "The streams of the machine that are referenced.", NULL},
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
