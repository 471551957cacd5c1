/* args: converts what callers pass to numbers and texts. Each returns -1 (or NULL) with an exception that names it. */
#ifndef FAN_PY_ARGS_H
#define FAN_PY_ARGS_H

#include "py/py.h"

/* fan_number_arg: an int that fits 64 bits; NULL leaves *out as it is. `what` begins the message. */
int fan_number_arg(PyObject *o, const char *what, int64_t *out);
/* fan_small_index: a plain int from 0 on; -1, without an exception: something else. */
static inline Py_ssize_t fan_small_index(PyObject *o)
{
    Py_ssize_t i;
    if (!PyLong_CheckExact(o))
        return -1;
    /* One digit, without a call: an add of a batch reads three. */
#if PY_VERSION_HEX >= 0x030C0000
    if (PyUnstable_Long_IsCompact((PyLongObject *)o))
        return PyUnstable_Long_CompactValue((PyLongObject *)o);
#else
    if ((size_t)Py_SIZE(o) <= 1)
        return Py_SIZE(o) ? (Py_ssize_t)((PyLongObject *)o)->ob_digit[0] : 0;
#endif
    i = PyLong_AsSsize_t(o);
    if (i == -1 && PyErr_Occurred())
        PyErr_Clear();
    return i;
}
/* fan_text_arg: a str as the core and its messages have it: no NUL in it. Lives as long as the str. */
const char *fan_text_arg(PyObject *text);
/* fan_is_bare: is `o` one array (or Slot, or scalar) where a sequence of them was expected? */
int fan_is_bare(PyObject *o);
/* fan_sequence_arg: a tuple of what a sequence holds; *out is a new reference. */
int fan_sequence_arg(PyObject *o, const char *what, PyObject **out);
/* fan_accumulate_arg: a dtype, or "exact". */
int fan_accumulate_arg(PyObject *o, fan_dtype *dtype, bool *exact);
/* fan_scale_arg: D10: a number; the core checks whether the sum's dtype allows it. */
int fan_scale_arg(PyObject *o, fan_take *how);
/* fan_scale_finish: fills in the integer of a scale whose real part is set (how->real). */
void fan_scale_finish(fan_take *how);
/* fan_plans_arg: the words of leave_out, a tuple, as bits of plans (fan_plan_bits). */
int fan_plans_arg(PyObject *words, uint64_t *bits);

/* fan_int_arg: an integer index; an exception of class `large` where it is no int64. bool is refused: True as an index
 * is a mistake. */
int fan_int_arg(PyObject *o, PyObject *large, int64_t *out);
/* fan_ints_arg: integers from a sequence, or one bare integer, into out[FAN_MAX_NDIM]; their number. */
int fan_ints_arg(PyObject *o, int64_t *out);
/* fan_ints: the other way: integers as a tuple. */
PyObject *fan_ints(int n, const int64_t *items);

#endif
