/* dtype: NumPy's element types and ours. */
#include "py/base/py.h"

#include <string.h>

/* ml_types: the scalar types of ml_dtypes, by dtype; NULL where it has none, or the caller has not
 * imported it. Never fails. */
static PyObject *const *ml_types(void)
{
    fan_state *st = fan_state_get();
    PyObject *modules, *m;
    if (st->has_ml_types)
        return st->ml_types;
    modules = PyImport_GetModuleDict();
    m = modules ? PyDict_GetItemString(modules, "ml_dtypes") : NULL; /* borrowed */
    if (!m)
        return st->ml_types;
    Py_INCREF(m);
    bool all = true; /* false: another thread imports it now */
    for (int d = 0; d < FAN_DT_COUNT; d++)
        if (fan_dtype_of_ml_dtypes((fan_dtype)d) && !st->ml_types[d] &&
            !(st->ml_types[d] = PyObject_GetAttrString(m, fan_dtype_name((fan_dtype)d)))) {
            PyErr_Clear();
            all = false;
        }
    st->has_ml_types = all;
    Py_DECREF(m);
    return st->ml_types;
}

/* of_type: not inlined, so that the fast path saves no registers for it. */
__attribute__((noinline)) static fan_dtype of_type(PyTypeObject *t)
{
    PyObject *const *types = ml_types();
    for (int d = 0; t && d < FAN_DT_COUNT; d++)
        if (types[d] == (PyObject *)t)
            return (fan_dtype)d;
    return FAN_DT_NONE;
}

/* SIZED, INTEGER: a type of C, and its unsigned one, by size. */
#define SIZED(type, what)                    \
    (sizeof(type) == 1   ? FAN_DT_##what##8  \
     : sizeof(type) == 2 ? FAN_DT_##what##16 \
     : sizeof(type) == 4 ? FAN_DT_##what##32 \
                         : FAN_DT_##what##64)
#define INTEGER(NAME, type) \
    [NPY_##NAME] = 1 + SIZED(type, INT), [NPY_U##NAME] = 1 + SIZED(type, UINT)

fan_dtype fan_dtype_of_descr(PyArray_Descr *d)
{
    static const uint8_t more_by_one[NPY_USERDEF] = {[NPY_BOOL] = 1 + FAN_DT_BOOL,
                                                     [NPY_HALF] = 1 + FAN_DT_FLOAT16,
                                                     [NPY_FLOAT] = 1 + FAN_DT_FLOAT32,
                                                     [NPY_DOUBLE] = 1 + FAN_DT_FLOAT64,
                                                     [NPY_CFLOAT] = 1 + FAN_DT_COMPLEX64,
                                                     [NPY_CDOUBLE] = 1 + FAN_DT_COMPLEX128,
                                                     INTEGER(BYTE, npy_byte),
                                                     INTEGER(SHORT, npy_short),
                                                     INTEGER(INT, npy_int),
                                                     INTEGER(LONG, npy_long),
                                                     INTEGER(LONGLONG, npy_longlong)};
    if (!PyDataType_ISNOTSWAPPED(d))
        return FAN_DT_NONE;
    if (d->type_num >= 0 && d->type_num < NPY_USERDEF)
        return more_by_one[d->type_num] ? (fan_dtype)(more_by_one[d->type_num] - 1) : FAN_DT_NONE;
    return of_type(d->typeobj);
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
    PyObject *type;
    if (!fan_dtype_of_ml_dtypes(d))
        return PyArray_DescrFromType(numbers[d]);
    type = ml_types()[d];
    if (!type) {
        PyErr_Format(PyExc_TypeError,
                     "NumPy has %s only through ml_dtypes, which is not imported: import ml_dtypes",
                     fan_dtype_name(d));
        return NULL;
    }
    return PyArray_DescrConverter(type, &descr) == NPY_SUCCEED ? descr : NULL;
}

int fan_dtype_refuse(PyArray_Descr *d, const char *what)
{
    PyObject *type = fan_state_get()->dtype_error, *name = (PyObject *)d;
    if (!PyDataType_ISNOTSWAPPED(d) && PyTypeNum_ISNUMBER(d->type_num))
        return fan_refuse(type,
                          "%s has dtype %S of foreign byte order; expected native: "
                          "x.astype(x.dtype.newbyteorder('=')), or Slot(combine=f)",
                          what, name);
    if (d->type_num == NPY_LONGDOUBLE || d->type_num == NPY_CLONGDOUBLE)
        return fan_refuse(
            type,
            "%s has dtype %S, which is not summed; expected %s: x.astype('%s'), or Slot(combine=f)",
            what, name, d->type_num == NPY_LONGDOUBLE ? "float64" : "complex128",
            d->type_num == NPY_LONGDOUBLE ? "float64" : "complex128");
    if (PyTypeNum_ISUSERDEF(d->type_num)) {
        char names[256] = "";
        for (int i = 0; i < FAN_DT_COUNT; i++)
            if (fan_dtype_of_ml_dtypes((fan_dtype)i))
                fan_append(names, sizeof names, "%s%s", names[0] ? ", " : "",
                           fan_dtype_name((fan_dtype)i));
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
    PyObject *text, *after;
    if (PyUnicode_Check(o))
        return Py_NewRef(o);
    if (strcmp(Py_TYPE(o)->tp_name, "torch.dtype") != 0)
        return NULL;
    text = PyObject_Str(o);
    after =
        text ? PyUnicode_Substring(text, (Py_ssize_t)strlen("torch."), PyUnicode_GET_LENGTH(text))
             : NULL;
    Py_XDECREF(text);
    return after;
}

int fan_dtype_parse(PyObject *o, fan_dtype *out)
{
    PyArray_Descr *descr = NULL;
    PyObject *name;
    const char *text;
    *out = FAN_DT_NONE;
    if (o == Py_None)
        return 0;
    name = name_of(o);
    if (!name && PyErr_Occurred())
        return -1;
    if (name) {
        text = fan_word_of(name);
        if (text)
            *out = fan_dtype_from_name(text);
        if (text && *out == FAN_DT_NONE && o != name)
            fan_refuse(
                fan_state_get()->dtype_error,
                "dtype %S is not summed; expected bool, int8..64, uint8..64, float or complex", o);
        Py_DECREF(name);
        if (*out != FAN_DT_NONE)
            return 0;
        if (PyErr_Occurred())
            return -1;
    }
    if (PyArray_DescrConverter(o, &descr) != NPY_SUCCEED) {
        if (!PyErr_ExceptionMatches(PyExc_Exception))
            return -1;
        PyErr_Clear();
        return fan_refuse(PyUnicode_Check(o) ? PyExc_ValueError : PyExc_TypeError,
                          "expected a dtype (a NumPy or torch dtype, or a name as 'float32' or "
                          "'bfloat16'), got %R",
                          o);
    }
    *out = fan_dtype_of_descr(descr);
    if (*out == FAN_DT_NONE && !PyDataType_ISNOTSWAPPED(descr) &&
        PyTypeNum_ISNUMBER(descr->type_num)) {
        PyArray_Descr *native = PyArray_DescrNewByteorder(descr, NPY_NATIVE);
        if (native)
            fan_refuse(fan_state_get()->dtype_error,
                       "dtype %S is not summed: its byte order is foreign; expected native byte "
                       "order, '%S': x.astype('%S')",
                       (PyObject *)descr, (PyObject *)native, (PyObject *)native);
        Py_XDECREF(native);
    } else if (*out == FAN_DT_NONE)
        fan_refuse(fan_state_get()->dtype_error,
                   "dtype %S is not summed; expected bool, int8..64, uint8..64, float or complex "
                   "in native byte order, "
                   "or a slot without a dtype and with combine=f",
                   (PyObject *)descr);
    Py_DECREF(descr);
    return *out == FAN_DT_NONE ? -1 : 0;
}
