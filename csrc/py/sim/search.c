/* search: the search of explore, in a capsule. */
#include "py/sim/machine_object.h"

#include "base/mem.h"

#include <string.h>

fan_explore *fan_search_of(PyObject *capsule) { return PyCapsule_GetPointer(capsule, "fanin.explore"); }

/* fan_text_filled: a string of unknown length from a function that truncates. */
PyObject *fan_text_filled(void (*fill)(const void *from, char *buf, size_t size), const void *from)
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

static void fill_explore_schedule(const void *from, char *buf, size_t size) { fan_explore_schedule(from, buf, size); }

/* The search of explore, in a capsule */

static void free_search(PyObject *capsule) { fan_explore_free(fan_search_of(capsule)); }

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
    fan_explore *x = fan_search_of(capsule);
    return x ? PyBool_FromLong(fan_explore_begin(x)) : NULL;
}

static PyObject *explore_end(PyObject *Py_UNUSED(module), PyObject *capsule)
{
    fan_explore *x = fan_search_of(capsule);
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
    if (!PyArg_ParseTuple(args, "Os:explore_replay", &capsule, &schedule) || !(x = fan_search_of(capsule)))
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
    if (!PyArg_ParseTuple(args, "OK:explore_sample", &capsule, &seed) || !(x = fan_search_of(capsule)))
        return NULL;
    fan_explore_sample(x, seed);
    Py_RETURN_NONE;
}

static PyObject *explore_state(PyObject *Py_UNUSED(module), PyObject *capsule)
{
    fan_explore *x = fan_search_of(capsule);
    PyObject *schedule = x ? fan_text_filled(fill_explore_schedule, x) : NULL;
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
