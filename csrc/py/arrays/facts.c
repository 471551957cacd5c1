/* facts: what an object is that may be a gradient: its class, then its dtype and shape. */
#include "py/arrays/facts.h"
#include "py/arrays/arrays.h"
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

/* read_tensor: of one on the CPU, of any layout, that is not complex. */
static void read_tensor(PyObject *o, fan_facts *facts)
{
    fan_dl_tensor tensor;
    if (!fan_tensor_look(o, &tensor) || tensor.device.type != FAN_DL_CPU)
        return;
    if (tensor.dtype.lanes != 1 || tensor.dtype.code == FAN_DL_COMPLEX)
        return;
    facts->dtype = fan_dl_dtype_of(tensor.dtype);
    facts->ndim = tensor.ndim;
    facts->shape = tensor.shape;
}

fan_facts fan_facts_of(void *o)
{
    fan_facts facts = {.is = fan_class_of(o), .dtype = FAN_DT_NONE};
    switch (facts.is) {
    case FAN_IS_UNBOXED: {
        const fan_array *array = fan_unboxed_array(o);
        facts.dtype = array->dtype;
        facts.ndim = array->ndim;
        facts.shape = array->shape;
        break;
    }
    case FAN_IS_NDARRAY: {
        PyArrayObject *array = o;
        _Static_assert(sizeof(npy_intp) == sizeof(int64_t), "NumPy's shapes are read as ours");
        facts.dtype = fan_dtype_of_descr(PyArray_DESCR(array));
        facts.ndim = PyArray_NDIM(array);
        facts.shape = (const int64_t *)PyArray_DIMS(array);
        break;
    }
    case FAN_IS_TENSOR:
        read_tensor(o, &facts);
        break;
    case FAN_IS_NUMBER:
    case FAN_IS_NUMPY_SCALAR: {
        FAN_UNINITIALIZED fan_plain_kind kind;
        char *value;
        if (fan_plain_import(o, &kind, &value))
            facts.dtype = kind.dtype;
        break;
    }
    default:
        break;
    }
    return facts;
}
