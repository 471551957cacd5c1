/* declared: the arguments of a call, and a call as a step of an explored schedule. */
#include "py/base/declared.h"

#include "device/sim/sim.h"
#include "py/base/args.h"
#include "py/base/handles.h"

/* ---- arguments ---- */

#define WORD_MAX 32 /* bytes of a parameter's name */

/* distance: how many letters must be changed, added or removed to make b of a; both are shorter than WORD_MAX. */
static size_t distance(const char *a, const char *b)
{
    size_t row[WORD_MAX + 1], n = strlen(b);
    for (size_t j = 0; j <= n; j++)
        row[j] = j;
    for (size_t i = 1; a[i - 1]; i++) {
        size_t left_above = row[0];
        row[0] = i;
        for (size_t j = 1; j <= n; j++) {
            size_t above = row[j], best = above < row[j - 1] ? above : row[j - 1];
            row[j] = a[i - 1] == b[j - 1] ? left_above : 1 + (left_above < best ? left_above : best);
            left_above = above;
        }
    }
    return row[n];
}

/* Arguments of other libraries, and ours of the same meaning. */
static const char *const elsewhere[][2] = {{"retain_graph", "keep_graph"}};

static int refuse_unknown(const fan_decl *d, PyObject *name)
{
    const char *text = PyUnicode_AsUTF8(name), *near = NULL;
    if (!text) {
        PyErr_Clear(); /* a lone surrogate: no name of ours is near */
        text = "";
    }
    size_t n = strlen(text), least = n < 4 ? 2 : 3; /* a name is near if fewer letters differ */
    for (size_t i = 0; n > 0 && n < WORD_MAX && i < d->n; i++) {
        size_t changes = distance(text, d->names[i]);
        if (changes < least) {
            least = changes;
            near = d->names[i];
        }
    }
    for (size_t i = 0; i < sizeof elsewhere / sizeof *elsewhere; i++)
        for (size_t j = 0; strcmp(text, elsewhere[i][0]) == 0 && j < d->n; j++)
            near = strcmp(d->names[j], elsewhere[i][1]) == 0 ? d->names[j] : near;
    if (near)
        PyErr_Format(PyExc_TypeError, "%s() has no argument '%U': did you mean '%s'?", d->call, name, near);
    else
        PyErr_Format(PyExc_TypeError, "%s() has no argument '%U'", d->call, name);
    return -1;
}

static int refuse_positional(const fan_decl *d, Py_ssize_t given)
{
    char names[256] = "";
    for (size_t i = 0; i < d->by_place; i++)
        fan_append(names, sizeof names, "%s%s", i == 0 ? "" : i + 1 == d->by_place ? " and " : ", ", d->names[i]);
    if (d->by_place == 0)
        PyErr_Format(PyExc_TypeError, "%s() takes %s, got %zd by position", d->call,
                     d->n ? "arguments by name only" : "no arguments", given);
    else
        PyErr_Format(PyExc_TypeError, "%s() takes %s by position%s; got %zd by position", d->call, names,
                     d->n > d->by_place ? ", and the rest by name" : "", given);
    return -1;
}

/* by_name: writes the value that the caller gave by this name. */
static int by_name(const fan_decl *d, PyObject *name, PyObject *value, PyObject **values)
{
    size_t i = 0;
    while (i < d->n && PyUnicode_CompareWithASCIIString(name, d->names[i]) != 0)
        i++;
    if (i == d->n)
        return refuse_unknown(d, name);
    if (i < d->by_place_only) {
        PyErr_Format(PyExc_TypeError, "%s() takes '%U' by position, not by name", d->call, name);
        return -1;
    }
    if (values[i]) {
        PyErr_Format(PyExc_TypeError, "%s() got '%U' twice: by position and by name", d->call, name);
        return -1;
    }
    values[i] = value;
    return 0;
}

/* X(letter, condition on o, what the message calls it) */
#define KIND_LIST(X)                                     \
    X('a', PyArray_Check(o), "an ndarray")               \
    X('b', PyByteArray_Check(o), "a bytearray")          \
    X('c', PyType_Check(o), "a type")                    \
    X('d', PyDict_Check(o), "a dict")                    \
    X('f', is_bool(o), "a bool")                         \
    X('F', o == Py_None || is_bool(o), "a bool or None") \
    X('l', PyList_Check(o), "a list")                    \
    X('s', PyUnicode_Check(o), "a str")                  \
    X('t', PyTuple_Check(o), "a tuple")

static bool is_bool(PyObject *o) { return PyBool_Check(o) || PyArray_IsScalar(o, Bool); }

static int check_kinds(const fan_decl *d, PyObject **values)
{
    for (size_t i = 0; i < d->n; i++) {
        PyObject *o = values[i];
        const char *expected = NULL;
#define X(letter, condition, text)                    \
    if (o && d->kinds[i] == (letter) && !(condition)) \
        expected = text;
        KIND_LIST(X)
#undef X
        if (expected) {
            PyErr_Format(PyExc_TypeError, "%s(): %s: expected %s, got %s", d->call, d->names[i], expected,
                         FAN_TYPE_TEXT(o));
            return -1;
        }
        if (o && PyArray_IsScalar(o, Bool) && (d->kinds[i] == 'f' || d->kinds[i] == 'F'))
            values[i] = PyObject_IsTrue(o) ? Py_True : Py_False;
    }
    return 0;
}

static int check_parsed(const fan_decl *d, PyObject **values)
{
    for (size_t i = 0; i < d->required; i++)
        if (!values[i]) {
            PyErr_Format(PyExc_TypeError, "%s() needs '%s'", d->call, d->names[i]);
            return -1;
        }
    return d->kinds ? check_kinds(d, values) : 0;
}

int fan_parse(const fan_decl *d, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames, PyObject **values)
{
    Py_ssize_t named = kwnames ? PyTuple_GET_SIZE(kwnames) : 0;
    if (nargs > d->by_place)
        return refuse_positional(d, nargs);
    for (Py_ssize_t i = 0; i < d->n; i++)
        values[i] = i < nargs ? args[i] : NULL;
    for (Py_ssize_t k = 0; k < named; k++)
        if (by_name(d, PyTuple_GET_ITEM(kwnames, k), args[nargs + k], values) < 0)
            return -1;
    return check_parsed(d, values);
}

int fan_parse_tuple(const fan_decl *d, PyObject *args, PyObject *named, PyObject **values)
{
    Py_ssize_t nargs = PyTuple_GET_SIZE(args), at = 0;
    PyObject *name, *value;
    if (nargs > d->by_place)
        return refuse_positional(d, nargs);
    for (Py_ssize_t i = 0; i < d->n; i++)
        values[i] = i < nargs ? PyTuple_GET_ITEM(args, i) : NULL;
    while (named && PyDict_Next(named, &at, &name, &value)) {
        if (!PyUnicode_Check(name)) {
            PyErr_Format(PyExc_TypeError, "%s(): expected keywords that are str, got %s", d->call, FAN_TYPE_TEXT(name));
            return -1;
        }
        if (by_name(d, name, value, values) < 0)
            return -1;
    }
    return check_parsed(d, values);
}

/* ---- steps ---- */

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

/* buffer_accessed: the slots that a call with this argument writes; NULL: all slots, and it reads what is counted. */
static void buffer_accessed(const fan_buffer *b, PyObject *slots)
{
    if (slots && (PyList_CheckExact(slots) || PyTuple_CheckExact(slots))) {
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

/* accessed: a call writes `o`, its self or an argument, if it is ours. Streams and machines record their own steps, and
 * a leaf's gradient has a lock. */
static void accessed(PyObject *o, PyObject *slots)
{
    const fan_state *st = fan_state_get();
    PyTypeObject *type = Py_TYPE(o);
    if (type == st->buffer_type)
        buffer_accessed(fan_buffer_of(o), slots);
    else if (type == st->array_type)
        fan_sim_access_memory(fan_array_self(o)->d, fan_array_self(o)->a, true);
    else if (type == st->event_type)
        fan_sim_read_event(fan_event_of(o));
    else if (type == st->edges_type || type == st->hook_type || type == st->walk_type ||
             type == st->graph_function_type || PyType_IsSubtype(type, st->node_type))
        fan_sched_access(FAN_THING_GRAPH, 0, FAN_SCHED_WRITE);
}

/* step_begin: opens the step and records what the call may access; -1 with an exception. */
static int step_begin(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    Py_ssize_t n = nargs + (kwnames ? PyTuple_GET_SIZE(kwnames) : 0);
    PyObject *slots = nargs > 0 ? args[0] : NULL;
    bool writes = false; /* memory of the caller's */
    if (fan_sched_enter_or_raise() < 0)
        return -1;
    for (Py_ssize_t i = nargs; i < n; i++) {
        PyObject *name = PyTuple_GET_ITEM(kwnames, i - nargs);
        if (PyUnicode_CompareWithASCIIString(name, "slot") == 0 || PyUnicode_CompareWithASCIIString(name, "slots") == 0)
            slots = args[i] == Py_None ? slots : args[i];
        writes |= PyUnicode_CompareWithASCIIString(name, "out") == 0;
    }
    fan_sched_access(FAN_THING_HOST_MEMORY, 0, writes ? FAN_SCHED_WRITE : FAN_SCHED_READ);
    fan_sched_access(FAN_THING_COUNTERS, 0, FAN_SCHED_COUNT);
    accessed(self, slots);
    for (Py_ssize_t i = 0; i < n; i++)
        accessed(args[i], NULL);
    return 0;
}

PyObject *fan_step_fast(fan_fastcall call, PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    if (step_begin(self, args, nargs, kwnames) < 0)
        return NULL;
    PyObject *result = call(self, args, nargs, kwnames);
    fan_sched_leave();
    return result;
}

PyObject *fan_step_vector(vectorcallfunc call, PyObject *type, PyObject *const *args, size_t nargsf, PyObject *kwnames)
{
    if (step_begin(type, args, PyVectorcall_NARGS(nargsf), kwnames) < 0)
        return NULL;
    if (type != (PyObject *)fan_state_get()->buffer_type)
        fan_sched_access(FAN_THING_GRAPH, 0, FAN_SCHED_WRITE);
    PyObject *result = call(type, args, nargsf, kwnames);
    fan_sched_leave();
    return result;
}

PyObject *fan_step_one(PyCFunction call, PyObject *self, PyObject *arg)
{
    if (step_begin(self, &arg, arg != NULL, NULL) < 0)
        return NULL;
    PyObject *result = call(self, arg);
    fan_sched_leave();
    return result;
}

PyObject *fan_step_repr(reprfunc call, PyObject *self)
{
    if (step_begin(self, NULL, 0, NULL) < 0)
        return NULL;
    PyObject *result = call(self);
    fan_sched_leave();
    return result;
}

PyObject *fan_step_get(getter call, PyObject *self, void *closure)
{
    if (step_begin(self, NULL, 0, NULL) < 0)
        return NULL;
    PyObject *result = call(self, closure);
    fan_sched_leave();
    return result;
}

int fan_step_set(setter call, PyObject *self, PyObject *value, void *closure)
{
    if (step_begin(self, &value, value != NULL, NULL) < 0)
        return -1;
    int result = call(self, value, closure);
    fan_sched_leave();
    return result;
}
