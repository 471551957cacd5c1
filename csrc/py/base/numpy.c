/* numpy: NumPy's C API, which every file of this folder reaches through py.h. */
#define FAN_PY_IMPORTS_NUMPY
#include "py/base/py.h"

int fan_numpy_import(void) { return PyArray_ImportNumPyAPI(); }
