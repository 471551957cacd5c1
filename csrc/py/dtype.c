/* dtype: NumPy's element types and ours. */
#include "py/py.h"

#include <string.h>

static fan_dtype of_number(int type_num)
{
    switch (type_num) {
    case NPY_BOOL:
        return FAN_DT_BOOL;
    case NPY_HALF:
        return FAN_DT_FLOAT16;
    case NPY_FLOAT:
        return FAN_DT_FLOAT32;
    case NPY_DOUBLE:
        return FAN_DT_FLOAT64;
    case NPY_CFLOAT:
        return FAN_DT_COMPLEX64;
    case NPY_CDOUBLE:
        return FAN_DT_COMPLEX128;
#define INTEGER(NAME, type)                        \
    case NPY_##NAME:                               \
        return sizeof(type) == 1   ? FAN_DT_INT8   \
               : sizeof(type) == 2 ? FAN_DT_INT16  \
               : sizeof(type) == 4 ? FAN_DT_INT32  \
                                   : FAN_DT_INT64; \
    case NPY_U##NAME:                              \
        return sizeof(type) == 1   ? FAN_DT_UINT8  \
               : sizeof(type) == 2 ? FAN_DT_UINT16 \
               : sizeof(type) == 4 ? FAN_DT_UINT32 \
                                   : FAN_DT_UINT64
        INTEGER(BYTE, npy_byte);
        INTEGER(SHORT, npy_short);
        INTEGER(INT, npy_int);
        INTEGER(LONG, npy_long);
        INTEGER(LONGLONG, npy_longlong);
#undef INTEGER
    default:
        return FAN_DT_NONE;
    }
}

/* find_low: ml_dtypes' types, where the caller has imported it. Never fails: what is not there stays NULL. */
static void find_low(fan_state *st)
{
    PyObject *modules, *m;
    if (st->bfloat16)
        return;
    modules = PyImport_GetModuleDict();
    m = modules ? PyDict_GetItemString(modules, "ml_dtypes") : NULL; /* borrowed */
    if (!m)
        return;
    Py_INCREF(m);
#define X(field)                                                        \
    if (!st->field && !(st->field = PyObject_GetAttrString(m, #field))) \
        PyErr_Clear();
    X(bfloat16)
    X(float8_e4m3fn)
    X(float8_e5m2)
#undef X
    Py_DECREF(m);
}

static fan_dtype of_type(PyTypeObject *t)
{
    fan_state *st = fan_state_get();
    PyObject *o = (PyObject *)t;
    find_low(st);
    return !t                       ? FAN_DT_NONE
           : o == st->bfloat16      ? FAN_DT_BFLOAT16
           : o == st->float8_e4m3fn ? FAN_DT_FLOAT8_E4M3FN
           : o == st->float8_e5m2   ? FAN_DT_FLOAT8_E5M2
                                    : FAN_DT_NONE;
}

fan_dtype fan_dtype_of_descr(PyArray_Descr *d)
{
    if (!PyDataType_ISNOTSWAPPED(d))
        return FAN_DT_NONE;
    if (d->type_num >= 0 && d->type_num < NPY_USERDEF)
        return of_number(d->type_num);
    return of_type(d->typeobj);
}

static PyObject *low_type(fan_dtype d)
{
    fan_state *st = fan_state_get();
    find_low(st);
    return d == FAN_DT_BFLOAT16 ? st->bfloat16 : d == FAN_DT_FLOAT8_E4M3FN ? st->float8_e4m3fn : st->float8_e5m2;
}

bool fan_dtype_of_ml_dtypes(fan_dtype d)
{
    return d == FAN_DT_BFLOAT16 || d == FAN_DT_FLOAT8_E4M3FN || d == FAN_DT_FLOAT8_E5M2;
}

bool fan_dtype_needs_ml_dtypes(fan_dtype d) { return fan_dtype_of_ml_dtypes(d) && !low_type(d); }

PyArray_Descr *fan_descr_of_dtype(fan_dtype d)
{
    static const int numbers[FAN_DT_COUNT] = {
        [FAN_DT_BOOL] = NPY_BOOL,           [FAN_DT_INT8] = NPY_INT8,
        [FAN_DT_INT16] = NPY_INT16,         [FAN_DT_INT32] = NPY_INT32,
        [FAN_DT_INT64] = NPY_INT64,         [FAN_DT_UINT8] = NPY_UINT8,
        [FAN_DT_UINT16] = NPY_UINT16,       [FAN_DT_UINT32] = NPY_UINT32,
        [FAN_DT_UINT64] = NPY_UINT64,       [FAN_DT_FLOAT16] = NPY_FLOAT16,
        [FAN_DT_FLOAT32] = NPY_FLOAT32,     [FAN_DT_FLOAT64] = NPY_FLOAT64,
        [FAN_DT_COMPLEX64] = NPY_COMPLEX64, [FAN_DT_COMPLEX128] = NPY_COMPLEX128,
    };
    PyArray_Descr *descr = NULL;
    PyObject *type;
    if (!fan_dtype_of_ml_dtypes(d))
        return PyArray_DescrFromType(numbers[d]);
    type = low_type(d);
    if (!type) {
        PyErr_Format(PyExc_TypeError, "NumPy has %s only through ml_dtypes, which is not imported: import ml_dtypes",
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
        return fan_refuse(type, "%s has dtype %S, which is not summed; expected %s: x.astype('%s'), or Slot(combine=f)",
                          what, name, d->type_num == NPY_LONGDOUBLE ? "float64" : "complex128",
                          d->type_num == NPY_LONGDOUBLE ? "float64" : "complex128");
    if (PyTypeNum_ISUSERDEF(d->type_num))
        return fan_refuse(type,
                          "%s has dtype %S, which is not summed; of ml_dtypes, bfloat16, float8_e4m3fn and float8_e5m2 "
                          "are: x.astype('float32'), or Slot(combine=f)",
                          what, name);
    return fan_refuse(type,
                      "%s has dtype %S, which has no sum; expected bool, int8..64, uint8..64, float or complex: "
                      "x.astype(..), or Slot(combine=f)",
                      what, name);
}

/* name_of: the name by which `o` calls a dtype: "bfloat16" of a str or of torch.bfloat16; NULL, without exception,
 * where it is neither. */
static PyObject *name_of(PyObject *o)
{
    PyObject *text, *after;
    if (PyUnicode_Check(o))
        return Py_NewRef(o);
    if (strcmp(Py_TYPE(o)->tp_name, "torch.dtype") != 0)
        return NULL;
    text = PyObject_Str(o);
    after = text ? PyUnicode_Substring(text, (Py_ssize_t)strlen("torch."), PyUnicode_GET_LENGTH(text)) : NULL;
    Py_XDECREF(text);
    return after;
}

/* refuse_swapped: a dtype of foreign byte order. */
static void refuse_swapped(PyArray_Descr *d)
{
    PyArray_Descr *native = PyArray_DescrNewByteorder(d, NPY_NATIVE);
    if (native)
        fan_refuse(
            fan_state_get()->dtype_error,
            "dtype %S is not summed: its byte order is foreign; expected native byte order, '%S': x.astype('%S')",
            (PyObject *)d, (PyObject *)native, (PyObject *)native);
    Py_XDECREF(native);
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
            fan_refuse(fan_state_get()->dtype_error,
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
                          "expected a dtype (a NumPy or torch dtype, or a name as 'float32' or 'bfloat16'), got %R", o);
    }
    *out = fan_dtype_of_descr(descr);
    if (*out == FAN_DT_NONE && !PyDataType_ISNOTSWAPPED(descr) && PyTypeNum_ISNUMBER(descr->type_num))
        refuse_swapped(descr);
    else if (*out == FAN_DT_NONE)
        fan_refuse(fan_state_get()->dtype_error,
                   "dtype %S is not summed; expected bool, int8..64, uint8..64, float or complex in native byte order, "
                   "or a slot without a dtype and with combine=f",
                   (PyObject *)descr);
    Py_DECREF(descr);
    return *out == FAN_DT_NONE ? -1 : 0;
}
