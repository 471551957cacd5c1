/* machine_tests: functions of a development build on a simulated machine, for tests/kit/hooks.py. A
 * release has none of them. */
#include "py/base/args.h"
#include "py/base/handles.h"
#include "py/sim/machine_object.h"

#ifdef FAN_TEST

static fan_sim *machine_arg(PyObject *o)
{
    PyTypeObject *type = fan_state_get()->machine_type; /* NULL: a core without fanin.sim */
    if (type && PyObject_TypeCheck(o, type))
        return fan_machine_self(o)->m;
    PyErr_Format(PyExc_TypeError, "expected a machine, not %.80s", Py_TYPE(o)->tp_name);
    return NULL;
}

static PyObject *test_unsound(PyObject *Py_UNUSED(module), PyObject *machine)
{
    fan_sim *m = machine_arg(machine);
    if (!m)
        return NULL;
    fan_sim_read_all(m);
    return PyLong_FromUnsignedLongLong(fan_sim_unsound(m));
}

static PyObject *test_unsafe(PyObject *Py_UNUSED(module), PyObject *machine)
{
    fan_sim *m = machine_arg(machine);
    if (!m)
        return NULL;
    return FAN_DONE(fan_sim_unsafe(m, "an unsafe call", false, &err));
}

static PyObject *test_fail_call(PyObject *Py_UNUSED(module), PyObject *const *a)
{
    int64_t index = 0;
    fan_sim *m = machine_arg(a[0]);
    if (!m)
        return NULL;
    if (fan_number_arg(a[1], "index", &index) < 0)
        return NULL;
    fan_sim_fail_at(m, index, a[2] == Py_True ? FAN_ERR_DEVICE_NOMEM : FAN_ERR_DEVICE);
    Py_RETURN_NONE;
}

static PyObject *test_capture_state(PyObject *Py_UNUSED(module), PyObject *where)
{
    fan_stream *s = NULL;
    PyObject *state = NULL;
    if (fan_stream_arg(where, &s) < 0)
        return NULL;
    fan_sim *m = NULL;
    if (s)
        m = fan_sim_of(s->device);
    if (m)
        state = PyLong_FromLong(fan_sim_capture_state(m, s, NULL));
    else
        PyErr_SetString(PyExc_ValueError, "expected a stream of a simulated machine");
    fan_stream_drop(s);
    return state;
}

#include "py/declared/machine_tests.h"

#endif
