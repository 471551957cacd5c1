/* holds: Python's objects as the core holds them: on any thread, while an exception may be live. */
#include "py/arrays/unboxed.h"

void fan_object_hold(void *object)
{
    fan_gil gil;
    if (fan_is_unboxed(object)) {
        fan_array_hold(fan_unboxed_array(object));
        return;
    }
    if (!fan_gil_enter(&gil))
        return;
    Py_INCREF((PyObject *)object);
    fan_gil_leave(&gil);
}

void fan_object_drop(void *object)
{
    fan_gil gil;
    PyObject *live;
    if (fan_is_unboxed(object)) {
        fan_array_drop(fan_unboxed_array(object));
        return;
    }
    if (!fan_gil_enter(&gil))
        return;
    live = PyErr_Occurred() ? fan_exception_take() : NULL;
    Py_DECREF((PyObject *)object);
    if (live)
        fan_exception_put(live);
    fan_gil_leave(&gil);
}

void fan_object_hold_here(void *object)
{
    if (fan_is_unboxed(object))
        fan_array_hold(fan_unboxed_array(object));
    else
        Py_INCREF((PyObject *)object);
}

void fan_object_drop_here(void *object)
{
    if (fan_is_unboxed(object))
        fan_array_drop(fan_unboxed_array(object));
    else
        Py_DECREF((PyObject *)object);
}

void fan_value_release(fan_value *v)
{
    static const fan_frontend holds = {.hold = fan_object_hold, .drop = fan_object_drop};
    PyObject *live = fan_exception_take();
    fan_value_drop(&holds, v);
    fan_exception_put(live);
}
