/* returned: what the function of a node, or a hook in its stead, returned: one gradient per edge (V1). */
#include "py/engine_part.h"

/* wrong_number: takes `result`; -1. */
static int wrong_number(PyObject *result, const fan_node *n, const char *who, uint32_t ngradients)
{
    char name[128];
    who = who ? who : fan_node_name(n, name, sizeof name);
    if (PyTuple_Check(result) || PyList_Check(result))
        PyErr_Format(PyExc_ValueError, "%s returned an invalid number of gradients: expected %u, got %zd", who,
                     ngradients, PySequence_Fast_GET_SIZE(result));
    else if (ngradients == 0)
        PyErr_Format(PyExc_ValueError, "%s returned an invalid number of gradients: expected 0, got %s", who,
                     FAN_TYPE_TEXT(result));
    else
        PyErr_Format(PyExc_TypeError, "%s returned an invalid number of gradients: expected a tuple of %u, got %s", who,
                     ngradients, FAN_TYPE_TEXT(result));
    Py_DECREF(result);
    return -1;
}

int fan_gradients_of(PyObject *result, const fan_node *n, const char *who, void **gradients, uint32_t ngradients)
{
    bool several = PyTuple_Check(result) || PyList_Check(result);
    if (several && PySequence_Fast_GET_SIZE(result) == (Py_ssize_t)ngradients) {
        for (uint32_t i = 0; i < ngradients; i++) {
            PyObject *one = PySequence_Fast_GET_ITEM(result, (Py_ssize_t)i);
            gradients[i] = one == Py_None ? NULL : Py_NewRef(one);
        }
        Py_DECREF(result);
        return 0;
    }
    if (several || (ngradients != 1 && (ngradients || result != Py_None)))
        return wrong_number(result, n, who, ngradients);
    if (result != Py_None)
        gradients[0] = result;
    else
        Py_DECREF(result);
    return 0;
}
