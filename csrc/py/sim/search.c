/* search: the search of explore, in a capsule. */
#include "py/base/args.h"
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

static PyObject *explore_new(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    unsigned long long limit = PyLong_AsUnsignedLongLong(a[1]);
    fan_explore *x;
    PyObject *capsule;
    if (PyErr_Occurred())
        return NULL;
    if (!(x = fan_explore_new(a[0] == Py_True, limit)))
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

static PyObject *explore_replay(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    fan_explore *x = fan_search_of(a[0]);
    const char *schedule = x ? fan_text_arg(a[1]) : NULL;
    fan_status status;
    if (!schedule)
        return NULL;
    status = fan_explore_replay(x, schedule);
    if (status == FAN_ERR_VALUE)
        return PyErr_Format(PyExc_ValueError,
                            "replay: '%s' is no schedule: it has one character for each step, 0-9 and a-v, and Y or N "
                            "for each answer to a query",
                            schedule);
    return status == FAN_OK ? Py_NewRef(Py_None) : fan_raise(status, NULL);
}

static PyObject *explore_sample(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    fan_explore *x = fan_search_of(a[0]);
    unsigned long long seed = x ? PyLong_AsUnsignedLongLongMask(a[1]) : 0;
    if (PyErr_Occurred())
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

#include "py/declared/search.h"
