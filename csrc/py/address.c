/* address: where an ndarray's first element lies, as a Python int: what `a.ctypes.data` says, in a fraction of the
 * time. */
#include "py/py.h"

static PyObject *address(PyObject *Py_UNUSED(module), PyObject *a)
{
    if (!PyArray_Check(a)) {
        PyErr_Format(PyExc_TypeError, "address: expected an ndarray, got %.100s", Py_TYPE(a)->tp_name);
        return NULL;
    }
    return PyLong_FromVoidPtr(PyArray_DATA((PyArrayObject *)a));
}

/* restride: what `a.strides =` does, where NumPy does not find its way back: of an array that owns its memory it knows
 * no more bytes than the strides of now reach. */
static PyObject *restride(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *a, *strides;
    npy_intp to[FAN_MAX_NDIM];
    if (!PyArg_ParseTuple(args, "O!O!:restride", &PyArray_Type, &a, &PyTuple_Type, &strides))
        return NULL;
    int ndim = PyArray_NDIM((PyArrayObject *)a);
    if (ndim > FAN_MAX_NDIM || PyTuple_GET_SIZE(strides) != ndim) {
        PyErr_Format(PyExc_ValueError, "restride: expected %d strides, got %zd", ndim, PyTuple_GET_SIZE(strides));
        return NULL;
    }
    for (int i = 0; i < ndim; i++) {
        to[i] = PyLong_AsSsize_t(PyTuple_GET_ITEM(strides, i));
        if (to[i] == -1 && PyErr_Occurred())
            return NULL;
    }
    for (int i = 0; i < ndim; i++)
        PyArray_STRIDES((PyArrayObject *)a)[i] = to[i];
    PyArray_UpdateFlags((PyArrayObject *)a, NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_F_CONTIGUOUS | NPY_ARRAY_ALIGNED);
    Py_RETURN_NONE;
}

PyMethodDef fan_address_functions[] = {
    {"restride", restride, METH_VARARGS,
     "restride(a, strides, /)\n--\n\n"
     "Give an ndarray strides that it had before, without a check that they stay within its memory."},
    {"address", address, METH_O,
     "address(a, /)\n--\n\n"
     "The address of the first element of an ndarray."},
    {0},
};
