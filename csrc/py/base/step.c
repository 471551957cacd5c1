/* step: a call as a step of an explored schedule: opens it, and records what it may access. */
#include "py/base/args.h"
#include "py/base/handles.h"

int fan_sched_enter_or_raise(void)
{
    if (fan_sched_enter()) {
        fan_sched_access(FAN_THING_OPTIONS, 0, FAN_SCHED_READ); /* any call may depend on them */
        return 0;
    }
    PyObject *sim = PyImport_ImportModule("fanin.sim.machine");
    PyObject *type = sim ? PyObject_GetAttrString(sim, "Abandoned") : NULL;
    if (type)
        PyErr_SetString(type, "the machine ends this run");
    Py_XDECREF(type);
    Py_XDECREF(sim);
    return -1;
}

static size_t small_index(PyObject *o)
{
    Py_ssize_t i = fan_small_index(o);
    return i < 0 ? SIZE_MAX : (size_t)i;
}

/* buffer_accessed: the slots that a call with this argument writes; NULL: all slots, and it reads
 * what is counted. */
static void buffer_accessed(const fan_buffer *b, PyObject *slots)
{
    bool several = slots && (PyList_CheckExact(slots) || PyTuple_CheckExact(slots));
    if (several) {
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(slots); i++)
            fan_buffer_seen(b, small_index(PySequence_Fast_GET_ITEM(slots, i)), FAN_SCHED_WRITE);
        return;
    }
    fan_buffer_seen(b, slots ? small_index(slots) : SIZE_MAX, FAN_SCHED_WRITE);
    if (!slots) {
        fan_buffer_seen_counters(b);
        fan_buffer_seen_parked(b);
    }
}

/* of_graph: nodes, leaves, walks, and what belongs to a graph tree. */
static bool of_graph(const fan_state *state, PyTypeObject *type)
{
    const PyTypeObject *const types[] = {state->walk_type, state->graph_tree_type,
                                         state->graph_step_type, state->graph_function_type};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (type == types[i])
            return true;
    return PyType_IsSubtype(type, state->node_type);
}

static void array_accessed(const fan_array_object *array)
{
    const fan_backend *backend = array->d->backend;
    if (backend->array_accessed)
        backend->array_accessed(array->d, array->a);
}

static void event_accessed(const fan_event *e)
{
    const fan_backend *backend = e->device->backend;
    if (backend->event_accessed)
        backend->event_accessed(e);
}

/* accessed: a call writes `o`, its self or an argument, if it is ours. Streams and machines record
 * their own steps, and a leaf's gradient has a lock. */
static void accessed(PyObject *o, PyObject *slots)
{
    const fan_state *state = fan_state_get();
    PyTypeObject *type = Py_TYPE(o);
    if (type == state->buffer_type)
        buffer_accessed(fan_buffer_of(o), slots);
    else if (type == state->array_type)
        array_accessed(fan_array_self(o));
    else if (type == state->event_type)
        event_accessed(fan_event_of(o));
    else if (of_graph(state, type))
        fan_sched_access(FAN_THING_GRAPH, 0, FAN_SCHED_WRITE);
}

/* step_begin: opens the step and records what the call may access; -1 with an exception. */
static int step_begin(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    Py_ssize_t n = nargs + (kwnames ? PyTuple_GET_SIZE(kwnames) : 0);
    PyObject *slots = nargs > 0 ? args[0] : NULL;
    bool writes = false;                                   /* memory of the caller's */
    PyTypeObject *machine = fan_state_get()->machine_type; /* NULL: a core without fanin.sim */
    if (fan_sched_enter_or_raise() < 0)
        return -1;
    fan_sched_access(FAN_THING_COUNTERS, 0, FAN_SCHED_COUNT);
    if (machine && PyObject_TypeCheck(self, machine))
        return 0;
    for (Py_ssize_t i = nargs; i < n; i++) {
        PyObject *name = PyTuple_GET_ITEM(kwnames, i - nargs);
        bool of_slots = PyUnicode_CompareWithASCIIString(name, "slot") == 0 ||
                        PyUnicode_CompareWithASCIIString(name, "slots") == 0;
        if (of_slots && args[i] != Py_None)
            slots = args[i];
        writes |= PyUnicode_CompareWithASCIIString(name, "out") == 0;
    }
    fan_sched_access(FAN_THING_HOST_MEMORY, 0, writes ? FAN_SCHED_WRITE : FAN_SCHED_READ);
    accessed(self, slots);
    for (Py_ssize_t i = 0; i < n; i++)
        accessed(args[i], NULL);
    return 0;
}

/* STEP: a call of one of CPython's signatures; `opened`: 0, or -1 with an exception. */
#define STEP(type, failed, name, declared, opened, call) \
    type name declared                                   \
    {                                                    \
        if ((opened) < 0)                                \
            return failed;                               \
        type result = call;                              \
        fan_sched_leave();                               \
        return result;                                   \
    }

/* type_begin: of a call of a class, which may make a node. */
static int type_begin(PyObject *type, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    if (step_begin(type, args, nargs, kwnames) < 0)
        return -1;
    if (type != (PyObject *)fan_state_get()->buffer_type)
        fan_sched_access(FAN_THING_GRAPH, 0, FAN_SCHED_WRITE);
    return 0;
}

STEP(PyObject *, NULL, fan_step_fast,
     (fan_fastcall call, PyObject *self, PyObject *const *args, Py_ssize_t nargs,
      PyObject *kwnames),
     step_begin(self, args, nargs, kwnames), call(self, args, nargs, kwnames))
STEP(PyObject *, NULL, fan_step_vector,
     (vectorcallfunc call, PyObject *type, PyObject *const *args, size_t nargsf, PyObject *kwnames),
     type_begin(type, args, PyVectorcall_NARGS(nargsf), kwnames), call(type, args, nargsf, kwnames))
STEP(PyObject *, NULL, fan_step_one, (PyCFunction call, PyObject *self, PyObject *arg),
     step_begin(self, &arg, arg != NULL, NULL), call(self, arg))
STEP(PyObject *, NULL, fan_step_repr, (reprfunc call, PyObject *self),
     step_begin(self, NULL, 0, NULL), call(self))
STEP(PyObject *, NULL, fan_step_get, (getter call, PyObject *self, void *closure),
     step_begin(self, NULL, 0, NULL), call(self, closure))
STEP(int, -1, fan_step_set, (setter call, PyObject *self, PyObject *value, void *closure),
     step_begin(self, &value, value != NULL, NULL), call(self, value, closure))
