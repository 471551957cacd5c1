/* step: a call as a step of an explored schedule: opens it, and records what it may access.
 *
 * In order: the end of a run that is abandoned; what a call accesses, by the types of its
 * arguments; the beginning of a step. */
#include "py/base/args.h"
#include "py/base/handles.h"

int fan_sched_enter_or_raise(void)
{
    if (fan_sched_enter()) {
        fan_sched_access(FAN_THING_OPTIONS, 0, FAN_SCHED_READ); /* any call may depend on them */
        return 0;
    }
    PyObject *type = fan_imported("fanin.sim.machine", "Abandoned");
    if (type)
        PyErr_SetString(type, "the machine ends this run");
    Py_XDECREF(type);
    return -1;
}

/* slot_accessed: of no small index, all slots. */
static void slot_accessed(const fan_buffer *b, PyObject *slot)
{
    Py_ssize_t index = fan_small_index(slot);
    if (index < 0)
        index = -1;
    fan_buffer_seen(b, (size_t)index, FAN_SCHED_WRITE);
}

/* buffer_accessed: the slots that a call with this argument writes; NULL: all slots, and it reads
 * what is counted. */
static void buffer_accessed(const fan_buffer *b, PyObject *slots)
{
    bool several = slots && (PyList_CheckExact(slots) || PyTuple_CheckExact(slots));
    if (several) {
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(slots); i++)
            slot_accessed(b, PySequence_Fast_GET_ITEM(slots, i));
    } else if (slots) {
        slot_accessed(b, slots);
    } else {
        fan_buffer_seen(b, SIZE_MAX, FAN_SCHED_WRITE);
        fan_buffer_seen_counters(b);
        fan_buffer_seen_parked(b);
    }
}

/* of_graph: nodes, leaves, walks, and what belongs to a graph tree. */
static bool of_graph(const fan_state *state, PyTypeObject *type)
{
    const PyTypeObject *const types[] = {state->walk_type, state->graph_tree_type,
                                         state->graph_step_type, state->graph_function_type};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        if (type == types[i])
            return true;
    }
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

int fan_step_begin(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    Py_ssize_t n = nargs;
    PyObject *slots = NULL;
    fan_sched_mode memory = FAN_SCHED_READ;                /* of the caller's */
    PyTypeObject *machine = fan_state_get()->machine_type; /* NULL: a core without fanin.sim */
    if (fan_sched_enter_or_raise() < 0)
        return -1;
    fan_sched_access(FAN_THING_COUNTERS, 0, FAN_SCHED_COUNT);
    if (machine && PyObject_TypeCheck(self, machine))
        return 0;
    if (kwnames)
        n += PyTuple_GET_SIZE(kwnames);
    if (nargs > 0)
        slots = args[0];
    for (Py_ssize_t i = nargs; i < n; i++) {
        PyObject *name = PyTuple_GET_ITEM(kwnames, i - nargs);
        bool of_slots = PyUnicode_CompareWithASCIIString(name, "slot") == 0 ||
                        PyUnicode_CompareWithASCIIString(name, "slots") == 0;
        if (of_slots && args[i] != Py_None)
            slots = args[i];
        if (PyUnicode_CompareWithASCIIString(name, "out") == 0)
            memory = FAN_SCHED_WRITE;
    }
    fan_sched_access(FAN_THING_HOST_MEMORY, 0, memory);
    accessed(self, slots);
    for (Py_ssize_t i = 0; i < n; i++)
        accessed(args[i], NULL);
    return 0;
}

int fan_step_begin_one(PyObject *self, PyObject *arg)
{
    return fan_step_begin(self, &arg, arg != NULL, NULL);
}

int fan_step_begin_type(PyObject *type, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    if (fan_step_begin(type, args, nargs, kwnames) < 0)
        return -1;
    if (type != (PyObject *)fan_state_get()->buffer_type)
        fan_sched_access(FAN_THING_GRAPH, 0, FAN_SCHED_WRITE);
    return 0;
}
