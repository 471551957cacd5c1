/* worker: the context of a thread that runs nodes for another one (engine/workers.h): the interpreter, a copy of the
 * other's context variables (NumPy's errstate is one of them), the machine that it has entered, its traces. */
#include "py/engine/node_object.h"

#include "base/trace.h"
#include "device/sim/sim.h"

enum { CONTEXT, MACHINE, TRACES, PARTS };

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

static void drop_machine(PyObject *capsule) { fan_sim_drop(PyCapsule_GetPointer(capsule, "fanin.machine")); }

/* machine_now: a capsule of the simulated machine that this thread has entered; None: there is none. */
static PyObject *machine_now(void)
{
    fan_sim *m = fan_sim_entered();
    PyObject *capsule = m ? PyCapsule_New(m, "fanin.machine", drop_machine) : Py_NewRef(Py_None);
    if (m && capsule)
        fan_sim_hold(m);
    return capsule;
}

fan_status fan_worker_new(void **worker, fan_error *err)
{
    PyObject *context = PyContext_CopyCurrent(), *machine = context ? machine_now() : NULL,
             *rings = machine ? rings_beside() : NULL;
    *worker = rings ? PyTuple_Pack(PARTS, context, machine, rings) : NULL;
    Py_XDECREF(context);
    Py_XDECREF(machine);
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

/* machine_of: borrowed; NULL: none. */
static fan_sim *machine_of(PyObject *parts)
{
    PyObject *machine = PyTuple_GET_ITEM(parts, MACHINE);
    return machine == Py_None ? NULL : PyCapsule_GetPointer(machine, "fanin.machine");
}

bool fan_worker_enter(void *worker)
{
    PyObject *parts = worker;
    fan_sim *m = machine_of(parts);
    if (fan_finalizing())
        return false;
    (void)PyGILState_Ensure(); /* a thread of the pool has none before */
    if (PyContext_Enter(PyTuple_GET_ITEM(parts, CONTEXT)) < 0)
        PyErr_Clear();
    if (m)
        (void)fan_sim_enter(m, NULL);
    each_ring(PyTuple_GET_ITEM(parts, TRACES), "begin");
    return true;
}

void fan_worker_leave(void *worker)
{
    PyObject *parts = worker;
    const fan_sim *m = machine_of(parts);
    each_ring(PyTuple_GET_ITEM(parts, TRACES), "end");
    if (m)
        fan_sim_leave(m);
    if (PyContext_Exit(PyTuple_GET_ITEM(parts, CONTEXT)) < 0)
        PyErr_Clear();
    PyGILState_Release(PyGILState_UNLOCKED);
}
