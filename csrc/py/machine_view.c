/* machine_view: what can be read of a simulated machine. */
#include "py/machine_part.h"

#include "base/mem.h"

PyObject *fan_machine_get_devices(PyObject *o, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(fan_machine_self(o)->devices);
}

PyObject *fan_machine_get_seed(PyObject *o, void *Py_UNUSED(closure))
{
    return PyLong_FromUnsignedLongLong(fan_sim_seed(fan_machine_self(o)->m));
}

PyObject *fan_machine_get_races(PyObject *o, void *Py_UNUSED(closure))
{
    return PyLong_FromUnsignedLongLong(fan_sim_races(fan_machine_self(o)->m));
}

PyObject *fan_machine_get_host_us(PyObject *o, void *Py_UNUSED(closure))
{
    return PyFloat_FromDouble(fan_sim_host_us(fan_machine_self(o)->m));
}

PyObject *fan_machine_get_device_us(PyObject *o, void *Py_UNUSED(closure))
{
    return PyFloat_FromDouble(fan_sim_device_us(fan_machine_self(o)->m));
}

PyObject *fan_machine_get_abandoned(PyObject *o, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(fan_sim_abandoned(fan_machine_self(o)->m));
}

static void fill_host_schedule(const void *from, char *buf, size_t size) { fan_sim_host_schedule(from, buf, size); }

PyObject *fan_machine_get_host_schedule(PyObject *o, void *Py_UNUSED(closure))
{
    return fan_text_filled(fill_host_schedule, fan_machine_self(o)->m);
}

PyObject *fan_machine_get_streams(PyObject *o, void *Py_UNUSED(closure))
{
    fan_stream **all = NULL;
    size_t n = 0;
    fan_error err = {0};
    fan_status status = fan_sim_listed(fan_machine_self(o)->m, &all, &n, &err);
    PyObject *made = status == FAN_OK ? PyTuple_New((Py_ssize_t)n) : fan_raise(status, &err);
    for (size_t i = 0; made && i < n; i++) {
        PyObject *s = fan_stream_wrap(all[i]);
        if (!s)
            Py_CLEAR(made);
        else
            PyTuple_SET_ITEM(made, (Py_ssize_t)i, s);
    }
    while (n > 0)
        fan_stream_drop(all[--n]);
    fan_free(all);
    return made;
}

PyObject *fan_machine_get_steps(PyObject *o, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(fan_sim_steps(fan_machine_self(o)->m));
}
