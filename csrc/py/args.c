/* args: converts what callers pass to numbers and texts; each error names the argument. */
#include "py/args.h"

#include "buffer/sync.h"

#include <math.h>
#include <string.h>

int fan_number_arg(PyObject *o, const char *what, int64_t *out)
{
    if (!o)
        return 0;
    if (!PyIndex_Check(o))
        return fan_refuse(PyExc_TypeError, "%s: expected an integer, got %s", what, FAN_TYPE_TEXT(o));
    PyObject *i = PyNumber_Index(o);
    int overflow = 0;
    long long n = i ? PyLong_AsLongLongAndOverflow(i, &overflow) : -1;
    Py_XDECREF(i);
    if (overflow)
        return fan_refuse(PyExc_OverflowError, "%s: expected an integer that fits 64 bits, got %R", what, o);
    *out = n;
    return n == -1 && PyErr_Occurred() ? -1 : 0;
}

int fan_index(PyObject *o, const char *what, PyObject *negative, int64_t *out)
{
    PyObject *i;
    int overflow = 0;
    long long n;
    if (PyBool_Check(o) || PyArray_IsScalar(o, Bool))
        return fan_refuse(PyExc_TypeError, "%s: expected an integer, got the bool %R", what, o);
    if (PyLong_CheckExact(o)) {
        n = PyLong_AsLongLongAndOverflow(o, &overflow);
    } else {
        if (!PyIndex_Check(o))
            return fan_refuse(PyExc_TypeError, "%s: expected an integer, got %s", what, FAN_TYPE_TEXT(o));
        i = PyNumber_Index(o);
        if (!i)
            return -1;
        n = PyLong_AsLongLongAndOverflow(i, &overflow);
        Py_DECREF(i);
    }
    if (n == -1 && PyErr_Occurred())
        return -1;
    bool out_of_range = overflow || n < 0;
    if (out_of_range && !negative) {
        *out = -1;
        return 0;
    }
    if (out_of_range)
        return fan_refuse(negative, "%s: expected a non-negative integer%s, got %R", what,
                          overflow > 0 || n > 0 ? " that fits 64 bits" : "", o);
    *out = n;
    return 0;
}

/* fan_text_arg: a name as the core and its messages have it; NULL with an exception. */
const char *fan_text_arg(PyObject *text)
{
    Py_ssize_t n;
    const char *words = PyUnicode_AsUTF8AndSize(text, &n);
    if (words && strlen(words) == (size_t)n)
        return words;
    if (!words && PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) {
        PyErr_Clear();
        fan_refuse(PyExc_ValueError, "name: expected text without surrogates, got %R: UTF-8 cannot hold it", text);
    }
    if (!words)
        return NULL;
    fan_refuse(PyExc_ValueError, "name: expected text without a NUL character, got %R", text);
    return NULL;
}

/* fan_is_bare: is `o` one array (or Slot, or scalar) where a sequence of them was expected? */
int fan_is_bare(PyObject *o)
{
    PyObject *arrays, *answer;
    int bare;
    if (PyList_Check(o) || PyTuple_Check(o))
        return 0;
    arrays = fan_arrays();
    answer = arrays ? PyObject_CallMethod(arrays, "is_bare", "O", o) : NULL;
    bare = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return bare;
}

#define ITEM(tuple, i) PyTuple_GET_ITEM(tuple, i)

int fan_sequence_arg(PyObject *o, const char *what, PyObject **out)
{
    if (PyUnicode_Check(o) || PyBytes_Check(o) || PyDict_Check(o) || PyAnySet_Check(o) ||
        (!Py_TYPE(o)->tp_iter && !PySequence_Check(o)))
        return fan_refuse(PyExc_TypeError, "%s: expected a sequence, got %s", what, FAN_TYPE_TEXT(o));
    *out = PySequence_Tuple(o);
    return *out ? 0 : -1;
}

/* ---- making one ---- */

int fan_budget_arg(PyObject *o, uint64_t *out)
{
    PyObject *i;
    int negative;
    if (PyBool_Check(o) || (!PyFloat_Check(o) && !PyIndex_Check(o)))
        return fan_refuse(PyExc_TypeError, "budget: expected a number of bytes, math.inf or None, got %R", o);
    if (PyFloat_Check(o)) {
        double f = PyFloat_AS_DOUBLE(o);
        if (!(f >= 0) || (isfinite(f) && f != floor(f)))
            return fan_refuse(PyExc_ValueError,
                              "budget: expected a non-negative whole number of bytes, or math.inf, got %R", o);
        *out = f >= 0x1p63 ? UINT64_MAX : (uint64_t)f;
        return 0;
    }
    i = PyNumber_Index(o);
    if (!i)
        return -1;
    *out = PyLong_AsUnsignedLongLong(i);
    if (PyErr_Occurred()) {
        PyErr_Clear();
        negative = PyObject_RichCompareBool(i, fan_state_get()->zero, Py_LT);
        if (negative != 0) {
            if (negative > 0)
                fan_refuse(PyExc_ValueError, "budget: expected a non-negative number of bytes, got %R", o);
            Py_DECREF(i);
            return -1;
        }
        *out = UINT64_MAX;
    }
    Py_DECREF(i);
    return 0;
}

int fan_buffer_budget_arg(PyObject *o, uint64_t *out)
{
    if (PyBool_Check(o) || (!PyUnicode_Check(o) && !PyFloat_Check(o) && !PyIndex_Check(o)))
        return fan_refuse(PyExc_TypeError, "budget: expected \"auto\", a number of bytes, math.inf or None, got %R", o);
    if (!PyUnicode_Check(o))
        return fan_budget_arg(o, out);
    if (PyUnicode_CompareWithASCIIString(o, "auto") != 0)
        return fan_refuse(PyExc_ValueError, "budget: expected \"auto\", a number of bytes or math.inf, got %R", o);
    *out = FAN_BUDGET_AUTO;
    return 0;
}

PyObject *fan_budget_wrap(uint64_t budget)
{
    if (budget == FAN_BUDGET_AUTO)
        return PyUnicode_FromString("auto");
    return budget == UINT64_MAX ? PyFloat_FromDouble(Py_HUGE_VAL) : PyLong_FromUnsignedLongLong(budget);
}

/* fan_accumulate_arg: a dtype, or "exact". */
int fan_accumulate_arg(PyObject *o, fan_dtype *dtype, bool *exact)
{
    *exact = PyUnicode_Check(o) && PyUnicode_CompareWithASCIIString(o, "exact") == 0;
    *dtype = FAN_DT_NONE;
    return *exact ? 0 : fan_dtype_parse(o, dtype);
}

void fan_scale_finish(fan_take *how)
{
    fan_scale *s = &how->scale;
    how->integral = how->real && s->re == floor(s->re) && s->re >= -0x1p63 && s->re < 0x1p63;
    if (how->integral)
        s->i = (int64_t)s->re;
}

/* fan_scale_arg: D10: a number; the core checks whether the sum's dtype allows it. */
int fan_scale_arg(PyObject *o, fan_take *how)
{
    PyObject *number = NULL;
    fan_scale *s = &how->scale;
    int overflow = 0;
    how->real = true;
    if (o == Py_None)
        return 0;
    s->on = true;
    if (PyComplex_Check(o) || PyArray_IsScalar(o, ComplexFloating)) {
        Py_complex c = PyComplex_AsCComplex(o);
        if (c.real == -1.0 && PyErr_Occurred())
            return -1;
        s->re = c.real;
        s->im = c.imag;
        how->real = false;
    } else if (PyFloat_Check(o) || PyBool_Check(o) || PyArray_IsScalar(o, Bool)) {
        s->re = PyFloat_Check(o) ? PyFloat_AS_DOUBLE(o) : (double)PyObject_IsTrue(o);
    } else if (PyIndex_Check(o) && !PyArray_Check(o)) {
        number = PyNumber_Index(o);
        s->i = number ? PyLong_AsLongLongAndOverflow(number, &overflow) : 0;
        s->re = number ? PyLong_AsDouble(number) : 0;
        Py_XDECREF(number);
        if (!PyErr_Occurred()) {
            how->integral = !overflow;
            return 0;
        }
        if (!PyErr_ExceptionMatches(PyExc_OverflowError))
            return -1;
        PyErr_Clear();
        return fan_refuse(PyExc_ValueError, "scale: %R is more than a float can hold", o);
    } else if ((PyArray_Check(o) && PyArray_NDIM((PyArrayObject *)o) > 0) || PyUnicode_Check(o) || PyBytes_Check(o) ||
               !Py_TYPE(o)->tp_as_number || !Py_TYPE(o)->tp_as_number->nb_float) {
        return fan_refuse(PyExc_TypeError, "scale: expected a number, got %s", FAN_TYPE_TEXT(o));
    } else {
        number = PyNumber_Float(o);
        s->re = number ? PyFloat_AS_DOUBLE(number) : 0;
        Py_XDECREF(number);
        if (!number)
            return -1;
    }
    fan_scale_finish(how);
    return 0;
}

int fan_int_arg(PyObject *o, PyObject *large, int64_t *out)
{
    Py_ssize_t n;
    if (!PyIndex_Check(o) || PyBool_Check(o)) {
        PyErr_Format(PyExc_TypeError, "expected an integer, got %.80s", Py_TYPE(o)->tp_name);
        return -1;
    }
    n = PyNumber_AsSsize_t(o, large);
    *out = n;
    return n == -1 && PyErr_Occurred() ? -1 : 0;
}

int fan_ints_arg(PyObject *o, int64_t *out)
{
    PyObject *items;
    Py_ssize_t n;
    if (PyIndex_Check(o))
        return fan_int_arg(o, PyExc_ValueError, out) < 0 ? -1 : 1;
    if (!(items = PySequence_Tuple(o))) { /* a tuple: an __index__ cannot change it under our hands */
        if (PyErr_ExceptionMatches(PyExc_TypeError))
            PyErr_Format(PyExc_TypeError, "expected an integer or a sequence of integers, got %.80s",
                         Py_TYPE(o)->tp_name);
        return -1;
    }
    n = PyTuple_GET_SIZE(items);
    if (n > FAN_MAX_NDIM) {
        PyErr_Format(PyExc_ValueError, "at most %d dimensions are supported, not %zd", FAN_MAX_NDIM, n);
        n = -1;
    }
    for (Py_ssize_t i = 0; i < n; i++)
        if (fan_int_arg(PyTuple_GET_ITEM(items, i), PyExc_ValueError, out + i) < 0)
            n = -1;
    Py_DECREF(items);
    return (int)n;
}

PyObject *fan_ints(int n, const int64_t *items)
{
    PyObject *t = PyTuple_New(n);
    for (int i = 0; t && i < n; i++) {
        PyObject *item = PyLong_FromLongLong(items[i]);
        if (!item)
            Py_CLEAR(t);
        else
            PyTuple_SET_ITEM(t, i, item);
    }
    return t;
}

static int refuse_plan(PyObject *word)
{
    char every[FAN_PLAN_COUNT * 16] = "";
    if (PyErr_Occurred())
        return -1;
    for (int k = 0; k < FAN_PLAN_COUNT; k++)
        fan_append(every, sizeof every, "%s%s", k ? ", " : "", fan_plan_word(k));
    PyErr_Format(PyExc_ValueError, "leave_out: no plan has %R. A word names a rule, as in \"S12\", or one of: %s", word,
                 every);
    return -1;
}

int fan_plans_arg(PyObject *words, uint64_t *bits)
{
    *bits = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(words); i++) {
        PyObject *word = PyTuple_GET_ITEM(words, i);
        const char *text = PyUnicode_Check(word) ? fan_word_of(word) : NULL;
        uint64_t here = text ? fan_plan_bits(text) : 0;
        if (!here)
            return refuse_plan(word);
        *bits |= here;
    }
    return 0;
}
