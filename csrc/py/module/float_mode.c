/* float_mode: the default floating-point modes for arithmetic in Python (base/float_mode.h). */
#include "py/base/args.h"

#include "base/float_mode.h"

static PyObject *in_default_modes(PyObject *Py_UNUSED(module), PyObject *call)
{
    FAN_DEFAULT_FLOAT_MODE;
    return PyObject_CallNoArgs(call);
}

#include "py/declared/float_mode.h"
