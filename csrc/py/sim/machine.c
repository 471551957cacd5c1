/* machine: the simulated machine as Python has it. fanin/sim builds on `_core.Machine`: spawn,
 * join, the context manager.
 *
 * Title: Cycles. A kernel that waits holds its function, and that may hold the machine, or a graph
 * of its. To the collector the machine holds the functions of all its kernels, and a graph, whose
 * kernels are among them, its machine. Arrays and streams hold neither: where the machine is
 * collected although one of them could still have run what is queued, that raises when it is run.
 *
 * In order: hooks; the choice among the host threads; new and dealloc; streams, events, memory and
 * work; host threads; what can be read; graphs; the type; the search. */
#include "base/mem.h"
#include "py/base/args.h"
#include "py/arrays/arrays.h"
#include "py/sim/machine_object.h"

#include <string.h>

static fan_sim *sim_of(PyObject *o)
{
    return fan_machine_self(o)->m;
}

static void hook_site(void *Py_UNUSED(ctx), char *buf, size_t size)
{
    fan_gil gil;
    buf[0] = '\0';
    if (!fan_gil_enter(&gil))
        return;
    /* A finalizer may yield. A collection here, between the caller's check and its wait, would let
     * another thread make the change that the caller then waits for. */
    int collects = PyGC_Disable();
    fan_call_site(buf, size);
    if (collects)
        PyGC_Enable();
    fan_gil_leave(&gil);
}

static void *before_block(void *Py_UNUSED(ctx))
{
    return fan_allow_threads_begin();
}

static void after_block(void *Py_UNUSED(ctx), void *left)
{
    fan_allow_threads_end(left);
}

/* An event that was never recorded is warned of where the user waits for it (stream.c): `warn` is
 * left out. */
static const fan_sim_hooks hooks = {
    .call_site = hook_site,
    .before_block = before_block,
    .after_block = after_block,
};

/* ---- the choice among the host threads ---- */

static fan_explore *search_of(PyObject *capsule)
{
    return PyCapsule_GetPointer(capsule, "fanin.explore");
}

/* text_filled: a string of unknown length from a function that truncates. */
static PyObject *text_filled(void (*fill)(const void *from, char *buf, size_t size),
                             const void *from)
{
    size_t size = 256;
    char *buf = NULL;
    do {
        fan_free(buf);
        size *= 4;
        buf = fan_alloc(size);
        if (!buf)
            return PyErr_NoMemory();
        buf[0] = '\0';
        fill(from, buf, size);
    } while (strlen(buf) == size - 1);
    PyObject *made = PyUnicode_FromString(buf);
    fan_free(buf);
    return made;
}

static int choose(void *ctx, uint32_t enabled)
{
    chooser *c = ctx;
    if (c->mode != FOLLOW)
        return -1;
    return fan_explore_choose(c->x, enabled);
}

static int pick(void *ctx, int n)
{
    chooser *c = ctx;
    if (c->mode != FOLLOW)
        return 0;
    return fan_explore_pick(c->x, n);
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
    if (c.mode == BY_SEED) {
        fan_sim_set_chooser(self->m, NULL);
    } else {
        fan_sim_set_chooser(self->m, &(fan_sim_chooser){
                                         .choose = choose,
                                         .access = touched,
                                         .pick = pick,
                                         .ctx = &self->chooser,
                                     });
    }
    Py_XDECREF(search);
}

/* ---- making and unmaking ---- */

static PyObject *machine_new(PyTypeObject *type, PyObject *const *a)
{
    fan_sim_config config = {.run_work = true};
    int64_t devices = 0;
    int64_t schedule = 0;
    int64_t memory = 0;
    if (fan_number_arg(a[0], "devices", &devices) < 0)
        return NULL;
    if (fan_number_arg(a[2], "schedule", &schedule) < 0)
        return NULL;
    if (fan_number_arg(a[4], "memory", &memory) < 0)
        return NULL;
    config.devices = (int)devices;
    config.seed = PyLong_AsUnsignedLongLongMask(a[1]);
    config.schedule = (fan_sim_schedule)schedule;
    config.starve = PyLong_AsUnsignedLongLongMask(a[3]);
    config.memory = (size_t)memory;
    config.launch_us = PyFloat_AsDouble(a[5]);
    config.gbytes_per_s = PyFloat_AsDouble(a[6]);
    if (PyErr_Occurred())
        return NULL;
    PyObject *made = type->tp_alloc(type, 0);
    if (!made)
        return NULL;
    machine_object *self = fan_machine_self(made);
    self->devices = config.devices;
    if (FAN_CHECK(fan_sim_new(&config, &hooks, &self->m, &err)) < 0) {
        self->m = NULL;
        Py_CLEAR(made);
    }
    return made;
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

/* By the collector before anything of a cycle is taken apart, with a reference of its own: no
 * function runs that has been. Else on the way to dealloc. */
static void machine_finalize(PyObject *o)
{
    if (Py_REFCNT(o) > 1)
        forget(fan_machine_self(o), true);
}

/* device_arg: the number of a device of the machine; -1 with an exception. */
static int device_arg(machine_object *self, PyObject *o)
{
    int64_t index = 0;
    if (fan_number_arg(o, "device", &index) < 0)
        return -1;
    if (index >= 0 && index < self->devices)
        return (int)index;
    return fan_refuse(PyExc_ValueError,
                      "device %lld: this machine has %d device%s, numbered from 0",
                      (long long)index, self->devices, FAN_PLURAL(self->devices));
}

/* ---- streams, events, memory, work ---- */

static int name_stream(fan_sim *m, const fan_stream *s, PyObject *name)
{
    PyObject *text = PyUnicode_AsEncodedString(name, "utf-8", "replace");
    if (!text)
        return -1;
    int bad = FAN_CHECK(fan_sim_name_stream(m, s, PyBytes_AS_STRING(text), &err));
    Py_DECREF(text);
    return bad;
}

static PyObject *machine_stream(PyObject *o, PyObject *const *given)
{
    machine_object *self = fan_machine_self(o);
    int device = device_arg(self, given[0]);
    fan_stream *s = NULL;
    if (device < 0)
        return NULL;
    if (FAN_CHECK(fan_sim_stream(self->m, device, given[1] == Py_True, &s, &err)) < 0)
        return NULL;
    if (given[2] != Py_None && name_stream(self->m, s, given[2]) < 0) {
        fan_stream_drop(s);
        return NULL;
    }
    fan_sim_list(self->m, s);
    return fan_stream_give(s);
}

static PyObject *machine_event(PyObject *o, PyObject *which)
{
    int device = device_arg(fan_machine_self(o), which);
    fan_event *e = NULL;
    if (device < 0)
        return NULL;
    fan_device *d = fan_sim_device(sim_of(o), device);
    if (FAN_CHECK(fan_event_new(d, &e, &err)) < 0)
        return NULL;
    PyObject *made = fan_event_wrap(e);
    fan_event_drop(e);
    return made;
}

static PyObject *wrap_new(machine_object *self, int device, fan_status status, fan_array *a,
                          const fan_error *err)
{
    if (status != FAN_OK)
        return fan_raise(status, err);
    PyObject *made = fan_array_wrap(a, fan_sim_device(self->m, device));
    fan_array_drop(a);
    return made;
}

static PyObject *machine_array(PyObject *o, PyObject *const *given)
{
    machine_object *self = fan_machine_self(o);
    PyArrayObject *from = (PyArrayObject *)given[0];
    int device = device_arg(self, given[1]);
    fan_array *init;
    fan_array *a = NULL;
    fan_error err = {0};
    if (device < 0)
        return NULL;
    fan_dtype dtype = fan_dtype_of_descr(PyArray_DESCR(from));
    if (dtype == FAN_DT_NONE) {
        return PyErr_Format(
            fan_state_get()->dtype_error,
            "Machine.array: the array has dtype %S, which no device sums; expected bool, int8..64, "
            "uint8..64, float or complex in native byte order: x.astype(..)",
            PyArray_DESCR(from));
    }
    if (PyArray_NDIM(from) > FAN_MAX_NDIM) {
        return PyErr_Format(PyExc_ValueError, "Machine.array: at most %d dimensions are supported",
                            FAN_MAX_NDIM);
    }
    if (fan_view_ndarray(from, dtype, false, &init) < 0)
        return NULL;
    fan_status status =
        fan_sim_array(self->m, device, dtype, init->ndim, init->shape, init, &a, &err);
    fan_array_drop(init);
    return wrap_new(self, device, status, a, &err);
}

static PyObject *machine_empty(PyObject *o, PyObject *const *given)
{
    machine_object *self = fan_machine_self(o);
    int device = device_arg(self, given[2]);
    int64_t shape[FAN_MAX_NDIM];
    fan_dtype dtype;
    fan_array *a = NULL;
    fan_error err = {0};
    if (device < 0)
        return NULL;
    if (fan_dtype_parse(given[1], &dtype) < 0)
        return NULL;
    int ndim = fan_shape_tuple(given[0], shape);
    if (ndim < 0)
        return NULL;
    if (dtype == FAN_DT_NONE)
        dtype = FAN_DT_FLOAT64;
    fan_status status = fan_sim_array(self->m, device, dtype, ndim, shape, NULL, &a, &err);
    return wrap_new(self, device, status, a, &err);
}

static PyObject *machine_synchronize(PyObject *o, PyObject *Py_UNUSED(none))
{
    return FAN_DONE_UNLOCKED(fan_sim_synchronize(sim_of(o), &err));
}

static PyObject *machine_step(PyObject *o, PyObject *Py_UNUSED(none))
{
    bool ran = false;
    if (FAN_CHECK_UNLOCKED(fan_sim_step(sim_of(o), &ran, &err)) < 0)
        return NULL;
    return PyBool_FromLong(ran);
}

static PyObject *machine_pending(PyObject *o, PyObject *Py_UNUSED(none))
{
    return FAN_DONE(fan_sim_pending(sim_of(o), &err));
}

static PyObject *machine_forget(PyObject *o, PyObject *Py_UNUSED(none))
{
    forget(fan_machine_self(o), false);
    Py_RETURN_NONE;
}

static PyObject *machine_check(PyObject *o, PyObject *on)
{
    fan_sim_check(sim_of(o), on == Py_True);
    Py_RETURN_NONE;
}

static PyObject *machine_leave_out(PyObject *o, PyObject *words)
{
    uint64_t bits;
    if (fan_plans_arg(words, &bits) < 0)
        return NULL;
    fan_sched_access(FAN_THING_OPTIONS, 0, FAN_SCHED_WRITE); /* each plan reads them */
    fan_sim_leave_out(sim_of(o), bits);
    Py_RETURN_NONE;
}

/* ---- host threads ---- */

/* ACTOR: a method of the number of a host thread. */
#define ACTOR(name, value)                                      \
    static PyObject *machine_##name(PyObject *o, PyObject *arg) \
    {                                                           \
        int actor = (int)PyLong_AsLong(arg);                    \
        if (PyErr_Occurred())                                   \
            return NULL;                                        \
        return value;                                           \
    }

static bool thread_begin(fan_sim *m, int actor)
{
    bool begins;
    Py_BEGIN_ALLOW_THREADS
        begins = fan_sim_thread_begin(m, actor);
    Py_END_ALLOW_THREADS
    return begins;
}

static void thread_end(fan_sim *m, int actor)
{
    Py_BEGIN_ALLOW_THREADS
        fan_sim_thread_end(m, actor);
    Py_END_ALLOW_THREADS
}

ACTOR(thread_begin, PyBool_FromLong(thread_begin(sim_of(o), actor)))
ACTOR(thread_apart, ((void)o, fan_sim_thread_apart(actor), Py_NewRef(Py_None)))
ACTOR(thread_end, (thread_end(sim_of(o), actor), Py_NewRef(Py_None)))
ACTOR(stuck, PyBool_FromLong(fan_sim_stuck(sim_of(o), actor)))
ACTOR(saw_thread, (fan_sim_read_thread(sim_of(o), actor), Py_NewRef(Py_None)))
ACTOR(after_thread, FAN_DONE(fan_sim_after_thread(sim_of(o), actor, &err)))

static PyObject *machine_spawn(PyObject *o, PyObject *Py_UNUSED(none))
{
    int actor = -1;
    if (FAN_CHECK(fan_sim_spawn(sim_of(o), &actor, &err)) < 0)
        return NULL;
    return PyLong_FromLong(actor);
}

static PyObject *machine_join(PyObject *o, PyObject *Py_UNUSED(none))
{
    return FAN_DONE_UNLOCKED(fan_sim_join(sim_of(o), &err));
}

static PyObject *machine_limit(PyObject *o, PyObject *arg)
{
    size_t steps = PyLong_AsSize_t(arg);
    if (PyErr_Occurred())
        return NULL;
    fan_sim_limit(sim_of(o), steps);
    Py_RETURN_NONE;
}

static PyObject *machine_break(PyObject *o, PyObject *text)
{
    const char *words = PyUnicode_AsUTF8(text);
    if (!words)
        return NULL;
    return PyLong_FromLong(fan_sim_break(sim_of(o), words));
}

static PyObject *machine_follow(PyObject *o, PyObject *capsule)
{
    fan_explore *x = search_of(capsule);
    if (!x)
        return NULL;
    machine_set_chooser(fan_machine_self(o), (chooser){
                                                 .mode = FOLLOW,
                                                 .x = x,
                                                 .search = Py_NewRef(capsule),
                                             });
    Py_RETURN_NONE;
}

static PyObject *machine_give_up(PyObject *o, PyObject *Py_UNUSED(none))
{
    machine_set_chooser(fan_machine_self(o), (chooser){.mode = GIVE_UP});
    Py_RETURN_NONE;
}

/* ---- what can be read ---- */

#define GETTER(name, value)                                                    \
    static PyObject *machine_get_##name(PyObject *o, void *Py_UNUSED(closure)) \
    {                                                                          \
        return value;                                                          \
    }
/* Of what the calls of other threads change. */
#define GETTER_OF_CALLS(name, value)                                           \
    static PyObject *machine_get_##name(PyObject *o, void *Py_UNUSED(closure)) \
    {                                                                          \
        fan_sim_read_all(sim_of(o));                                           \
        return value;                                                          \
    }

static void fill_host_schedule(const void *from, char *buf, size_t size)
{
    fan_sim_host_schedule(from, buf, size);
}

GETTER(devices, PyLong_FromLong(fan_machine_self(o)->devices))
GETTER(seed, PyLong_FromUnsignedLongLong(fan_sim_seed(sim_of(o))))
GETTER_OF_CALLS(races, PyLong_FromUnsignedLongLong(fan_sim_races(sim_of(o))))
GETTER_OF_CALLS(host_us, PyFloat_FromDouble(fan_sim_host_us(sim_of(o))))
GETTER_OF_CALLS(device_us, PyFloat_FromDouble(fan_sim_device_us(sim_of(o))))
GETTER(abandoned, PyBool_FromLong(fan_sim_abandoned(sim_of(o))))
GETTER(steps, PyLong_FromSize_t(fan_sim_steps(sim_of(o))))
GETTER_OF_CALLS(host_schedule, text_filled(fill_host_schedule, sim_of(o)))

static PyObject *machine_get_streams(PyObject *o, void *Py_UNUSED(closure))
{
    fan_sim_read_all(sim_of(o));
    fan_stream **all = NULL;
    size_t n = 0;
    if (FAN_CHECK(fan_sim_listed(sim_of(o), &all, &n, &err)) < 0)
        return NULL;
    PyObject *made = PyList_New(0);
    for (size_t i = 0; made && i < n; i++)
        fan_list_add(&made, fan_stream_wrap(all[i]));
    while (n > 0)
        fan_stream_drop(all[--n]);
    fan_free(all);
    return fan_tuple_of(made);
}

static PyObject *machine_enter(PyObject *o, PyObject *Py_UNUSED(none))
{
    return FAN_DONE(fan_sim_enter(sim_of(o), &err));
}

static PyObject *machine_leave(PyObject *o, PyObject *Py_UNUSED(none))
{
    fan_sim_leave(sim_of(o));
    Py_RETURN_NONE;
}

static PyObject *machine_launch(PyObject *o, PyObject *const *a)
{
    return fan_machine_launch(o, a);
}

/* ---- graphs ---- */

/* A graph is a capsule, with a hold; sim.machine.Graph has it and holds the machine. */
#define GRAPH "fanin.graph"

static void graph_drop(PyObject *capsule)
{
    fan_sim_graph *g = PyCapsule_GetPointer(capsule, GRAPH);
    Py_BEGIN_ALLOW_THREADS
        fan_sim_graph_drop(g);
    Py_END_ALLOW_THREADS
}

/* stream_here: a stream of this machine; a hold, or NULL with an exception. */
static fan_stream *stream_here(machine_object *self, PyObject *o, const char *call)
{
    fan_stream *s = NULL;
    if (fan_stream_arg(o, &s) < 0)
        return NULL;
    if (s && fan_sim_of(s->device) == self->m)
        return s;
    fan_machine_refuse_stream(call, o, s);
    fan_stream_drop(s);
    return NULL;
}

static PyObject *machine_begin_capture(PyObject *o, PyObject *const *a)
{
    int64_t mode = 0;
    fan_error err = {0};
    if (fan_number_arg(a[1], "mode", &mode) < 0)
        return NULL;
    fan_stream *s = stream_here(fan_machine_self(o), a[0], "begin_capture");
    if (!s)
        return NULL;
    fan_status status = fan_sim_capture_begin(sim_of(o), s, (int)mode, &err);
    fan_stream_drop(s);
    return fan_done(status, &err);
}

static PyObject *machine_end_capture(PyObject *o, PyObject *where)
{
    fan_sim_graph *g = NULL;
    fan_stream *s = stream_here(fan_machine_self(o), where, "end_capture");
    if (!s)
        return NULL;
    int bad = FAN_CHECK(fan_sim_capture_end(sim_of(o), s, &g, &err));
    fan_stream_drop(s);
    if (bad)
        return NULL;
    PyObject *made = PyCapsule_New(g, GRAPH, graph_drop);
    if (!made)
        fan_sim_graph_drop(g);
    return made;
}

static PyObject *machine_launch_graph(PyObject *o, PyObject *const *a)
{
    fan_sim_graph *g = PyCapsule_GetPointer(a[0], GRAPH);
    if (!g)
        return NULL;
    fan_stream *s = stream_here(fan_machine_self(o), a[1], "launch_graph");
    if (!s)
        return NULL;
    int bad = FAN_CHECK_UNLOCKED(fan_sim_graph_launch(g, s, &err));
    fan_stream_drop(s);
    if (bad)
        return NULL;
    Py_RETURN_NONE;
}

#include "py/declared/Machine.h"

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)machine_doc},
    {Py_tp_new, machine_new_door},
    {Py_tp_dealloc, machine_dealloc},
    {Py_tp_traverse, machine_traverse},
    {Py_tp_clear, machine_clear},
    {Py_tp_finalize, machine_finalize},
    {Py_tp_methods, machine_methods},
    {Py_tp_getset, machine_getset},
    {0, NULL},
};

PyType_Spec fan_machine_spec = {
    .name = "fanin._core.Machine",
    .basicsize = sizeof(machine_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};

/* ---- the search of explore, in a capsule ---- */

static void fill_explore_schedule(const void *from, char *buf, size_t size)
{
    fan_explore_schedule(from, buf, size);
}

static void free_search(PyObject *capsule)
{
    fan_explore_free(search_of(capsule));
}

static PyObject *explore_new(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    unsigned long long limit = PyLong_AsUnsignedLongLong(a[1]);
    if (PyErr_Occurred())
        return NULL;
    fan_explore *x = fan_explore_new(a[0] == Py_True, limit);
    if (!x)
        return PyErr_NoMemory();
    fan_explore_prune(x);
    PyObject *capsule = PyCapsule_New(x, "fanin.explore", free_search);
    if (!capsule)
        fan_explore_free(x);
    return capsule;
}

static PyObject *explore_begin(PyObject *Py_UNUSED(module), PyObject *capsule)
{
    fan_explore *x = search_of(capsule);
    if (!x)
        return NULL;
    return PyBool_FromLong(fan_explore_begin(x));
}

static PyObject *explore_end(PyObject *Py_UNUSED(module), PyObject *capsule)
{
    fan_explore *x = search_of(capsule);
    if (!x)
        return NULL;
    fan_explore_end(x);
    return fan_done(fan_explore_status(x), NULL);
}

static PyObject *explore_replay(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    fan_explore *x = search_of(a[0]);
    if (!x)
        return NULL;
    const char *schedule = fan_text_arg(a[1]);
    if (!schedule)
        return NULL;
    fan_status status = fan_explore_replay(x, schedule);
    if (status == FAN_ERR_VALUE) {
        return PyErr_Format(PyExc_ValueError,
                            "replay: '%s' is no schedule: it has one character for each step, 0-9 "
                            "and a-v, and Y or N for each answer to a query",
                            schedule);
    }
    return fan_done(status, NULL);
}

static PyObject *explore_sample(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    fan_explore *x = search_of(a[0]);
    if (!x)
        return NULL;
    unsigned long long seed = PyLong_AsUnsignedLongLongMask(a[1]);
    if (PyErr_Occurred())
        return NULL;
    fan_explore_sample(x, seed);
    Py_RETURN_NONE;
}

static PyObject *explore_state(PyObject *Py_UNUSED(module), PyObject *capsule)
{
    fan_explore *x = search_of(capsule);
    if (!x)
        return NULL;
    PyObject *schedule = text_filled(fill_explore_schedule, x);
    if (!schedule)
        return NULL;
    PyObject *complete = PyBool_FromLong(fan_explore_complete(x));
    PyObject *strayed = PyBool_FromLong(fan_explore_strayed(x));
    return Py_BuildValue("{s:K,s:K,s:K,s:N,s:N,s:N}", "anew",
                         (unsigned long long)fan_explore_anew(x), "runs",
                         (unsigned long long)fan_explore_runs(x), "abandoned",
                         (unsigned long long)fan_explore_abandoned(x), "complete", complete,
                         "strayed", strayed, "schedule", schedule);
}

#include "py/declared/search.h"
