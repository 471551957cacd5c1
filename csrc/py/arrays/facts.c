/* facts: the class of an object that may be a gradient. Its dtype and shape are read in
 * import_plain.c. */
#include "py/arrays/facts.h"
#include "py/arrays/dlpack.h"

static bool is_exact_number(PyObject *o)
{
    if (PyFloat_CheckExact(o) || PyLong_CheckExact(o))
        return true;
    return PyBool_Check(o) || PyComplex_CheckExact(o);
}

fan_class fan__class_of(PyObject *o)
{
    const fan_state *st = fan_state_get();
    if (fan_is_tensor(o))
        return FAN_IS_TENSOR;
    if (is_exact_number(o))
        return FAN_IS_NUMBER;
    if (o == Py_None)
        return FAN_IS_NONE;
    if (Py_TYPE(o) == st->array_type)
        return FAN_IS_ARRAY;
    /* before subclasses of numbers: numpy.float64 is one */
    if (PyArray_IsScalar(o, Generic))
        return FAN_IS_NUMPY_SCALAR;
    if (PyFloat_Check(o) || PyLong_Check(o) || PyComplex_Check(o))
        return FAN_IS_NUMBER_SUBCLASS;
    if (PyArray_Check(o))
        return FAN_IS_NDARRAY_SUBCLASS;
    return FAN_IS_OTHER;
}
