/* args: reads the arguments of a call, and converts each to a number or a text; errors name the
 * argument.
 *
 * In order: the arguments of a call by position and name; one integer, text or sequence; numbers of
 * bytes; accumulate= and scale=; tuples of integers; the words of leave_out. */
#include "py/base/args.h"

#include "base/mem.h"
#include "buffer/sync.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- the arguments of a call ---- */

/* refuse: TypeError with the text of a function of fanin._words: of the call, all parameters, how
 * many may be given by position, and `given`, which is taken. */
static int refuse(const fan_decl *d, const char *words, PyObject *given)
{
    PyObject *names = PyTuple_New(d->n);
    PyObject *text = NULL;
    for (Py_ssize_t i = 0; names && i < d->n; i++)
        PyTuple_SET_ITEM(names, i, PyUnicode_FromString(d->names[i]));
    if (!PyErr_Occurred())
        text = fan_call("fanin._words", words, "(sOiO)", d->call, names, (int)d->by_place, given);
    if (text)
        PyErr_SetObject(PyExc_TypeError, text);
    Py_XDECREF(text);
    Py_XDECREF(names);
    Py_XDECREF(given);
    return -1;
}

/* by_place: writes the values that the caller gave by position. */
static int by_place(const fan_decl *d, PyObject *const *args, Py_ssize_t nargs, PyObject **values)
{
    if (nargs > d->by_place)
        return refuse(d, "too_many_arguments", PyLong_FromSsize_t(nargs));
    for (Py_ssize_t i = 0; i < nargs; i++)
        values[i] = args[i];
    for (Py_ssize_t i = nargs; i < d->n; i++)
        values[i] = NULL;
    return 0;
}

/* by_name: writes the value that the caller gave by this name. */
static int by_name(const fan_decl *d, PyObject *name, PyObject *value, PyObject **values)
{
    size_t i = 0;
    while (i < d->n && PyUnicode_CompareWithASCIIString(name, d->names[i]) != 0)
        i++;
    if (i == d->n)
        return refuse(d, "unknown_argument", Py_NewRef(name));
    if (i < d->by_place_only) {
        return fan_set_error(PyExc_TypeError, "%s() takes '%U' by position, not by name", d->call,
                             name);
    }
    if (values[i]) {
        return fan_set_error(PyExc_TypeError, "%s() got '%U' twice: by position and by name",
                             d->call, name);
    }
    values[i] = value;
    return 0;
}

/* X(letter, condition on o, what the message calls it) */
#define KIND_LIST(X)                                     \
    X('a', PyArray_Check(o), "an ndarray")               \
    X('b', PyByteArray_Check(o), "a bytearray")          \
    X('c', PyType_Check(o), "a type")                    \
    X('d', PyDict_Check(o), "a dict")                    \
    X('f', is_bool(o), "a bool")                         \
    X('F', o == Py_None || is_bool(o), "a bool or None") \
    X('l', PyList_Check(o), "a list")                    \
    X('s', PyUnicode_Check(o), "a str")                  \
    X('t', PyTuple_Check(o), "a tuple")

static bool is_bool(PyObject *o)
{
    return PyBool_Check(o) || PyArray_IsScalar(o, Bool);
}

static int check_kinds(const fan_decl *d, PyObject **values)
{
    for (size_t i = 0; i < d->n; i++) {
        PyObject *o = values[i];
        const char *expected = NULL;
#define X(letter, condition, text)                    \
    if (o && d->kinds[i] == (letter) && !(condition)) \
        expected = text;
        KIND_LIST(X)
#undef X
        if (expected) {
            return fan_set_error(PyExc_TypeError, "%s(): %s: expected %s, got %s", d->call,
                                 d->names[i], expected, FAN_TYPE_TEXT(o));
        }
        bool flag = d->kinds[i] == 'f' || d->kinds[i] == 'F';
        if (o && flag && PyArray_IsScalar(o, Bool))
            values[i] = PyObject_IsTrue(o) ? Py_True : Py_False;
    }
    return 0;
}

static int check_parsed(const fan_decl *d, PyObject **values)
{
    for (size_t i = 0; i < d->required; i++) {
        if (!values[i])
            return fan_set_error(PyExc_TypeError, "%s() needs '%s'", d->call, d->names[i]);
    }
    if (!d->kinds)
        return 0;
    return check_kinds(d, values);
}

int fan_parse(const fan_decl *d, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
              PyObject **values)
{
    if (by_place(d, args, nargs, values) < 0)
        return -1;
    for (Py_ssize_t k = 0; kwnames && k < PyTuple_GET_SIZE(kwnames); k++) {
        if (by_name(d, PyTuple_GET_ITEM(kwnames, k), args[nargs + k], values) < 0)
            return -1;
    }
    return check_parsed(d, values);
}

int fan_parse_tuple(const fan_decl *d, PyObject *args, PyObject *named, PyObject **values)
{
    Py_ssize_t at = 0;
    PyObject *name, *value;
    if (by_place(d, ((PyTupleObject *)args)->ob_item, PyTuple_GET_SIZE(args), values) < 0)
        return -1;
    while (named && PyDict_Next(named, &at, &name, &value)) {
        if (!PyUnicode_Check(name)) {
            return fan_set_error(PyExc_TypeError, "%s(): expected keywords that are str, got %s",
                                 d->call, FAN_TYPE_TEXT(name));
        }
        if (by_name(d, name, value, values) < 0)
            return -1;
    }
    return check_parsed(d, values);
}

/* ---- one argument ---- */

bool fan_is_array(PyObject *o)
{
    if (PyArray_Check(o))
        return true;
    PyObject *live = fan_exception_take();
    bool has = PyObject_HasAttrString((PyObject *)Py_TYPE(o), "__dlpack__");
    fan_exception_put(live);
    return has;
}

/* refuse_integer: TypeError for an object that is no integer. */
static int refuse_integer(PyObject *o, const char *what)
{
    return fan_refuse(PyExc_TypeError, "%s: expected an integer, got %s", what, FAN_TYPE_TEXT(o));
}

/* integer_of: a Python int of an integer; new reference; NULL with an exception. The error of an
 * array's __index__ is replaced: it is its library's. */
static PyObject *integer_of(PyObject *o, const char *what)
{
    if (!PyIndex_Check(o)) {
        (void)refuse_integer(o, what);
        return NULL;
    }
    PyObject *i = PyNumber_Index(o);
    if (!i && PyErr_ExceptionMatches(PyExc_TypeError) && fan_is_array(o)) {
        PyErr_Clear();
        (void)refuse_integer(o, what);
    }
    return i;
}

int fan_number_arg(PyObject *o, const char *what, int64_t *out)
{
    if (!o)
        return 0;
    PyObject *i = integer_of(o, what);
    if (!i)
        return -1;
    int overflow = 0;
    *out = PyLong_AsLongLongAndOverflow(i, &overflow);
    Py_DECREF(i);
    if (overflow) {
        return fan_refuse(PyExc_OverflowError, "%s: expected an integer that fits 64 bits, got %R",
                          what, o);
    }
    return 0;
}

int fan_index(PyObject *o, const char *what, PyObject *negative, int64_t *out)
{
    PyObject *i;
    int overflow = 0;
    long long n;
    if (is_bool(o))
        return fan_refuse(PyExc_TypeError, "%s: expected an integer, got the bool %R", what, o);
    if (PyLong_CheckExact(o)) {
        n = PyLong_AsLongLongAndOverflow(o, &overflow);
    } else {
        i = integer_of(o, what);
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
    if (out_of_range) {
        return fan_refuse(negative, "%s: expected a non-negative integer%s, got %R", what,
                          overflow > 0 || n > 0 ? " that fits 64 bits" : "", o);
    }
    *out = n;
    return 0;
}

int fan_slot_index(PyObject *o, const char *what, int64_t *out)
{
    if (!PyLong_CheckExact(o) && fan_is_array(o))
        return refuse_integer(o, what);
    return fan_index(o, what, PyExc_IndexError, out);
}

const char *fan_text_arg(PyObject *text)
{
    const char *words = fan_word_of(text);
    if (words && (words[0] || PyUnicode_GET_LENGTH(text) == 0))
        return words;
    if (words) {
        fan_refuse(PyExc_ValueError, "name: expected text without a NUL character, got %R", text);
    } else if (PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) {
        PyErr_Clear();
        fan_refuse(PyExc_ValueError,
                   "name: expected text without surrogates, got %R: UTF-8 cannot hold it", text);
    }
    return NULL;
}

int fan_is_bare(PyObject *o)
{
    if (PyList_Check(o) || PyTuple_Check(o))
        return 0;
    PyObject *arrays = fan_arrays();
    if (!arrays)
        return -1;
    PyObject *answer = PyObject_CallMethod(arrays, "is_bare", "O", o);
    if (!answer)
        return -1;
    int bare = PyObject_IsTrue(answer);
    Py_DECREF(answer);
    return bare;
}

int fan_sequence_arg(PyObject *o, const char *what, PyObject **out)
{
    bool text = PyUnicode_Check(o) || PyBytes_Check(o);
    bool unordered = PyDict_Check(o) || PyAnySet_Check(o);
    bool items = Py_TYPE(o)->tp_iter || PySequence_Check(o);
    if (text || unordered || !items) {
        return fan_refuse(PyExc_TypeError, "%s: expected a sequence, got %s", what,
                          FAN_TYPE_TEXT(o));
    }
    *out = PySequence_Tuple(o);
    if (*out)
        return 0;
    if (PyErr_ExceptionMatches(PyExc_TypeError) && fan_is_array(o)) {
        PyErr_Clear();
        fan_refuse(PyExc_TypeError, "%s: expected a sequence, got %s without axes", what,
                   FAN_TYPE_TEXT(o));
    }
    return -1;
}

/* ---- numbers of bytes ---- */

static bool is_number_of_bytes(PyObject *o)
{
    if (PyFloat_Check(o))
        return true;
    return PyIndex_Check(o) && !PyBool_Check(o) && !fan_is_array(o);
}

/* whole_bytes: reads a number of bytes, UINT64_MAX: more than any machine has; 1: it is negative or
 * not whole; -1 with an exception. */
static int whole_bytes(PyObject *o, uint64_t *out)
{
    if (PyFloat_Check(o)) {
        double f = PyFloat_AS_DOUBLE(o);
        *out = UINT64_MAX;
        if (f >= 0x1p63)
            return 0;
        if (!(f >= 0) || f != floor(f))
            return 1;
        *out = (uint64_t)f;
        return 0;
    }
    PyObject *i = PyNumber_Index(o);
    if (!i)
        return -1;
    int negative = PyObject_RichCompareBool(i, fan_state_get()->zero, Py_LT);
    if (negative == 0) {
        *out = PyLong_AsUnsignedLongLong(i);
        if (*out == UINT64_MAX)
            PyErr_Clear();
    }
    Py_DECREF(i);
    return negative;
}

int fan_budget_arg(PyObject *o, const char *what, uint64_t *out)
{
    if (!is_number_of_bytes(o)) {
        return fan_refuse(PyExc_TypeError,
                          "%s: expected a number of bytes, math.inf or None, got %R", what, o);
    }
    int wrong = whole_bytes(o, out);
    if (wrong > 0) {
        return fan_refuse(PyExc_ValueError,
                          "%s: expected a non-negative whole number of bytes, or math.inf, got %R",
                          what, o);
    }
    return wrong;
}

int fan_buffer_budget_arg(PyObject *o, uint64_t *out)
{
    if (!PyUnicode_Check(o) && !is_number_of_bytes(o)) {
        return fan_refuse(PyExc_TypeError,
                          "budget: expected \"auto\", a number of bytes, math.inf or None, got %R",
                          o);
    }
    if (!PyUnicode_Check(o))
        return fan_budget_arg(o, "budget", out);
    if (PyUnicode_CompareWithASCIIString(o, "auto") != 0) {
        return fan_refuse(PyExc_ValueError,
                          "budget: expected \"auto\", a number of bytes or math.inf, got %R", o);
    }
    *out = FAN_BUDGET_AUTO;
    return 0;
}

PyObject *fan_budget_wrap(uint64_t budget)
{
    if (budget == FAN_BUDGET_AUTO)
        return PyUnicode_FromString("auto");
    if (budget == UINT64_MAX)
        return PyFloat_FromDouble(Py_HUGE_VAL);
    return PyLong_FromUnsignedLongLong(budget);
}

/* ---- accumulate= and scale= ---- */

int fan_accumulate_arg(PyObject *o, fan_dtype *dtype, bool *exact)
{
    *exact = PyUnicode_Check(o) && PyUnicode_CompareWithASCIIString(o, "exact") == 0;
    *dtype = FAN_DT_NONE;
    if (*exact)
        return 0;
    return fan_dtype_parse(o, dtype);
}

void fan_scale_finish(fan_take *how)
{
    fan_scale *s = &how->scale;
    bool fits = s->re >= -0x1p63 && s->re < 0x1p63;
    how->integral = how->real && fits && s->re == floor(s->re);
    if (how->integral)
        s->i = (int64_t)s->re;
}

/* scale_integer: a scale that is an integer. */
static int scale_integer(PyObject *o, fan_take *how)
{
    fan_scale *s = &how->scale;
    int overflow = 0;
    PyObject *number = PyNumber_Index(o);
    if (number) {
        s->i = PyLong_AsLongLongAndOverflow(number, &overflow);
        s->re = PyLong_AsDouble(number);
        Py_DECREF(number);
    }
    if (!PyErr_Occurred()) {
        how->integral = !overflow;
        return 0;
    }
    if (!PyErr_ExceptionMatches(PyExc_OverflowError))
        return -1;
    PyErr_Clear();
    return fan_refuse(PyExc_ValueError, "scale: %R is more than a float can hold", o);
}

/* is_real: whether `o` is one number that float() takes. */
static bool is_real(PyObject *o)
{
    const PyNumberMethods *methods = Py_TYPE(o)->tp_as_number;
    bool text = PyUnicode_Check(o) || PyBytes_Check(o);
    if (text || !methods || !methods->nb_float)
        return false;
    return !PyArray_Check(o) || PyArray_NDIM((PyArrayObject *)o) == 0;
}

int fan_scale_arg(PyObject *o, fan_take *how)
{
    fan_scale *s = &how->scale;
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
    } else if (PyFloat_Check(o)) {
        s->re = PyFloat_AS_DOUBLE(o);
    } else if (is_bool(o)) {
        s->re = PyObject_IsTrue(o);
    } else if (PyIndex_Check(o) && !PyArray_Check(o)) {
        return scale_integer(o, how);
    } else if (is_real(o)) {
        PyObject *number = PyNumber_Float(o);
        if (!number)
            return -1;
        s->re = PyFloat_AS_DOUBLE(number);
        Py_DECREF(number);
    } else {
        return fan_refuse(PyExc_TypeError, "scale: expected a number, got %s", FAN_TYPE_TEXT(o));
    }
    fan_scale_finish(how);
    return 0;
}

/* ---- weight= and weights= ---- */

/* weight_exactly: `number`, a float, is what `o` is; takes the reference. */
static int weight_exactly(PyObject *o, PyObject *number, const char *name, fan_weight *out)
{
    if (!number && PyErr_ExceptionMatches(PyExc_OverflowError)) {
        PyErr_Clear();
        return fan_refuse(PyExc_ValueError, "%s: %R is more than a float can hold (W4)", name, o);
    }
    if (!number)
        return -1;
    int same = PyObject_RichCompareBool(o, number, Py_EQ);
    out->re = PyFloat_AS_DOUBLE(number);
    Py_DECREF(number);
    if (same < 0)
        return -1;
    if (!same && isfinite(out->re)) {
        return fan_refuse(PyExc_ValueError,
                          "%s: %R is no float exactly, and would be rounded: give float(w) (W4)",
                          name, o);
    }
    return 0;
}

/* weight_integer: as weight_exactly, of a Python int or a NumPy integer. NumPy compares its own
 * with a float as two floats, Python compares both exactly. */
static int weight_integer(PyObject *o, const char *name, fan_weight *out)
{
    PyObject *whole = PyNumber_Index(o);
    if (!whole)
        return -1;
    int bad = weight_exactly(whole, PyNumber_Float(whole), name, out);
    Py_DECREF(whole);
    return bad;
}

int fan_weight_arg(PyObject *o, const char *name, fan_weight *out)
{
    *out = (fan_weight){.on = o != Py_None};
    if (o == Py_None)
        return 0;
    int bad = 0;
    if (is_bool(o)) {
        return fan_refuse(PyExc_ValueError, "%s: expected a number, got the bool %R (W4)", name, o);
    } else if (PyFloat_Check(o)) {
        out->re = PyFloat_AS_DOUBLE(o);
    } else if (PyLong_Check(o) || PyArray_IsScalar(o, Integer)) {
        out->integer = true;
        bad = weight_integer(o, name, out);
    } else if (PyComplex_Check(o) || PyArray_IsScalar(o, ComplexFloating)) {
        Py_complex c = PyComplex_AsCComplex(o);
        if (c.real == -1.0 && PyErr_Occurred())
            return -1;
        out->re = c.real;
        out->im = c.imag;
    } else if (PyArray_IsScalar(o, Floating)) {
        bad = weight_exactly(o, PyNumber_Float(o), name, out);
    } else {
        return fan_refuse(PyExc_TypeError,
                          "%s: expected a number, got %s: give float(w) or int(w) (W4)", name,
                          FAN_TYPE_TEXT(o));
    }
    if (bad)
        return -1;
    if (!isfinite(out->re) || !isfinite(out->im))
        return fan_refuse(PyExc_ValueError, "%s: expected a finite number, got %R (W4)", name, o);
    return 0;
}

static int late_by_key(const void *a, const void *b)
{
    const fan_late_weight *x = a;
    const fan_late_weight *y = b;
    return (x->key > y->key) - (x->key < y->key);
}

/* late_read: the i-th item: a pair of a mapping's, or a weight. */
static int late_read(PyObject *item, Py_ssize_t i, bool pairs, fan_late_weight *out)
{
    PyObject *weight = item;
    out->key = i;
    if (pairs) {
        weight = PyTuple_GET_ITEM(item, 1);
        if (fan_index(PyTuple_GET_ITEM(item, 0), "weights: key", PyExc_ValueError, &out->key) < 0)
            return -1;
    }
    if (weight == Py_None)
        return fan_refuse(PyExc_TypeError, "weights: expected a number, got None (W4)");
    return fan_weight_arg(weight, "weights", &out->weight);
}

int fan_late_arg(PyObject *o, fan_late_weight **out, size_t *n)
{
    bool pairs = PyDict_Check(o);
    PyObject *items;
    *out = NULL;
    *n = 0;
    if (o == Py_None)
        return 0;
    if (!pairs && !PyList_Check(o) && !PyTuple_Check(o)) {
        return fan_refuse(
            PyExc_TypeError,
            "weights: expected a dict from keys to numbers, or a list in the order of "
            "arrival, got %s",
            FAN_TYPE_TEXT(o));
    }
    if (pairs)
        items = PyDict_Items(o);
    else
        items = PySequence_List(o);
    if (!items)
        return -1;
    Py_ssize_t count = PyList_GET_SIZE(items);
    fan_late_weight *all = fan_calloc(((size_t)count + 1) * sizeof *all);
    int bad = all ? 0 : fan_no_memory();
    for (Py_ssize_t i = 0; i < count && !bad; i++)
        bad = late_read(PyList_GET_ITEM(items, i), i, pairs, &all[i]);
    Py_DECREF(items);
    if (bad) {
        fan_free(all);
        return -1;
    }
    qsort(all, (size_t)count, sizeof *all, late_by_key);
    *out = all;
    *n = (size_t)count;
    return 0;
}

/* ---- integers out, words in ---- */

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

/* refuse_plan: of a word that names no plan. */
static int refuse_plan(PyObject *word)
{
    char every[FAN_PLAN_COUNT * 16];
    snprintf(every, sizeof every, "%s", fan_plan_word(0));
    for (int k = 1; k < FAN_PLAN_COUNT; k++)
        fan_append(every, sizeof every, ", %s", fan_plan_word(k));
    return fan_set_error(PyExc_ValueError,
                         "leave_out: no plan has %R. A word names a rule, as in \"S12\", or one "
                         "of: %s",
                         word, every);
}

int fan_plans_arg(PyObject *words, uint64_t *bits)
{
    *bits = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(words); i++) {
        PyObject *word = PyTuple_GET_ITEM(words, i);
        const char *text = "";
        if (PyUnicode_Check(word))
            text = fan_word_of(word);
        if (!text)
            return -1;
        uint64_t here = fan_plan_bits(text);
        if (!here)
            return refuse_plan(word);
        *bits |= here;
    }
    return 0;
}
