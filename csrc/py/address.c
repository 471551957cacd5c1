/* address: where an ndarray's first element lies, as a Python int: what `a.ctypes.data` says, in a fraction of the time. */
#include "py/py.h"

static PyObject *address(PyObject *Py_UNUSED(module), PyObject *a)
{
    if (!PyArray_Check(a)) {
        PyErr_Format(PyExc_TypeError, "address: expected an ndarray, got %.100s", Py_TYPE(a)->tp_name);
        return NULL;
    }
    return PyLong_FromVoidPtr(PyArray_DATA((PyArrayObject *)a));
}

PyMethodDef fan_address_functions[] = {
    {"address", address, METH_O, "address(a, /)\n--\n\nWhere the first element of an ndarray lies."},
    {0},
};
