/* float_mode: calls a function of Python in the default floating-point modes (base/float_mode.h),
 * for sums that the package computes in Python: their bits do not depend on the modes of the
 * caller's thread (A15). */
#include "py/base/args.h"

#include "base/float_mode.h"

static PyObject *in_default_modes(PyObject *Py_UNUSED(module), PyObject *call)
{
    FAN_DEFAULT_FLOAT_MODE;
    return PyObject_CallNoArgs(call);
}

#include "py/declared/float_mode.h"
