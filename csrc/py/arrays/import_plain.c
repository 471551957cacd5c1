/* import_plain: reads plain contributions (buffer/plain.h), without a Python call and without a
 * lock: ndarrays, exact torch tensors, NumPy's scalars and Python's numbers.
 *
 * In this order: the kind of a tensor, of a number, of an ndarray; whether a contribution still is
 * what it was when it came; fresh arrays for sums and copies; the facts of an object (facts.h). */
#include "py/arrays/dlpack.h"
#include "py/arrays/arrays.h"
#include "py/arrays/facts.h"

#include "base/mem.h"

#include <assert.h>
#include <numpy/arrayscalars.h>
#include <stdatomic.h>
#include <string.h>

/* Tensors for which torch's table threw. fan_tensor_look calls the getters of fan_tensor_is_plain
 * after the first one only, as they cost a quarter of an add. */
static atomic_llong throws;

void fan_tensor_threw(void)
{
    atomic_fetch_add_explicit(&throws, 1, memory_order_relaxed);
}
#ifdef FAN_TEST
long long fan_tensor_throws(void)
{
    return atomic_load_explicit(&throws, memory_order_relaxed);
}
#endif

/* call_getter: reads an attribute of `o` by its descriptor. New reference; NULL with an
 * exception. */
static PyObject *call_getter(PyObject *descriptor, PyObject *o)
{
    const PyGetSetDef *getter = ((PyGetSetDescrObject *)descriptor)->d_getset;
    return getter->get(o, getter->closure);
}

bool fan_tensor_is_plain(PyObject *o)
{
    PyObject *plain = fan_state_get()->torch_plain;
    PyObject *runs_python = PyCFunction_GET_FUNCTION(PyTuple_GET_ITEM(plain, 0))(NULL, NULL);
    bool good = runs_python != NULL;
    for (Py_ssize_t i = 1; good && runs_python == Py_False && i < PyTuple_GET_SIZE(plain); i += 2) {
        PyObject *value = call_getter(PyTuple_GET_ITEM(plain, i), o);
        good = value == PyTuple_GET_ITEM(plain, i + 1);
        Py_XDECREF(value);
    }
    Py_XDECREF(runs_python);
    PyErr_Clear();
    return good;
}

bool fan_tensor_look(PyObject *o, fan_dl_tensor *out)
{
    if (atomic_load_explicit(&throws, memory_order_relaxed) && !fan_tensor_is_plain(o))
        return false;
    if (fan_state_get()->torch_api->look(o, out) == 0)
        return true;
    PyErr_Clear();
    fan_tensor_threw();
    return false;
}

bool fan_dl_plain(const fan_dl_tensor *t, bool gaps, fan_plain_kind *kind, char **data)
{
    int64_t elements = 1;
    bool in_c_order = true;
    if (t->device.type != FAN_DL_CPU)
        return false;
    if (t->dtype.lanes != 1)
        return false;
    if (t->ndim < 0 || t->ndim > FAN_PLAIN_NDIM)
        return false;
    if (!t->data || t->byte_offset > INT64_MAX)
        return false;
    if (t->ndim && !t->shape)
        return false;
    kind->dtype = fan_dl_dtype_of(t->dtype);
    if (kind->dtype == FAN_DT_NONE)
        return false;
    for (int i = t->ndim - 1; i >= 0; i--) {
        int64_t extent = t->shape[i];
        kind->shape[i] = extent;
        if (extent > 1 && t->strides && t->strides[i] != elements)
            in_c_order = false;
        if (extent < 0 || __builtin_mul_overflow(elements, extent, &elements))
            return false;
    }
    kind->order = 0;
    if (!in_c_order && !fan_plain_order(t->ndim, t->shape, t->strides, 1, gaps, &kind->order))
        return false;
    kind->ndim = (int8_t)t->ndim;
    kind->scalar = kind->weak = kind->inside = false;
    *data = (char *)t->data + t->byte_offset;
    return elements > 0 && elements <= INT64_MAX / 16;
}

static bool kind_of_tensor(PyObject *o, bool gaps, fan_plain_kind *kind, char **data)
{
    fan_dl_tensor tensor;
    if (!fan_tensor_look(o, &tensor))
        return false;
    if (tensor.dtype.code == FAN_DL_COMPLEX)
        return false;
    kind->origin = fan_state_get()->torch_origin;
    kind->check_at_use = true;
    return fan_dl_plain(&tensor, gaps, kind, data);
}

static bool set_number(fan_plain_kind *kind, fan_dtype dtype, fan_origin origin, bool inside)
{
    kind->dtype = dtype;
    kind->origin = (uint8_t)origin;
    kind->ndim = 0;
    kind->order = 0;
    kind->check_at_use = false;
    kind->scalar = true;
    kind->weak = origin == FAN_FROM_PYTHON_SCALAR;
    kind->inside = inside;
    return true;
}

bool fan_number_read(PyObject *o, fan_plain_kind *kind, char **data)
{
    if (PyFloat_CheckExact(o)) {
        *data = (char *)&((PyFloatObject *)o)->ob_fval;
        return set_number(kind, FAN_DT_FLOAT64, FAN_FROM_PYTHON_SCALAR, false);
    }
    if (PyComplex_CheckExact(o)) {
        *data = (char *)&((PyComplexObject *)o)->cval;
        return set_number(kind, FAN_DT_COMPLEX128, FAN_FROM_PYTHON_SCALAR, false);
    }
    if (PyBool_Check(o)) {
        *data = NULL;
        *(char *)data = o == Py_True;
        return set_number(kind, FAN_DT_BOOL, FAN_FROM_PYTHON_SCALAR, true);
    }
    int overflow;
    int64_t n = PyLong_AsLongLongAndOverflow(o, &overflow);
    _Static_assert(sizeof *data == sizeof n, "a value takes the place of an address");
    memcpy(data, &n, sizeof n);
    return !overflow && set_number(kind, FAN_DT_INT64, FAN_FROM_PYTHON_SCALAR, true);
}

/* kind_of_numpy_scalar: of NumPy's own scalars; false: of a subclass, or not summed. */
static bool kind_of_numpy_scalar(PyObject *o, fan_plain_kind *kind, char **data)
{
    const PyTypeObject *t = Py_TYPE(o);
#define NUMBER(Name, DTYPE)                                           \
    if (t == &Py##Name##ArrType_Type) {                               \
        *data = (char *)&PyArrayScalar_VAL(o, Name);                  \
        return set_number(kind, DTYPE, FAN_FROM_NUMPY_SCALAR, false); \
    }
#define BY_SIZE(type, SIGN)                  \
    (sizeof(type) == 1   ? FAN_DT_##SIGN##8  \
     : sizeof(type) == 2 ? FAN_DT_##SIGN##16 \
     : sizeof(type) == 4 ? FAN_DT_##SIGN##32 \
                         : FAN_DT_##SIGN##64)
#define INTEGER(Name, type)          \
    NUMBER(Name, BY_SIZE(type, INT)) \
    NUMBER(U##Name, BY_SIZE(type, UINT))
    NUMBER(Double, FAN_DT_FLOAT64)
    NUMBER(Float, FAN_DT_FLOAT32)
    NUMBER(CDouble, FAN_DT_COMPLEX128)
    NUMBER(CFloat, FAN_DT_COMPLEX64)
    NUMBER(Half, FAN_DT_FLOAT16)
    NUMBER(Bool, FAN_DT_BOOL)
    INTEGER(Byte, npy_byte)
    INTEGER(Short, npy_short)
    INTEGER(Int, npy_int)
    INTEGER(Long, npy_long)
    INTEGER(LongLong, npy_longlong)
#undef NUMBER
#undef BY_SIZE
#undef INTEGER
    return false;
}

void *fan_plain_number(const fan_plain_kind *kind, const char *value)
{
    union {
        double f;
        long long n;
        Py_complex c;
    } number;
    memcpy(&number, value, fan_dtype_size(kind->dtype));
    if (!kind->weak) {
        PyArray_Descr *descr = fan_descr_of_dtype(kind->dtype);
        if (!descr)
            return NULL;
        PyObject *scalar = PyArray_Scalar(&number, descr, NULL);
        Py_DECREF(descr);
        return scalar;
    }
    switch (kind->dtype) {
    case FAN_DT_FLOAT64:
        return PyFloat_FromDouble(number.f);
    case FAN_DT_INT64:
        return PyLong_FromLongLong(number.n);
    case FAN_DT_COMPLEX128:
        return PyComplex_FromCComplex(number.c);
    default:
        return PyBool_FromLong(*value);
    }
}

/* order_of_ndarray: the order of the axes of an array of at most FAN_PLAIN_NDIM; false, as
 * fan_plain_order returns it: it is no plain one. */
static inline bool order_of_ndarray(PyArrayObject *a, bool gaps, uint32_t *order)
{
    _Static_assert(sizeof(npy_intp) == sizeof(int64_t),
                   "NumPy's shapes and strides are read as ours");
    *order = 0;
    if (PyArray_CHKFLAGS(a, NPY_ARRAY_C_CONTIGUOUS))
        return true;
    if (!PyArray_CHKFLAGS(a, NPY_ARRAY_ALIGNED))
        return false;
    return fan_plain_order(PyArray_NDIM(a), (const int64_t *)PyArray_DIMS(a),
                           (const int64_t *)PyArray_STRIDES(a), PyArray_ITEMSIZE(a), gaps, order);
}

bool fan_plain_import_as(PyObject *o, bool gaps, fan_plain_kind *kind, char **data)
{
#ifdef Py_GIL_DISABLED
    return false; /* its counters need one thread at a time */
#endif
    switch (fan_class_of(o)) {
    case FAN_IS_NDARRAY:
        break;
    case FAN_IS_UNBOXED:
        return fan_unboxed_plain(o, kind, data);
    case FAN_IS_TENSOR:
        return kind_of_tensor(o, gaps, kind, data);
    case FAN_IS_NUMBER:
        return fan_number_read(o, kind, data);
    case FAN_IS_NUMPY_SCALAR:
        return kind_of_numpy_scalar(o, kind, data);
    default:
        return false;
    }
    PyArrayObject *a = (PyArrayObject *)o;
    int ndim = PyArray_NDIM(a);
    if (ndim > FAN_PLAIN_NDIM)
        return false;
    if (!order_of_ndarray(a, gaps, &kind->order))
        return false;
    kind->dtype = fan_dtype_of_descr(PyArray_DESCR(a));
    if (kind->dtype == FAN_DT_NONE)
        return false;
    kind->origin = FAN_FROM_NDARRAY;
    kind->check_at_use = kind->scalar = kind->weak = kind->inside = false;
    kind->ndim = (int8_t)ndim;
    for (int i = 0; i < ndim; i++)
        kind->shape[i] = PyArray_DIM(a, i);
    *data = PyArray_BYTES(a);
    return true;
}

bool fan_plain_has_own_value(void *o)
{
    const PyObject *is_neg = fan_state_get()->torch_is_neg;
    return fan_result_is(((PyMethodDescrObject *)is_neg)->d_method->ml_meth(o, NULL), Py_False);
}

bool fan_plain_is_detached(void *o)
{
    return fan_result_is(call_getter(fan_state_get()->torch_requires_grad, o), Py_False);
}

/* base_of: the object whose memory an ndarray or a memoryview shows, borrowed; NULL: its own. */
static PyObject *base_of(PyObject *view)
{
    if (PyArray_Check(view))
        return PyArray_BASE((PyArrayObject *)view);
    if (PyMemoryView_Check(view))
        return PyMemoryView_GET_BASE(view);
    return NULL;
}

bool fan_owner_has(PyObject *view, const char *lo, const char *hi)
{
    PyObject *owner = view;
    PyObject *base = base_of(owner);
    while (base) {
        owner = base;
        base = base_of(owner);
    }
    if (lo == hi || !PyArray_Check(owner))
        return true;
    PyArrayObject *a = (PyArrayObject *)owner;
    if (!PyArray_CHKFLAGS(a, NPY_ARRAY_OWNDATA))
        return true;
    const char *at = PyArray_BYTES(a);
    return at <= lo && hi <= at + PyArray_NBYTES(a);
}

/* same_ndarray: whether an ndarray still is what fan_plain_import read. Field by field, as each
 * take calls it for each term. */
static bool same_ndarray(PyObject *o, const fan_plain_kind *kind, const char *data)
{
    PyArrayObject *a = (PyArrayObject *)o;
    if (!PyArray_CheckExact(o) || PyArray_BYTES(a) != data)
        return false;
    if (PyArray_NDIM(a) != kind->ndim)
        return false;
    if (fan_dtype_of_descr(PyArray_DESCR(a)) != kind->dtype)
        return false;
    uint32_t order;
    if (!order_of_ndarray(a, true, &order))
        return false;
    if (order != kind->order)
        return false;
    for (int i = 0; i < kind->ndim; i++) {
        if (PyArray_DIM(a, i) != kind->shape[i])
            return false;
    }
    return !PyArray_BASE(a) || fan_owner_has(o, data, data + fan_plain_reach(kind));
}

bool fan_plain_is_unchanged(void *o, const fan_plain_kind *kind, const char *data)
{
    if (kind->scalar || fan_is_unboxed(o))
        return true; /* these cannot change */
    if (!kind->check_at_use)
        return same_ndarray(o, kind, data);
    FAN_UNINITIALIZED fan_plain_kind now;
    char *at;
    return fan_plain_import_as(o, true, &now, &at) && at == data && fan_plain_same(&now, kind);
}

bool fan_plain_writable(void *o, const fan_plain_kind *kind)
{
    assert(!kind->scalar); /* a number has no flags */
    if (fan_is_unboxed(o))
        return fan_unboxed_array(o)->writable;
    return kind->check_at_use || PyArray_ISWRITEABLE((PyArrayObject *)o);
}

#define DATA_ALIGN 64

/* The record that torch keeps of a tensor; the elements follow it in the same block. */
typedef struct tensor_block {
    fan_dl_versioned managed;
    int64_t shape[FAN_PLAIN_NDIM];
    int64_t strides[FAN_PLAIN_NDIM];
} tensor_block;

/* block_free: the thread that drops the last reference to the tensor's memory calls it. */
static void block_free(fan_dl_versioned *managed)
{
    fan_free(managed);
}

/* fresh_tensor: torch wraps memory of ours: half the work of a tensor of torch's allocator, which
 * torch wraps, too. */
static PyObject *fresh_tensor(const fan_plain_kind *kind, char **data)
{
    const fan_state *st = fan_state_get();
    tensor_block *block = fan_alloc(sizeof *block + DATA_ALIGN - 1 + (size_t)fan_plain_bytes(kind));
    if (!block)
        return NULL;
    uintptr_t end = (uintptr_t)(block + 1) + DATA_ALIGN - 1;
    *data = (char *)(end - end % DATA_ALIGN);
    block->managed = (fan_dl_versioned){
        .major = FAN_DL_MAJOR,
        .minor = FAN_DL_MINOR,
        .deleter = block_free,
        .tensor =
            {
                .data = *data,
                .device = {FAN_DL_CPU, 0},
                .ndim = kind->ndim,
                .dtype = fan_dl_dtype_for(kind->dtype),
                .shape = block->shape,
                .strides = block->strides,
            },
    };
    for (int i = 0; i < kind->ndim; i++)
        block->shape[i] = kind->shape[i];
    fan_plain_strides(kind, 1, block->strides);
    void *made = NULL;
    int failed = st->torch_api->give(&block->managed, &made); /* takes the block, errors too */
    PyErr_Clear();
    if (failed)
        return NULL;
    PyObject *tensor = made;
    if (tensor && Py_TYPE(tensor) != st->torch_type)
        Py_CLEAR(tensor);
    return tensor;
}

void *fan_plain_fresh(void *first, const fan_plain_kind *kind, char **data)
{
    if (fan_is_unboxed(first))
        return fan_unboxed_fresh(kind, data);
    if (kind->check_at_use)
        return fresh_tensor(kind, data);
    PyArray_Descr *descr = PyArray_DESCR((PyArrayObject *)first);
    if (fan_dtype_of_descr(descr) == kind->dtype)
        Py_INCREF(descr);
    else /* one of them is a wider sum */
        descr = fan_descr_of_dtype(kind->dtype);
    if (!descr)
        return NULL;
    npy_intp dims[FAN_PLAIN_NDIM];
    for (int i = 0; i < kind->ndim; i++)
        dims[i] = kind->shape[i];
    int64_t strides[FAN_PLAIN_NDIM];
    if (kind->order)
        fan_plain_strides(kind, PyDataType_ELSIZE(descr), strides);
    PyObject *made = PyArray_NewFromDescr(&PyArray_Type, descr, kind->ndim, dims,
                                          kind->order ? (npy_intp *)strides : NULL, NULL, 0, NULL);
    *data = made ? PyArray_BYTES((PyArrayObject *)made) : NULL;
    return made;
}

void *fan_plain_copy(void *o, const fan_plain_kind *kind, char **data)
{
    char *to = NULL;
    PyObject *copy = NULL;
    if (!kind->check_at_use || fan_plain_has_own_value(o))
        copy = fan_plain_fresh(o, kind, &to);
    PyErr_Clear();
    /* the calls above may have run arbitrary code */
    if (copy && !fan_plain_is_unchanged(o, kind, *data))
        Py_CLEAR(copy);
    if (!copy)
        return NULL;
    memcpy(to, *data, (size_t)fan_plain_bytes(kind));
    *data = to;
    return copy;
}

/* ---- facts of an object (facts.h) ---- */

/* read_tensor: of one on the CPU, of any layout, that is not complex. */
static void read_tensor(PyObject *o, fan_facts *facts)
{
    fan_dl_tensor tensor;
    if (!fan_tensor_look(o, &tensor) || tensor.device.type != FAN_DL_CPU)
        return;
    if (tensor.dtype.lanes != 1 || tensor.dtype.code == FAN_DL_COMPLEX)
        return;
    facts->dtype = fan_dl_dtype_of(tensor.dtype);
    facts->ndim = tensor.ndim;
    facts->shape = tensor.shape;
}

fan_facts fan_facts_of(void *o)
{
    fan_facts facts = {
        .is = fan_class_of(o),
        .dtype = FAN_DT_NONE,
    };
    switch (facts.is) {
    case FAN_IS_UNBOXED: {
        const fan_array *array = fan_unboxed_array(o);
        facts.dtype = array->dtype;
        facts.ndim = array->ndim;
        facts.shape = array->shape;
        break;
    }
    case FAN_IS_NDARRAY: {
        PyArrayObject *array = o;
        _Static_assert(sizeof(npy_intp) == sizeof(int64_t), "NumPy's shapes are read as ours");
        facts.dtype = fan_dtype_of_descr(PyArray_DESCR(array));
        facts.ndim = PyArray_NDIM(array);
        facts.shape = (const int64_t *)PyArray_DIMS(array);
        break;
    }
    case FAN_IS_TENSOR:
        read_tensor(o, &facts);
        break;
    case FAN_IS_NUMBER:
    case FAN_IS_NUMPY_SCALAR: {
        FAN_UNINITIALIZED fan_plain_kind kind;
        char *value;
        if (fan_plain_import(o, &kind, &value))
            facts.dtype = kind.dtype;
        break;
    }
    default:
        break;
    }
    return facts;
}
