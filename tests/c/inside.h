/* inside: what the two files of the tests' library share. */
#ifndef INSIDE_H
#define INSIDE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* inside_ints: a tuple of integers into out[FAN_MAX_NDIM]; how many, or -1 with an exception. */
int inside_ints(PyObject *tuple, int64_t *out);

extern PyMethodDef inside_rules[];

#endif
