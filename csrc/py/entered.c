#include "py/entered.h"

/* The machines entered on this thread: a list in the thread's own dictionary; borrowed. NULL without exception where
 * there is none. */
static PyObject *entered(void)
{
    PyObject *mine = PyThreadState_GetDict();
    return mine ? PyDict_GetItemString(mine, "fanin.machines") : NULL;
}

static machine_object *innermost(void)
{
    PyObject *list = entered();
    Py_ssize_t n = list ? PyList_GET_SIZE(list) : 0;
    return n ? fan_machine_self(PyList_GET_ITEM(list, n - 1)) : NULL;
}

int fan_machine_count(void)
{
    machine_object *self = innermost();
    return self ? self->devices : 0;
}

fan_device *fan_machine_device(long index)
{
    machine_object *self = innermost();
    if (!self) {
        PyErr_Format(PyExc_ValueError,
                     "device \"sim:%ld\": no simulated machine is entered on this thread: with fanin.sim.Machine(): ..",
                     index);
        return NULL;
    }
    if (index < 0 || index >= self->devices) {
        PyErr_Format(PyExc_ValueError,
                     "device \"sim:%ld\": this machine has %d device%s; say fanin.sim.Machine(devices=%ld)", index,
                     self->devices, self->devices == 1 ? "" : "s", index + 1);
        return NULL;
    }
    return fan_device_hold(fan_sim_device(self->m, (int)index));
}

fan_stream *fan_machine_stream(fan_device *d, uint64_t handle)
{
    PyObject *list = entered();
    char text[32];
    if (handle == 1) {
        fan_stream *s = d->backend->current(d);
        if (!s)
            PyErr_NoMemory();
        return s;
    }
    for (Py_ssize_t i = list ? PyList_GET_SIZE(list) : 0; i-- > 0;) {
        machine_object *self = fan_machine_self(PyList_GET_ITEM(list, i));
        fan_stream *s = fan_sim_of(d) == self->m ? fan_sim_find(self->m, d->index, handle) : NULL;
        if (s)
            return s;
    }
    PyErr_Format(PyExc_ValueError, "no stream of %s has the handle %llu: Machine.stream makes one",
                 fan_device_text(d, text, sizeof text), (unsigned long long)handle);
    return NULL;
}

PyObject *fan_machine_enter(PyObject *o, PyObject *Py_UNUSED(none))
{
    PyObject *mine = PyThreadState_GetDict(), *list = entered();
    if (!mine)
        return PyErr_NoMemory();
    if (!list) {
        if (!(list = PyList_New(0)))
            return NULL;
        if (PyDict_SetItemString(mine, "fanin.machines", list) < 0) {
            Py_DECREF(list);
            return NULL;
        }
        Py_DECREF(list); /* the dictionary holds it */
    }
    if (PyList_Append(list, o) < 0)
        return NULL;
    Py_RETURN_NONE;
}

PyObject *fan_machine_leave(PyObject *o, PyObject *Py_UNUSED(none))
{
    PyObject *list = entered();
    for (Py_ssize_t i = list ? PyList_GET_SIZE(list) : 0; i-- > 0;)
        if (PyList_GET_ITEM(list, i) == o) {
            if (PySequence_DelItem(list, i) < 0)
                return NULL;
            break;
        }
    Py_RETURN_NONE;
}
