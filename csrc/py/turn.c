/* turn: what a call says that comes too late. */
#include "py/turn.h"

int fan_call_begin_or_raise(void)
{
    if (fan_call_begin())
        return 0;
    PyObject *sim = PyImport_ImportModule("fanin._sim.machine");
    PyObject *type = sim ? PyObject_GetAttrString(sim, "Abandoned") : NULL;
    if (type)
        PyErr_SetString(type, "the machine ends this run");
    Py_XDECREF(type);
    Py_XDECREF(sim);
    return -1;
}
