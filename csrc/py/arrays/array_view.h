/* array_view: methods of fanin.sim.Array that give views of it. */
#ifndef FAN_PY_ARRAY_VIEW_H
#define FAN_PY_ARRAY_VIEW_H

#include "py/base/handles.h"

/* fan_array_on_cpu: whether it is an array of ours on the CPU: memory of a graph tree. */
bool fan_array_on_cpu(PyObject *o);
PyObject *fan_array_getitem(PyObject *o, PyObject *key);
PyObject *fan_array_transpose(PyObject *o, PyObject *args);
PyObject *fan_array_reshape(PyObject *o, PyObject *args);
PyObject *fan_array_broadcast_to(PyObject *o, PyObject *args);

#endif
