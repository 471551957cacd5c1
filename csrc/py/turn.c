/* turn: what a call says that comes too late. */
#include "py/turn.h"

int fan_sched_enter_or_raise(void)
{
    if (fan_sched_enter()) {
        fan_sched_access(FAN_THING_OPTIONS, 0, FAN_SCHED_READ); /* whatever a call does may hang on them */
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
