/* worker: the context of a thread that runs nodes for another one (engine/workers.h): the interpreter, a copy of the
 * other's context variables (NumPy's errstate is one of them), the machines that it has entered, its traces. */
#include "py/engine_part.h"

#include "base/trace.h"

enum { CONTEXT, MACHINES, TRACES, PARTS };

/* rings_beside: a ring for one more thread, in each trace that records this one; None: no trace does. */
static PyObject *rings_beside(void)
{
    PyObject *module, *rings;
    if (atomic_load_explicit(&fan_traces, memory_order_relaxed) == 0 || !fan_trace_on())
        Py_RETURN_NONE;
    module = PyImport_ImportModule("fanin._trace.recording");
    rings = module ? PyObject_CallMethod(module, "beside", NULL) : NULL;
    Py_XDECREF(module);
    return rings;
}

/* machines_now: a copy of this thread's list; None: there is none (entered.c). */
static PyObject *machines_now(void)
{
    PyObject *mine = PyThreadState_GetDict(), *list = mine ? PyDict_GetItemString(mine, "fanin.machines") : NULL;
    return list ? PySequence_List(list) : Py_NewRef(Py_None);
}

fan_status fan_worker_new(void **worker, fan_error *err)
{
    PyObject *context = PyContext_CopyCurrent(), *machines = context ? machines_now() : NULL,
             *rings = machines ? rings_beside() : NULL;
    *worker = rings ? PyTuple_Pack(PARTS, context, machines, rings) : NULL;
    Py_XDECREF(context);
    Py_XDECREF(machines);
    Py_XDECREF(rings);
    return *worker ? FAN_OK : fan_from_python(err);
}

static void each_ring(PyObject *rings, const char *method)
{
    for (Py_ssize_t i = 0; rings != Py_None && i < PyList_GET_SIZE(rings); i++) {
        PyObject *none = PyObject_CallMethod(PyList_GET_ITEM(rings, i), method, NULL);
        if (!none)
            PyErr_Clear();
        Py_XDECREF(none);
    }
}

bool fan_worker_enter(void *worker)
{
    PyObject *parts = worker, *mine;
    if (fan_finalizing())
        return false;
    (void)PyGILState_Ensure(); /* a thread of the pool has none before */
    mine = PyThreadState_GetDict();
    if (PyContext_Enter(PyTuple_GET_ITEM(parts, CONTEXT)) < 0)
        PyErr_Clear();
    if (mine && PyTuple_GET_ITEM(parts, MACHINES) != Py_None &&
        PyDict_SetItemString(mine, "fanin.machines", PyTuple_GET_ITEM(parts, MACHINES)) < 0)
        PyErr_Clear();
    each_ring(PyTuple_GET_ITEM(parts, TRACES), "begin");
    return true;
}

void fan_worker_leave(void *worker)
{
    PyObject *parts = worker;
    each_ring(PyTuple_GET_ITEM(parts, TRACES), "end");
    if (PyContext_Exit(PyTuple_GET_ITEM(parts, CONTEXT)) < 0)
        PyErr_Clear();
    PyGILState_Release(PyGILState_UNLOCKED);
}
