/* dtype: NumPy's element types and ours.
 *
 * In order: the types of ml_dtypes; from a type of NumPy to ours and back; errors about a type that
 * is none of ours; a dtype from what a caller gives for one. */
#include "py/base/py.h"

#include <string.h>

/* ml_types: the scalar types of ml_dtypes, by dtype; NULL where it has none, or the caller has not
 * imported it. Never fails. */
static PyObject *const *ml_types(void)
{
    fan_state *state = fan_state_get();
    if (state->has_ml_types)
        return state->ml_types;
    PyObject *m = fan_module_loaded("ml_dtypes");
    if (!m)
        return state->ml_types;
    Py_INCREF(m);
    bool all = true; /* false: another thread imports it now */
    for (fan_dtype d = 0; d < FAN_DT_COUNT; d++) {
        if (!fan_dtype_of_ml_dtypes(d) || state->ml_types[d])
            continue;
        state->ml_types[d] = PyObject_GetAttrString(m, fan_dtype_name(d));
        if (!state->ml_types[d]) {
            PyErr_Clear();
            all = false;
        }
    }
    state->has_ml_types = all;
    Py_DECREF(m);
    return state->ml_types;
}

/* of_type: not inlined, so that the fast path saves no registers for it. */
__attribute__((noinline)) static fan_dtype of_type(PyTypeObject *t)
{
    PyObject *const *types = ml_types();
    for (int d = 0; t && d < FAN_DT_COUNT; d++) {
        if (types[d] == (PyObject *)t)
            return (fan_dtype)d;
    }
    return FAN_DT_NONE;
}

/* INTEGER: a type of C, and its unsigned one: 8 bits, 16, 32 and 64 follow each other. */
_Static_assert(FAN_DT_INT8 + 3 == FAN_DT_INT64 && FAN_DT_UINT8 + 3 == FAN_DT_UINT64,
               "integer dtypes are in the order of their sizes");
#define INTEGER(NAME, type)                                             \
    [NPY_##NAME] = 1 + FAN_DT_INT8 + __builtin_ctz(sizeof(npy_##type)), \
    [NPY_U##NAME] = 1 + FAN_DT_UINT8 + __builtin_ctz(sizeof(npy_##type))

fan_dtype fan_dtype_of_descr(PyArray_Descr *d)
{
    static const uint8_t more_by_one[NPY_USERDEF] = {[NPY_BOOL] = 1 + FAN_DT_BOOL,
                                                     [NPY_HALF] = 1 + FAN_DT_FLOAT16,
                                                     [NPY_FLOAT] = 1 + FAN_DT_FLOAT32,
                                                     [NPY_DOUBLE] = 1 + FAN_DT_FLOAT64,
                                                     [NPY_CFLOAT] = 1 + FAN_DT_COMPLEX64,
                                                     [NPY_CDOUBLE] = 1 + FAN_DT_COMPLEX128,
                                                     INTEGER(BYTE, byte),
                                                     INTEGER(SHORT, short),
                                                     INTEGER(INT, int),
                                                     INTEGER(LONG, long),
                                                     INTEGER(LONGLONG, longlong)};
    if (!PyDataType_ISNOTSWAPPED(d))
        return FAN_DT_NONE;
    if (d->type_num < 0 || d->type_num >= NPY_USERDEF)
        return of_type(d->typeobj);
    uint8_t number = more_by_one[d->type_num];
    return number ? (fan_dtype)(number - 1) : FAN_DT_NONE;
}

bool fan_dtype_needs_ml_dtypes(fan_dtype d)
{
    return fan_dtype_of_ml_dtypes(d) && !ml_types()[d];
}

PyArray_Descr *fan_descr_of_dtype(fan_dtype d)
{
#define NUMBER_IN_NUMPY(NAME) NPY_##NAME
#define NUMBER_IN_ML_DTYPES(NAME) NPY_NOTYPE
    static const int numbers[FAN_DT_COUNT] = {
#define X(NAME, name, bytes, kind, SUM, LIBRARY, ...) NUMBER_IN_##LIBRARY(NAME),
        FAN_DTYPE_LIST(X)
#undef X
    };
    PyArray_Descr *descr = NULL;
    if (!fan_dtype_of_ml_dtypes(d))
        return PyArray_DescrFromType(numbers[d]);
    PyObject *type = ml_types()[d];
    if (!type) {
        PyErr_Format(PyExc_TypeError,
                     "NumPy has %s only through ml_dtypes, which is not imported: import ml_dtypes",
                     fan_dtype_name(d));
        return NULL;
    }
    (void)PyArray_DescrConverter(type, &descr); /* NULL: it failed */
    return descr;
}

int fan_dtype_refuse(PyArray_Descr *d, const char *what)
{
    PyObject *type = fan_state_get()->dtype_error;
    PyObject *name = (PyObject *)d;
    if (!PyDataType_ISNOTSWAPPED(d) && PyTypeNum_ISNUMBER(d->type_num)) {
        return fan_refuse(type,
                          "%s has dtype %S of foreign byte order; expected native: "
                          "x.astype(x.dtype.newbyteorder('=')), or Slot(combine=f)",
                          what, name);
    }
    bool long_real = d->type_num == NPY_LONGDOUBLE;
    if (long_real || d->type_num == NPY_CLONGDOUBLE) {
        const char *instead = long_real ? "float64" : "complex128";
        return fan_refuse(
            type,
            "%s has dtype %S, which is not summed; expected %s: x.astype('%s'), or Slot(combine=f)",
            what, name, instead, instead);
    }
    if (PyTypeNum_ISUSERDEF(d->type_num)) {
        char names[256] = "";
        for (int i = 0; i < FAN_DT_COUNT; i++) {
            if (fan_dtype_of_ml_dtypes((fan_dtype)i)) {
                fan_append(names, sizeof names, "%s%s", names[0] ? ", " : "",
                           fan_dtype_name((fan_dtype)i));
            }
        }
        return fan_refuse(type,
                          "%s has dtype %S, which is not summed; expected one of ml_dtypes' %s: "
                          "x.astype('float32'), or "
                          "Slot(combine=f)",
                          what, name, names);
    }
    return fan_refuse(
        type,
        "%s has dtype %S, which has no sum; expected bool, int8..64, uint8..64, float or complex: "
        "x.astype(..), or Slot(combine=f)",
        what, name);
}

/* name_of: the name by which `o` calls a dtype: "bfloat16" of a str or of torch.bfloat16; NULL,
 * without exception, where it is neither. */
static PyObject *name_of(PyObject *o)
{
    const Py_ssize_t before = (Py_ssize_t)strlen("torch.");
    if (PyUnicode_Check(o))
        return Py_NewRef(o);
    if (strcmp(Py_TYPE(o)->tp_name, "torch.dtype") != 0)
        return NULL;
    PyObject *text = PyObject_Str(o);
    if (!text)
        return NULL;
    PyObject *name = PyUnicode_Substring(text, before, PyUnicode_GET_LENGTH(text));
    Py_DECREF(text);
    return name;
}

/* parse_name: reads a name; *out stays FAN_DT_NONE where it is none of ours. 0, or -1 with an
 * exception. o: the object whose name it is. */
static int parse_name(PyObject *o, PyObject *name, fan_dtype *out)
{
    const char *text = fan_word_of(name);
    if (!text)
        return -1;
    *out = fan_dtype_from_name(text);
    if (*out != FAN_DT_NONE || o == name)
        return 0;
    return fan_refuse(
        fan_state_get()->dtype_error,
        "dtype %S is not summed; expected bool, int8..64, uint8..64, float or complex", o);
}

/* refuse_descr: DTypeError for a dtype of NumPy that is none of ours. Returns -1. */
static int refuse_descr(PyArray_Descr *descr)
{
    PyObject *type = fan_state_get()->dtype_error;
    if (PyDataType_ISNOTSWAPPED(descr) || !PyTypeNum_ISNUMBER(descr->type_num)) {
        return fan_refuse(type,
                          "dtype %S is not summed; expected bool, int8..64, uint8..64, float or "
                          "complex in native byte order, or a slot without a dtype and with "
                          "combine=f",
                          (PyObject *)descr);
    }
    PyObject *native = (PyObject *)PyArray_DescrNewByteorder(descr, NPY_NATIVE);
    if (!native)
        return -1;
    fan_refuse(type,
               "dtype %S is not summed: its byte order is foreign; expected native byte order, "
               "'%S': x.astype('%S')",
               (PyObject *)descr, native, native);
    Py_DECREF(native);
    return -1;
}

int fan_dtype_parse(PyObject *o, fan_dtype *out)
{
    PyArray_Descr *descr = NULL;
    *out = FAN_DT_NONE;
    if (o == Py_None)
        return 0;
    PyObject *name = name_of(o);
    if (!name && PyErr_Occurred())
        return -1;
    if (name) {
        int bad = parse_name(o, name, out);
        Py_DECREF(name);
        if (bad || *out != FAN_DT_NONE)
            return bad;
    }
    if (PyArray_DescrConverter(o, &descr) != NPY_SUCCEED) {
        if (!PyErr_ExceptionMatches(PyExc_Exception))
            return -1;
        PyErr_Clear();
        PyObject *type = PyExc_TypeError;
        if (PyUnicode_Check(o))
            type = PyExc_ValueError;
        return fan_refuse(type,
                          "expected a dtype (a NumPy or torch dtype, or a name as 'float32' or "
                          "'bfloat16'), got %R",
                          o);
    }
    *out = fan_dtype_of_descr(descr);
    int bad = 0;
    if (*out == FAN_DT_NONE)
        bad = refuse_descr(descr);
    Py_DECREF(descr);
    return bad;
}
